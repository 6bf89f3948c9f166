from __future__ import annotations

import pytest
import torch
from composer.algorithms.warnings import NoEffectWarning
from composer.models import ComposerClassifier

from composer_speedups import FusedBiasGELU, apply_fused_bias_gelu
from composer_speedups.algorithms import fused_bias_gelu as module
from composer_speedups.errors import SpeedUpUnavailable


@pytest.fixture
def pretend_cuda(monkeypatch):
    """Surgery alone can be looked at without a GPU; what the changed layer computes cannot."""
    monkeypatch.setattr(module, "_unavailable", lambda device=None: None)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_without_cuda_it_says_so_before_training(make_trainer, tiny_bert) -> None:
    with pytest.raises(SpeedUpUnavailable, match=r"needs a CUDA device.*remove it"):
        make_trainer([FusedBiasGELU()])
    with pytest.raises(SpeedUpUnavailable, match="needs a CUDA device, and this machine has none"):
        apply_fused_bias_gelu(tiny_bert)


def test_missing_triton_names_the_remedy(monkeypatch) -> None:
    cuda = torch.device("cuda", 0)
    assert FusedBiasGELU().unavailable(cuda) is None
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install triton" in FusedBiasGELU().unavailable(cuda)


def test_cpu_inputs_go_to_torch(pretend_cuda, tiny_bert) -> None:
    layer, x = tiny_bert.bert.encoder.layer[0].intermediate, torch.randn(3, 32)
    expected = layer(x)
    assert apply_fused_bias_gelu(tiny_bert) == 2
    assert torch.equal(layer(x), expected)


def test_warns_when_nothing_fits(pretend_cuda, make_trainer) -> None:
    linear = ComposerClassifier(torch.nn.Linear(2, 2), num_classes=2)
    with pytest.warns(NoEffectWarning, match="no layer in the model is dense and activation"):
        make_trainer([FusedBiasGELU()], model=linear)


@pytest.mark.gpu
def test_trains_on_the_gpu(make_trainer) -> None:
    algorithm = FusedBiasGELU()
    make_trainer([algorithm], device="gpu", precision="amp_fp16").fit()
    assert algorithm.evidence["changed"] == 2
