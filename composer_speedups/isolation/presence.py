"""Whether another run is being measured on this machine at the same time: two that share its cores or its memory's
bandwidth slow each other down, and neither's numbers are its own.

Each run holds a lock on a file of its own in a folder that all users of the machine share; whoever can't get such a
lock knows that its run goes on. The kernel lets go of the lock when the process dies, however it dies. Processes in
other containers, and load that is no run of this package, are not seen.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
import uuid
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

__all__ = ["Presence"]

_EVERY = 0.5  # seconds between two looks


class Presence:
    """Announces a run while this context is entered; `overlapped` tells whether another one was there, too.

    Args:
        folder: None is `$COMPOSER_SPEEDUPS_PRESENCE`, or a folder beside the machine's temporary files.
    """

    def __init__(self, folder: Path | None = None) -> None:
        own = os.environ.get("COMPOSER_SPEEDUPS_PRESENCE")
        self.folder = folder or (Path(own) if own else Path(tempfile.gettempdir()) / "composer_speedups-presence")
        self.overlapped = False
        self._lock = -1
        self._path: Path | None = None
        self._next = 0.0

    def __enter__(self) -> Presence:
        if fcntl is None:
            return self
        # A folder that cannot be had costs the mark, and never the run.
        with contextlib.suppress(OSError):
            if not self.folder.is_dir():
                self.folder.mkdir(parents=True, exist_ok=True)
                self.folder.chmod(0o1777)
            self._announce()
        self.look(now=True)
        return self

    def __exit__(self, *_: object) -> None:
        self.look(now=True)
        if self._lock >= 0:
            assert self._path is not None
            self._path.unlink(missing_ok=True)
            os.close(self._lock)
            self._lock = -1

    def look(self, now: bool = False) -> None:
        """See whether another run is going on; at most twice a second, unless `now`."""
        if self._lock < 0 or self.overlapped or (not now and time.monotonic() < self._next):
            return
        self._next = time.monotonic() + _EVERY
        with contextlib.suppress(OSError):
            self.overlapped = any(_held(path) for path in self.folder.iterdir() if path != self._path)

    def _announce(self) -> None:
        while True:
            path = self.folder / f"{os.getpid()}-{uuid.uuid4().hex[:12]}"
            lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX)
            except OSError:  # a file system that knows no locks
                os.close(lock)
                path.unlink(missing_ok=True)
                raise
            # Between the two lines another process may have taken the file for a dead run's, and removed it.
            with contextlib.suppress(OSError):
                if path.stat().st_ino == os.fstat(lock).st_ino:
                    self._lock, self._path = lock, path
                    return
            os.close(lock)


def _held(path: Path) -> bool:
    """Whether a living process holds the lock of `path`; what a dead one left is removed."""
    try:
        probe = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:  # gone, or not ours to read: of another user, whose process would have removed it
        return False
    try:
        fcntl.flock(probe, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    else:
        with contextlib.suppress(OSError):  # in a sticky folder, only its owner may
            path.unlink()
        return False
    finally:
        os.close(probe)
