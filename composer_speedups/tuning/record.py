"""The record of a search: one JSON line for each trial, beside the recipe that is to be written.

A line is written whole and synced before the next trial starts, so that a search which was stopped, or killed, goes on
where it was. A last line that was cut in half is dropped; anything else that is not as it was written is refused.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from composer_speedups.errors import UserError
from composer_speedups.files import open_locked

__all__ = ["Record", "RecordError"]

_FORMAT = 3  # 1: warm-ups that were not the recipe's, and failures; 2: one loss of each try
_BEGIN = b'{"check": "'
_INPUTS = "inputs"  # the kind of a line that is no trial


class RecordError(UserError):
    """The record is damaged, or of another search."""


class Record:
    """Open the record at `path`, or begin it.

    Args:
        path: of the file.
        search: what is searched, as plain data: a record of anything else is refused.
        inputs: what the tries read from the disk, by path: a digest of what is there. A record of tries on other data
            is refused, too.

    Raises:
        RecordError: what is there is no record, a damaged one, or that of another search of which something came. It
            is left as it is.
    """

    def __init__(self, path: Path, search: dict[str, Any], inputs: Mapping[str, str] | None = None) -> None:
        self.path = path
        self.trials: list[dict[str, Any]] = []
        self._lock = self._locked()
        try:
            self._begin(json.loads(json.dumps(search)), dict(inputs or {}))
        except BaseException:
            self.close()
            raise

    def _begin(self, search: dict[str, Any], inputs: dict[str, str]) -> None:
        lines = self._read()
        if lines and lines[0].get("format") != _FORMAT:
            raise RecordError(f"{self.path} was written by another version. {self._remedy()}")
        if lines and (different := _difference(lines[0]["search"], search)):
            if any(line.get("status") == "ok" for line in lines[1:]):
                raise RecordError(f"{self.path} holds the trials of another search ({different}). {self._remedy()}")
            # Nothing came of that one: most likely its bounds are wider now, as its end asked for.
            self._cut(0)
            lines = []
        if lines:
            self.trials = [line for line in lines[1:] if line["kind"] != _INPUTS]
        else:
            self._append({"format": _FORMAT, "search": search})
        self._keep(inputs, [line for line in lines[1:] if line["kind"] == _INPUTS])

    def _keep(self, inputs: dict[str, str], lines: list[dict[str, Any]]) -> None:
        """Refuse inputs that are not what `lines` say of them, and write down those that are new."""
        known = {path: content for line in lines for path, content in line["inputs"].items()}
        if other := [path for path, content in inputs.items() if known.get(path, content) != content]:
            raise RecordError(
                f"{self.path} holds the trials of another search ({other[0]} has changed since it began). "
                f"{self._remedy()}"
            )
        # A record of an earlier version says nothing of its inputs. It is gone on with, as a study of that version is:
        # what they were nobody can know, and most often they are the same. From here on they must stay so.
        if new := {path: content for path, content in inputs.items() if path not in known}:
            self._append({"kind": _INPUTS, "inputs": new})

    def close(self) -> None:
        """Let another process have it."""
        os.close(self._lock)

    def find(self, **what: Any) -> list[dict[str, Any]]:
        """The trials that agree with `what`, in the order in which they were made."""
        return [trial for trial in self.trials if all(trial.get(key) == value for key, value in what.items())]

    def add(self, trial: dict[str, Any]) -> dict[str, Any]:
        trial = json.loads(json.dumps(trial))  # as it will be read again
        self._append(trial)
        self.trials.append(trial)
        return trial

    def remove(self) -> None:
        """The search is over: what it found stands in the recipe."""
        self.path.unlink(missing_ok=True)

    def _locked(self) -> int:
        """Hold the folder's right to this record until `close`, or this process's end however it comes."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            descriptor, locked = open_locked(self.path)
        except OSError as error:
            raise RecordError(f"cannot write {self.path}: {error.strerror}. Choose another --out") from error
        if not locked:
            os.close(descriptor)
            raise RecordError(f"another process is at {self.path}. Wait for it, or choose another --out")
        return descriptor

    def _append(self, content: dict[str, Any]) -> None:
        text = json.dumps(content, sort_keys=True)
        line = json.dumps({"check": _check(text), "content": text}) + "\n"
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(line)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise RecordError(f"cannot write {self.path}: {error.strerror}. Choose another --out") from error

    def _read(self) -> list[dict[str, Any]]:
        try:
            raw = self.path.read_bytes()
        except FileNotFoundError:
            return []
        except OSError as error:
            raise RecordError(f"cannot read {self.path}: {error.strerror}. Choose another --out") from error
        *whole, rest = raw.split(b"\n")
        found = []
        for number, line in enumerate(whole, start=1):
            try:
                entry = json.loads(line)
                if _check(entry["content"]) != entry["check"]:
                    raise ValueError("it was changed")
                found.append(json.loads(entry["content"]))
                if ("search" if number == 1 else "kind") not in found[-1]:
                    raise ValueError("it is not ours")
            except (ValueError, KeyError, TypeError) as error:
                raise RecordError(f"{self.path} is damaged in line {number}. {self._remedy()}") from error
        if rest:  # a kill in the middle of writing: that trial is made again
            if not (rest.startswith(_BEGIN) or _BEGIN.startswith(rest)):
                raise RecordError(f"{self.path} is damaged in line {len(whole) + 1}. {self._remedy()}")
            self._cut(len(raw) - len(rest))
        return found

    def _cut(self, length: int) -> None:
        try:
            with self.path.open("r+b") as file:
                file.truncate(length)
        except OSError as error:
            raise RecordError(f"cannot write {self.path}: {error.strerror}. Choose another --out") from error

    def _remedy(self) -> str:
        return "It was left as it is: move it away, or choose another --out"


def _check(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _difference(stored: dict[str, Any], asked: dict[str, Any], path: str = "") -> str:
    """The first value in which two searches differ."""
    for key in sorted(stored.keys() | asked.keys()):
        one, other = stored.get(key), asked.get(key)
        if one == other:
            continue
        if isinstance(one, dict) and isinstance(other, dict):
            return _difference(one, other, f"{path}{key}.")
        return f"{path}{key} was {_show(one)}, is {_show(other)}"
    return ""


def _show(value: Any) -> str:
    if value is None:
        return "not given"
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
