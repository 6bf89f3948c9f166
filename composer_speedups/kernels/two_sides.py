"""What kernels with a CUDA side in Triton, a CPU side in C and a meaning in PyTorch's operations have in common."""

from __future__ import annotations

import importlib
import os
from types import ModuleType

import torch

__all__ = ["CPU", "CUDA", "NAMES", "as_float", "chunks_of", "cuda_side"]

CUDA = (torch.float32, torch.float16, torch.bfloat16)
CPU = (*CUDA, torch.float64)
NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}  # of those that C has a function for

_CHUNKS, _ROWS = 64, 16  # partial sums of a C kernel: at most so many, each of so many rows at least


def cuda_side(name: str, x: torch.Tensor) -> ModuleType | None:
    """The module `<name>_triton`, if it serves `x`. Triton's interpreter stands in for the GPU in the tests."""
    if not x.is_cuda and os.environ.get("TRITON_INTERPRET") != "1":
        return None
    kernels = importlib.import_module(f"{__package__}.{name}_triton")
    return kernels if x.is_cuda or (kernels.interpreted() and x.dtype in CUDA) else None


def chunks_of(rows: int) -> int:
    """Into how many a C kernel cuts sums over `rows`: not by threads, so that their number does not change the result.

    >>> chunks_of(1), chunks_of(160), chunks_of(5000)
    (1, 10, 64)
    """
    return max(1, min(_CHUNKS, rows // _ROWS))


def as_float(parameter: torch.Tensor) -> torch.Tensor:
    """`parameter` as a C kernel reads it."""
    return parameter.detach().float().contiguous()
