"""What speed-ups ask of their arguments: one line that names the argument, its value, and what may stand there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["check_choice", "check_count", "check_flag"]


def check_flag(name: str, value: Any) -> bool:
    """`value`, if it is True or False.

    Raises:
        TypeError: it is something else; 0 and 1 are, too: they may be meant as numbers.
    """
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be true or false, got {value!r}")
    return value


def check_count(name: str, value: Any) -> int:
    """`value`, if it is an integer of at least 1.

    Raises:
        TypeError: it is no integer.
        ValueError: it is below 1.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be a positive integer, got {value!r}")
    if value < 1:
        raise ValueError(f"{name} must be a positive integer, got {value}")
    return value


def check_choice(name: str, value: Any, choices: Sequence[str]) -> str:
    """`value`, if it is one of `choices`.

    Raises:
        TypeError: it is no string.
        ValueError: it is another string.

    >>> check_choice("precision", "hihg", ["highest", "high"])
    Traceback (most recent call last):
    ValueError: precision='hihg' is unknown. Use one of: highest, high
    """
    if not isinstance(value, str):
        raise TypeError(f"{name}={value!r} is not a string. Use one of: {', '.join(choices)}")
    if value not in choices:
        raise ValueError(f"{name}={value!r} is unknown. Use one of: {', '.join(choices)}")
    return value
