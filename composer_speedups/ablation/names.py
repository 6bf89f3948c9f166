"""What the rows of a study are called: short in a list, and marked where their numbers are not the recipe's own."""

from __future__ import annotations

from collections.abc import Sequence

from composer_speedups.ablation.plans import WITHOUT
from composer_speedups.ablation.row import Row

__all__ = ["mark_names", "marked_names", "short_names"]


def short_names(names: Sequence[str]) -> list[str]:
    """Names without the folder that all of them share, and what a plan made of one of them without its name.

    Where plans made rows of several, each keeps its name: it says which.

    >>> short_names(["finetune/fp32", "finetune/fp16"])
    ['fp32', 'fp16']
    >>> short_names(["cpu/fp32", "cpu/fp32+unpadding", "cpu/fp32+unpadding+fused_adamw"])
    ['fp32', '+unpadding', '+unpadding+fused_adamw']
    >>> short_names(["plain", "bf16", "plain+reuse_host_memory", "bf16+unpadding"])
    ['plain', 'bf16', 'plain+reuse_host_memory', 'bf16+unpadding']
    """
    folders = {name.rpartition("/")[0] for name in names}
    cut = len(folders.pop()) + 1 if len(folders) == 1 and "/" in names[0] else 0
    short = [name[cut:] for name in names]
    made_of = {name: base for base in sorted(short, key=len, reverse=True) for name in short if _made(name, base)}
    if len(set(made_of.values())) > 1:
        return short
    return [name.removeprefix(made_of[name]).lstrip(".") if name in made_of else name for name in short]


def _made(name: str, base: str) -> bool:
    """Whether a plan made the row `name` of the row `base`."""
    return name.startswith((f"{base}+", f"{base}{WITHOUT}"))


def marked_names(rows: Sequence[Row]) -> list[str]:
    """Short names; a star marks a row of which a switch did nothing, a dagger one with runs that were not alone."""
    return mark_names(short_names([row["recipe"] for row in rows]), rows)


def mark_names(names: Sequence[str], rows: Sequence[Row]) -> list[str]:
    marks = (("*" if row["no_effect"] else "") + ("†" if row["overlapped"] else "") for row in rows)
    return [f"{name} {mark}" if mark else name for name, mark in zip(names, marks, strict=True)]
