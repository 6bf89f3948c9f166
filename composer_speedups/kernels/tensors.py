"""Which tensors a kernel may take. Imported without Triton, too."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensor

__all__ = ["MAX_WIDTH", "plain", "shape_only"]

# Of the Triton kernels over rows: a whole row is held in registers, 32 elements in each of 256 threads.
MAX_WIDTH = 8192


def plain(x: torch.Tensor) -> bool:
    """Whether `x` has memory of its own that a pointer may be taken to, or is the shape of such a tensor.

    While compiling every tensor counts as plain: what it will be is not known.
    """
    if torch.compiler.is_compiling():
        return True
    known = type(x) in (torch.Tensor, torch.nn.Parameter) or shape_only(x)
    return known and not torch._C._are_functorch_transforms_active()


def shape_only(x: torch.Tensor) -> bool:
    """Whether `x` has a shape and no numbers, as in a dry run that counts memory (`memory.predict`)."""
    return isinstance(x, FakeTensor)
