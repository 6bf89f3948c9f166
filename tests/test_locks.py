"""Locks: one process at a time, and no trouble where a file system knows none."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from composer_speedups import files


def opened(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT, 0o644)


def test_a_lock_is_one_holders(tmp_path: Path):
    one, other = opened(tmp_path / "x"), opened(tmp_path / "x")
    assert files.lock(one) and not files.lock(other)
    os.close(one)
    assert files.lock(other)
    os.close(other)


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_no_obstacle(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(files.fcntl, "flock", refuse)
    descriptor = opened(tmp_path / "x")
    assert files.lock(descriptor)
    os.close(descriptor)


def test_a_file_that_its_holder_has_removed_keeps_nobody_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The second one has opened it when the first removes it and lets it go: he must take the new one, as a third does,
    or both hold what they take for one lock."""
    path = tmp_path / "x"
    first, _ = files.open_locked(path)
    really, opens = files.lock, []

    def meanwhile(descriptor: int) -> bool:
        if not opens:
            opens.append(descriptor)
            path.unlink()
            os.close(first)
        return really(descriptor)

    monkeypatch.setattr(files, "lock", meanwhile)
    second, held = files.open_locked(path)
    assert held and path.exists()
    third, free = files.open_locked(path)
    assert not free, "two hold it"
    os.close(third)
    os.close(second)
    assert len(opens) == 1
