from __future__ import annotations

import pytest
import torch

from composer_speedups import FusedCrossEntropy, apply_fused_cross_entropy
from composer_speedups.algorithms import fused_cross_entropy
from composer_speedups.errors import SpeedUpUnavailable

without_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")


@without_cuda
def test_refused_without_a_gpu(make_trainer) -> None:
    assert "masked_token_head" in FusedCrossEntropy().unavailable(torch.device("cpu"))
    with pytest.raises(SpeedUpUnavailable, match="needs a CUDA device"):
        make_trainer([FusedCrossEntropy()])
    with pytest.raises(SpeedUpUnavailable, match="needs a CUDA device"):
        apply_fused_cross_entropy(torch.nn.Linear(2, 2))


def test_a_loss_that_the_caller_asks_for_is_the_stock_one_and_told_once(caplog, monkeypatch) -> None:
    """As the Hugging Face Trainer does of models that take any argument: ModernBERT, and with transformers 5 most."""
    monkeypatch.setattr(fused_cross_entropy, "_told", set())
    asked = []
    forward = fused_cross_entropy._FusedLoss(False)(lambda model, **kwargs: asked.append(kwargs))
    for _ in range(2):
        forward(torch.nn.Identity(), labels=torch.zeros(3), num_items_in_batch=2)
    assert [sorted(kwargs) for kwargs in asked] == [["labels", "num_items_in_batch"]] * 2
    [record] = caplog.records
    assert "leaves the loss of Identity to its own code, as the caller passes num_items_in_batch" in record.message
    assert "Set model.accepts_loss_kwargs = False" in record.message


def test_arguments_are_checked() -> None:
    with pytest.raises(TypeError, match="reuse_logits must be true or false, got 1"):
        FusedCrossEntropy(reuse_logits=1)
