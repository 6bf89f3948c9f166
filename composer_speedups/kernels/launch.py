"""What the Triton kernels over rows have in common: which tensors they take, in which blocks, on which device."""

from __future__ import annotations

import contextlib
import os
from functools import cache

import torch
import triton

__all__ = [
    "DTYPES",
    "STAGES",
    "interpreted",
    "most_programs",
    "on_device",
    "processors",
    "programs_for",
    "rows_of",
    "tile_of",
]

# A product and a sum as one instruction, as all versions do by themselves until 3.10; 3.9 warns where nothing is said.
# For the whole process: Inductor, which launches these kernels, too, takes no such option of a kernel's.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

DTYPES = (torch.float32, torch.float16, torch.bfloat16)

STAGES = 1  # of the backward kernels' loops: loads of so many rows less one are under way while a row is computed
_WARPS = 4  # of a program, if its rows are not too long
_HELD = 32  # elements of a row that a thread holds at most
_TOGETHER = 8192  # elements for which a processor has registers at a time, in the backward kernels


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


def tile_of(width: int, itemsize: int) -> dict[str, int]:
    """Block sizes for whole rows: ROWS of them in a program, each of CHUNKS x BLOCK columns, and `num_warps`.

    A warp takes a row, or several that are short: sums over a row then need no shared memory and no barrier, and what
    a row costs once is shared by up to 32 elements a thread. Each thread loads 16 bytes at a time, so that a chunk is
    what a warp loads at once; Triton gives warps to the first axis before the second. Rows of more than 1,024 elements
    are shared by several warps. For widths that are no multiple of 16, of which Triton does not see that they are
    aligned, a thread loads one element at a time, and 16 in all: with 32 the backward kernel has too few registers;
    rows of more than 512 are shared there.

    These kernels wait for memory only if they have few instructions: in the time in which an H200 moves a byte at 4.8
    TB/s, its threads together have 6.2. By ptxas for sm_90, for each element in bf16 at a width of 768: LayerNorm 13
    forward and 19 backward, where there is time for 25 and 37; dropout + residual + LayerNorm 25 and 36, and with the
    bias before it 26 and 41, where it is 37 and 62. With rows shared by all warps of a program it was 30 and 36, 57 and
    72 (without the bias). Backward that is the loop over rows.

    At its end each row of a program stores its own sums, for PyTorch to add up. Adding up rows that warps have goes
    through shared memory, where Triton lets all threads of a warp write to one bank after the other: counted in the
    emulator (`benchmarks/null_gpu/ptx`), 17,000 cycles a program for the two sums of 1,024 columns, by instructions
    28 turns of its loop, of which a batch of 16,000 tokens asks for 16. This way it is 500, and a few megabytes more to
    and from the cache.
    """
    cols = triton.next_power_of_2(width)
    vector, held = (1, 16) if width % 16 else (16 // itemsize, _HELD)
    chunks = max(1, min(cols // (32 * vector), held // vector))
    block = cols // chunks
    shared = max(1, block // (32 * vector))  # warps that share a row
    warps = max(_WARPS, shared)
    rows = warps // shared * max(1, 32 * vector // block)
    return {"ROWS": min(rows, 64), "CHUNKS": chunks, "BLOCK": block, "num_warps": warps}


def most_programs(tile: dict[str, int], device: torch.device) -> int:
    """Programs of a backward kernel: all that run at once, so that each sums up as many rows as it can."""
    if device.type != "cuda":
        return 3  # interpreter: so few that they loop over rows
    together = _TOGETHER // (tile["ROWS"] * tile["CHUNKS"] * tile["BLOCK"])
    return max(1, min(together, 16)) * processors(device)


def programs_for(rows: int, each: int, most: int) -> int:
    """Programs of a backward kernel that takes `each` of `rows` at a time, and has partial sums to store.

    Two at least, as a compiler asks whether it is one, and compiles again where that changes. With no rows at all they
    have zeros to store.
    """
    return torch.sym_max(2, torch.sym_min(triton.cdiv(rows, each), most))


@cache
def processors(device: torch.device) -> int:
    """Streaming multiprocessors; one in the interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def on_device(device: torch.device) -> contextlib.AbstractContextManager:
    """Triton launches on the current device, which need not be the tensor's."""
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        return torch.cuda.device(device)
    return contextlib.nullcontext()
