"""Products of small matrices, whose elements are spread over the registers of a warp (`mma.sync`), or of four warps and
lie in shared memory (`wgmma.mma_async`).

Sums are exact here and rounded once; a GPU adds up in float32, in an order of its own. What is asynchronous there is
done at once: that a kernel waits before it looks is not checked.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from benchmarks.null_gpu.ptx.numerics import half
from benchmarks.null_gpu.ptx.parse import Unsupported

__all__ = ["GROUP", "matrix_places", "multiply", "multiply_group"]

GROUP = 128  # threads of four warps

_LANE = np.arange(32)
_GROUP, _IN_GROUP = _LANE // 4, _LANE % 4  # by which PTX names the elements that a thread has


def multiply(a: Sequence, b: Sequence, c: Sequence, kind: str, lanes: int) -> list[np.ndarray]:
    """a [16, 16] times b [16, 8] plus c, of each warp; `a` and `b` are registers of two elements of `kind`, c float32.

    Returns:
        Four float32 registers, as those of `c`.
    """
    right = np.zeros((lanes // 32, 16, 8))
    for i, register in enumerate(b):
        for place in (0, 1):
            right[:, 2 * _IN_GROUP + place + 8 * i, _GROUP] = _of_warps(half(register, place, kind), lanes)
    return _spread(_left(a, kind, lanes) @ right, c, lanes)


def multiply_group(a, b: np.ndarray, c: Sequence, kind: str, lanes: int) -> list[np.ndarray]:
    """a [64, 16] times b [16, columns] plus c, of each four warps; c is `columns / 2` float32 registers or zeros.

    Args:
        a: a list of registers as those of `multiply`, a warp's being 16 rows; or all, [groups, 64, 16] bits.
        b: [groups, 16, columns] bits of 16.
    """
    left = _left(a, kind, lanes) if isinstance(a, list) else half(a, 0, kind).reshape(-1, 16, 16).astype(np.float64)
    right = np.repeat(half(b, 0, kind).astype(np.float64), GROUP // 32, axis=0)
    return _spread(left @ right, c, lanes)


def matrix_places(descriptor: np.ndarray, rows: int, transposed: bool) -> np.ndarray:
    """Where in shared memory the elements [descriptors, rows, 16] of 2 bytes are that a matrix descriptor names.

    As the PTX ISA has it: "Asynchronous Warpgroup Level Matrix Shared Memory Layout". Each row has its 16 elements
    beside each other, or, `transposed`, each of the 16 columns its rows. Lines of 32, 64 or 128 bytes, eight to a
    block, whose 16 bytes change places by the line's number, so that no two meet in one bank.
    """
    start, leading, stride = (
        ((descriptor >> np.uint64(n)) & np.uint64(0x3FFF)).astype(np.int64) * 16 for n in (0, 16, 32)
    )
    line = 256 >> (descriptor >> np.uint64(62)).astype(np.int64)
    if (line == 256).any() or ((descriptor >> np.uint64(49)) & np.uint64(7)).any():
        raise Unsupported("a matrix in shared memory whose lines keep their order, or begin within a block")
    start, leading, stride, line = (x[:, None, None] for x in (start, leading, stride, line))
    row, column = np.arange(rows)[:, None], np.arange(16)
    if transposed:
        inside = line // 2
        place = row // inside * leading + column // 8 * stride + column % 8 * line + row % inside * 2
    else:
        place = row // 8 * stride + row % 8 * line + column * 2
    place = start + place
    return place ^ ((place >> 7 & (line // 16 - 1)) << 4)


def _left(registers: Sequence, kind: str, lanes: int) -> np.ndarray:
    left = np.zeros((lanes // 32, 16, 16))
    for i, register in enumerate(registers):
        for place in (0, 1):
            row, column = _GROUP + 8 * (i % 2), 2 * _IN_GROUP + place + 8 * (i // 2)
            left[:, row, column] = _of_warps(half(register, place, kind), lanes)
    return left


def _spread(product: np.ndarray, c: Sequence, lanes: int) -> list[np.ndarray]:
    """[warps, 16, columns] plus `c`, as registers of one element."""
    found = []
    for i, register in enumerate(c):
        own = product[:, _GROUP + 8 * (i // 2 % 2), 8 * (i // 4) + 2 * _IN_GROUP + i % 2]
        found.append(np.float32(own + _of_warps(register, lanes)).ravel())
    return found


def _of_warps(register, lanes: int) -> np.ndarray:
    return np.broadcast_to(register, lanes).reshape(-1, 32)
