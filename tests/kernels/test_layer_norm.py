"""The Triton kernel without a GPU: compiled for GPUs (`interpreted_layer_norm.py` runs it)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import triton
from layer_norm_check import case, check
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from composer_speedups.kernels import layer_norm as module
from composer_speedups.kernels.launch import DTYPES
from composer_speedups.kernels.layer_norm import layer_norm

NAMES = {torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16"}


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [64, 769, 8192])
@pytest.mark.parametrize("name", ["_forward_kernel", "_backward_kernel"])
def test_compiles_for_a_gpu(
    name: str, width: int, dtype: torch.dtype, capability: int, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernel = getattr(module, name)
    tile = module.tile_of(width, per_thread=16 if name == "_forward_kernel" else 8)
    warps = tile.pop("num_warps")
    flags = {n: True for n in ("HAS_W", "HAS_B", "NEED_DX", "NEED_DW") if n in kernel.arg_names}
    constants = tile | flags

    def kind(argument: str) -> str:
        if argument in constants:
            return "constexpr"
        if argument in ("w_ptr", "b_ptr", "mean_ptr", "rstd_ptr", "dw_ptr", "db_ptr"):
            return "*fp32"
        if argument.endswith("_ptr"):
            return NAMES[dtype]
        return "fp32" if argument == "eps" else "i32"

    source = ASTSource(kernel, {n: kind(n) for n in kernel.arg_names}, constexprs=constants)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": warps})
    assert compiled.asm["cubin"][:4] == b"\x7fELF"
    assert f".target sm_{capability}" in compiled.asm["ptx"]
    assert ".local" not in compiled.asm["ptx"]  # no array that lives in memory instead of registers


def test_needs_a_gpu_and_says_so() -> None:
    with pytest.raises(ValueError, match="needs a CUDA device, x is on cpu"):
        layer_norm(torch.ones(2, 4))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [1, 2, 31, 64, 768, 769, 4096, 8192])
def test_matches_float64_on_the_gpu(width: int, dtype: torch.dtype) -> None:
    check(layer_norm, *case((70, 9, width), dtype, device="cuda"))


@pytest.mark.gpu
def test_compiled_model_on_the_gpu() -> None:
    compiled = torch.compile(layer_norm, fullgraph=True, dynamic=True)
    check(compiled, *case((64, 768), torch.bfloat16, device="cuda"))
    check(compiled, *case((2000, 768), torch.bfloat16, device="cuda"))


@pytest.mark.gpu
def test_repeats_bit_for_bit_on_the_gpu() -> None:
    inputs = case((5000, 768), torch.bfloat16, device="cuda")
    first, second = (torch.autograd.grad(layer_norm(*inputs).float().square().sum(), inputs) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.gpu
def test_more_than_two_to_the_31_elements() -> None:
    if torch.cuda.get_device_properties(0).total_memory < 24 << 30:
        pytest.skip("needs a GPU with 24 GiB of memory")
    x = torch.zeros(2**31 // 8192 + 8, 8192, dtype=torch.bfloat16, device="cuda")
    x[-1] = torch.randn(8192, device="cuda")
    torch.testing.assert_close(layer_norm(x)[-1], layer_norm(x[-1:])[0], rtol=0, atol=0)
