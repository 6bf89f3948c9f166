"""The null GPU's runtime (`runtime.c`) as Python calls it, and answers it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

__all__ = ["answer", "runtime"]

_LAUNCH_FAILED = 719

runtime = ctypes.CDLL(None)  # libnull.so, preloaded


def answer(what: str, call: Callable[[], None]) -> int:
    """What a callback of the runtime returns: 0, or that a launch failed, of which the error's text is then told."""
    try:
        call()
    except Exception as error:
        runtime.null_say(f"{what}: {error}".encode())
        return _LAUNCH_FAILED
    return 0
