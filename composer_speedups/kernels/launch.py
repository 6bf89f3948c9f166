"""What the Triton kernels over rows have in common: which tensors they take, in which blocks, on which device."""

from __future__ import annotations

import contextlib
from functools import cache

import torch
import triton

__all__ = ["DTYPES", "interpreted", "most_programs", "on_device", "rows_of", "tile_of"]

DTYPES = (torch.float32, torch.float16, torch.bfloat16)

_TILE = 2048  # elements a program holds at a time: narrow rows are taken several at once


@triton.jit
def _probe():
    pass


def interpreted() -> bool:
    """Whether `TRITON_INTERPRET=1` was set when this module was imported: kernels then run on the CPU, slowly."""
    return not isinstance(_probe, triton.runtime.JITFunction)


def rows_of(x: torch.Tensor) -> torch.Tensor:
    """`x` as a matrix whose rows are contiguous; a copy only if the strides leave no other way."""
    matrix = x.reshape(-1, x.shape[-1])
    return matrix if matrix.stride(1) == 1 else matrix.contiguous()


def tile_of(width: int, per_thread: int) -> dict[str, int]:
    """Block sizes: whole rows, about `_TILE` elements a program, `per_thread` of them in each thread.

    16 in the forward kernel; 8 in the backward one, which holds five values an element: with 16 it took 128 to
    254 registers and spilled (ptxas for sm_80 and sm_90, widths 64 to 1024).
    """
    cols = triton.next_power_of_2(width)
    rows = max(1, min(32, _TILE // cols))
    return {"ROWS": rows, "COLS": cols, "num_warps": max(1, min(16, rows * cols // (32 * per_thread)))}


@cache
def most_programs(device: torch.device) -> int:
    """Programs of the backward kernel: enough to fill the device, few enough that their sums stay small."""
    if device.type != "cuda":
        return 3  # interpreter: a few, so that partial sums are exercised
    return 4 * torch.cuda.get_device_properties(device).multi_processor_count


def on_device(device: torch.device) -> contextlib.AbstractContextManager:
    """Triton launches on the current device, which need not be the tensor's."""
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        return torch.cuda.device(device)
    return contextlib.nullcontext()
