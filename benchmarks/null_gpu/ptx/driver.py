"""A driver for Triton, both stacks': kernels are compiled for a GPU, and executed on tensors of the CPU.

    triton.runtime.driver.set_active(Emulator(90))
    kernel[grid](x, y, ...)

A kernel may reach the tensors that it is given, and what else is in their storages.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import triton
from packaging.version import Version
from triton.backends import backends
from triton.backends.compiler import GPUTarget

from benchmarks.null_gpu.ptx.load import keep_ptx, program_of
from benchmarks.null_gpu.ptx.machine import Memory, run
from benchmarks.null_gpu.ptx.translate import Program

__all__ = ["Emulator", "launch"]

# How many things Triton expects of a loaded kernel: since 3.4 the most threads as well.
_LOADED = 5 if Version(triton.__version__) >= Version("3.4") else 4
_PAGE = 4096
_ADDRESSES = 1 << 47  # of a process on x86-64
_NUMBERS = {"i1": "b", "i8": "b", "i16": "h", "i32": "i", "i64": "q", "fp32": "f", "fp64": "d"}
_NUMBERS |= {f"u{bits}": _NUMBERS[f"i{bits}"].upper() for bits in (8, 16, 32, 64)}


class Emulator:
    """In the place of Triton's driver for CUDA, for `sm_<capability>`."""

    def __init__(self, capability: int) -> None:
        keep_ptx(backends["nvidia"].compiler)
        self._target = GPUTarget("cuda", capability, 32)
        self.utils = SimpleNamespace(
            get_device_properties=lambda device: {"max_shared_mem": 232448 if capability >= 90 else 101376},
            load_binary=lambda name, code, shared, device: (code, program_of(code), 0, 0, 1024)[:_LOADED],
            unload_module=lambda code: None,
        )

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def launcher_cls(self, source: Any, metadata: Any) -> _Launcher:
        return _Launcher(list(source.signature.values()), 32 * metadata.num_warps, metadata.shared)


class _Launcher:
    def __init__(self, kinds: Sequence[str], threads: int, shared: int) -> None:
        self.kinds, self.threads, self.shared = kinds, threads, shared

    def __call__(self, x: int, y: int, z: int, stream, program: Program, packed, metadata, enter, leave, *arguments):
        given = [(kind, value) for kind, value in zip(self.kinds, arguments, strict=True) if kind != "constexpr"]
        launch(program, given, (x, y, z), self.threads, self.shared)


def launch(
    program: Program, given: Sequence[tuple[str, Any]], grid: Sequence[int], threads: int, shared: int = 0
) -> None:
    """Run it on tensors of the CPU.

    Args:
        given: its parameters, each with Triton's name for its type: `("*fp32", tensor)`, `("i32", 5)`. Missing ones, as
            Triton's scratch memory, are null.
    """
    storages = [value.untyped_storage() for _, value in given if isinstance(value, torch.Tensor)]
    starts = np.array([s.data_ptr() for s in storages], np.uint64)[:, None]
    ends = starts + np.array([s.nbytes() for s in storages], np.uint64)[:, None]

    def allocated(addresses: np.ndarray, count: int) -> np.ndarray:
        return ((addresses >= starts) & (addresses + np.uint64(count) <= ends)).any(0)

    parameters = [
        struct.pack("Q", value.data_ptr()) if kind[0] == "*" else struct.pack(_NUMBERS[kind], value)
        for kind, value in given
    ]
    parameters += [bytes(size) for size in list(program.parameters.values())[len(parameters) :]]
    run(program, grid, threads, shared, parameters, Memory(_PAGE, _ADDRESSES - _PAGE, allocated))
