"""The files in which a recommendation ends: the recipe to use, and what it was measured against."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from composer_speedups.recipes.written import write_recipe
from composer_speedups.recommend.choice import PLAIN

if TYPE_CHECKING:
    from composer_speedups.recipes import Recipe

__all__ = ["RECOMMENDED", "write_plain", "write_recommended"]

RECOMMENDED = "recommended.yaml"


def write_recommended(
    folder: Path, recipe: Recipe, base: Recipe, sentence: str, reasons: Mapping[str, str], command: str
) -> Path:
    """Write `recipe` into `folder`, with `sentence`, and why the others are not in it, as comments; return its path."""
    more = [key for key, arguments in recipe.speedups.items() if base.speedups.get(key) != arguments]
    lines = [f"{time.strftime('%Y-%m-%d')}: {command}", *_wrapped(sentence), "Rejected:"]
    lines += [line for name, why in reasons.items() for line in _wrapped(f"{name}: {why}", "  ")] or ["  nothing"]
    description = f"recommended: {', '.join(more) or 'no speed-ups beyond the plain recipe'}"[:500]
    _write(folder / RECOMMENDED, recipe, description, lines)
    return folder / RECOMMENDED


def write_plain(folder: Path, recipe: Recipe) -> None:
    """Write what the recommended one was measured against into `folder`."""
    _write(folder / f"{PLAIN}.yaml", recipe, f"what {RECOMMENDED} was measured against", [])


def _write(path: Path, recipe: Recipe, description: str, evidence: list[str]) -> None:
    write_recipe(path, recipe, None, None, description=description, evidence=evidence, reasons={}, overwrite=True)


def _wrapped(text: str, indent: str = "") -> list[str]:
    return textwrap.wrap(
        text,
        112,
        initial_indent=indent,
        subsequent_indent=2 * indent,
        break_long_words=False,  # paths
        break_on_hyphens=False,
    )
