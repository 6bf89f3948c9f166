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
    "backward_tile_of",
    "held_by_a_thread",
    "interpreted",
    "most_programs",
    "on_device",
    "processors",
    "programs_for",
    "room",
    "rows_of",
    "tile_of",
]

# A product and a sum as one instruction, as all versions do by themselves until 3.10; 3.9 warns where nothing is said.
# For the whole process: Inductor, which launches these kernels, too, takes no such option of a kernel's.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

DTYPES = (torch.float32, torch.float16, torch.bfloat16)

# Of the norms' backward loops, for Triton: with 3 or more of them the rows of so many turns less two are under way to
# shared memory while one is computed; with 2 it has room for one row alone, and waits for it; with 1 a row's loads go
# to registers.
STAGES = 1
_HELD, _HELD_BACKWARD = 32, 16  # elements that a thread holds at most
_FILLED = 100  # per cent of the backward programs that run at once: so many are launched
_REGISTERS = 65536  # of a processor
# Programs that a processor has room for, by capability; elsewhere 32. CUDA's programming guide, compute capabilities.
_ROOM = {(7, 5): 16, (8, 6): 16, (8, 7): 16, (8, 9): 24, (12, 0): 24, (12, 1): 24}


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
    """Block sizes of a forward kernel for whole rows: ROWS of them in a program, each of CHUNKS x BLOCK columns.

    A program is one warp, with a row or several that are short: sums over a row then need no shared memory and no
    barrier, and what a row costs once is shared by up to 32 elements a thread. Each thread loads 16 bytes at a time
    (VECTOR elements), so that a chunk is what a warp loads at once. Rows of more than 1,024 elements are shared by as
    many warps as they take, and those are the program. With warps for several rows it would be up to Triton which axis
    they go along: until 3.6 along the rows, in 3.9 along the chunks, which makes two to three times as many
    instructions. For widths that are no multiple of 16, of which Triton does not see that they are aligned, a thread
    loads one element at a time, and 16 in all: with 32 the backward kernel has too few registers; rows of more than 512
    are shared there.

    These kernels wait for memory only if they have few instructions: in the time in which an H200 moves a byte at 4.8
    TB/s, its threads together have 6.2. By ptxas for sm_90 (Triton 3.6; 3.9 differs by one at most), for each element
    in bf16 at a width of 768: LayerNorm 12 forward and 21 backward, where there is time for 25 and 37; bias + dropout +
    residual + LayerNorm 24 and 39, where it is 37 and 62. Backward that is the loop over rows.
    """
    return _tile(width, itemsize, _HELD, several=True)


def backward_tile_of(width: int, itemsize: int) -> dict[str, int]:
    """As `tile_of`, of a backward kernel, which keeps sums over its rows in registers: a thread holds half as much.

    What waits for memory needs enough of it under way, some 25 KB a processor at 4.8 TB/s, and while a row is computed
    its own loads are over. With up to 32 elements a thread, which are 24 of a width of 768, LayerNorm had 199 registers
    by ptxas for sm_90 (Triton 3.6, bf16), bias + dropout + residual + LayerNorm 236: 8 warps on a processor. With up to
    16, in 4 vectors of 4, they are 12, and 94 and 124 registers: 20 and 16 warps, which have 10 and 8 rows under way.
    Of a width of 1,024, 128 and 168: 16 and 12 warps. It is so for all widths from 256 to 4,096, and none spills.

    The price: two warps have one row of 513 to 1,024 elements, and exchange its sums by way of shared memory, once
    (`layer_norm.through_norm`): 10% more instructions for LayerNorm, and no more for the other. And a warp has one row
    also where it could hold more: ptxas would load the second when the first is done.

    At its end each row of a program stores its own sums, for `partial_sums.py` to add up. Adding up rows that warps
    have goes through shared memory, where Triton lets all threads of a warp write to one bank after the other: counted
    in the emulator (`benchmarks/null_gpu/ptx`), 17,000 cycles a program for the two sums of 1,024 columns, by
    instructions 28 turns of its loop, of which a batch of 16,000 tokens asks for 16. This way it is some hundred, and a
    few megabytes more to and from the cache.
    """
    return _tile(width, itemsize, _HELD_BACKWARD, several=False)


def _tile(width: int, itemsize: int, held: int, several: bool) -> dict[str, int]:
    """A thread holds up to `held` elements: 4 vectors or more, so that few lanes have none at odd widths.

    Args:
        several: rows until threads hold so many, or only until each has a vector.
    """
    cols = triton.next_power_of_2(width)
    vector, held = (1, 16) if width % 16 else (min(16 // itemsize, held // 4), held)
    warps = max(1, cols // (32 * held))  # that share a row
    chunks = max(1, cols // (32 * warps * vector))
    rows = min(max(1, 32 * (held if several else vector) // cols), 64)
    return {"ROWS": rows, "CHUNKS": chunks, "BLOCK": cols // chunks, "VECTOR": vector, "num_warps": warps}


def held_by_a_thread(width: int, tile: dict[str, int]) -> int:
    """Elements of its rows: chunks that lie beyond the width cost nothing, as the compiler knows it."""
    elements = tile["ROWS"] * triton.cdiv(width, tile["BLOCK"]) * tile["BLOCK"]
    return triton.cdiv(elements, 32 * tile["num_warps"])


def most_programs(tile: dict[str, int], registers: int, device: torch.device) -> int:
    """Programs of a backward kernel, whose threads have so many `registers` each: all that run at once.

    Each sums up as many rows as it can, then, and none begins when the others are done: a few too many would take
    twice the time. Hence the kernels say how many registers they need at most, by ptxas for sm_90; a test compares.
    Program p has the rows from p * ROWS on, and those that are all programs' further: in which order a sum is taken
    depends on the numbers of rows and processors, on width and dtype, and on nothing else.

    On an H100 there are 1,320 of LayerNorm and 1,056 of dropout + residual + LayerNorm at 768; at 1,024 1,056 and 792.
    """
    if device.type != "cuda":
        return 3  # interpreter: so few that they loop over rows
    together = min(_REGISTERS // (32 * tile["num_warps"] * _registers(registers)), room(device))
    return max(1, together * _FILLED // 100) * processors(device)


def _registers(needed: int) -> int:
    """What a thread is given."""
    return min(triton.cdiv(needed, 8) * 8, 255)


def programs_for(rows: int, each: int, most: int) -> int:
    """Programs of a backward kernel that takes `each` of `rows` at a time, and has partial sums to store.

    Two at least, as a compiler asks whether it is one, and compiles again where that changes. With no rows at all they
    have zeros to store.
    """
    return torch.sym_max(2, torch.sym_min(triton.cdiv(rows, each), most))


@cache
def room(device: torch.device) -> int:
    """Programs that a processor has room for, if their registers leave it."""
    return _ROOM.get(torch.cuda.get_device_capability(device), 32)


@cache
def processors(device: torch.device) -> int:
    """Streaming multiprocessors; one in the interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def on_device(device: torch.device) -> contextlib.AbstractContextManager:
    """Triton launches on the current device, which need not be the tensor's."""
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        return torch.cuda.device(device)
    return contextlib.nullcontext()
