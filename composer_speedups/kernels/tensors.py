"""Which tensors a kernel may take, and which are parts of one. Imported without Triton, too."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch._subclasses.fake_tensor import FakeTensor

__all__ = [
    "MAX_WIDTH",
    "autocast_dtype",
    "beside",
    "compute_dtype",
    "empty_beside",
    "plain",
    "refuse_batched",
    "shape_only",
    "to_save",
    "whole_of",
]

# Of the Triton kernels over rows: a whole row is held in registers, 32 elements in each of 256 threads.
MAX_WIDTH = 8192


def plain(x: torch.Tensor) -> bool:
    """Whether `x` has memory of its own that a pointer may be taken to, or is the shape of such a tensor.

    While compiling every tensor counts as plain: what it will be is not known. While tracing (`torch.jit.trace`, and
    ONNX by it) none does: what a kernel writes would become a constant of the trace.
    """
    if torch.compiler.is_compiling():
        return True
    if torch.jit.is_tracing():
        return False
    known = type(x) in (torch.Tensor, torch.nn.Parameter) or shape_only(x)
    forward_mode = torch.autograd.forward_ad._current_level >= 0  # which our functions have no derivatives for
    # Gradients in a batch of them have no storage.
    return known and torch._C._has_storage(x) and not forward_mode and not torch._C._are_functorch_transforms_active()


def refuse_batched(gradient: torch.Tensor) -> None:
    """Raise a sentence where a kernel in C is given many gradients at once, which have no memory of their own."""
    if not torch._C._has_storage(gradient):
        raise RuntimeError(
            "kernels in C take one gradient at a time, and these are many (is_grads_batched or vectorize=True): ask "
            "for one after the other, or of the model without speed-ups"
        )


def shape_only(x: torch.Tensor) -> bool:
    """Whether `x` has a shape and no numbers, as in a dry run that counts memory (`memory.predict`)."""
    return isinstance(x, FakeTensor)


def compute_dtype(x: torch.Tensor) -> torch.dtype:
    """What a matrix product of `x` is computed in: autocast's, which leaves float64 as it is and knows no meta device.

    >>> x = torch.ones(2)
    >>> with torch.autocast("cpu", torch.bfloat16):
    ...     compute_dtype(x), compute_dtype(x.double()), compute_dtype(x.to("meta"))
    (torch.bfloat16, torch.float64, torch.float32)
    """
    return autocast_dtype(x) or x.dtype


def autocast_dtype(x: torch.Tensor) -> torch.dtype | None:
    """What autocast would make of `x`; None where it is off or leaves `x` alone, which `compute_dtype` tells."""
    device = x.device.type
    if device == "meta" or x.dtype == torch.float64 or not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device)


def to_save(parameter: torch.Tensor | None) -> torch.Tensor | None:
    """What to save of a parameter for the backward pass: its numbers, but not itself.

    Where saved tensors go through hooks, as in checkpointing, PyTorch 2.7 forgets those of a parameter that a
    `torch.autograd.Function` has saved: what a user registered to clip its gradient would not be called.
    """
    return None if parameter is None else parameter.detach()


def beside(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """`torch.cat(tensors, -1)`; no copy where they are the parts of one contiguous tensor already.

    >>> whole = torch.arange(6).view(2, 3)
    >>> beside(whole.split((1, 2), -1)).data_ptr() == whole.data_ptr()
    True
    """
    whole = whole_of(tensors)
    return torch.cat(list(tensors), -1) if whole is None else whole


def whole_of(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """The contiguous tensor that they are the parts of, along the last dimension and in this order, if they are."""
    first = tensors[0]
    shape = (*first.shape[:-1], sum(x.shape[-1] for x in tensors))
    strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    fits = all(n == 1 or a == b for n, a, b in zip(first.shape, first.stride(), strides, strict=True))
    fits = fits and all(_follows(a, b, 1) for a, b in pairwise(tensors))
    return first.as_strided(shape, strides) if fits else None


def empty_beside(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Empty tensors of the same shapes, [tokens, heads, width]: parts of one tensor where `tensors` are such.

    >>> q, k = torch.ones(5, 4, 2).chunk(2, 1)
    >>> beside([x.flatten(1) for x in empty_beside(q, k)]).shape
    torch.Size([5, 8])
    """
    groups = [[tensors[0]]]
    for before, x in pairwise(tensors):
        if _follows(before, x, 2):
            groups[-1].append(x)
        else:
            groups.append([x])
    found = []
    for group in groups:
        heads = [x.shape[1] for x in group]
        found += group[0].new_empty(len(group[0]), sum(heads), group[0].shape[2]).split(heads, 1)
    return tuple(found)


def _follows(before: torch.Tensor, x: torch.Tensor, dims: int) -> bool:
    """Whether the last `dims` dimensions of `x` lie in memory where those of `before` end, everywhere."""
    size = before.shape[-dims:]
    return (
        all(map(torch._C._has_storage, (before, x)))  # gradients in a batch of them have none
        and before.untyped_storage()._cdata == x.untyped_storage()._cdata
        and (before.dtype, before.stride(), before.shape[:-dims]) == (x.dtype, x.stride(), x.shape[:-dims])
        and (before.is_conj(), before.is_neg()) == (x.is_conj(), x.is_neg())  # memory is read otherwise
        and size[1:] == x.shape[-dims:][1:]
        and before.stride()[-dims:] == tuple(math.prod(size[i + 1 :]) for i in range(dims))
        and before.storage_offset() + math.prod(size) == x.storage_offset()
    )
