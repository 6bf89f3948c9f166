"""Python's garbage collector where it has nothing to find: while libraries are imported, and when a process ends.

PyTorch, transformers and Composer are half a million objects that stay. The more there are, the oftener and the longer
the collector looks through all of them, and at the end of the process it does so several times more: together a third
of the seconds of a command that does little else.
"""

from __future__ import annotations

import atexit
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

__all__ = ["end_without_collecting", "importing"]


@contextmanager
def importing() -> Iterator[None]:
    """Collect nothing meanwhile. What follows is collected as ever: memory in a training's cycles must not pile up."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@cache
def end_without_collecting() -> None:
    """Leave what this process has at its end to the system, after all other handlers at exit; once is enough."""
    atexit.register(_leave)  # the first to register runs last


def _leave() -> None:
    if any(kind.__module__ == "nanobind" for kind in object.__subclasses__()):
        # Triton 3.9 is bound with it, and prints all that is never looked at as leaked. One look is left this way.
        gc.unfreeze()
        gc.disable()
    else:
        gc.freeze()
