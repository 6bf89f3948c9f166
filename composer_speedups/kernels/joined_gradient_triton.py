"""The CUDA side of `joined_gradient.py`: a Triton kernel that copies, and sums up what it copies, or only sums up.

A program has some columns of one part. It loads 16 rows before it stores the first, 8 KB in bf16, and adds up those
that a thread has, every fourth, by itself: threads exchange nothing, and `partial_sums.py` adds up what is left.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from composer_speedups.kernels.launch import interpreted, on_device, processors, programs_for, rows_of
from composer_speedups.kernels.partial_sums import add_up
from composer_speedups.kernels.tensors import whole_of

__all__ = ["interpreted", "join_kernel", "joined_and_summed"]

_ROWS, _SUMS, _COLS, _WARPS = 16, 4, 256, 4  # a row of bf16 is what a warp loads at once
_PROGRAMS = 8  # for each processor: with twice what a copy needs under way, loads of some go on while others store


@triton.jit
def join_kernel(
    first_ptr,  # [rows, width] each, rows `stride` apart
    second_ptr,
    third_ptr,  # read if there are three
    joined_ptr,  # [rows, PARTS * width], contiguous, written if COPIES
    partial_ptr,  # [programs * SUMS, PARTS * width] float32
    stride,
    rows,
    width,
    PARTS: tl.constexpr,
    COPIES: tl.constexpr,
    ROWS: tl.constexpr,
    SUMS: tl.constexpr,  # of a program, in each column
    COLS: tl.constexpr,
):
    program = tl.program_id(0)
    tiles = tl.cdiv(width, COLS)
    part = tl.program_id(1) // tiles
    col = tl.program_id(1) % tiles * COLS + tl.arange(0, COLS)
    from_ptr = first_ptr
    if part == 1:
        from_ptr = second_ptr
    elif part == 2:
        from_ptr = third_ptr
    total = tl.zeros([SUMS, COLS], tl.float32)
    for start in range(program * ROWS, rows, tl.num_programs(0) * ROWS):
        row = start + tl.arange(0, ROWS).to(tl.int64)  # 64 bits: rows * PARTS * width may pass 2^31
        mask = (row < rows)[:, None] & (col < width)[None, :]
        g = tl.load(from_ptr + row[:, None] * stride + col[None, :], mask=mask, other=0.0)
        if COPIES:
            tl.store(joined_ptr + row[:, None] * (PARTS * width) + part * width + col[None, :], g, mask=mask)
        total += tl.sum(tl.reshape(g.to(tl.float32), (ROWS // SUMS, SUMS, COLS)), 0)
    own = (program * SUMS + tl.arange(0, SUMS))[:, None]
    tl.store(partial_ptr + own * (PARTS * width) + part * width + col[None, :], total, mask=(col < width)[None, :])


def joined_and_summed(gradients: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """See `joined_gradient.joined_and_summed`."""
    parts = [rows_of(g) for g in gradients]
    if len({part.stride(0) for part in parts}) > 1:
        parts = [part.contiguous() for part in parts]
    first, number = parts[0], len(parts)
    rows, width = first.shape
    whole = whole_of(gradients)
    joined = first.new_empty((*gradients[0].shape[:-1], number * width)) if whole is None else whole
    columns = number * triton.cdiv(width, _COLS)
    programs = programs_for(rows, _ROWS, max(2, _PROGRAMS * processors(first.device) // columns))
    partial = torch.empty((programs * _SUMS, number * width), dtype=torch.float32, device=first.device)
    with on_device(first.device):
        join_kernel[(programs, columns)](
            *parts[:2],
            parts[-1],
            joined,
            partial,
            first.stride(0),
            rows,
            width,
            PARTS=number,
            COPIES=whole is None,
            ROWS=_ROWS,
            SUMS=_SUMS,
            COLS=_COLS,
            num_warps=_WARPS,
        )
    return joined, add_up(partial)
