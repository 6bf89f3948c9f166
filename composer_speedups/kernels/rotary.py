"""Rotary positions on the CPU in one pass: queries or keys are turned by an angle that is their token's own.

PyTorch operations take six passes over memory, those under autocast in float32, and as many for the gradient; here it
is one each, and nothing but the cosines and sines is kept. Each number is computed in float32 and rounded once.
The work is done by `rotary.c`; `_by_torch` is its meaning in PyTorch operations, bit for bit the same.

Source: RoFormer, https://arxiv.org/abs/2104.09864, by halves as in GPT-NeoX.
"""

from __future__ import annotations

import ctypes

import torch

from composer_speedups.kernels.native import checked
from composer_speedups.kernels.tensors import plain, refuse_batched, shape_only

__all__ = ["rotary", "serves"]

_NAMES = {torch.float32: "rotate_float32", torch.bfloat16: "rotate_bfloat16"}
_POINTER, _SIZE, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int


def serves(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> bool:
    """Whether these may be given to `rotary`: on the CPU, in float32 or bfloat16, but where Inductor would fuse it."""
    if torch.compiler.is_compiling() or x.dtype not in _NAMES or x.dim() != 3 or x.shape[-1] % 2:
        return False
    if not all(t.is_cpu and plain(t) for t in (x, cosine, sine)) or x.stride(-1) != 1:
        return False
    tables = (x.shape[0], x.shape[-1])
    fit = all(t.dtype == torch.float32 and t.shape == tables and not t.requires_grad for t in (cosine, sine))
    return fit and native() is not None


def rotary(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """`x * cosine + rotate_half(x) * sine`, where rotate_half gives minus the second half, and the first.

    Args:
        x: [tokens, heads, width], float32 or bfloat16; the last dimension without gaps.
        cosine: [tokens, width], float32.
        sine: [tokens, width], float32.

    Returns:
        [tokens, heads, width], of the type of `x`.

    >>> x, angle = torch.tensor([[[1.0, 0.0]]]), torch.full((1, 2), torch.pi / 2)
    >>> rotary(x, angle.cos(), angle.sin()).round().abs().tolist()
    [[[0.0, 1.0]]]
    """
    return _Rotary.apply(x, cosine, sine)


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, cosine, sine):
        ctx.save_for_backward(cosine, sine)
        return _turn(x, cosine, sine, back=False)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient):
        refuse_batched(gradient)
        gradient = gradient if gradient.stride(-1) == 1 else gradient.contiguous()
        return _turn(gradient, *ctx.saved_tensors, back=True), None, None


def _turn(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor, back: bool) -> torch.Tensor:
    out = x.new_empty(x.shape)
    if not shape_only(x):
        _call(native(), x, cosine.contiguous(), sine.contiguous(), out, back)
    return out


def _call(library: ctypes.CDLL, x, cosine, sine, out, back: bool) -> None:
    pointers = (t.data_ptr() for t in (cosine, sine, out))
    where = (x.data_ptr(), x.stride(0), x.stride(1))
    getattr(library, _NAMES[x.dtype])(*where, *pointers, *x.shape, back, torch.get_num_threads())


def _by_torch(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor, back: bool) -> torch.Tensor:
    """What the C functions mean."""
    a, b = x.float().chunk(2, -1)
    (c, d), (s, r) = (t[:, None].chunk(2, -1) for t in (cosine, sine))
    halves = (a * c + b * r, b * d - a * s) if back else (a * c - b * s, b * d + a * r)
    return torch.cat(halves, -1).to(x.dtype)


@checked("rotary")
def native(library: ctypes.CDLL) -> bool:
    """Whether the C functions agree with their meaning in PyTorch operations."""
    for name in _NAMES.values():
        arguments = (_POINTER, _SIZE, _SIZE, _POINTER, _POINTER, _POINTER, _SIZE, _SIZE, _SIZE, _INT, _INT)
        getattr(library, name).argtypes, getattr(library, name).restype = arguments, None
    return _agrees(library)


def _agrees(library: ctypes.CDLL) -> bool:
    angles = torch.linspace(0, 9, 5 * 38, dtype=torch.float32, device="cpu").view(5, 38)
    cosine, sine = angles.cos(), angles.sin()
    for dtype in _NAMES:
        x = torch.linspace(-3, 3, 5 * 3 * 38, dtype=torch.float32, device="cpu").view(5, 3, 38).to(dtype)
        for back in (False, True):
            out = torch.empty_like(x)
            _call(library, x, cosine, sine, out, back)
            if not torch.equal(out, _by_torch(x, cosine, sine, back)):
                return False
    return True
