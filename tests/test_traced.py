"""What is traced for TorchScript or ONNX computes what the model does, on other batches than its own, too."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from contract import USABLE, bert, case, make

from composer_speedups import (
    FusedBiasGELU,
    FusedDropoutAddNorm,
    GradientCheckpointing,
    LastLayerSubset,
    LowPrecisionNorm,
    MixedPrecision,
    Unpadding,
    registry,
)
from composer_speedups.speedup import Stage

TOGETHER = (Unpadding, FusedDropoutAddNorm, FusedBiasGELU, LastLayerSubset, GradientCheckpointing)
SURGERY = [key for key in USABLE if Stage.PRECISION < registry.speedup_class(key).stage <= Stage.RECOMPUTE]

pytestmark = [
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),
    pytest.mark.filterwarnings(
        "ignore:.torch.jit.(trace|script|save|load)"
    ),  # deprecated, in newer ones, for torch.export
]


class Logits(torch.nn.Module):
    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=ids, attention_mask=mask).logits


def batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Four rows of 16 tokens, of which 5 to 16 are real: others with each seed."""
    torch.manual_seed(seed)
    lengths = torch.randint(5, 17, (4, 1))
    return torch.randint(5, 60, (4, 16)), (torch.arange(16) < lengths).long()


def traced(model: torch.nn.Module) -> torch.jit.ScriptModule:
    """Saved and loaded: a trace that calls Python can be made, and not be saved."""
    file = io.BytesIO()
    torch.jit.save(torch.jit.trace(Logits(model).eval(), batch(1), check_trace=True), file)
    file.seek(0)
    return torch.jit.load(file)


@pytest.mark.parametrize("key", [*SURGERY, "together"])
def test_a_trace_is_of_the_stock_forward_pass(key: str, make_trainer) -> None:
    stock = bert(case(key).head if key != "together" else "classification")
    model = copy.deepcopy(stock)
    make_trainer([cls() for cls in TOGETHER] if key == "together" else [make(key)], model=model)
    script = traced(model)
    for seed in (1, 2):
        expected = Logits(stock).eval()(*batch(seed))
        found = script(*batch(seed))
        assert found.dtype == expected.dtype
        bf16 = key == "low_precision_norm"  # under autocast alone
        torch.testing.assert_close(found, expected, rtol=0, atol=2e-2 if bf16 else 2e-6)
    assert expected.std() > 1e-3, "all logits are alike: nothing could be wrong"


def test_norms_in_low_precision_are_traced_under_autocast(make_trainer) -> None:
    stock = bert("classification")
    model = copy.deepcopy(stock)
    make_trainer([MixedPrecision("bf16"), LowPrecisionNorm()], model=model)
    script = traced(model)
    torch.testing.assert_close(script(*batch(2)), Logits(stock).eval()(*batch(2)), rtol=0, atol=5e-3)
