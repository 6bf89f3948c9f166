"""LayerNorm over the last dimension as two Triton kernels, forward and backward.

What it computes is `reference_layer_norm`, in float32 whatever the input's type: input, weight and bias are
widened when loaded, mean and variance are two separate sums (never E[x^2] - E[x]^2, which cancels), and each
result is rounded once, when stored. The weight may have another dtype than the input (float32 weights with
bf16 activations), or be missing. Gradients of weight and bias are summed in float32 by each row of a program and then
over all of them (`partial_sums.py`): no atomics, so that a run repeats bit for bit.

Eager code goes through an `autograd.Function`; under `torch.compile` the same launches are a custom operator,
which is opaque to the compiler and breaks no graph. Not the operator in both: it is dispatched in Python, several
times over, which costs more than the launch itself, and a BERT-base step has 25 of them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from composer_speedups.kernels import launch
from composer_speedups.kernels.launch import (
    DTYPES,
    backward_tile_of,
    held_by_a_thread,
    interpreted,
    most_programs,
    on_device,
    rows_of,
    tile_of,
)
from composer_speedups.kernels.partial_sums import add_up
from composer_speedups.kernels.tensors import MAX_WIDTH, shape_only, to_save

__all__ = [
    "columns",
    "layer_norm",
    "load_for_each_row",
    "normalise",
    "own_sums",
    "reference_layer_norm",
    "row_sum",
    "through_norm",
]


@triton.jit
def columns(CHUNKS: tl.constexpr, BLOCK: tl.constexpr, VECTOR: tl.constexpr):
    """[1, CHUNKS, BLOCK]: the columns of a row in chunks, VECTOR neighbours to a thread; see `launch.tile_of`."""
    column = tl.arange(0, BLOCK)
    if VECTOR > 1:  # or it would be as many as 16 bytes have; single ones Triton gives anyway, with fewer instructions
        column = tl.max_contiguous(column, VECTOR)
    return (tl.arange(0, CHUNKS) * BLOCK)[None, :, None] + column[None, None, :]


@triton.jit
def row_sum(x):
    """[ROWS, 1, 1] of [ROWS, CHUNKS, BLOCK]: over the chunks, each thread by itself, then over their columns."""
    return tl.sum(tl.sum(x, 1), 1)[:, None, None]


@triton.jit
def load_for_each_row(ptr, col, inside, ROWS: tl.constexpr, CHUNKS: tl.constexpr, BLOCK: tl.constexpr):
    """[ROWS, CHUNKS, BLOCK] in float32 of the vector at `ptr`, each thread what it needs: no exchange of registers."""
    place = tl.broadcast_to(col, (ROWS, CHUNKS, BLOCK))
    return tl.load(ptr + place, mask=tl.broadcast_to(inside, (ROWS, CHUNKS, BLOCK)), other=0.0).to(tl.float32)


@triton.jit
def normalise(x, inside, width, eps):
    """Of rows `x` in float32, 0 where not `inside`: mean, x - mean (0 where not `inside`), 1 / deviation."""
    mean = row_sum(x) / width
    centred = tl.where(inside, x - mean, 0.0)
    rstd = 1.0 / tl.sqrt(row_sum(centred * centred) / width + eps)
    return mean, centred, rstd


@triton.jit
def through_norm(g, x_hat, rstd, width):
    """From `g`, the gradient of `x_hat`, that of x. How the row's own variance and mean answer to x: two sums."""
    both = tl.join(tl.sum(g * x_hat, 1), tl.sum(g, 1))  # so that warps which share a row meet once
    by_variance, by_mean = tl.split(tl.sum(both, 1)[:, None, None, :] / width)
    return (g - x_hat * by_variance - by_mean) * rstd


@triton.jit
def own_sums(program, WIDTH: tl.constexpr, ROWS: tl.constexpr):
    """Where each of a program's ROWS stores its sums: see `launch.backward_tile_of`."""
    return (program * ROWS + tl.arange(0, ROWS))[:, None, None] * WIDTH


@triton.jit
def _forward_kernel(
    x_ptr,  # [rows, WIDTH], rows x_stride apart
    w_ptr,  # [WIDTH], read if HAS_W
    b_ptr,  # [WIDTH], read if HAS_B
    y_ptr,  # [rows, WIDTH], contiguous
    mean_ptr,  # [rows] float32
    rstd_ptr,  # [rows] float32
    x_stride,
    rows,
    eps,
    WIDTH: tl.constexpr,  # known to the compiler, which then leaves out what lies beyond it
    HAS_W: tl.constexpr,
    HAS_B: tl.constexpr,
    ROWS: tl.constexpr,  # rows a program takes
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,  # CHUNKS * BLOCK: power of two, >= WIDTH
    VECTOR: tl.constexpr,  # neighbours that a thread loads at once
):
    # 64 bits: rows * WIDTH may pass 2^31.
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None, None]
    col = columns(CHUNKS, BLOCK, VECTOR)
    inside = col < WIDTH
    mask = (row < rows) & inside
    x = tl.load(x_ptr + row * x_stride + col, mask=mask, other=0.0).to(tl.float32)
    mean, centred, rstd = normalise(x, inside, WIDTH, eps)
    y = centred * rstd
    if HAS_W:
        y = y * load_for_each_row(w_ptr, col, inside, ROWS, CHUNKS, BLOCK)
    if HAS_B:
        y = y + load_for_each_row(b_ptr, col, inside, ROWS, CHUNKS, BLOCK)
    tl.store(y_ptr + row * WIDTH + col, y.to(y_ptr.dtype.element_ty), mask=mask)
    tl.store(mean_ptr + row, mean, mask=row < rows)
    tl.store(rstd_ptr + row, rstd, mask=row < rows)


