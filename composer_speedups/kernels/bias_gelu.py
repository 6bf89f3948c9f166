"""GELU(x + bias) with the error function as two Triton kernels, forward and backward.

What it computes is `reference_bias_gelu`, in float32 whatever the input's type, rounded once, when stored. Kept for
backward is `x` alone, the matrix product before its bias. The backward kernel reads it with the gradient, makes the
sum and the slope again, writes the gradient of `x`, and sums it over the rows that a program takes, in float32 and
before it is rounded; `torch.sum` over programs gives the bias's: no atomics, so that a run repeats bit for bit.

The distribution function is the rational approximation 7.1.26 of Abramowitz and Stegun, "Handbook of Mathematical
Functions", off by at most 7.5e-8, half a unit in float32's last place at 1, and on a GPU by what its approximate root
and exponential add. The exponential is the density that the slope needs; no library call is made.

Eager code goes through an `autograd.Function`, `torch.compile` through a custom operator; see `layer_norm.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from composer_speedups.kernels.launch import DTYPES, interpreted, on_device, processors, rows_of
from composer_speedups.kernels.tensors import shape_only

__all__ = ["bias_gelu", "reference_bias_gelu", "why_not"]

_COLS = 256  # a program's tile: rows x columns
_ROWS_FORWARD, _ROWS_BACKWARD = 16, 4  # 32 and 8 elements in each of 128 threads
_WARPS = 4


@triton.jit
def _normal(h):
    """Of the standard normal distribution: P(X <= h), and exp(-h^2 / 2)."""
    density = tl.exp2(-0.7213475204 * (h * h))  # log2(e) / 2; exp itself is exp2 with one product more
    d = 1.0 + 0.231641888 * tl.abs(h)  # 0.3275911 / sqrt(2)
    t = tl.rsqrt(d * d)  # 1 / d: two instructions, where a division takes nine
    tail = ((((0.5307027145 * t - 0.7265760135) * t + 0.7107068705) * t - 0.142248368) * t + 0.127414796) * t * density
    return tl.where(h < 0.0, tail, 1.0 - tail), density


@triton.jit
def _forward_kernel(
    x_ptr,  # [rows, width], rows x_stride apart
    bias_ptr,  # [width]
    y_ptr,  # [rows, width], contiguous
    x_stride,
    rows,
    width,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)  # 64 bits: rows * width may pass 2^31
    col = tl.program_id(1) * COLS + tl.arange(0, COLS)
    mask = (row < rows)[:, None] & (col < width)[None, :]
    bias = tl.load(bias_ptr + col, mask=col < width, other=0.0).to(tl.float32)[None, :]
    h = tl.load(x_ptr + row[:, None] * x_stride + col[None, :], mask=mask, other=0.0).to(tl.float32) + bias
    below, _density = _normal(h)
    tl.store(y_ptr + row[:, None] * width + col[None, :], (h * below).to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _backward_kernel(
    dy_ptr,  # [rows, width], rows dy_stride apart
    x_ptr,  # [rows, width], rows x_stride apart
    bias_ptr,  # [width]
    dx_ptr,  # [rows, width], contiguous
    dbias_ptr,  # [programs, width] float32
    dy_stride,
    x_stride,
    rows,
    width,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    program = tl.program_id(0)
    col = tl.program_id(1) * COLS + tl.arange(0, COLS)
    bias = tl.load(bias_ptr + col, mask=col < width, other=0.0).to(tl.float32)[None, :]
    total = tl.zeros([ROWS, COLS], tl.float32)
    for start in range(program * ROWS, rows, tl.num_programs(0) * ROWS):
        row = start + tl.arange(0, ROWS).to(tl.int64)
        mask = (row < rows)[:, None] & (col < width)[None, :]
        h = tl.load(x_ptr + row[:, None] * x_stride + col[None, :], mask=mask, other=0.0).to(tl.float32) + bias
        dy = tl.load(dy_ptr + row[:, None] * dy_stride + col[None, :], mask=mask, other=0.0).to(tl.float32)
        below, density = _normal(h)
        dx = dy * (below + 0.3989422804 * h * density)
        tl.store(dx_ptr + row[:, None] * width + col[None, :], dx.to(dx_ptr.dtype.element_ty), mask=mask)
        total += dx
    tl.store(dbias_ptr + program * width + col, tl.sum(total, 0), mask=col < width)


def reference_bias_gelu(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """What the kernel means, in plain PyTorch; in float64 if `x` is."""
    wide = torch.promote_types(x.dtype, torch.float32)
    h = x.to(wide) + bias.to(wide)
    return (h * 0.5 * (1 + torch.erf(h * 0.5**0.5))).to(x.dtype)


def bias_gelu(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """GELU(x + bias); the result has the dtype of `x`.

    Args:
        x: `[..., width]`, float32, float16 or bfloat16, on a CUDA device, any strides.
        bias: `[width]`, of any of these dtypes.
    """
    if (reason := why_not(x, bias)) is not None:
        raise ValueError(f"bias_gelu: {reason}")
    if torch.compiler.is_compiling() or shape_only(x):
        return _forward_op(x, bias)
    return _BiasGELU.apply(x, bias)


def why_not(x: torch.Tensor, bias: torch.Tensor) -> str | None:
    """Why the kernels do not take these; None if they do."""
    width = x.shape[-1] if x.dim() else 0
    for name, tensor in (("x", x), ("bias", bias)):
        if tensor.dtype not in DTYPES:
            return f"{name} is in {tensor.dtype}, and must be in float32, float16 or bfloat16"
    if width < 1 or bias.shape != (width,) or bias.device != x.device:
        return f"bias must have the shape ({width},) on {x.device}, not {tuple(bias.shape)} on {bias.device}"
    if not (x.is_cuda or interpreted()):
        return f"it needs a CUDA device, x is on {x.device}: use torch's gelu here"
    return None


def _forward(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    matrix = rows_of(x)
    rows, width = matrix.shape
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if rows:
        grid = (triton.cdiv(rows, _ROWS_FORWARD), triton.cdiv(width, _COLS))
        with on_device(x.device):
            _forward_kernel[grid](
                matrix,
                bias.contiguous(),
                y,
                matrix.stride(0),
                rows,
                width,
                ROWS=_ROWS_FORWARD,
                COLS=_COLS,
                num_warps=_WARPS,
            )
    return y


def _backward(dy: torch.Tensor, x: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`dx` like `x`, and the bias's gradient in float32."""
    gradients, matrix = rows_of(dy), rows_of(x)
    rows, width = matrix.shape
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    columns = triton.cdiv(width, _COLS)
    # Tiles over columns fill the device as well: 16 programs a processor in all, but 8 rows of programs at least.
    programs = min(triton.cdiv(rows, _ROWS_BACKWARD), max(8, 16 * processors(x.device) // columns))
    partial = torch.empty((programs, width), dtype=torch.float32, device=x.device)
    if rows:
        with on_device(x.device):
            _backward_kernel[(programs, columns)](
                gradients,
                matrix,
                bias.contiguous(),
                dx,
                partial,
                gradients.stride(0),
                matrix.stride(0),
                rows,
                width,
                ROWS=_ROWS_BACKWARD,
                COLS=_COLS,
                num_warps=_WARPS,
            )
    return dx, partial.sum(0)


class _BiasGELU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, bias):
        ctx.save_for_backward(x, bias)
        return _forward(x, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        return _gradients(_backward, ctx, dy)


def _gradients(backward, ctx, dy):
    x, bias = ctx.saved_tensors
    dx, dbias = backward(dy, x, bias)
    return dx if ctx.needs_input_grad[0] else None, dbias.to(bias.dtype) if ctx.needs_input_grad[1] else None


@torch.library.custom_op("composer_speedups::bias_gelu", mutates_args=())
def _forward_op(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return _forward(x, bias)


@_forward_op.register_fake
def _(x, bias):
    return x.new_empty(x.shape)


@torch.library.custom_op("composer_speedups::bias_gelu_backward", mutates_args=())
def _backward_op(dy: torch.Tensor, x: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return _backward(dy, x, bias)


@_backward_op.register_fake
def _(dy, x, bias):
    return x.new_empty(x.shape), x.new_empty((x.shape[-1],), dtype=torch.float32)


def _remember(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate(ctx, dy):
    return _gradients(_backward_op, ctx, dy)


_forward_op.register_autograd(_differentiate, setup_context=_remember)
