"""How many packed tokens a forward pass works on, where that is decided beforehand: for a CUDA graph of a whole model.

Where the real tokens are is then computed on the device, as all else in the graph; on the host nothing is known of the
batch but this number. Each thread has its own.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

__all__ = ["FixedTotal", "fixed_total", "total_fixed"]


class FixedTotal(NamedTuple):
    """
    Attributes:
        tokens: real ones, and padding that fills them up.
        filling: how many of them may be padding.
    """

    tokens: int
    filling: int


class _Here(threading.local):
    def __init__(self) -> None:
        self.total: FixedTotal | None = None


_here = _Here()


def fixed_total() -> FixedTotal | None:
    """What holds now, here."""
    return _here.total


@contextmanager
def total_fixed(total: FixedTotal | None) -> Iterator[None]:
    """`total` holds inside, in this thread."""
    before, _here.total = _here.total, total
    try:
        yield
    finally:
        _here.total = before
