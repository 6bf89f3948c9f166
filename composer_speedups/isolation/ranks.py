"""One run as several ranks: the process of a run forks into them, before any of them has a thread or a GPU.

What torchrun does with new interpreters, each of which would import torch and Composer again for ten seconds. The ranks
are one process group of the system, so that whatever ends the run ends them all.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from typing import Any

from composer_speedups.errors import UserError

__all__ = ["Ranks", "check_ranks", "die_with", "look_for", "share_cores", "together", "train_words"]

_PATIENCE = 3.0  # seconds in which a rank that failed first is heard
_WELL = "well"  # the last word of a rank that has done its part


class Ranks:
    """Forks this process into `count` ranks of one machine; each goes on from here.

    Args:
        count: of ranks; with 1 nothing happens.
        failed: called once in the first rank, from a thread of its own, when another one has failed: with its exit
            code, or the signal that ended it as a negative number, and what it has told by `fail`. It must end the
            process, as the first rank may wait for the other for good.

    Attributes:
        rank: this process's, from 0.
        count: of ranks.

    Raises:
        OSError: no process, or no port to meet at, can be had.
    """

    def __init__(self, count: int, failed: Callable[[int, str], None]) -> None:
        self.rank, self.count = 0, count
        self._watching: list[threading.Thread] = []
        self._failed, self._one_at_a_time = failed, threading.Lock()
        if count == 1:
            return
        environment = {
            "WORLD_SIZE": str(count),
            "LOCAL_WORLD_SIZE": str(count),
            "NODE_RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(_free_port()),
        }
        first, others = os.getpid(), []
        for rank in range(1, count):
            heard, telling = os.pipe()  # one for each: what several say at once would be one text
            pid = os.fork()
            if pid == 0:
                self.rank, self._telling = rank, telling
                die_with(first)
                for descriptor in (heard, *(earlier for _, earlier in others)):
                    os.close(descriptor)
                break
            os.close(telling)
            os.set_blocking(heard, False)  # of one that ended without a word there is nothing to read
            others.append((pid, heard))
        os.environ.update(environment, RANK=str(self.rank), LOCAL_RANK=str(self.rank))
        if self.rank == 0:
            self._watching = [
                threading.Thread(target=self._watch, args=one, daemon=True, name=f"rank {number}")
                for number, one in enumerate(others, start=1)
            ]
            for thread in self._watching:
                thread.start()

    def end(self) -> None:
        """Wait for all ranks to come here. Those after the first end here; the first goes on when they have."""
        distributed = sys.modules.get("torch.distributed")
        if distributed is not None and distributed.is_available() and distributed.is_initialized():
            distributed.barrier()  # whoever is slower may still ask the others for something
        if self.rank:
            self._leave(0, _WELL)
        for thread in self._watching:
            thread.join()

    def fail(self, words: str) -> None:
        """End this rank, if it is one after the first, as one that failed; its traceback goes into the run's log."""
        if self.rank:
            traceback.print_exc()
            self._leave(1, words)

    def settle(self) -> None:
        """Give a later rank time to tell that it failed first: what the first then sees is a lost connection."""
        for thread in self._watching:
            thread.join(_PATIENCE / len(self._watching))

    def _leave(self, code: int, words: str) -> None:
        os.write(self._telling, words.encode())
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # Gloo's threads may outlive an interpreter that ends by itself, which then aborts

    def _watch(self, pid: int, heard: int) -> None:
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        try:
            words = os.read(heard, 65536).decode(errors="replace")
        except BlockingIOError:  # a process that it had started has the other end still
            words = ""
        if (code, words) != (0, _WELL):
            with self._one_at_a_time:  # for good: who fails afterwards may do so as this one is gone
                try:
                    self._failed(code, words)
                finally:
                    os._exit(1)


def together(ranks: int, machine: str) -> str:
    """`machine` in words, and how many ranks of it work together."""
    return f"{ranks} ranks of {machine}" if ranks > 1 else machine


def train_words(ranks: int) -> str:
    """How a recipe is trained on so many ranks."""
    return "composer-speedups train" if ranks == 1 else f"composer -n {ranks} -m composer_speedups train"


def share_cores() -> None:
    """Leave each rank of this machine its share of the cores."""
    import torch
    from composer.utils import dist

    if (ranks := dist.get_world_size()) > 1:
        torch.set_num_threads(max(1, torch.get_num_threads() // ranks))


def look_for(ranks: int) -> None:
    """Have this process, which only looks before others train, find what each of `ranks` would."""
    if ranks > 1:
        os.environ["WORLD_SIZE"] = str(ranks)  # what Composer, and speed-ups about several ranks, ask for


def check_ranks(ranks: int, facts: Mapping[str, Any]) -> None:
    """Raise unless there is a GPU, or at least a core, for each."""
    gpus = len(facts.get("gpus") or [])
    have, what = (gpus, "GPU") if gpus else ((facts.get("cpu") or {}).get("usable") or ranks, "core")
    if ranks > have:
        raise UserError(f"{ranks} ranks need a {what} each, this machine has {have}: use --ranks {have}")


def die_with(parent: int) -> None:
    """Ask Linux to kill this process when its parent dies, or the thread of it that has forked it."""
    try:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    except (OSError, AttributeError):
        return
    if os.getppid() != parent:  # it has died before it was asked
        os._exit(os.EX_SOFTWARE)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
