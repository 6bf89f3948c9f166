"""Checkpoint files of anyone's: read without running code from them, written whole or not at all."""

from __future__ import annotations

import errno
import importlib
import pickle
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from composer_speedups.errors import CheckpointError, first_line
from composer_speedups.files import whole

__all__ = ["Damaged", "Unsafe", "read_file", "write_file"]


class Damaged(CheckpointError):
    """A file is not what `torch.save` wrote; `reason` says in what."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"{path} is damaged or no checkpoint: {reason}")
        self.reason = reason


class Unsafe(CheckpointError):
    """A file asks for classes, in `names`, whose making may run code. Nothing of it was loaded."""

    def __init__(self, path: Path, names: Sequence[str]) -> None:
        super().__init__(f"{path} holds objects of {', '.join(names)}, which may run code when loaded")
        self.names = names


def read_file(path: Path, allow: Sequence[str] = ()) -> Any:
    """What `torch.save` wrote to `path`, as far as it is tensors, plain data and harmless classes.

    Args:
        path: the file.
        allow: further classes that may be made from it, as `module.Class`; they are imported.

    Raises:
        Damaged: it is cut off, altered, or no such file at all.
        Unsafe: it holds objects of other classes.
        CheckpointError: it is missing, a folder, or cannot be opened.
    """
    try:
        if path.is_dir():
            raise CheckpointError(f"{path} is a folder: a checkpoint in one file is read here, not a sharded one")
        if not path.exists():
            raise CheckpointError(f"there is no checkpoint {path}")
        if not zipfile.is_zipfile(path):
            with path.open("rb") as file:
                cut = file.read(2) == b"PK"
            raise Damaged(path, "its end is missing, it is cut off" if cut else "torch.save did not write it")
        with zipfile.ZipFile(path) as file:  # torch's reader skips checksums: a flipped bit would be another weight
            if (bad := file.testzip()) is not None:
                raise Damaged(path, f"its part {bad.partition('/')[2]} does not match its checksum")
        with torch.serialization.safe_globals([*_harmless(), *map(_allowed, allow)]):
            if names := torch.serialization.get_unsafe_globals_in_checkpoint(str(path)):
                raise Unsafe(path, sorted(names))
            return torch.load(path, map_location="cpu", weights_only=True)
    except CheckpointError:
        raise
    except OSError as error:
        if error.errno == errno.EINVAL:  # it names a place in itself that cannot be
            raise Damaged(path, "it is cut off") from error
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    except (
        RuntimeError,
        ValueError,
        EOFError,
        KeyError,
        IndexError,
        TypeError,
        AttributeError,
        pickle.UnpicklingError,
        zipfile.BadZipFile,
        zlib.error,
    ) as error:
        raise Damaged(path, first_line(error)) from error


def write_file(content: Any, target: Path, *, overwrite: bool) -> None:
    """`torch.save` beside `target`, then move: a reader sees the old file or the whole new one.

    Raises:
        CheckpointError: it exists and `overwrite` is False, or it cannot be written.
    """
    if not target.parent.is_dir():
        raise CheckpointError(f"{target} cannot be written: there is no folder {target.parent}")
    try:
        with whole(target, overwrite=overwrite) as temporary, temporary.open("wb") as file:
            torch.save(content, file)
    except FileExistsError:
        raise CheckpointError(f"{target} exists: choose another name, or add --overwrite") from None
    except (OSError, RuntimeError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else first_line(error)
        raise CheckpointError(f"{target} cannot be written: {reason}") from error


def _harmless() -> list[Any]:
    """Classes beyond torch's own list that Composer writes into checkpoints; making one runs no code of the file."""
    import datetime
    from collections import deque

    import numpy as np
    from numpy._core import multiarray
    from torch.torch_version import TorchVersion

    # numpy's random state is an array. Of its element types all but `object`, which would hold anything.
    kinds = [c for name, c in vars(np.dtypes).items() if name.endswith("DType") and name != "ObjectDType"]
    arrays = [np.ndarray, np.dtype, multiarray._reconstruct, multiarray.scalar, *kinds]
    return [datetime.timedelta, datetime.datetime, deque, TorchVersion, *arrays]


def _allowed(name: str) -> Any:
    module, _, attribute = name.rpartition(".")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise CheckpointError(f"--allow {name}: no such class, expected module.Class") from error
