"""The CUDA side of `dropout_add_norm.py`: two Triton kernels, forward and backward.

As in `layer_norm.py`, whose pieces they are made of, a program holds whole rows, widened to float32. The dropout mask
is bit for bit that of `fast_dropout.keep_by_torch`: a word of random bits is hashed once for two neighbours.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from composer_speedups.kernels import launch
from composer_speedups.kernels.launch import (
    backward_tile_of,
    held_by_a_thread,
    interpreted,
    most_programs,
    on_device,
    programs_for,
    rows_of,
    tile_of,
)
from composer_speedups.kernels.layer_norm import columns, load_for_each_row, normalise, own_sums, through_norm
from composer_speedups.kernels.partial_sums import add_up

__all__ = ["backward", "backward_kernel", "forward", "forward_kernel", "interpreted"]


@triton.jit
def _seeds(seeds_ptr):
    """Both, [2] int64 of 32 bits each."""
    return tl.load(seeds_ptr).to(tl.uint32), tl.load(seeds_ptr + 1).to(tl.uint32)


@triton.jit
def _keep(
    first,
    second,
    row,
    col,
    WIDTH: tl.constexpr,
    DROPPED: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Whether each element stays, by the two seeds `first` and `second`; see `fast_dropout.keep_by_torch`."""
    if WIDTH % 2 == 0:  # a word's two halves are neighbours in a row
        word = row.to(tl.uint32) * (WIDTH // 2) + columns(CHUNKS, BLOCK // 2, 1).to(tl.uint32)
    else:
        element = row * WIDTH + col
        word = (element >> 1).to(tl.uint32)
    h = word * 0x9E3779B9 + first
    h = (h ^ (h >> 16) ^ second) * 0x7FEB352D
    h = (h ^ (h >> 15)) * 0x846CA68B
    h = h ^ (h >> 16) ^ 0x80008000  # halves are of signed 16 bits: below 0 comes first
    if WIDTH % 2 == 0:
        both = tl.join((h & 0xFFFF) >= DROPPED, (h >> 16) >= DROPPED)
        return tl.reshape(both, (ROWS, CHUNKS, BLOCK))
    else:
        return tl.where((element & 1) == 0, h & 0xFFFF, h >> 16) >= DROPPED


@triton.jit
def forward_kernel(
    x_ptr,  # [rows, WIDTH], rows x_stride apart
    x_bias_ptr,  # [WIDTH], read if BIASED
    residual_ptr,  # [rows, WIDTH], rows residual_stride apart
    w_ptr,  # [WIDTH]
    b_ptr,  # [WIDTH]
    seeds_ptr,  # [2] int64, read if DROPPED
    y_ptr,  # [rows, WIDTH], contiguous
    mean_ptr,  # [rows] float32
    rstd_ptr,  # [rows] float32
    x_stride,
    residual_stride,
    rows,
    WIDTH: tl.constexpr,
    BIASED: tl.constexpr,
    DROPPED: tl.constexpr,  # of 65536
    EPS: tl.constexpr,  # constants, as is the scale below: numbers of Python's are float64 where Inductor launches
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
    if BIASED:
        x += load_for_each_row(x_bias_ptr, col, inside, ROWS, CHUNKS, BLOCK)
    residual = tl.load(residual_ptr + row * residual_stride + col, mask=mask, other=0.0).to(tl.float32)
    z = x + residual
    if DROPPED:
        scale: tl.constexpr = 65536.0 / (65536 - DROPPED)
        first, second = _seeds(seeds_ptr)
        z = tl.where(_keep(first, second, row, col, WIDTH, DROPPED, ROWS, CHUNKS, BLOCK), x, 0.0) * scale + residual
    mean, centred, rstd = normalise(z, inside, WIDTH, EPS)
    w = load_for_each_row(w_ptr, col, inside, ROWS, CHUNKS, BLOCK)
    b = load_for_each_row(b_ptr, col, inside, ROWS, CHUNKS, BLOCK)
    y = centred * rstd * w + b
    tl.store(y_ptr + row * WIDTH + col, y.to(y_ptr.dtype.element_ty), mask=mask)
    tl.store(mean_ptr + row, mean, mask=row < rows)
    tl.store(rstd_ptr + row, rstd, mask=row < rows)


@triton.jit
def backward_kernel(
    dy_ptr,  # [rows, WIDTH], rows dy_stride apart
    more_ptr,  # [rows, WIDTH], contiguous, read if MORE: added to dy, and rounded as PyTorch does
    x_ptr,  # [rows, WIDTH], rows x_stride apart
    x_bias_ptr,  # [WIDTH], read if BIASED
    residual_ptr,  # [rows, WIDTH], rows residual_stride apart
    w_ptr,  # [WIDTH]
    mean_ptr,  # [rows] float32
    rstd_ptr,  # [rows] float32
    seeds_ptr,  # [2] int64, read if DROPPED
    dx_ptr,  # [rows, WIDTH], contiguous, written if DROPPED; else it is dresidual
    dresidual_ptr,  # [rows, WIDTH], contiguous
    partial_ptr,  # [2 or, if BIASED, 3, programs * ROWS, WIDTH] float32: what is added to those of weight, bias, x_bias
    dy_stride,
    x_stride,
    residual_stride,
    rows,
    WIDTH: tl.constexpr,
    MORE: tl.constexpr,
    BIASED: tl.constexpr,
    DROPPED: tl.constexpr,
    STAGES: tl.constexpr,  # see `launch.STAGES`
    ROWS: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
    VECTOR: tl.constexpr,
    STAY: tl.constexpr,  # whether the vectors of weight and x_bias stay in registers; else they are loaded for each row
):
    scale: tl.constexpr = 65536.0 / (65536 - DROPPED)
    program = tl.program_id(0)
    col = columns(CHUNKS, BLOCK, VECTOR)
    inside = col < WIDTH
    dw = tl.zeros([ROWS, CHUNKS, BLOCK], tl.float32)
    db = tl.zeros([ROWS, CHUNKS, BLOCK], tl.float32)
    if BIASED:
        dx_bias = tl.zeros([ROWS, CHUNKS, BLOCK], tl.float32)
    if STAY:
        w = load_for_each_row(w_ptr, col, inside, ROWS, CHUNKS, BLOCK)
        if BIASED:
            x_bias = load_for_each_row(x_bias_ptr, col, inside, ROWS, CHUNKS, BLOCK)
    if DROPPED:
        first, second = _seeds(seeds_ptr)
    for start in tl.range(program * ROWS, rows, tl.num_programs(0) * ROWS, num_stages=STAGES):
        row = (start + tl.arange(0, ROWS).to(tl.int64))[:, None, None]
        mask = (row < rows) & inside
        # All loads before what waits for one of them: a row waits for memory once.
        x = tl.load(x_ptr + row * x_stride + col, mask=mask, other=0.0)
        residual = tl.load(residual_ptr + row * residual_stride + col, mask=mask, other=0.0)
        dy = tl.load(dy_ptr + row * dy_stride + col, mask=mask, other=0.0)
        if MORE:
            more = tl.load(more_ptr + row * WIDTH + col, mask=mask, other=0.0)
        mean = tl.load(mean_ptr + row, mask=row < rows, other=0.0)
        rstd = tl.load(rstd_ptr + row, mask=row < rows, other=0.0)
        x = x.to(tl.float32)
        residual = residual.to(tl.float32)
        dy = dy.to(tl.float32)
        if MORE:
            dy = (dy + more.to(tl.float32)).to(dy_ptr.dtype.element_ty).to(tl.float32)
        if not STAY:
            if start < rows:  # as it always is: what is in a branch is not loaded ahead of its row, as `STAGES` says
                w = load_for_each_row(w_ptr, col, inside, ROWS, CHUNKS, BLOCK)
                x_bias = load_for_each_row(x_bias_ptr, col, inside, ROWS, CHUNKS, BLOCK)
            else:
                w = tl.zeros([ROWS, CHUNKS, BLOCK], tl.float32)
                x_bias = tl.zeros([ROWS, CHUNKS, BLOCK], tl.float32)
        if BIASED:
            x += x_bias
        z = x + residual
        if DROPPED:
            keep = _keep(first, second, row, col, WIDTH, DROPPED, ROWS, CHUNKS, BLOCK)
            z = tl.where(keep, x, 0.0) * scale + residual
        z_hat = tl.where(inside, (z - mean) * rstd, 0.0)
        dz = through_norm(dy * w, z_hat, rstd, WIDTH)
        place = row * WIDTH + col
        tl.store(dresidual_ptr + place, dz.to(dresidual_ptr.dtype.element_ty), mask=mask)
        if DROPPED:
            dz = tl.where(keep, dz * scale, 0.0)
            tl.store(dx_ptr + place, dz.to(dx_ptr.dtype.element_ty), mask=mask)
        if BIASED:
            dx_bias += dz
        dw += dy * z_hat
        db += dy
    place = partial_ptr + own_sums(program, WIDTH, ROWS) + col
    all_sums = tl.num_programs(0) * ROWS * WIDTH
    tl.store(place, dw, mask=inside)
    tl.store(place + all_sums, db, mask=inside)
    if BIASED:
        tl.store(place + 2 * all_sums, dx_bias, mask=inside)


def _registers(width: int, tile: dict[str, int]) -> int:
    """Of a thread of the backward kernel: three sums, two vectors, a row and what is computed with them. Where it loads
    single elements, each has its own test whether it is inside."""
    needed = 20 + 9 * held_by_a_thread(width, tile)
    return needed if tile["VECTOR"] > 1 else needed * 3 // 2


def _stay(width: int, tile: dict[str, int], biased: bool) -> bool:
    """Whether weight and x_bias find room in registers, for which the sums of weight, bias and x_bias ask, too.

    Not with more than 16 elements a thread, nor in the 16 warps of a row of more than 4,096, which have 128 registers a
    thread: some would be kept in memory. Of single elements more are, if they are loaded for each row.
    """
    crowded = held_by_a_thread(width, tile) > 16 or (tile["num_warps"] >= 16 and tile["VECTOR"] > 1)
    return not (biased and crowded)


def forward(x, residual, weight, bias, seeds, dropped: int, eps: float, x_bias=None, kernel=forward_kernel):
    """The output, and mean and reciprocal deviation of each row in float32; see `dropout_add_norm._forward`.

    `kernel`: what launches it, if it is not Triton; see `inductor_operators.py`.
    """
    matrix, other = rows_of(x), rows_of(residual)
    rows, width = matrix.shape[0], int(matrix.shape[1])  # a number also where the compiler has a symbol
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    mean = torch.empty(rows, dtype=torch.float32, device=x.device)
    rstd = torch.empty_like(mean)
    if rows:
        tile = tile_of(width, x.element_size())
        with on_device(x.device):
            kernel[(triton.cdiv(rows, tile["ROWS"]),)](
                matrix,
                weight if x_bias is None else x_bias.contiguous(),
                other,
                weight.contiguous(),
                bias.contiguous(),
                seeds if dropped else mean,
                y,
                mean,
                rstd,
                matrix.stride(0),
                other.stride(0),
                rows,
                WIDTH=width,
                BIASED=x_bias is not None,
                DROPPED=dropped,
                EPS=eps,
                **tile,
            )
    return y, mean, rstd


def backward(dy, x, residual, weight, mean, rstd, seeds, dropped: int, x_bias=None, more=None, kernel=backward_kernel):
    """Gradients of x (empty if `dropped` is 0), of residual, and `[2 or 3, width]` float32 of weight, bias, x_bias.

    `more`: what is to be added to `dy`, or None.
    """
    if more is not None and more.dtype == torch.float32:  # for which a thread has no registers left
        dy, more = dy + more, None
    gradients, matrix, other = rows_of(dy), rows_of(x), rows_of(residual)
    rows, width = matrix.shape[0], int(matrix.shape[1])
    dx = torch.empty(x.shape if dropped else (0,), dtype=x.dtype, device=x.device)
    dresidual = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    tile = backward_tile_of(width, x.element_size())
    programs = programs_for(rows, tile["ROWS"], most_programs(tile, _registers(width, tile), x.device))
    shape = (2 if x_bias is None else 3, programs * tile["ROWS"], width)
    partial = torch.empty(shape, dtype=torch.float32, device=x.device)
    with on_device(x.device):
        kernel[(programs,)](
            gradients,
            gradients if more is None else more.contiguous(),
            matrix,
            weight if x_bias is None else x_bias.contiguous(),
            other,
            weight.contiguous(),
            mean,
            rstd,
            seeds if dropped else mean,
            dx,
            dresidual,
            partial,
            gradients.stride(0),
            matrix.stride(0),
            other.stride(0),
            rows,
            WIDTH=width,
            MORE=more is not None,
            BIASED=x_bias is not None,
            DROPPED=dropped,
            STAGES=launch.STAGES,
            STAY=_stay(width, tile, x_bias is not None),
            **tile,
        )
    sums = add_up(partial) if kernel is backward_kernel else partial.sum(1)  # Inductor fuses what follows
    return dx, dresidual, sums
