"""Triton's kernels on the null GPU: their PTX is executed on the CPU (`ptx/`), whoever launches them.

Triton, and Inductor through it, compiles as for a GPU, down to PTX; what the driver would be given as machine code is
that text. An error in a kernel is the launch's, at once, with what was wrong.
"""

from __future__ import annotations

import ctypes
from functools import cache, partial

import numpy as np

from benchmarks.null_gpu.graphs import record
from benchmarks.null_gpu.ptx.load import program_of
from benchmarks.null_gpu.ptx.machine import Memory, run
from benchmarks.null_gpu.runtime import answer, runtime

__all__ = ["install"]

_Grid = ctypes.POINTER(ctypes.c_uint)
_Launch = ctypes.CFUNCTYPE(
    ctypes.c_int,
    *(ctypes.c_char_p, ctypes.c_char_p, _Grid, ctypes.c_uint, ctypes.c_uint, ctypes.POINTER(ctypes.c_void_p)),
)


def install() -> None:
    """From now on the driver executes what this process launches."""
    driver = ctypes.CDLL("libcuda.so.1")
    runtime.null_memory.restype, runtime.null_span.restype = ctypes.c_void_p, ctypes.c_size_t

    def allocated(addresses: np.ndarray, count: int) -> np.ndarray:
        addresses, found = np.ascontiguousarray(addresses), np.empty(len(addresses), bool)
        runtime.null_allocated(
            *(addresses.ctypes.data_as(ctypes.c_void_p), ctypes.c_long(len(addresses)), ctypes.c_size_t(count)),
            found.ctypes.data_as(ctypes.c_void_p),
        )
        return found

    memory = cache(lambda: Memory(runtime.null_memory(), runtime.null_span(), allocated))

    @_Launch
    def launch(code, name, grid, threads, shared, parameters) -> int:
        def execute() -> None:
            program = program_of(code)
            given = [ctypes.string_at(parameters[i], size) for i, size in enumerate(program.parameters.values())]
            again = partial(run, program, tuple(grid[:3]), threads, shared, given, memory())
            again()
            record(again)

        return answer(name.decode(), execute)

    driver.null_launch_with(launch)
    install.kept = launch  # or Python would free what the driver calls
