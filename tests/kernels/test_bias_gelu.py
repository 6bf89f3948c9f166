"""The Triton kernel without a GPU: compiled for GPUs (`interpreted_bias_gelu.py` runs it)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from bias_gelu_check import case, check
from gpu_code import compile_for, instructions, spills, time_for

from composer_speedups.kernels import bias_gelu as module
from composer_speedups.kernels.bias_gelu import bias_gelu
from composer_speedups.kernels.launch import DTYPES


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["_forward_kernel", "_backward_kernel"])
def test_compiles_for_a_gpu(name: str, dtype: torch.dtype, capability: int, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    assert not spills(compiled(capability, name, dtype), tmp_path)


@pytest.mark.parametrize(("name", "moved"), [("_forward_kernel", 4), ("_backward_kernel", 6)])
def test_memory_is_what_it_waits_for(name: str, moved: int, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    code = compiled(90, name, torch.bfloat16, ("x_stride", "dy_stride", "width"))
    assert instructions(code, tmp_path, rows_of_a_tile(name) * module._COLS) < time_for(moved)


def rows_of_a_tile(name: str) -> int:
    return module._ROWS_FORWARD if name == "_forward_kernel" else module._ROWS_BACKWARD


def compiled(capability: int, name: str, dtype: torch.dtype, aligned: tuple[str, ...] = ()):
    constants = {"ROWS": rows_of_a_tile(name), "COLS": module._COLS}
    dtypes = dict.fromkeys(("bias", "dbias"), torch.float32) | dict.fromkeys(("x", "y", "dx", "dy"), dtype)
    return compile_for(capability, getattr(module, name), dtypes, constants, module._WARPS, aligned)


def test_needs_a_gpu_and_says_so() -> None:
    with pytest.raises(ValueError, match="needs a CUDA device, x is on cpu"):
        bias_gelu(torch.ones(2, 4), torch.ones(4))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [1, 31, 256, 300, 3072, 4096])
def test_matches_float64_on_the_gpu(width: int, dtype: torch.dtype) -> None:
    check(bias_gelu, case((70, 9, width), dtype, device="cuda"))


@pytest.mark.gpu
def test_compiled_model_on_the_gpu() -> None:
    compiled = torch.compile(bias_gelu, fullgraph=True, dynamic=True)
    for rows in (64, 2000):
        check(compiled, case((rows, 3072), torch.bfloat16, device="cuda"))
    torch._dynamo.reset()


@pytest.mark.gpu
def test_repeats_bit_for_bit_on_the_gpu() -> None:
    inputs = case((5000, 3072), torch.bfloat16, device="cuda")
    first, second = (torch.autograd.grad(bias_gelu(*inputs).float().square().sum(), inputs) for _ in "ab")
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.gpu
def test_more_than_two_to_the_31_elements() -> None:
    if torch.cuda.get_device_properties(0).total_memory < 24 << 30:
        pytest.skip("needs a GPU with 24 GiB of memory")
    x = torch.zeros(2**31 // 4096 + 8, 4096, dtype=torch.bfloat16, device="cuda")
    x[-1] = torch.randn(4096, device="cuda")
    bias = torch.randn(4096, device="cuda")
    torch.testing.assert_close(bias_gelu(x, bias)[-1], bias_gelu(x[-1:], bias)[0], rtol=0, atol=0)
