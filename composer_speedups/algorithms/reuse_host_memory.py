"""ReuseHostMemory: the process keeps the memory that it frees, instead of giving it back and asking for it again.

**Why it is faster.** On a CPU PyTorch asks the C library for each tensor. From 32 MiB on (and at first from
128 KiB) glibc maps fresh pages for it and unmaps them when it is freed, and it returns the free end of its heap to
the system. The next step asks for the same sizes again, and the kernel has to find, clear and map every page of 4 KiB
at its first touch: as many page faults, in which the cores compute nothing. With higher thresholds the pages stay and
are used again.

**Numerics.** None: bit-exact.

**When it pays.** On CPUs, with tensors of tens of megabytes: padded batches, float32, eager attention's scores. With
`Unpadding` in bf16 most tensors are small enough for the heap already, and little is left. The resident memory
stays at its peak until the process ends; the peak itself grows by fragments.

**Needs.** Linux with glibc, and the CPU as the training device. Where jemalloc or tcmalloc is preloaded, that
allocator keeps memory by itself. The setting is the whole process's and stays after the training.

Source: `mallopt(3)`, M_MMAP_THRESHOLD, M_TRIM_THRESHOLD and M_TOP_PAD. Hugging Face's guide to training on CPUs and
PyTorch's Performance Tuning Guide recommend jemalloc or tcmalloc for the same reason.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable

import torch
from composer.core import State
from composer.loggers import Logger

from composer_speedups.speedup import SpeedUp, Stage

__all__ = ["ReuseHostMemory", "apply_reuse_host_memory"]

# Of glibc's malloc.h: numbers and values. Mapped are only blocks above 1 GiB, which the heap could not keep together;
# glibc before 2.35 takes 32 MiB at most. The heap's end is never given back (the largest int: 2 GiB and more of free
# space at once do not come about), and it grows by 64 MiB, so that it seldom has to.
_MMAP_THRESHOLD, _LIMITS = -3, (1 << 30, 32 << 20)
_OTHERS = ((-1, (1 << 31) - 1), (-2, 64 << 20))  # M_TRIM_THRESHOLD, M_TOP_PAD
_ALLOCATORS = ("jemalloc", "tcmalloc", "mimalloc")


def apply_reuse_host_memory() -> int:
    """Let this process keep freed memory for its next tensors; return how many settings the C library took.

    >>> apply_reuse_host_memory() if _why_not() is None else 3
    3
    """
    mallopt = _mallopt()
    # Without this one the others do harm: setting any of them ends glibc's own raising of this threshold, and every
    # block from 128 KiB on would be mapped anew.
    if not any(mallopt(_MMAP_THRESHOLD, limit) for limit in _LIMITS):
        return 0
    return 1 + sum(mallopt(*setting) for setting in _OTHERS)


def _mallopt() -> Callable[[int, int], int]:
    mallopt = ctypes.CDLL(None).mallopt
    mallopt.argtypes, mallopt.restype = (ctypes.c_int, ctypes.c_int), ctypes.c_int
    return mallopt


class ReuseHostMemory(SpeedUp):
    """Apply `apply_reuse_host_memory` at `Event.INIT`.

    >>> ReuseHostMemory()
    ReuseHostMemory()
    """

    stage = Stage.LOOP

    def unavailable(self, device: torch.device) -> str | None:
        if device.type != "cpu":
            return f"it is about tensors in the CPU's memory, and a {device.type} run has them elsewhere: remove it"
        return _why_not()

    def install(self, state: State, logger: Logger) -> None:
        self.report(logger, apply_reuse_host_memory(), "the C library refused the settings")


def _why_not() -> str | None:
    preloaded = os.environ.get("LD_PRELOAD", "")
    if any(name in preloaded for name in _ALLOCATORS):
        return f"another allocator is preloaded (LD_PRELOAD={preloaded}), which keeps memory by itself: remove it"
    if not sys.platform.startswith("linux") or not hasattr(ctypes.CDLL(None), "gnu_get_libc_version"):
        return "it sets glibc's malloc, and this system has another. Use jemalloc or tcmalloc, or remove it"
    return None
