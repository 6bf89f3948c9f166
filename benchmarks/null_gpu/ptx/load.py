"""How Triton comes to hand over PTX where it would machine code, and what becomes of it."""

from __future__ import annotations

from functools import cache

from benchmarks.null_gpu.ptx.parse import parse
from benchmarks.null_gpu.ptx.translate import Program

__all__ = ["keep_ptx", "program_of"]


def keep_ptx(backend: type) -> None:
    """Let Triton's `CUDABackend` stop at PTX: what would be machine code is that text.

    Whoever does this must have a `TRITON_CACHE_DIR` of its own, as such kernels are found there by others.
    """
    backend.make_cubin = lambda self, source, metadata, options, capability: source.encode()


@cache
def program_of(code: bytes) -> Program:
    return Program(parse(code.decode()))
