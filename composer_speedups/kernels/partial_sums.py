"""Sums over what the programs of a kernel have stored, each its own: the second half of a sum over many rows.

These are a few hundred rows to some more than a thousand, all in the cache. PyTorch's sum lets several processors share
a column only from 1,024 rows on (`Reduce.cuh`), and takes 8 to 10 us for them on an H200 (36 of a step of BERT-base,
`benchmarks/results/2026-11-26_h200_profiles`). Here each program has a few columns of all rows, so that there are as
many programs as processors, and asks for all its rows in a few turns. No atomics: the order depends on the numbers of
rows and columns alone, so that a run repeats bit for bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from composer_speedups.kernels.launch import on_device

__all__ = ["add_up", "sum_kernel"]

_COLS, _ROWS, _WARPS = 16, 512, 8  # 64 bytes of a row; 8 loads of 16 bytes under way in each of 256 threads


@triton.jit
def sum_kernel(
    partial_ptr,  # [groups, rows, width] float32, groups `stride` apart, contiguous within
    out_ptr,  # [groups, width] float32
    stride,
    rows,
    width,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    group = tl.program_id(1)
    col = tl.program_id(0) * COLS + tl.arange(0, COLS)
    total = tl.zeros([ROWS, COLS], tl.float32)
    for start in range(0, rows, ROWS):
        row = start + tl.arange(0, ROWS)
        mask = (row < rows)[:, None] & (col < width)[None, :]
        total += tl.load(partial_ptr + group * stride + row[:, None] * width + col[None, :], mask=mask, other=0.0)
    tl.store(out_ptr + group * width + col, tl.sum(total, 0), mask=col < width)


def add_up(partial: torch.Tensor) -> torch.Tensor:
    """`partial.sum(-2)` of a float32 tensor [rows, width] or [groups, rows, width], contiguous within each group."""
    groups = partial if partial.dim() == 3 else partial[None]
    number, rows, width = groups.shape
    out = torch.empty((number, width), dtype=torch.float32, device=partial.device)
    with on_device(partial.device):
        sum_kernel[(triton.cdiv(width, _COLS), number)](
            groups, out, groups.stride(0), rows, width, ROWS=_ROWS, COLS=_COLS, num_warps=_WARPS
        )
    return out if partial.dim() == 3 else out[0]
