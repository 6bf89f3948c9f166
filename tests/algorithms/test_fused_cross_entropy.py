from __future__ import annotations

import pytest
import torch

from composer_speedups import FusedCrossEntropy, apply_fused_cross_entropy
from composer_speedups.errors import SpeedUpUnavailable

without_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")


@without_cuda
def test_refused_without_a_gpu(make_trainer) -> None:
    assert "masked_token_head" in FusedCrossEntropy().unavailable(torch.device("cpu"))
    with pytest.raises(SpeedUpUnavailable, match="needs a CUDA device"):
        make_trainer([FusedCrossEntropy()])
    with pytest.raises(SpeedUpUnavailable, match="needs a CUDA device"):
        apply_fused_cross_entropy(torch.nn.Linear(2, 2))


def test_arguments_are_checked() -> None:
    with pytest.raises(TypeError, match="reuse_logits must be true or false, got 1"):
        FusedCrossEntropy(reuse_logits=1)
