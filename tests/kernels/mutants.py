"""Kernels with a fault planted in them: a check that finds none of it would find nothing."""

from __future__ import annotations

import ctypes
import importlib.util
import shutil
from pathlib import Path
from types import ModuleType

import pytest

from composer_speedups.kernels import native as building

__all__ = ["c_mutant", "triton_mutant"]


def _changed(file: Path, old: str, new: str) -> str:
    source = file.read_text()
    assert source.count(old) == 1, f"{old!r} is {source.count(old)} times in the kernel"
    return source.replace(old, new)


def c_mutant(module: ModuleType, old: str, new: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `module` have, for its C kernel, one with `new` in the place of `old`."""
    (folder / "mutant.c").write_text(_changed(Path(module.__file__).with_suffix(".c"), old, new))
    shutil.copy(Path(building.__file__).with_name("native.h"), folder)
    monkeypatch.setattr(building, "_folder", lambda: folder)
    library = ctypes.CDLL(str(building._built(folder / "mutant.c", shutil.which("cc") or "gcc", ())))
    module._declare(library)
    monkeypatch.setattr(module, "native", lambda: library)


def triton_mutant(module: ModuleType, old: str, new: str, folder: Path) -> ModuleType:
    """`module` with `new` in the place of `old`, and operators of its own."""
    own = f'"mutant{abs(hash((old, new)))}::'
    (folder / "mutant.py").write_text(_changed(Path(module.__file__), old, new).replace('"composer_speedups::', own))
    spec = importlib.util.spec_from_file_location("mutant", folder / "mutant.py")
    mutant = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(mutant)
    return mutant
