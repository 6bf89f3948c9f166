"""Nomic BERT, Jina embeddings v3, GTE and EuroBERT: what they have and other families have not."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import transformers
from unpadded import FAMILIES, batch, compare, labelled, make

from composer_speedups import apply_fused_bias_gelu, apply_last_layer_subset, apply_unpadding
from composer_speedups.packed import llama_named as module

HEAD = "ForSequenceClassification"
OF_NOMIC = [family for family in ("NomicBert", "JinaEmbeddingsV3", "Gte") if family in FAMILIES]
ALL = [*OF_NOMIC, *(family for family in ("EuroBert",) if family in FAMILIES)]
pytestmark = pytest.mark.skipif(not ALL, reason="transformers has none of them before version 5")


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("family", ALL)
def test_positions_and_types_of_your_own(family: str, cut: bool) -> None:
    stock, inputs = make(family, type_vocab_size=2), batch(HEAD, FAMILIES[family])
    inputs["position_ids"] = torch.arange(16).flip(0).expand(6, -1) + 2
    if family != "EuroBert":
        inputs["token_type_ids"] = torch.arange(6 * 16).view(6, 16) % 2
    fast = copy.deepcopy(stock)
    assert not cut or apply_last_layer_subset(fast) == 1
    assert apply_unpadding(fast) == 2
    compare(stock, fast, HEAD, inputs)


def without_rotations(attention: torch.nn.Module, rotations: module.Rotations, *tensors: torch.Tensor):
    return tensors


def other_heads(attention: torch.nn.Module, *tensors: torch.Tensor) -> list[torch.Tensor]:
    return [x.repeat(*[1] * (x.dim() - 2), getattr(attention, "num_key_value_groups", 1), 1) for x in tensors]


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("family", ALL)
@pytest.mark.parametrize(("place", "fault"), [("turned", without_rotations), ("_for_every_head", other_heads)])
def test_a_planted_fault_is_found(place: str, fault: Callable, family: str, cut: bool, monkeypatch) -> None:
    if fault is other_heads and family != "EuroBert":
        pytest.skip("each of its heads has keys of its own")
    stock = make(family)
    fast = copy.deepcopy(stock)
    (apply_last_layer_subset if cut else apply_unpadding)(fast)
    monkeypatch.setattr(module, place, fault)
    with pytest.raises(AssertionError):
        compare(stock, fast, HEAD, batch(HEAD, FAMILIES[family]))


def test_gte_may_have_no_types_of_tokens() -> None:
    if "Gte" not in FAMILIES:
        pytest.skip("transformers has no GTE")
    stock = make("Gte", type_vocab_size=0)
    fast = copy.deepcopy(stock)
    assert apply_unpadding(fast) == 2
    compare(stock, fast, HEAD, batch(HEAD, FAMILIES["Gte"]))


@pytest.mark.parametrize("family", ALL)
def test_angles_may_depend_on_the_batch(family: str) -> None:
    """By how long its rows are, as GTE's for long texts."""
    rope = {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 4.0}
    stock = make(family, rope_parameters=rope, max_position_embeddings=8)
    fast = copy.deepcopy(stock)
    assert apply_unpadding(fast) == 2
    compare(stock, fast, HEAD, batch(HEAD, FAMILIES[family]))


@pytest.mark.parametrize("way", [apply_unpadding, apply_last_layer_subset])
@pytest.mark.parametrize("family", ALL)
def test_a_model_of_bfloat16_is_no_further_from_float64(way: Callable, family: str) -> None:
    exact, inputs = make(family), labelled(family, HEAD)
    stock = copy.deepcopy(exact).bfloat16()
    fast = copy.deepcopy(stock)
    way(fast)
    with torch.no_grad():
        expected, plain, found = (model(**inputs).logits.double() for model in (exact, stock, fast))
    assert (found - expected).norm() <= 1.5 * (plain - expected).norm()  # they are rounded in other places


@pytest.mark.parametrize("family", ALL)
def test_embeddings_of_your_own_are_left_alone(family: str) -> None:
    class Rows(torch.nn.Embedding):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            rows = super().forward(ids)
            return rows - rows.mean(1, keepdim=True)

    model = make(family)
    own = Rows(64, 32).double()
    if family == "EuroBert":
        model.model.embed_tokens = own
    else:
        model.base_model.embeddings.forward = own.forward
    assert apply_unpadding(model) == 0


def test_jinas_bias_and_gelu() -> None:
    if "JinaEmbeddingsV3" not in FAMILIES:
        pytest.skip("transformers has no Jina embeddings v3")
    stock = make("JinaEmbeddingsV3").float()
    fast = copy.deepcopy(stock)
    assert apply_fused_bias_gelu(fast) == 2 and apply_fused_bias_gelu(fast) == 0
    close = dict(rtol=1e-4, atol=1e-4)  # float32 on both sides, and weights that make large numbers
    compare(stock, fast, HEAD, batch(HEAD, FAMILIES["JinaEmbeddingsV3"]), **close)


@pytest.mark.parametrize("family", ALL)
def test_saved_and_loaded_without(family: str, tmp_path) -> None:
    model, inputs = make(family), batch(HEAD, FAMILIES[family])
    apply_last_layer_subset(model)
    apply_unpadding(model)
    model.save_pretrained(tmp_path)
    stock = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path, dtype=torch.float64)
    torch.testing.assert_close(stock(**inputs).logits, model(**inputs).logits)
