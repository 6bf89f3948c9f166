"""Files that are there as a whole or not at all, never in another one's place, and held by one process."""

from __future__ import annotations

import os
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

__all__ = ["lock", "move_if_free"]


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


def move_if_free(temporary: str, target: Path) -> None:
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
