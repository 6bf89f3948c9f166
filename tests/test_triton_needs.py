"""What Triton's kernels need is asked before training, not found missing in its first step."""

from __future__ import annotations

import pytest
import torch

from composer_speedups import compilation, registry

KEYS = ("fused_bias_gelu", "fused_cross_entropy", "fused_dropout_add_norm", "fused_embedding", "fused_layer_norm")
CUDA = torch.device("cuda", 0)


@pytest.fixture
def a_gpu(monkeypatch: pytest.MonkeyPatch):
    """A machine with a GPU of some capability, as far as questions to it go."""

    def make(capability: tuple[int, int]) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)

    return make


@pytest.mark.parametrize("key", KEYS)
def test_an_old_gpu_a_missing_compiler_and_a_good_machine(key: str, a_gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    a_gpu((6, 1))
    assert "compute capability 7.0" in registry.build(key).unavailable(CUDA)
    a_gpu((8, 0))
    assert registry.build(key).unavailable(CUDA) is None
    monkeypatch.setattr(compilation.shutil, "which", lambda name: None)
    assert "Triton needs a compiler" in registry.build(key).unavailable(CUDA)


def test_a_cpu_needs_no_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilation.shutil, "which", lambda name: None)
    for key in ("fused_dropout_add_norm", "fused_bias_gelu"):
        assert registry.build(key).unavailable(torch.device("cpu")) is None
