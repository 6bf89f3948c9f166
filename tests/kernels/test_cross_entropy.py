"""The Triton kernels without a GPU: compiled for GPUs (`interpreted_cross_entropy.py` runs them)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gpu_code import compile_for, instructions, spills, time_for

from composer_speedups.kernels import cross_entropy as module
from composer_speedups.kernels.cross_entropy import cross_entropy, reference_cross_entropy
from composer_speedups.kernels.launch import DTYPES


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["_forward_kernel", "_backward_kernel"])
def test_compiles_for_a_gpu(name: str, dtype: torch.dtype, capability: int, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    assert not spills(compiled(capability, name, dtype), tmp_path)


@pytest.mark.parametrize(("name", "moved"), [("_forward_kernel", 2), ("_backward_kernel", 4)])
@pytest.mark.parametrize("vocabulary", [30528, 30522])
def test_memory_is_what_it_waits_for(name: str, moved: int, vocabulary: int, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    aligned = ("x_stride", "dx_stride", "vocabulary") if vocabulary % 16 == 0 else ("pointers",)
    code = compiled(90, name, torch.bfloat16, aligned, vocabulary)
    assert instructions(code, tmp_path, module._MOST) < time_for(moved)


def compiled(capability: int, name: str, dtype: torch.dtype, aligned: tuple[str, ...] = (), vocabulary: int = 30528):
    constants = {"COLS": module._cols(vocabulary)}
    if name == "_forward_kernel":
        constants |= module._held(torch.empty((1, vocabulary), dtype=dtype), constants["COLS"])
    dtypes = dict.fromkeys(("loss", "lse", "scale"), torch.float32) | {"x": dtype, "dx": dtype, "label": torch.int64}
    return compile_for(capability, getattr(module, name), dtypes, constants, module._WARPS, aligned)


def test_refused_on_the_cpu() -> None:
    with pytest.raises(ValueError, match="torch's cross_entropy"):
        cross_entropy(torch.randn(2, 3), torch.tensor([0, 1]))


def test_reference_is_torchs() -> None:
    logits, labels = torch.randn(9, 11).double(), torch.tensor([0, -100, 4, 10, -100, 3, 3, 9, 1])
    expected = torch.nn.functional.cross_entropy(logits, labels)
    torch.testing.assert_close(reference_cross_entropy(logits, labels), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("reuse", [False, True])
def test_on_the_gpu(dtype: torch.dtype, reuse: bool) -> None:
    logits = (torch.randn(300, 30_522, device="cuda") * 4).to(dtype)
    labels = torch.randint(0, 30_522, (300,), device="cuda")
    labels[::3] = -100
    x, wide = logits.clone().requires_grad_(), logits.double().requires_grad_()
    expected = reference_cross_entropy(wide, labels)
    (want,) = torch.autograd.grad(expected, wide)
    loss = cross_entropy(x * 1, labels, reuse_logits=reuse)
    (got,) = torch.autograd.grad(loss, x)
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-5)
    smallest = 2.0**-24 if dtype == torch.float16 else 1e-8
    torch.testing.assert_close(got.double(), want, rtol=torch.finfo(dtype).eps / 2 + 1e-5, atol=smallest)
