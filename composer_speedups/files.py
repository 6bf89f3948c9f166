"""Files that are there as a whole or not at all, never in another one's place, and held by one process."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

__all__ = ["lock", "move_if_free", "open_locked", "whole"]

_TRIES = 100  # holders that come and go before us


def lock(descriptor: int) -> bool:
    """Take the lock of an open file; False if another process holds it.

    The kernel lets go of it when the process ends, however it ends. True, too, on file systems that know no locks
    (some network ones): that another process is there can't be told then, and most often none is.
    """
    if fcntl is None:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def open_locked(path: Path) -> tuple[int, bool]:
    """A descriptor of `path`, which is made if it is not there, and whether its lock could be had.

    Who holds it may remove the file when he is done: a lock of a file that has no name any more keeps nobody out.

    Raises:
        OSError: it cannot be opened.
    """
    for _ in range(_TRIES):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o644)
        if not lock(descriptor):
            return descriptor, False
        with contextlib.suppress(OSError):  # it is gone, in a network's file system by another machine's hand
            if os.path.samestat(os.fstat(descriptor), path.stat()):
                return descriptor, True
        os.close(descriptor)
    raise OSError(errno.ESTALE, "it is removed again and again", str(path))


@contextlib.contextmanager
def whole(target: Path, *, overwrite: bool = True) -> Iterator[Path]:
    """A new file beside `target`, to write to, which then takes its name: a reader sees the old file or all of the new.

    So it is also after a crash of the machine. Nothing is left of what ends with an error.

    Raises:
        FileExistsError: `target` exists, and `overwrite` is False.
        OSError: it cannot be written.
    """
    temporary = target.with_name(f".{target.stem}-{secrets.token_hex(4)}{target.suffix}")
    try:
        temporary.touch(exist_ok=False)  # with the rights of any other file, unlike tempfile's
        yield temporary
        with temporary.open("r+b") as file:
            os.fsync(file.fileno())  # the name must not reach the disk before what it stands for
        if overwrite:
            os.replace(temporary, target)
        else:
            move_if_free(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


def move_if_free(temporary: Path, target: Path) -> None:
    """Give the file `temporary`, of the same folder, the name `target` (and it may keep its own).

    Raises:
        FileExistsError: somebody else has made `target` meanwhile.
    """
    try:
        os.link(temporary, target)  # unlike a move, it fails if somebody made the target meanwhile
    except FileExistsError:
        raise
    except OSError:  # a file system without hard links
        if target.exists():
            raise FileExistsError(target) from None
        os.replace(temporary, target)
