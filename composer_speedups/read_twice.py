"""Hidden states that a layer reads twice: for its products, and as the residual beside them.

Each reader has a gradient, and autograd adds them up by a kernel that reads both and writes their sum, for the norm
that made the hidden states to read. Given out as two tensors, of the same memory, they have two gradients, which that
norm reads at once. Only while a CUDA graph is recorded: elsewhere somebody may have got hold of the hidden states, and
ask for their gradient, of which there would be one half.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["as_residual", "given_out_twice", "read_twice", "reading_twice"]


class _Here(threading.local):
    def __init__(self) -> None:
        # By id: the first tensor, which lives as long as it is here, its version then, and the second.
        self.pairs: dict[int, tuple[torch.Tensor, int, torch.Tensor]] | None = None


_here = _Here()


@contextmanager
def reading_twice() -> Iterator[None]:
    """Inside, in this thread, norms give their output out twice."""
    before, _here.pairs = _here.pairs, {}
    try:
        yield
    finally:
        _here.pairs = before


def read_twice() -> bool:
    """Whether that holds now, here, and the code is run and not compiled."""
    return not torch.compiler.is_compiling() and _here.pairs is not None and torch.is_grad_enabled()


def given_out_twice(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """`first`; whoever has it as a residual then gets `second`, if it has a gradient."""
    if _here.pairs is not None and first.requires_grad:  # others, autograd does not keep either
        _here.pairs[id(first)] = first, first._version, second
    return first


def as_residual(x: torch.Tensor) -> torch.Tensor:
    """What stands for `x` as a residual; `x` itself if it was not given out twice, or has been changed in place."""
    if torch.compiler.is_compiling() or not _here.pairs or id(x) not in _here.pairs:
        return x  # without a look at its version, which tensors of inference mode do not have
    _, version, second = _here.pairs[id(x)]
    return second if x._version == version else x
