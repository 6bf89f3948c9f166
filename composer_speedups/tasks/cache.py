"""Folders built once and kept: keyed by all that matters, whole or not there, safe between processes."""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from composer_speedups.cache_root import cache_root
from composer_speedups.errors import TaskError

__all__ = ["cached", "digest"]

log = logging.getLogger("composer_speedups")

_MANIFEST = "manifest.json"
# Of a full disk `tokenizers` tells by a bare Exception, and numpy by an OSError without a number.
_FULL = (*map(os.strerror, (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)), "Not enough free space", "requested and")
_FORMAT = 1  # raise it when the meaning of stored files changes: old folders are then left unused


def digest(key: Mapping[str, Any]) -> str:
    """A short stable name for `key`, a mapping that JSON can hold.

    >>> digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1})
    True
    """
    text = json.dumps({"format": _FORMAT, **key}, sort_keys=True, ensure_ascii=True)
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()


def cached(
    kind: str,
    key: Mapping[str, Any],
    build: Callable[[Path], None],
    progress: Callable[[str], None] | None = None,
) -> Path:
    """The folder for `key`, filled by `build(folder)` if it is not there yet or was damaged.

    Two processes that want the same folder at once build it once: the second waits. A folder appears under its
    name only when it is complete, so a run killed half-way leaves nothing that looks finished.
    """
    from filelock import FileLock, Timeout

    name = digest(key)
    target = cache_root() / kind / name
    if _whole(target):
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(target.parent / f".{name}.lock")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            if progress is not None:
                progress(f"waiting for another process that prepares the same {kind}")
            lock.acquire()
    except OSError as error:
        raise _unusable(error) from error
    try:
        if _whole(target):  # the process that we waited for has built it
            return target
        partial = target.parent / f".{name}.partial"
        try:
            for leftover in (partial, target):
                if leftover.exists():
                    log.warning("removing incomplete or damaged cache folder %s", leftover)
                    shutil.rmtree(leftover)
            partial.mkdir()
        except OSError as error:
            raise _unusable(error) from error
        try:
            build(partial)
            _seal(partial, key)
            partial.rename(target)
        except BaseException as error:
            shutil.rmtree(partial, ignore_errors=True)
            if _is_of_cache(error, name):
                raise _unusable(error) from error
            raise
        return target
    finally:
        lock.release()


def _is_of_cache(error: BaseException, name: str) -> bool:
    """Whether the folder `name` could not be written: by the file that the error names, or without one a full disk."""
    if isinstance(error, OSError) and error.filename is not None:
        return name in str(error.filename)
    return (isinstance(error, OSError) or type(error) is Exception) and any(word in str(error) for word in _FULL)


def _unusable(error: BaseException) -> TaskError:
    return TaskError(
        f"the cache folder {str(cache_root())!r} cannot be written ({getattr(error, 'strerror', None) or error}): "
        "set COMPOSER_SPEEDUPS_CACHE to a folder that can"
    )


def _seal(folder: Path, key: Mapping[str, Any]) -> None:
    files = {path.relative_to(folder).as_posix(): _hash(path) for path in sorted(folder.rglob("*")) if path.is_file()}
    (folder / _MANIFEST).write_text(json.dumps({"key": dict(key), "files": files}, indent=1))


def _whole(folder: Path) -> bool:
    """Whether every file is there, byte for byte as it was written."""
    try:
        manifest = json.loads((folder / _MANIFEST).read_text())
        return all(_hash(folder / name) == value for name, value in manifest["files"].items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _hash(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
