"""Run a translated kernel: some programs of its grid at a time, all their threads in step.

Where threads part, those that are furthest behind go on first, so that they meet again; a barrier that only some of a
program's threads reach is a fault. Faults, too: addresses outside of what was allocated or not aligned, and shared
memory that warps write and read without a barrier between them, whichever of them would have been first on a GPU.
Shared memory begins as all ones (NaN), registers do. All threads are in step here: a race within a warp, or through
global memory, is not seen.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from benchmarks.null_gpu.ptx import tensor_cores
from benchmarks.null_gpu.ptx.copies import Copies
from benchmarks.null_gpu.ptx.operands import APART
from benchmarks.null_gpu.ptx.translate import Program

__all__ = ["Fault", "Memory", "run"]

_THREADS = 4096  # at a time: their registers stay in a cache
_NOBODY, _SEVERAL = -1, -2


class Fault(Exception):
    """What would have stopped the GPU, or should have."""


class Memory:
    """Bytes of this process that a kernel may reach.

    Args:
        start: address of the first.
        size: of the whole area; most of it need not be allocated.
        allocated: for an array of addresses and a count of bytes, whether all those bytes of each are.
    """

    def __init__(self, start: int, size: int, allocated: Callable[[np.ndarray, int], np.ndarray]) -> None:
        whole = np.frombuffer((ctypes.c_uint8 * size).from_address(start), np.uint8)
        self.start, self.allocated = start, allocated
        self.words = {n: whole.view(f"u{n}") for n in (1, 2, 4, 8)}

    def places(self, addresses: np.ndarray, each: int, count: int) -> np.ndarray:
        """Where in `words[each]` the first of `count` words at each address is."""
        if not self.allocated(addresses, each * count).all():
            wrong = addresses[~self.allocated(addresses, each * count)][0]
            raise Fault(f"{each * count} bytes at {wrong:#x} are outside of any tensor")
        if (addresses & np.uint64(each * count - 1)).any():
            raise Fault(f"an address of {each * count} bytes is not a multiple of that")
        return ((addresses - np.uint64(self.start)) // np.uint64(each)).astype(np.int64)


def run(
    program: Program, grid: Sequence[int], threads: int, shared: int, parameters: Sequence[bytes], memory: Memory
) -> None:
    """Launch it.

    Args:
        grid: programs in x, y and z.
        threads: of a program, a multiple of 32.
        shared: bytes of shared memory of a program.
        parameters: their bytes, in order.

    Raises:
        Fault: what would be an error of the device.
    """
    programs = int(np.prod(grid))
    together = max(1, _THREADS // threads)
    named = dict(zip(program.parameters, parameters, strict=True))
    with np.errstate(all="ignore"):
        for first in range(0, programs, together):
            chunk = np.arange(first, min(first + together, programs))
            _Machine(program, grid, chunk, threads, shared, named, memory).run()


class _Machine:
    """Programs `chunk` of the grid: what their registers and shared memory hold."""

    def __init__(self, program, grid, chunk, threads, shared, parameters, memory) -> None:
        self.program, self.threads, self.parameters, self.memory = program, threads, parameters, memory
        self.count = lanes = len(chunk) * threads
        widths = {
            bits: np.full((rows, lanes), -1, f"i{bits // 8}") for bits, rows in program.counts.items() if bits > 1
        }
        self.registers = (
            *(widths[16].view(kind) for kind in ("u2", "i2", "f2")),
            *(widths[32].view(kind) for kind in ("u4", "i4", "f4")),
            *(widths[64].view(kind) for kind in ("u8", "i8", "f8")),
            np.zeros((program.counts[1], lanes), bool),
        )
        each = np.arange(lanes) % threads
        self.tid_x, self.tid_y, self.tid_z = each.astype(np.uint32), np.uint32(0), np.uint32(0)
        self.laneid = (each % 32).astype(np.uint32)
        self.ntid_x, self.ntid_y, self.ntid_z = (np.uint32(n) for n in (threads, 1, 1))
        self.nctaid_x, self.nctaid_y, self.nctaid_z = (np.uint32(n) for n in grid)
        of = np.repeat(chunk, threads)
        self.ctaid_x = (of % grid[0]).astype(np.uint32)
        self.ctaid_y = (of // grid[0] % grid[1]).astype(np.uint32)
        self.ctaid_z = (of // (grid[0] * grid[1])).astype(np.uint32)
        self.warp = each // 32
        self.first_of_warp = np.arange(lanes) // 32 * 32
        self.bytes, self.room = shared, (shared + 15) // 16 * 16
        bytes_ = np.full(len(chunk) * self.room, 255, np.uint8)
        self.shared = {n: bytes_.view(f"u{n}") for n in (1, 2, 4, 8)}
        self.shared_start = np.repeat(np.arange(len(chunk)) * self.room, threads)
        # Of each byte, the warp that has written or read it since the last barrier.
        self.writers, self.readers = (np.full(len(bytes_), _NOBODY, np.int16) for _ in "wr")
        self.copies = Copies(lanes)

    def run(self) -> None:
        waiting: dict[int, Any] = {0: True}
        while waiting:
            at = min(waiting, key=self.program.order)
            m = waiting.pop(at)
            if at >= len(self.program.blocks):
                continue
            jump, goes = self.program.jumps[at], self.program.blocks[at](self, m)
            for target, mask in self._ways(m, at, jump, goes):
                if target >= 0:
                    waiting[target] = self._together(waiting.get(target), mask)

    def _ways(self, m, at: int, jump: int | None, goes) -> list[tuple[int, Any]]:
        """Where threads go on: block and mask."""
        if goes is None:
            return [(at + 1, m)]
        if goes is True:
            return [(jump, m)]
        taken = goes if m is True else goes & m
        rest = ~goes if m is True else m & ~goes
        return [(jump, taken.copy())] * bool(taken.any()) + [(at + 1, rest)] * bool(rest.any())

    @staticmethod
    def _together(some, others):
        if some is None:
            return others
        both = some | others
        return True if both is True or both.all() else both

    # --- what instructions call ---------------------------------------------------------------------------------------

    def parameter(self, name: str, offset: int, kind: type) -> Any:
        return np.frombuffer(self.parameters[name], kind, 1, offset)[0]

    def parameter_at(self, where, offset: int, kind: type, m) -> np.ndarray:
        """Of each thread, the one whose address it has."""
        found, names = np.zeros(self.count, kind), list(self.parameters)
        for address in np.unique(where if m is True else where[m]):
            found[where == address] = self.parameter(names[address // APART], offset, kind)
        return found

    def trap(self, text: str, m) -> None:
        if m is True or m.any():
            raise Fault(f"an assertion in the kernel: {text}")

    def _active(self, m) -> Any:
        return slice(None) if m is True else np.flatnonzero(m)

    def _spread(self, active, values: np.ndarray) -> np.ndarray:
        if isinstance(active, slice):
            return values
        out = np.zeros(self.count, values.dtype)
        out[active] = values
        return out

    def load_global(self, where, offset: int, each: int, count: int, m) -> list[np.ndarray]:
        active = self._active(m)
        places = self.memory.places(self._addresses(where, offset, active), each, count)
        words = self.memory.words[each]
        return [self._spread(active, words[places + i]) for i in range(count)]

    def store_global(self, where, offset: int, each: int, values: list, m) -> None:
        active = self._active(m)
        places = self.memory.places(self._addresses(where, offset, active), each, len(values))
        for i, value in enumerate(values):
            self.memory.words[each][places + i] = np.broadcast_to(value, self.count)[active]

    def add_global(self, where, offset: int, kind: type, values: list, m, wide=None, narrow=None) -> list[np.ndarray]:
        """One after the other, as each sees what was there before it.

        `wide` and `narrow` are for what NumPy does not know: from its bits, of type `kind`, to numbers and back.
        """
        active = self._active(m)
        each = np.dtype(kind).itemsize
        places = self.memory.places(self._addresses(where, offset, active), each, len(values))
        words = self.memory.words[each].view(kind)
        before = []
        for i, value in enumerate(values):
            added = np.broadcast_to(value, self.count)[active]
            old = np.empty(len(places), kind)
            for j, place in enumerate(places + i):
                old[j] = words[place]
                words[place] = old[j] + added[j] if narrow is None else narrow(wide(old[j : j + 1]) + added[j])[0]
            before.append(self._spread(active, old if wide is None else wide(old)))
        return before

    def _addresses(self, where, offset: int, active) -> np.ndarray:
        return np.broadcast_to(where, self.count)[active] + np.uint64(offset % (1 << 64))

    def load_shared(self, where, offset: int, each: int, count: int, m) -> list[np.ndarray]:
        active = self._active(m)
        places = self._shared_places(where, offset, active, each * count)
        self._touch(places, each * count, self.warp[active], writes=False)
        return [self._spread(active, self.shared[each][places // each + i]) for i in range(count)]

    def store_shared(self, where, offset: int, each: int, values: list, m) -> None:
        active = self._active(m)
        places = self._shared_places(where, offset, active, each * len(values))
        self._touch(places, each * len(values), self.warp[active], writes=True)
        for i, value in enumerate(values):
            value = np.broadcast_to(value, self.count)[active]
            self.shared[each][places // each + i] = value
            # Warps may write the same there, as copies of a layout do, and threads of a warp one after the other.
            lost = self.shared[each][places // each + i] != value
            if (lost & (self.writers[places] != self.warp[active])).any():
                raise Fault("two warps write to one place in shared memory")

    def start_copy(self, to, to_offset: int, source, offset: int, size: int, given, m) -> None:
        """To shared memory, of `size` bytes: from `source` those `given`, which are all or none, and zeros."""
        threads = np.arange(self.count)[self._active(m)]
        places = self._shared_places(to, to_offset, threads, size)
        self._touch(places, size, self.warp[threads], writes=True)
        given = np.broadcast_to(given, self.count)[threads]
        if ((given != 0) & (given != size)).any():
            raise Fault(f"a copy of {given.max()} of {size} bytes")
        real, words = given != 0, np.zeros((len(threads), size // 4), np.uint32)
        found = self.memory.places(self._addresses(source, offset, threads[real]), 4, size // 4)
        words[real] = self.memory.words[4][found[:, None] + np.arange(size // 4)]
        self.copies.start(threads, places, words)

    def close_copies(self, m) -> None:
        self.copies.close(self._active(m))

    def wait_for_copies(self, latest: int, m) -> None:
        for threads, places, words in self.copies.arrived(np.arange(self.count)[self._active(m)], latest):
            self._touch(places, 4 * words.shape[1], self.warp[threads], writes=True)
            self.shared[4][places[:, None] // 4 + np.arange(words.shape[1])] = words

    def _shared_places(self, where, offset: int, active, size: int) -> np.ndarray:
        addresses = np.broadcast_to(where, self.count)[active].astype(np.int64) + offset
        if (addresses < 0).any() or (addresses + size > self.bytes).any():
            raise Fault(f"shared memory has {self.bytes} bytes, and byte {addresses.max() + size - 1} is used")
        if (addresses % size).any():
            raise Fault(f"an address of {size} bytes in shared memory is not a multiple of that")
        return addresses + self.shared_start[active]

    def _touch(self, places: np.ndarray, size: int, warp: np.ndarray, writes: bool) -> None:
        """Remember which warp reads or writes; what another has written, or has read and this one writes, is a race."""
        at = (places[:, None] + np.arange(size)).ravel()
        who = np.repeat(warp, size).astype(np.int16)
        before = [self.writers[at]] + [self.readers[at]] * writes
        if any(((found != _NOBODY) & (found != who)).any() for found in before):
            raise Fault("two warps meet in shared memory without a barrier between them")
        if writes:
            self.writers[at] = who
        else:
            self.readers[at] = np.where((self.readers[at] == _NOBODY) | (self.readers[at] == who), who, _SEVERAL)
            # Two warps that read the same in this instruction: the last has its name there, so look again.
            self.readers[at[self.readers[at] != who]] = _SEVERAL

    def barrier(self, m) -> None:
        programs = slice(None)
        if m is not True:
            there = m.reshape(-1, self.threads)
            if (there.any(1) != there.all(1)).any():
                raise Fault("a barrier that some threads of a program do not reach")
            programs = there.all(1)
        for touched in (self.writers, self.readers):
            touched.reshape(self.count // self.threads, self.room)[programs] = _NOBODY

    def _whole_warps(self, m) -> None:
        if m is not True and (lambda by: (by.any(1) != by.all(1)).any())(m.reshape(-1, 32)):
            raise Fault("an exchange within a warp that some of its threads do not reach")

    def shuffle(self, how: str, values, by, clamp, m) -> np.ndarray:
        self._whole_warps(m)
        lane, by = self.laneid.astype(np.int64), np.asarray(by).astype(np.int64) & 31
        segment, bound = (int(clamp) >> 8) & 31, int(clamp) & 31
        last, first = (lane & segment) | (bound & ~segment), lane & segment
        source = {"up": lane - by, "down": lane + by, "bfly": lane ^ by, "idx": first | (by & ~segment)}[how]
        inside = source >= last if how == "up" else source <= last
        return np.broadcast_to(values, self.count)[self.first_of_warp + np.where(inside, source, lane)]

    def reduce(self, function: np.ufunc, values, members, m) -> np.ndarray:
        self._whole_warps(m)
        if (np.broadcast_to(members, self.count)[self._active(m)] != 0xFFFFFFFF).any():
            raise Fault("a reduction over some threads of a warp")
        return np.repeat(function.reduce(np.broadcast_to(values, self.count).reshape(-1, 32), axis=1), 32)

    def multiply(self, a: list, b: list, c: list, kind: str, m) -> list[np.ndarray]:
        self._whole_warps(m)
        return tensor_cores.multiply(a, b, c, kind, self.count)

    def multiply_group(self, a, b: np.ndarray, c: list, kind: str, m) -> list[np.ndarray]:
        return tensor_cores.multiply_group(a, b, c, kind, self.count)

    def matrix(self, descriptor, rows: int, transposed: bool, m) -> np.ndarray:
        """Bits, [groups of warps, rows, 16], of the matrices in shared memory; zeros for groups that do not ask."""
        size, groups = tensor_cores.GROUP, self.count // tensor_cores.GROUP
        if self.threads % size:
            raise Fault(f"{self.threads} threads are no groups of {size}")
        asks = np.broadcast_to(m, self.count).reshape(groups, size)
        if (asks.any(1) != asks.all(1)).any():
            raise Fault("a product of four warps that some of their threads do not reach")
        own = np.broadcast_to(descriptor, self.count).reshape(groups, size)[asks.any(1)]
        if (own != own[:, :1]).any():
            raise Fault("a product of four warps with several matrices")
        found = np.zeros((groups, rows, 16), np.uint16)
        first = np.flatnonzero(asks.any(1)) * size
        places = tensor_cores.matrix_places(own[:, 0], rows, transposed)
        if (places < 0).any() or (places + 2 > self.bytes).any():
            raise Fault(f"shared memory has {self.bytes} bytes, and byte {places.max() + 1} is used")
        places = places + self.shared_start[first][:, None, None]
        for warp in range(size // 32):  # all four read it all
            self._touch(places.ravel(), 2, np.repeat(self.warp[first + 32 * warp], rows * 16), writes=False)
        found[asks.any(1)] = self.shared[2][places // 2]
        return found

    # --- matrices of 8 x 8 elements of 16 bits: thread 8 i + j of a warp has the address of row j of the i-th --------

    def load_matrices(self, where, offset: int, count: int, transposed: bool, m) -> list[np.ndarray]:
        out = []
        for i in range(count):
            low, high = self._elements(where, offset, i, transposed, m, writes=False)
            both = [self.shared[2][place // 2].astype(np.uint32) for place in (low, high)]
            out.append(self._spread(self._active(m), both[0] | (both[1] << np.uint32(16))))
        return out

    def store_matrices(self, where, offset: int, values: list, transposed: bool, m) -> None:
        for i, value in enumerate(values):
            low, high = self._elements(where, offset, i, transposed, m, writes=True)
            value = np.broadcast_to(value, self.count)[self._active(m)]
            self.shared[2][low // 2] = (value & 0xFFFF).astype(np.uint16)
            self.shared[2][high // 2] = (value >> np.uint32(16)).astype(np.uint16)

    def _elements(self, where, offset: int, matrix: int, transposed: bool, m, writes: bool):
        """Of each active thread the places of its two elements."""
        self._whole_warps(m)
        active = self._active(m)
        rows = np.zeros(self.count, np.int64)
        lane, first = self.laneid[active].astype(np.int64), self.first_of_warp[active] + 8 * matrix
        named = np.arange(self.count)[active][lane // 8 == matrix]
        rows[named] = self._shared_places(where, offset, named, 16)
        by_four, of_four = lane // 4, 2 * (lane % 4)
        places = []
        for second in (0, 1):
            row, column = (of_four + second, by_four) if transposed else (by_four, of_four + second)
            places.append(rows[first + row] + 2 * column)
            self._touch(places[-1], 2, self.warp[active], writes)
        return places
