"""The gradient of an embedding table as one Triton kernel: each token's is added to its row where that lies.

PyTorch sorts the ids, finds where each begins among them, and adds up in two stages: some 20 kernels for each table,
most of which take a few microseconds for what is nothing. Additions are atomic and in float32, in no order: a run does
not repeat bit for bit, as it does not with flash attention either. Tables of a few rows, as of token types, would have
all tokens wait for one another; they are summed up by programs, and then over those (`partial_sums.py`), in order.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from composer_speedups.kernels.launch import on_device, processors, programs_for, rows_of
from composer_speedups.kernels.partial_sums import add_up
from composer_speedups.kernels.tensors import plain

__all__ = ["embedding", "few_kernel", "scatter_kernel"]

_FEW = 4  # rows of a table: its tokens are read once for each
_COLS, _WARPS = 256, 4
_ROWS, _ROWS_OF_FEW, _SUMS, _PROGRAMS = 4, 16, 4, 8  # as `joined_gradient_triton.py` has them


@triton.jit
def scatter_kernel(
    dy_ptr,  # [rows, width], rows dy_stride apart
    ids_ptr,  # [rows] int32 or int64
    table_ptr,  # [any, width] float32, zeros
    padding,  # the id whose row gets nothing, -1 for none
    dy_stride,
    rows,
    width,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)  # 64 bits: rows * width may pass 2^31
    col = tl.program_id(1) * COLS + tl.arange(0, COLS)
    ids = tl.load(ids_ptr + row, mask=row < rows, other=0).to(tl.int64)
    mask = ((row < rows) & (ids != padding))[:, None] & (col < width)[None, :]
    dy = tl.load(dy_ptr + row[:, None] * dy_stride + col[None, :], mask=mask, other=0.0)
    tl.atomic_add(table_ptr + ids[:, None] * width + col[None, :], dy.to(tl.float32), mask=mask, sem="relaxed")


@triton.jit
def few_kernel(
    dy_ptr,  # [rows, width], rows dy_stride apart
    ids_ptr,  # [rows] int32 or int64
    partial_ptr,  # [rows of the table, programs * SUMS, width] float32
    padding,  # the id whose row gets nothing, -1 for none
    dy_stride,
    rows,
    width,
    ROWS: tl.constexpr,
    SUMS: tl.constexpr,  # of a program, in each column
    COLS: tl.constexpr,
):
    program, own = tl.program_id(0), tl.program_id(2)
    col = tl.program_id(1) * COLS + tl.arange(0, COLS)
    total = tl.zeros([SUMS, COLS], tl.float32)
    for start in range(program * ROWS, rows, tl.num_programs(0) * ROWS):
        row = start + tl.arange(0, ROWS).to(tl.int64)
        ids = tl.load(ids_ptr + row, mask=row < rows, other=-1).to(tl.int64)
        mask = ((ids == own) & (ids != padding))[:, None] & (col < width)[None, :]
        dy = tl.load(dy_ptr + row[:, None] * dy_stride + col[None, :], mask=mask, other=0.0)
        total += tl.sum(tl.reshape(dy.to(tl.float32), (ROWS // SUMS, SUMS, COLS)), 0)
    place = own * tl.num_programs(0) * SUMS + program * SUMS + tl.arange(0, SUMS)
    tl.store(partial_ptr + place[:, None] * width + col[None, :], total, mask=(col < width)[None, :])


def embedding(ids: torch.Tensor, weight: torch.Tensor, padding: int | None = None) -> torch.Tensor:
    """`F.embedding`, with such a gradient.

    Args:
        ids: of any shape, int32 or int64, on a CUDA device.
        weight: [any, width] float32.
        padding: the id whose row gets no gradient.
    """
    return _Embedding.apply(ids, weight, -1 if padding is None else padding)


def _gradient(dy: torch.Tensor, ids: torch.Tensor, number: int, padding: int) -> torch.Tensor:
    """[number, width] float32."""
    gradients, ids = rows_of(dy), ids.reshape(-1).contiguous()
    rows, width = gradients.shape
    columns = triton.cdiv(width, _COLS)
    arguments = (padding, gradients.stride(0), rows, width)
    with on_device(dy.device):
        if number <= _FEW:
            most = max(2, _PROGRAMS * processors(dy.device) // (columns * number))
            programs = programs_for(rows, _ROWS_OF_FEW, most)
            partial = torch.empty((number, programs * _SUMS, width), dtype=torch.float32, device=dy.device)
            few_kernel[(programs, columns, number)](
                gradients, ids, partial, *arguments, ROWS=_ROWS_OF_FEW, SUMS=_SUMS, COLS=_COLS, num_warps=_WARPS
            )
            return add_up(partial)
        table = torch.zeros((number, width), dtype=torch.float32, device=dy.device)
        if rows:
            scatter_kernel[(triton.cdiv(rows, _ROWS), columns)](
                gradients, ids, table, *arguments, ROWS=_ROWS, COLS=_COLS, num_warps=_WARPS
            )
        return table


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx, ids: torch.Tensor, weight: torch.Tensor, padding: int):
        ctx.save_for_backward(ids)
        ctx.number, ctx.padding = len(weight), padding
        return F.embedding(ids, weight)

    @staticmethod
    def backward(ctx, dy: torch.Tensor):
        (ids,) = ctx.saved_tensors
        if torch.is_grad_enabled() or not plain(dy):  # to be differentiated once more, or many at once
            return None, torch.ops.aten.embedding_dense_backward(dy, ids, ctx.number, ctx.padding, False), None
        return None, _gradient(dy, ids, ctx.number, ctx.padding), None