@triton.jit
def _backward_kernel(
    dy_ptr,  # [rows, WIDTH], rows dy_stride apart
    x_ptr,  # [rows, WIDTH], rows x_stride apart
    w_ptr,  # [WIDTH], read if HAS_W
    mean_ptr,  # [rows] float32
    rstd_ptr,  # [rows] float32
    dx_ptr,  # [rows, WIDTH], contiguous, written if NEED_DX
    dw_ptr,  # [programs * ROWS, WIDTH] float32, written if NEED_DW
    db_ptr,  # [programs * ROWS, WIDTH] float32, written if NEED_DW
    dy_stride,
    x_stride,
    rows,
    WIDTH: tl.constexpr,
    HAS_W: tl.constexpr,
    NEED_DX: tl.constexpr,
    NEED_DW: tl.constexpr,
    STAGES: tl.constexpr,  # see `launch.STAGES`
    ROWS: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
    VECTOR: tl.constexpr,
):
    program = tl.program_id(0)
    col = columns(CHUNKS, BLOCK, VECTOR)
    inside = col < WIDTH
    dw = tl.zeros([ROWS, CHUNKS, BLOCK], tl.float32)
    db = tl.zeros([ROWS, CHUNKS, BLOCK], tl.float32)
    if HAS_W:
        w = load_for_each_row(w_ptr, col, inside, ROWS, CHUNKS, BLOCK)
    for start in tl.range(program * ROWS, rows, tl.num_programs(0) * ROWS, num_stages=STAGES):
        row = (start + tl.arange(0, ROWS).to(tl.int64))[:, None, None]
        mask = (row < rows) & inside
        # All loads before what waits for one of them: a row waits for memory once.
        x = tl.load(x_ptr + row * x_stride + col, mask=mask, other=0.0)
        dy = tl.load(dy_ptr + row * dy_stride + col, mask=mask, other=0.0)
        mean = tl.load(mean_ptr + row, mask=row < rows, other=0.0)
        rstd = tl.load(rstd_ptr + row, mask=row < rows, other=0.0)
        x = x.to(tl.float32)
        dy = dy.to(tl.float32)
        x_hat = tl.where(inside, (x - mean) * rstd, 0.0)
        if NEED_DX:
            g = dy
            if HAS_W:
                g = dy * w
            dx = through_norm(g, x_hat, rstd, WIDTH)
            tl.store(dx_ptr + row * WIDTH + col, dx.to(dx_ptr.dtype.element_ty), mask=mask)
        if NEED_DW:
            dw += dy * x_hat
            db += dy
    if NEED_DW:
        place = own_sums(program, WIDTH, ROWS) + col
        tl.store(dw_ptr + place, dw, mask=inside)
        tl.store(db_ptr + place, db, mask=inside)


def reference_layer_norm(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float = 1e-5
) -> torch.Tensor:
    """What the kernel means, in plain PyTorch; in float64 if `x` is."""
    wide = x if x.dtype == torch.float64 else x.float()
    centred = wide - wide.mean(-1, keepdim=True)
    y = centred * (centred.square().mean(-1, keepdim=True) + eps).rsqrt()
    y = y if weight is None else y * weight.to(y.dtype)
    y = y if bias is None else y + bias.to(y.dtype)
    return y.to(x.dtype)


def layer_norm(
    x: torch.Tensor, weight: torch.Tensor | None = None, bias: torch.Tensor | None = None, eps: float = 1e-5
) -> torch.Tensor:
    """LayerNorm over the last dimension of `x`; the result has the dtype of `x`.

    Args:
        x: `[..., width]`, float32, float16 or bfloat16, on a CUDA device; width from 1 to 8192, any strides.
        weight: `[width]` or None, of any of these dtypes.
        bias: `[width]` or None, of any of these dtypes.
        eps: added to the variance.
    """
    width = x.shape[-1] if x.dim() else 0
    if not 1 <= width <= MAX_WIDTH:
        raise ValueError(f"layer_norm takes widths from 1 to {MAX_WIDTH}, not {width}: use torch's layer_norm here")
    for name, tensor in (("x", x), ("weight", weight), ("bias", bias)):
        if tensor is None:
            continue
        if tensor.dtype not in DTYPES:
            raise ValueError(f"layer_norm takes float32, float16 or bfloat16, not {name} in {tensor.dtype}")
        if tensor is not x and tensor.shape != (width,):
            raise ValueError(f"layer_norm: {name} must have the shape ({width},), not {tuple(tensor.shape)}")
        if tensor.device != x.device:
            raise ValueError(f"layer_norm: {name} is on {tensor.device}, x on {x.device}: move it to {x.device}")
    if not (x.is_cuda or interpreted()):
        raise ValueError(f"layer_norm needs a CUDA device, x is on {x.device}: use torch's layer_norm here")
    if torch.compiler.is_compiling() or shape_only(x):
        return _forward_op(x, weight, bias, eps)[0]
    return _LayerNorm.apply(x, weight, bias, eps)


