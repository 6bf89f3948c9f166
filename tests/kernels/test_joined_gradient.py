"""Sums with copies, and of partial sums: on a GPU, and Triton's kernels compiled for GPUs that need not be there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from gpu_code import at_once, compile_for, spills

from composer_speedups.kernels import joined_gradient, partial_sums
from composer_speedups.kernels import joined_gradient_triton as cuda
from composer_speedups.kernels.launch import DTYPES


def compiled_for(capability: int, kernel: str, dtype: torch.dtype = torch.float32):
    if kernel == "sum":
        dtypes = dict.fromkeys(("partial", "out"), torch.float32)
        constants = {"ROWS": partial_sums._ROWS, "COLS": partial_sums._COLS}
        function, warps = partial_sums.sum_kernel, partial_sums._WARPS
    else:
        dtypes = dict.fromkeys(("first", "second", "third", "joined"), dtype) | {"partial": torch.float32}
        constants = {"PARTS": 3, "COPIES": True, "ROWS": cuda._ROWS, "SUMS": cuda._SUMS, "COLS": cuda._COLS}
        function, warps = cuda.join_kernel, cuda._WARPS
    return compile_for(capability, function, dtypes, constants, warps, aligned=("stride", "width"))


@pytest.mark.parametrize("kernel", ["sum", "join"])
@pytest.mark.parametrize("capability", [75, 80, 90])
def test_loads_and_stores_as_much_at_once_as_a_thread_can(capability: int, kernel: str, tmp_path: Path) -> None:
    """16 bytes, several of them before the first is waited for, and nothing of a thread's in memory."""
    for dtype in DTYPES:
        compiled = compiled_for(capability, kernel, dtype)
        loads = re.findall(r"ld\.global\.(\S+)", compiled.asm["ptx"])
        assert set(loads) == {"v4.b32"} and len(loads) >= 4
        assert kernel == "sum" or set(re.findall(r"st\.global\.(\S+)", compiled.asm["ptx"])) == {"v4.b32"}
        assert spills(compiled, tmp_path) == 0


def test_programs_run_all_at_once(tmp_path: Path) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        assert at_once(compiled_for(90, "join", dtype), tmp_path) >= cuda._PROGRAMS
    assert at_once(compiled_for(90, "sum"), tmp_path) >= 3


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "width"), [(5, 40), (13312, 768), (700, 1000)])
def test_on_a_gpu(rows: int, width: int, dtype: torch.dtype) -> None:
    parts = [torch.randn(rows, width, device="cuda").to(dtype) for _ in range(3)]
    joined, sums = joined_gradient.joined_and_summed(parts)
    wanted = torch.cat(parts, -1)
    assert joined.equal(wanted)
    allowed = wanted.double().abs().sum(0) * rows * torch.finfo(torch.float32).eps / 2
    assert ((sums.double() - wanted.double().sum(0)).abs() <= allowed).all()


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(3, 1056, 768), (352, 3072), (2, 5, 17)])
def test_partial_sums_on_a_gpu(shape: tuple[int, ...]) -> None:
    partial = torch.randn(shape, device="cuda")
    allowed = partial.double().abs().sum(-2) * shape[-2] * torch.finfo(torch.float32).eps / 2
    assert ((partial_sums.add_up(partial).double() - partial.double().sum(-2)).abs() <= allowed).all()
