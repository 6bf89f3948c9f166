"""Find speed-ups by name. Nothing is listed by hand: a file in `algorithms/` is a speed-up.

The names are known without importing anything heavy, so that the command line answers at once.
"""

from __future__ import annotations

import difflib
import importlib
import pkgutil
import re
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from composer_speedups.collector import importing
from composer_speedups.errors import RecipeError, UserError

if TYPE_CHECKING:
    from collections.abc import Callable

    from composer_speedups.speedup import SpeedUp

__all__ = ["NotASpeedUp", "build", "check_arguments", "class_name", "function", "keys", "regrouping", "speedup_class"]

_FOLDER = Path(__file__).parent / "algorithms"


class NotASpeedUp(UserError, TypeError):
    """A file under `algorithms` that is not yet what the registry needs: its author's to mend."""


@cache
def keys() -> tuple[str, ...]:
    """Every speed-up's key, sorted."""
    return tuple(sorted(m.name for m in pkgutil.iter_modules([str(_FOLDER)]) if not m.name.startswith("_")))


@cache
def regrouping() -> frozenset[str]:
    """Keys of those that set `regroups`: read from their files, as a study's own process is to stay free of torch."""
    return frozenset(key for key in keys() if "\n    regroups = True\n" in (_FOLDER / f"{key}.py").read_text("utf-8"))


@cache
def class_name(key: str) -> str:
    """The class in a speed-up's file, whose name is the file's; empty where it has none. Without importing torch."""
    names = re.findall(r"^class (\w+)", (_FOLDER / f"{key}.py").read_text("utf-8"), re.MULTILINE)
    return next((name for name in names if name.lower() == key.replace("_", "")), "")


@cache
def speedup_class(key: str) -> type[SpeedUp]:
    """The class registered under `key`; an unknown key raises `RecipeError` with the nearest names."""
    with importing():
        from composer_speedups.speedup import SpeedUp, Stage

    if key not in keys():
        near = difflib.get_close_matches(key, keys(), n=3, cutoff=0.4) or keys()
        raise RecipeError(f"unknown speed-up {key!r}. Nearest: {', '.join(near)}")
    with importing():
        module = importlib.import_module(f"composer_speedups.algorithms.{key}")
    found = [
        c
        for c in vars(module).values()
        if isinstance(c, type)
        and issubclass(c, SpeedUp)
        and c.__module__ == module.__name__
        and not c.__name__.startswith("_")
    ]
    if len(found) != 1:
        raise NotASpeedUp(f"{module.__file__} must define exactly one public SpeedUp, found {found}")
    (cls,) = found
    if cls.__name__.lower() != key.replace("_", ""):
        name = key.title().replace("_", "")
        raise NotASpeedUp(f"{module.__file__}: its class must have the file's name, such as {name}, not {cls.__name__}")
    if not hasattr(cls, "stage"):
        raise NotASpeedUp(f"{module.__file__}: set `stage`, when it acts, to one of {', '.join(s.name for s in Stage)}")
    if not hasattr(module, f"apply_{key}"):
        raise NotASpeedUp(f"{module.__file__} must define the function apply_{key}, which does the work")
    return cls


def function(key: str) -> Callable[..., Any]:
    """The plain function `apply_<key>`, for bare loops, Accelerate and the Hugging Face Trainer."""
    return getattr(importlib.import_module(speedup_class(key).__module__), f"apply_{key}")


def check_arguments(key: str, kwargs: dict[str, Any]) -> None:
    """Raise `RecipeError` if `key` does not take one of `kwargs`."""
    allowed = speedup_class(key).parameters()
    for name in kwargs:
        if name not in allowed:
            takes = f"it takes {', '.join(allowed)}" if allowed else "it takes no arguments"
            raise RecipeError(f"speed-up {key!r} has no argument {name!r}: {takes}")


def build(key: str, **kwargs: Any) -> SpeedUp:
    """Make the speed-up registered under `key`.

    >>> build("matmul_precision", precision="high")
    MatmulPrecision(precision='high')
    """
    check_arguments(key, kwargs)
    try:
        return speedup_class(key)(**kwargs)
    except (TypeError, ValueError) as error:
        raise RecipeError(f"speed-up {key!r}: {error}") from error
