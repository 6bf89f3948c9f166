"""What ESM alone has: embeddings that count masked tokens, positions of two kinds, rotations that a layer may own."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers
from torch._subclasses.fake_tensor import FakeTensorMode
from unpadded import batch, compare, make, tiny_config

from composer_speedups import apply_last_layer_subset, apply_masked_token_head, apply_unpadding
from composer_speedups.algorithms.unpadding import _packed_parts
from composer_speedups.packed.esm import turns_alike

MASK, ESM1B = 9, {"position_embedding_type": "absolute", "emb_layer_norm_before": True}


def masked(kind: str) -> dict[str, torch.Tensor]:
    """A batch whose rows have other shares of masked tokens, one of them none, and none nothing else."""
    inputs = batch("ForMaskedLM", 1, kind)
    real = inputs["attention_mask"].bool()
    inputs["input_ids"][inputs["input_ids"] == MASK] = MASK + 1
    chosen = real & (torch.arange(real.shape[1]) % torch.tensor([2, 3, 4, 50, 5, 50])[:, None] == 1)
    inputs["input_ids"] = torch.where(chosen, MASK, inputs["input_ids"])
    return inputs


@pytest.mark.parametrize("kind", ["right", "left", "holes", "full"])
@pytest.mark.parametrize("changes", [{}, {"token_dropout": False}, ESM1B], ids=["esm2", "no dropout", "esm1b"])
def test_masked_tokens_are_counted_row_by_row(changes: dict, kind: str) -> None:
    stock = make("Esm", "ForMaskedLM", mask_token_id=MASK, **changes)
    fast, inputs = copy.deepcopy(stock), masked(kind)
    assert apply_unpadding(fast) == 2
    compare(stock, fast, "ForMaskedLM", inputs)


def test_other_counts_would_be_seen() -> None:
    """The same tokens, but with the padding counted as if it were text."""
    model, inputs = make("Esm", "ForMaskedLM", mask_token_id=MASK), masked("right")
    apply_unpadding(model)
    stock = type(model.esm.embeddings).forward

    def blind(self, input_ids, attention_mask, position_ids):
        counted = stock(self, input_ids=input_ids, attention_mask=torch.ones_like(input_ids), position_ids=position_ids)
        return counted * attention_mask[..., None]

    right = model(**inputs).logits
    model.esm.embeddings.forward = blind.__get__(model.esm.embeddings)
    assert (model(**inputs).logits - right)[inputs["attention_mask"].bool()].abs().max() > 1e-3


def test_without_a_mask_nothing_is_padding() -> None:
    stock = make("Esm", "ForMaskedLM", mask_token_id=MASK)
    fast, ids = copy.deepcopy(stock), masked("full")["input_ids"]
    apply_unpadding(fast)
    torch.testing.assert_close(fast(ids).logits, stock(ids, torch.ones_like(ids)).logits, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("changes", [{}, ESM1B], ids=["esm2", "esm1b"])
def test_positions_of_your_own(changes: dict) -> None:
    """ESM-2 turns by columns whatever is given, in transformers 4.53; in 5.x, and in ESM-1b, by what is given."""
    stock = make("Esm", "ForMaskedLM", **changes)
    fast, inputs = copy.deepcopy(stock), batch("ForMaskedLM", 1)
    inputs["position_ids"] = torch.arange(16).flip(0).expand(6, -1) + 2
    apply_unpadding(fast)
    compare(stock, fast, "ForMaskedLM", inputs)


def test_the_head_on_masked_tokens_alone() -> None:
    stock = make("Esm", "ForMaskedLM", mask_token_id=MASK).train()
    fast, inputs = copy.deepcopy(stock), masked("right")
    assert apply_unpadding(fast) == 2 and apply_masked_token_head(fast) == 1
    losses = [model(**inputs).loss for model in (stock, fast)]
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-10, atol=1e-10)
    for p, q in zip(stock.parameters(), fast.parameters(), strict=True):
        if p.grad is not None:
            torch.testing.assert_close(q.grad, p.grad, rtol=1e-10, atol=1e-10)


def test_angles_that_differ_from_layer_to_layer_are_left_alone() -> None:
    model = make("Esm")
    own = [m for m in model.modules() if hasattr(m, "inv_freq")]
    assert turns_alike(model.esm)
    own[-1].inv_freq.mul_(2)
    if len(own) > 1:  # transformers 4.53: each layer has its own
        assert not turns_alike(model.esm) and apply_unpadding(model) == 0
    else:
        assert turns_alike(model.esm) and apply_unpadding(model) == 2


def test_a_dry_run_has_no_angles_to_compare() -> None:
    """The memory of a recipe is predicted by one."""
    for without_numbers in (FakeTensorMode(), torch.device("meta")):
        with without_numbers:
            model = transformers.EsmForSequenceClassification(tiny_config("Esm"))
            assert apply_unpadding(model) == 2


@pytest.mark.parametrize("way", [apply_unpadding, apply_last_layer_subset])
def test_a_model_of_bfloat16_turns_by_the_same_angles(way) -> None:
    """In transformers 4.53 they are bfloat16 then, too, which knows few positions above 256."""
    stock = make("Esm", "ForSequenceClassification", max_position_embeddings=1000).bfloat16()
    fast, ids = copy.deepcopy(stock), torch.randint(5, 64, (2, 900))
    way(fast)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    inputs["attention_mask"][1, 600:] = 0
    with torch.no_grad():
        found, expected = fast(**inputs).logits.double(), stock(**inputs).logits.double()
    torch.testing.assert_close(found, expected, rtol=0.1, atol=0.1 * float(expected.norm()))


def test_hooks_on_its_embeddings_see_rows() -> None:
    """They are not packed, so that nothing is said of them."""
    model = make("Esm")
    model.esm.embeddings.register_forward_hook(lambda *_: None)
    apply_unpadding(model)
    assert model.esm.embeddings not in _packed_parts(model)


def test_contacts_are_predicted_as_before() -> None:
    """They are made of attention weights: such a call takes the padded forward pass."""
    stock = make("Esm", "ForMaskedLM").eval()
    stock.config._attn_implementation = "eager"  # SDPA, in 5.x, computes no weights
    fast, inputs = copy.deepcopy(stock), batch("Model", 1)
    apply_unpadding(fast)
    with torch.no_grad():
        found, expected = (m.predict_contacts(inputs["input_ids"], inputs["attention_mask"]) for m in (fast, stock))
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)  # of rows too short
