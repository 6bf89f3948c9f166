"""The Triton kernel without a GPU: compiled for GPUs (`interpreted_bias_gelu.py` runs it)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import triton
from bias_gelu_check import case, check
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from composer_speedups.kernels import bias_gelu as module
from composer_speedups.kernels.bias_gelu import bias_gelu
from composer_speedups.kernels.launch import DTYPES

NAMES = {torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16"}


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["_forward_kernel", "_backward_kernel"])
def test_compiles_for_a_gpu(name: str, dtype: torch.dtype, capability: int, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernel = getattr(module, name)
    rows = module._ROWS_FORWARD if name == "_forward_kernel" else module._ROWS_BACKWARD
    constants = {"ROWS": rows, "COLS": module._COLS}

    def kind(argument: str) -> str:
        if argument in constants:
            return "constexpr"
        if argument in ("bias_ptr", "dbias_ptr"):
            return "*fp32"
        return NAMES[dtype] if argument.endswith("_ptr") else "i32"

    source = ASTSource(kernel, {n: kind(n) for n in kernel.arg_names}, constexprs=constants)
    options = {"num_warps": module._WARPS}
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    assert compiled.asm["cubin"][:4] == b"\x7fELF"
    assert f".target sm_{capability}" in compiled.asm["ptx"]
    assert ".local" not in compiled.asm["ptx"]  # no array that lives in memory instead of registers


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
