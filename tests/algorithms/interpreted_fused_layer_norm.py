"""FusedLayerNorm with its real kernel, on the CPU: `test_interpreted.py` runs this file."""

from __future__ import annotations

import copy

import pytest
import torch
from layer_norm_check import EPS, case, check
from model_check import check_model, random_weights
from small import padded_batch

from composer_speedups import FusedLayerNorm, apply_fused_layer_norm

# Triton 3.3's interpreter turns arrays of one element into scalars in a way that NumPy deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")


@pytest.mark.parametrize("padded", [True, False])
def test_bert_matches_float64(tiny_bert: torch.nn.Module, padded: bool) -> None:
    stock = random_weights(tiny_bert).eval()
    changed = copy.deepcopy(stock)
    assert apply_fused_layer_norm(changed) == 5
    batch = padded_batch(rows=2, length=6)
    if not padded:
        batch["attention_mask"] = torch.ones_like(batch["attention_mask"])
    check_model(changed, stock, batch)


@pytest.mark.parametrize("fault", ["bias", "eps"])
def test_the_check_finds_a_planted_fault(tiny_bert: torch.nn.Module, fault: str) -> None:
    stock = random_weights(tiny_bert).eval()
    changed = copy.deepcopy(stock)
    apply_fused_layer_norm(changed)
    norm = changed.bert.encoder.layer[0].output.LayerNorm
    if fault == "bias":
        norm.forward = lambda x: type(norm).forward(norm, x) - norm.bias
    else:
        norm.eps = 1e-3
    with pytest.raises(AssertionError, match="is off by"):
        check_model(changed, stock, padded_batch(rows=2, length=6))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_computes_in_the_autocast_dtype_with_float32_weights(dtype: torch.dtype) -> None:
    layer = torch.nn.LayerNorm(48, eps=EPS)
    model = torch.nn.Sequential(layer)
    apply_fused_layer_norm(model)

    def under_autocast(x, weight, bias, eps):
        layer.weight.data, layer.bias.data = weight.detach(), bias.detach()
        assert eps == layer.eps
        with torch.autocast("cpu", dtype=dtype):
            y = torch.func.functional_call(model, {"0.weight": weight, "0.bias": bias}, (x,))
        return y

    check(under_autocast, *case((6, 48), dtype))
    with torch.autocast("cpu", dtype=dtype):
        assert model(torch.randn(3, 48)).dtype == dtype


def test_trains_in_a_trainer(make_trainer) -> None:
    algorithm = FusedLayerNorm()
    trainer = make_trainer([algorithm], rows=8)
    model = trainer.state.model
    before = model.state_dict()["model.bert.embeddings.LayerNorm.weight"].clone()
    trainer.fit()
    after = model.state_dict()["model.bert.embeddings.LayerNorm.weight"]
    assert algorithm.evidence == {"changed": 5, "backend": "triton", "left_alone": 0}
    assert after.isfinite().all() and not torch.equal(before, after)
