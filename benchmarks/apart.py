"""Kernels in a process of their own, and in another one after an error that a process does not survive.

After an illegal access of memory every call to CUDA fails for as long as the process lives; a library may crash, or end
it by itself, as bitsandbytes does. What was being tried then is left out by the next process, which goes on with the
rest: `Failures` is how the one tells the other. The context of CUDA and its gigabytes end with each process.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from benchmarks.harness import GRACE, keep_words
from composer_speedups.isolation.isolate import Isolation

__all__ = ["Apart", "Failed", "Failures", "context_lost", "failed_before", "measure"]

_PROCESSES = 6  # for one part, at most: what ends more of them needs somebody to look at it
_DIED = "its process ended while it ran"


class Failed(RuntimeError):
    """Some of what a part measures could not be; all the rest was."""


class Apart:
    """The part `module`, measured in processes of its own. Its table is made in this one."""

    def __init__(self, module: ModuleType) -> None:
        self.table: Callable[[Path], str] = module.table
        self._name = module.__name__

    def measure(self, folder: Path, repetitions: int, batches: int, deadline: float) -> None:
        payload = {"part": self._name, "folder": str(folder), "repetitions": repetitions, "batches": batches}
        problems: list[str] = []
        with Isolation("benchmarks.apart:measure") as isolation:
            for _ in range(_PROCESSES):
                known, left = failed_before(folder), max(0.0, deadline - time.monotonic())
                outcome = isolation.run(payload | {"seconds": left}, timeout=left + GRACE)
                sys.stderr.write(outcome.log)
                if problem := outcome.value or outcome.reason:
                    problems.append(problem)
                    keep_words(folder, self._name, outcome)
                new = failed_before(folder).keys() - known.keys()
                if outcome.status in ("ok", "timeout") or not new:
                    break
                problems[-1] += f"; a new process goes on without {' and '.join(sorted(new))}"
                print(problems[-1], file=sys.stderr)
        if problems:
            raise Failed("\n".join(problems))


def measure(payload: dict[str, Any], report: Callable[[Any], None]) -> str:
    """Measure `payload["part"]` in this process, or what is left of it; what has failed on the way, if it survived."""
    part = importlib.import_module(payload["part"])
    deadline = time.monotonic() + payload["seconds"]
    try:
        part.measure(Path(payload["folder"]), payload["repetitions"], payload["batches"], deadline=deadline)
    except Failed as error:
        return str(error)
    return ""


class Failures:
    """What could not be made or measured, with the reason: in a file, also of a process that it has ended."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "failed.json"
        self.reasons = failed_before(folder)
        self._serious: list[str] = []

    def __contains__(self, name: str) -> bool:
        return name in self.reasons

    @contextmanager
    def attempt(self, name: str, optional: bool = False) -> Iterator[None]:
        """Go on after an exception, which is noted, unless the process is lost. A wrong result is never `optional`."""
        self._write(self.reasons | {name: _DIED})
        try:
            yield
        except Exception as error:
            traceback.print_exception(error)
            self.reasons[name] = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            if not optional or isinstance(error, ArithmeticError):
                self._serious.append(name)
            self._write(self.reasons)
            if context_lost():
                raise
        else:
            self._write(self.reasons)

    def tell(self) -> None:
        """Raise `Failed` if anything serious has failed."""
        if self._serious:
            raise Failed("\n".join(["failed:", *(f"{name}: {self.reasons[name]}" for name in self._serious)]))

    def _write(self, reasons: dict[str, str]) -> None:
        if not reasons:
            self._path.unlink(missing_ok=True)
            return
        beside = self._path.with_suffix(".new")  # whoever is killed now leaves a whole file
        beside.write_text(json.dumps(reasons, indent=1))
        beside.replace(self._path)


def failed_before(folder: Path) -> dict[str, str]:
    """What has failed there, and why."""
    path = folder / "failed.json"
    return json.loads(path.read_text()) if path.exists() else {}


def context_lost() -> bool:
    """Whether this process has lost its context of CUDA, and no call to it will succeed any more.

    The device is asked: by its text alone no error tells whether it stays.
    """
    import torch

    if not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False
