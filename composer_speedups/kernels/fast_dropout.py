"""Dropout on the CPU with masks from a counter-based hash instead of a generator that must be asked in order.

A mask is a function of two 32-bit keys, drawn once per call from PyTorch's default generator:
`torch.manual_seed`, checkpoints and gradient checkpointing's `preserve_rng_state` govern it as they govern
`torch.nn.Dropout`. Word j is a hash of j and the keys and gives 16 bits to each of two elements. So it needs no
order, vectorises, is shared out among threads without changing the result, and backward makes it again instead
of loading it.

An element is dropped with the probability `realised(p)`, a multiple of 1/65536 (p = 0.1 becomes 0.1000061), and
the scale is 1 / (1 - realised(p)), so the expectation is that of the input. The products are rounded once;
PyTorch on the CPU rounds the scale to the input's dtype first (bfloat16 at p = 0.1: 1.1094 for 1.1111).

The work is done by `fast_dropout.c`. `keep_by_torch` is its meaning in PyTorch operations, bit for bit the
same: it serves where there is no compiler, for other dtypes, and inside `torch.compile`, which fuses it.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence

import torch

from composer_speedups.kernels.native import checked
from composer_speedups.kernels.tensors import plain, shape_only

__all__ = [
    "Keys",
    "MOST",
    "STEPS",
    "draw_keys",
    "dropped_of",
    "fast_dropout",
    "fast_dropout_mask",
    "keep_by_torch",
    "least_of",
    "moved_on",
    "native",
    "realised",
    "scale_of",
]

Keys = tuple[int, int]

STEPS = 1 << 16  # probabilities of dropping are multiples of 1 / STEPS
MOST = 1 << 33  # elements that 2^32 different words serve
_STRIDE = 0x9E3779B9  # between what the hash is given for one word and for the next
_CHUNK = 1 << 16  # words at a time in PyTorch operations: the dozen passes over them stay in the L2 cache
_POINTER, _WORD = ctypes.c_void_p, ctypes.c_uint32
_ARGUMENTS = (_POINTER, _POINTER, ctypes.c_int64, _WORD, _WORD, ctypes.c_int16, ctypes.c_float, ctypes.c_int)
_KERNELS = {torch.float32: "dropout_float32", torch.bfloat16: "dropout_bfloat16", torch.bool: "keep_mask"}


def realised(p: float) -> float:
    """The probability of dropping that is really used: the multiple of 1/65536 nearest to `p`.

    >>> realised(0.5), realised(1e-9) > 0, realised(1.0)
    (0.5, True, 1.0)
    """
    return dropped_of(p) / STEPS


def scale_of(dropped: int) -> float:
    """By what that which stays is multiplied, where `dropped` of 65536 do not; 0 where nothing does.

    >>> scale_of(32768), scale_of(65536)
    (2.0, 0.0)
    """
    return 0.0 if dropped == STEPS else STEPS / (STEPS - dropped)


def least_of(dropped: int) -> int:
    """The threshold of a mask: an element stays from this value of its 16 bits on, read with their sign.

    >>> least_of(0), least_of(65536)
    (-32768, 32768)
    """
    return dropped - STEPS // 2


def draw_keys() -> Keys:
    """Two keys from PyTorch's default generator of the CPU, each uniform over 32 bits.

    >>> keys = torch.manual_seed(3) and draw_keys()
    >>> keys == (torch.manual_seed(3) and draw_keys())
    True
    """
    first, second = torch.randint(0, 1 << 32, (2,), device="cpu").tolist()
    return first, second


def moved_on(keys: Keys, words: int) -> Keys:
    """The keys of a mask that begins `words` words, of two elements each, after the one of `keys`.

    >>> mask = fast_dropout_mask((10,), 0.5, keys=(3, 4))
    >>> torch.equal(fast_dropout_mask((6,), 0.5, keys=moved_on((3, 4), 2)), mask[4:])
    True
    """
    return (keys[0] + words * _STRIDE) % (1 << 32), keys[1]


def fast_dropout(x: torch.Tensor, p: float, training: bool = True, inplace: bool = False) -> torch.Tensor:
    """As `torch.nn.functional.dropout`, with masks from cheap bits where `x` is an ordinary tensor on the CPU.

    Elsewhere (other devices, tensor subclasses, under `torch.func`, p of 1, no floating dtype) it is
    `torch.nn.functional.dropout`.

    Args:
        x: any shape and strides; the mask depends on the logical index, not on the layout.
        p: probability of dropping, from 0 to 1.
        training: False returns `x`.
        inplace: write the result to `x`.

    >>> out = fast_dropout(torch.ones(1000), 0.5)
    >>> out.unique().tolist()
    [0.0, 2.0]
    """
    if not training or p == 0:
        return x
    compiling = torch.compiler.is_compiling()
    if not 0 <= p < 1 or not x.is_cpu or not x.is_floating_point() or x.numel() > MOST or not plain(x):
        return torch.nn.functional.dropout(x, p, training, inplace)
    if compiling:
        out = _by_torch(x, torch.randint(0, 1 << 32, (2,), device="cpu").unbind(), dropped_of(p))
        return x.copy_(out) if inplace else out
    return _Dropout.apply(x, draw_keys(), dropped_of(p), inplace)


def fast_dropout_mask(
    shape: Sequence[int], p: float, dtype: torch.dtype = torch.float32, keys: Keys | None = None
) -> torch.Tensor:
    """A dropout mask on the CPU, to be multiplied: 0 with probability `realised(p)`, else 1 / (1 - realised(p)).

    For those who apply a mask themselves, as attention does; `fast_dropout` is faster and keeps no mask.

    Args:
        shape: of the mask.
        p: probability of dropping, from 0 to 1.
        dtype: of the mask; `torch.bool` gives True where an element stays, without the scale. Low precision rounds
            the scale: bfloat16 at p = 0.1 by 0.16 %, as PyTorch's own dropout has it.
        keys: of `draw_keys`, to make the same mask again; None draws new ones. Not made by counting: masks of
            `(k, j)` and `(k, j + 1)` are not independent.

    >>> fast_dropout_mask((20, 30), 0.5).unique().tolist()
    [0.0, 2.0]
    """
    if not 0 <= p <= 1:
        raise ValueError(f"p is a probability from 0 to 1, not {p!r}")
    if (size := math.prod(shape)) > MOST:
        raise ValueError(f"a mask of {tuple(shape)} has {size} elements, at most {MOST} are possible: make several")
    if p in (0, 1):
        return torch.full(tuple(shape), 1 - int(p), dtype=dtype, device="cpu")
    keys = draw_keys() if keys is None else keys
    if dtype == torch.bool or dtype not in _KERNELS or native() is None:
        keep = _keep(size, keys, dropped_of(p)).view(tuple(shape))
        return keep if dtype == torch.bool else keep.to(dtype).mul_(scale_of(dropped_of(p)))
    mask = torch.ones(tuple(shape), dtype=dtype, device="cpu")
    return _native(mask, mask, keys, dropped_of(p))


def keep_by_torch(size: int, keys: Sequence[int | torch.Tensor], dropped: int) -> torch.Tensor:
    """The mask's meaning: bool [size], True where an element stays; `dropped` of 65536 values drop it.

    `fast_dropout.c` has the same in C. int32 wraps around as uint32 does; its shifts to the right must be cleared of
    the sign that they drag along.
    """
    first, second = (key.to(torch.int32) if isinstance(key, torch.Tensor) else _signed(key) for key in keys)
    h = torch.arange((size + 1) // 2, dtype=torch.int32, device="cpu") * _signed(_STRIDE) + first
    h = (h ^ (h >> 16 & 0xFFFF) ^ second) * 0x7FEB352D
    h = (h ^ (h >> 15 & 0x1FFFF)) * _signed(0x846CA68B)
    h = h ^ (h >> 16 & 0xFFFF)
    lanes = torch.stack((h << 16 >> 16, h >> 16), -1).flatten()[:size]  # low half first, both with their sign
    return lanes >= least_of(dropped)


@checked("fast_dropout")
def native(library: ctypes.CDLL) -> bool:
    """Whether the C kernels agree with `keep_by_torch`."""
    for name in _KERNELS.values():
        kernel = getattr(library, name)
        kernel.argtypes, kernel.restype = _ARGUMENTS, None
    probe, keys = torch.empty(1031, dtype=torch.bool, device="cpu"), (0xDEADBEEF, 0x12345678)
    library.keep_mask(None, probe.data_ptr(), len(probe), *keys, least_of(6554), 1.0, 1)
    return torch.equal(probe, keep_by_torch(len(probe), keys, 6554))


def dropped_of(p: float) -> int:
    """How many of the 65536 values of an element's bits drop it. Never none and never all, if 0 < p < 1."""
    return round(p * STEPS) if p in (0, 1) else min(max(round(p * STEPS), 1), STEPS - 1)


