"""The CUDA side of `bias_gelu.py`: two Triton kernels, forward and backward.

Backward reads the product with the gradient, makes the sum and the slope again, writes the gradient, and sums it over
the rows that a warp takes, in float32 and before it is rounded; `partial_sums.py` adds up what warps have. The next
rows are under way while it computes. Rows that are loaded in the turn of the loop which needs them, ptxas would load
where they are needed, and a turn would wait for memory twice: for the product, and 160 instructions later for the
gradient.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from composer_speedups.kernels.launch import interpreted, on_device, processors, programs_for, rows_of
from composer_speedups.kernels.partial_sums import add_up

__all__ = ["backward", "backward_kernel", "forward", "forward_kernel", "interpreted"]

_COLS = 256  # a program's tile: rows x columns
_ROWS_FORWARD, _ROWS_BACKWARD = 16, 4  # 32 and 8 elements in each of 128 threads
_WARPS = 4
# Of the backward kernel, for each processor: all that run at once in bf16. By ptxas for sm_90 (Triton 3.6) a thread
# has 62 registers, so that there are 32 warps, and 29 instructions an element, of 37: see `launch.tile_of`.
_PROGRAMS = 8


@triton.jit
def _normal(h):
    """Of the standard normal distribution: P(X <= h), and exp(-h^2 / 2)."""
    density = tl.exp2(-0.7213475204 * (h * h))  # log2(e) / 2; exp itself is exp2 with one product more
    d = 1.0 + 0.231641888 * tl.abs(h)  # 0.3275911 / sqrt(2)
    t = tl.rsqrt(d * d)  # 1 / d: two instructions, where a division takes nine
    tail = ((((0.5307027145 * t - 0.7265760135) * t + 0.7107068705) * t - 0.142248368) * t + 0.127414796) * t * density
    return tl.where(h < 0.0, tail, 1.0 - tail), density


@triton.jit
def _load(ptr, stride, row, rows, col, width):
    """The tile of `row` and `col`, 0 beyond the matrix."""
    mask = (row < rows)[:, None] & (col < width)[None, :]
    return tl.load(ptr + row[:, None] * stride + col[None, :], mask=mask, other=0.0)


@triton.jit
def forward_kernel(
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
    h = _load(x_ptr, x_stride, row, rows, col, width).to(tl.float32) + bias
    below, _density = _normal(h)
    tl.store(y_ptr + row[:, None] * width + col[None, :], (h * below).to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def backward_kernel(
    dy_ptr,  # [rows, width], rows dy_stride apart
    x_ptr,  # [rows, width], rows x_stride apart
    bias_ptr,  # [width]
    dx_ptr,  # [rows, width], contiguous
    dbias_ptr,  # [programs * ROWS, width] float32
    dy_stride,
    x_stride,
    rows,
    width,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    program = tl.program_id(0)
    step = tl.num_programs(0) * ROWS
    col = tl.program_id(1) * COLS + tl.arange(0, COLS)
    bias = tl.load(bias_ptr + col, mask=col < width, other=0.0).to(tl.float32)[None, :]
    total = tl.zeros([ROWS, COLS], tl.float32)
    row = program * ROWS + tl.arange(0, ROWS).to(tl.int64)
    next_x = _load(x_ptr, x_stride, row, rows, col, width)
    next_dy = _load(dy_ptr, dy_stride, row, rows, col, width)
    for start in range(program * ROWS, rows, step):
        row = start + tl.arange(0, ROWS).to(tl.int64)
        x, dy = next_x, next_dy
        next_x = _load(x_ptr, x_stride, row + step, rows, col, width)
        next_dy = _load(dy_ptr, dy_stride, row + step, rows, col, width)
        h = x.to(tl.float32) + bias
        below, density = _normal(h)
        dx = dy.to(tl.float32) * (below + 0.3989422804 * h * density)
        mask = (row < rows)[:, None] & (col < width)[None, :]
        tl.store(dx_ptr + row[:, None] * width + col[None, :], dx.to(dx_ptr.dtype.element_ty), mask=mask)
        total += dx
    # Not added up over the rows: see `launch.backward_tile_of`.
    own = (program * ROWS + tl.arange(0, ROWS))[:, None]
    tl.store(dbias_ptr + own * width + col[None, :], total, mask=(col < width)[None, :])


def forward(x: torch.Tensor, bias: torch.Tensor, kernel=forward_kernel) -> torch.Tensor:
    """GELU(x + bias); `kernel`: what launches it, if it is not Triton; see `inductor_operators.py`."""
    matrix = rows_of(x)
    rows, width = matrix.shape[0], int(matrix.shape[1])  # a number also where the compiler has a symbol
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if rows:
        with on_device(x.device):
            kernel[(triton.cdiv(rows, _ROWS_FORWARD), triton.cdiv(width, _COLS))](
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


def _programs(rows: int, columns: int, itemsize: int, of_device: int) -> int:
    """Of the backward kernel, over rows. Tiles over columns fill the device as well; 8 rows of programs at least.

    No more than run at once, also as what each stores has to be added up: 352 rows at a width of 3,072.
    """
    each = _PROGRAMS if itemsize == 2 else max(1, _PROGRAMS - 1)  # a thread has 72 registers in float32
    return programs_for(rows, _ROWS_BACKWARD, max(8, each * of_device // columns))


def backward(
    dy: torch.Tensor, x: torch.Tensor, bias: torch.Tensor, kernel=backward_kernel
) -> tuple[torch.Tensor, torch.Tensor]:
    """`dx` like `x`, and the bias's gradient in float32."""
    gradients, matrix = rows_of(dy), rows_of(x)
    rows, width = matrix.shape[0], int(matrix.shape[1])
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    columns = triton.cdiv(width, _COLS)
    programs = _programs(rows, columns, x.element_size(), processors(x.device))
    partial = torch.empty((programs * _ROWS_BACKWARD, width), dtype=torch.float32, device=x.device)
    with on_device(x.device):
        kernel[(programs, columns)](
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
    sums = add_up(partial) if kernel is backward_kernel else partial.sum(0)  # Inductor fuses what follows
    return dx, sums
