"""A copy of a study's store, to look at: SQLite changes even files that it only reads, and may not be able to."""

from __future__ import annotations

import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from composer_speedups.errors import UserError

__all__ = ["STORE", "copied_aside"]

STORE = "runs.sqlite"


@contextmanager
def copied_aside(folder: Path) -> Iterator[Path]:
    """A folder to be thrown away with a copy of the store in `folder`, if there is one; `folder` stays as it is.

    What is wrong with the copy is said of `folder`: the user has never heard of the other one.
    """
    with tempfile.TemporaryDirectory() as temporary:
        source, target = folder / STORE, Path(temporary) / STORE
        if source.is_file() and not (_in_use(folder) and _backed_up(source, target)):
            for file in folder.glob(f"{STORE}*"):
                shutil.copy(file, temporary)
        try:
            yield Path(temporary)
        except UserError as error:
            raise UserError(str(error).replace(temporary, str(folder))) from error


def _in_use(folder: Path) -> bool:
    """Whether a process may be at it, which has shared memory then; a `-wal` alone is copied with the rest.

    SQLite would make the file of the shared memory to read that, and leave it behind where it cannot.
    """
    return any((folder / f"{STORE}-{kind}").exists() for kind in ("shm", "journal"))


def _backed_up(source: Path, target: Path) -> bool:
    """Copy by SQLite, which sees to it that no other process writes between two parts; False where it cannot read."""
    try:
        with (
            closing(sqlite3.connect(f"{source.absolute().as_uri()}?mode=ro", uri=True, timeout=60)) as before,
            closing(sqlite3.connect(target)) as after,
        ):
            before.backup(after)
    except sqlite3.Error:  # read-only, or damaged: whoever opens the copy finds out
        target.unlink(missing_ok=True)
        return False
    return True