def _forward(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    matrix = rows_of(x)
    rows, width = matrix.shape
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    mean = torch.empty(rows, dtype=torch.float32, device=x.device)
    rstd = torch.empty_like(mean)
    if rows:
        tile = tile_of(width, x.element_size())
        with on_device(x.device):
            _forward_kernel[(triton.cdiv(rows, tile["ROWS"]),)](
                matrix,
                matrix if weight is None else weight.contiguous(),
                matrix if bias is None else bias.contiguous(),
                y,
                mean,
                rstd,
                matrix.stride(0),
                rows,
                eps,
                WIDTH=width,
                HAS_W=weight is not None,
                HAS_B=bias is not None,
                **tile,
            )
    return y, mean, rstd


def _registers(width: int, tile: dict[str, int]) -> int:
    """Of a thread of the backward kernel: two sums, the weight, x_hat, and what is computed with them."""
    return 8 * held_by_a_thread(width, tile)


def _backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    need_dx: bool,
    need_dw: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`dx` like `x`, and `[2, width]` float32 with the gradients of weight and bias; empty where not needed."""
    gradients, matrix = rows_of(dy), rows_of(x)
    rows, width = matrix.shape
    dx = torch.empty(x.shape if need_dx else (0,), dtype=x.dtype, device=x.device)
    tile = backward_tile_of(width, x.element_size())
    programs = min(triton.cdiv(rows, tile["ROWS"]), most_programs(tile, _registers(width, tile), x.device))
    partial = torch.empty((2, programs * tile["ROWS"] if need_dw else 0, width), dtype=torch.float32, device=x.device)
    if rows and (need_dx or need_dw):
        with on_device(x.device):
            _backward_kernel[(programs,)](
                gradients,
                matrix,
                matrix if weight is None else weight.contiguous(),
                mean,
                rstd,
                dx,
                partial[0],
                partial[1],
                gradients.stride(0),
                matrix.stride(0),
                rows,
                WIDTH=width,
                HAS_W=weight is not None,
                NEED_DX=need_dx,
                NEED_DW=need_dw,
                STAGES=launch.STAGES,
                **tile,
            )
    return dx, add_up(partial)


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, eps):
        y, mean, rstd = _forward(x, weight, bias, eps)
        ctx.save_for_backward(x, to_save(weight), mean, rstd)
        ctx.bias_dtype = None if bias is None else bias.dtype
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        return _gradients(ctx, dy, _backward)


def _gradients(ctx, dy, backward):
    """Of the inputs of the forward pass, by `backward`."""
    x, weight, mean, rstd = ctx.saved_tensors
    need_dx, need_dw, need_db, _ = ctx.needs_input_grad
    dx, dwb = backward(dy, x, weight, mean, rstd, need_dx, need_dw or need_db)
    return (
        dx if need_dx else None,
        dwb[0].to(weight.dtype) if need_dw else None,
        dwb[1].to(ctx.bias_dtype) if need_db else None,
        None,
    )


@torch.library.custom_op("composer_speedups::layer_norm", mutates_args=())
def _forward_op(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return _forward(x, weight, bias, eps)


@_forward_op.register_fake
def _(x, weight, bias, eps):
    rows = x.numel() // x.shape[-1]
    statistic = x.new_empty((rows,), dtype=torch.float32)
    return x.new_empty(x.shape), statistic, torch.empty_like(statistic)


@torch.library.custom_op("composer_speedups::layer_norm_backward", mutates_args=())
def _backward_op(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    need_dx: bool,
    need_dw: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    return _backward(dy, x, weight, mean, rstd, need_dx, need_dw)


@_backward_op.register_fake
def _(dy, x, weight, mean, rstd, need_dx, need_dw):
    return x.new_empty(x.shape if need_dx else (0,)), x.new_empty((2, x.shape[-1]), dtype=torch.float32)


def _op_context(ctx, inputs, output) -> None:
    x, weight, bias, _ = inputs
    ctx.save_for_backward(x, weight, *output[1:])
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.set_materialize_grads(False)  # mean and rstd get no gradient: spare two tensors of zeros


def _op_gradient(ctx, dy, _dmean, _drstd):
    return _gradients(ctx, dy, _backward_op)


_forward_op.register_autograd(_op_gradient, setup_context=_op_context)