def _signed(word: int) -> int:
    return word - (word >> 31 << 32)


class _Dropout(torch.autograd.Function):
    """Its own gradient: what the mask and the scale do to the input, they do to the gradient."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, keys: Keys, dropped: int, inplace: bool) -> torch.Tensor:
        ctx.keys, ctx.dropped = keys, dropped
        if inplace:
            ctx.mark_dirty(x)
        if x.dtype in _KERNELS and native() is not None:
            if shape_only(x):
                return x if inplace else torch.empty_like(x, memory_format=torch.contiguous_format)
            source = x.contiguous()
            target = source if inplace else torch.empty_like(source)
            out = _native(source, target, keys, dropped)
        else:
            out = _by_torch(x, keys, dropped)
        return x.copy_(out) if inplace and out is not x else out

    @staticmethod
    def backward(ctx, gradient: torch.Tensor):
        return _Dropout.apply(gradient, ctx.keys, ctx.dropped, False), None, None, None


def _native(x: torch.Tensor, out: torch.Tensor, keys: Keys, dropped: int) -> torch.Tensor:
    kernel = getattr(native(), _KERNELS[out.dtype])
    scale = scale_of(dropped)
    threads = torch.get_num_threads()
    kernel(x.data_ptr(), out.data_ptr(), out.numel(), *keys, least_of(dropped), scale, threads)
    return out


def _by_torch(x: torch.Tensor, keys: Sequence[int | torch.Tensor], dropped: int) -> torch.Tensor:
    keep = keep_by_torch if torch.compiler.is_compiling() else _keep
    scale = scale_of(dropped)
    return torch.where(keep(x.numel(), keys, dropped).view(x.shape), x * scale, 0)


def _keep(size: int, keys: Keys, dropped: int) -> torch.Tensor:
    """`keep_by_torch`, by the C kernel or else in chunks."""
    keep = torch.empty(size, dtype=torch.bool, device="cpu")
    if native() is not None:
        return _native(keep, keep, keys, dropped)
    for start in range(0, size, 2 * _CHUNK):
        part = keep[start : start + 2 * _CHUNK]
        part.copy_(keep_by_torch(len(part), moved_on(keys, start // 2), dropped))
    return keep
