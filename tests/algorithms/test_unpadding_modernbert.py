"""What ModernBERT has and BERT has not: windows, rotary positions, means over real tokens. The rest is in the tests of
`Unpadding` for all families."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
import transformers
from composer.algorithms.warnings import NoEffectWarning
from unpadded import batch, compare, make, visible

from composer_speedups import Unpadding, apply_last_layer_subset, apply_unpadding
from composer_speedups.packed import encoder as packed_encoder
from composer_speedups.packed import modernbert as packed_modernbert
from composer_speedups.packed.packing import Holed, count_on_host, count_tokens, hand_over

CLASSIFIER = "ForSequenceClassification"


@pytest.mark.parametrize("head", [CLASSIFIER, "ForTokenClassification"])
def test_holes_take_the_stock_forward_where_a_layer_sees_a_window(head: str, caplog) -> None:
    """There the tokens between two others are counted, padding among them."""
    stock, inputs = make("ModernBert", head), batch(head, kind="holes")
    fast = copy.deepcopy(stock)
    apply_unpadding(fast)
    packed_encoder._SAID.clear()
    with caplog.at_level(logging.WARNING, "composer_speedups"):
        out, expected = fast(**inputs).logits, stock(**inputs).logits
        fast(**inputs)
    assert torch.equal(out, expected)
    assert len(caplog.records) == 1 and "padding between the tokens of a row" in caplog.text, "said once"


def test_holes_are_packed_where_every_layer_sees_everything(caplog) -> None:
    stock, inputs = make("ModernBert", global_attn_every_n_layers=1), batch(CLASSIFIER, kind="holes")
    fast = copy.deepcopy(stock)
    apply_unpadding(fast)
    with caplog.at_level(logging.WARNING, "composer_speedups"):
        compare(stock, fast, CLASSIFIER, inputs)
    assert not caplog.records


def test_the_count_of_a_row_with_holes_stays_one_through_a_batch() -> None:
    mask = torch.tensor([[1, 0, 1, 1], [1, 1, 0, 0], [0, 1, 0, 1]])
    inputs = {"attention_mask": mask}
    assert count_on_host(inputs)
    inputs["attention_mask"] = mask.to("meta")
    assert hand_over(inputs)
    counts = packed_encoder.counts_of(inputs["attention_mask"])
    assert counts == [3, 2, -2] and [isinstance(count, Holed) for count in counts] == [True, False, True]
    assert not any(isinstance(count, Holed) for count in count_tokens(torch.eye(3)))


@pytest.mark.parametrize("kind", ["right", "left"])
def test_a_mean_needs_no_first_token(kind: str) -> None:
    stock, inputs = make("ModernBert", classifier_pooling="mean"), batch(CLASSIFIER, kind=kind)
    fast, seen = copy.deepcopy(stock), []
    apply_unpadding(fast, multiple_of=1)
    fast.model.layers[1].mlp.register_forward_hook(lambda _, args, __: seen.append(args[0].shape[:-1].numel()))
    compare(stock, fast, CLASSIFIER, inputs)
    assert seen == [int(inputs["attention_mask"].sum())]


@pytest.mark.skipif(not hasattr(transformers, "ModernBertForMultipleChoice"), reason="transformers 4.53 has none")
@pytest.mark.parametrize("pooling", ["cls", "mean"])
@pytest.mark.parametrize("kind", ["right", "left"])
def test_multiple_choice(kind: str, pooling: str) -> None:
    """Its head looks for the first token that is real: the last layer must not be cut, and padding may be first."""
    stock = make("ModernBert", "ForMultipleChoice", classifier_pooling=pooling, global_attn_every_n_layers=1)
    fast = copy.deepcopy(stock)
    assert apply_last_layer_subset(fast) == 0 and apply_unpadding(fast) == 2
    inputs = {name: x.unflatten(0, (-1, 2)) for name, x in batch("Model", kind=kind).items()}
    torch.testing.assert_close(fast(**inputs).logits, stock(**inputs).logits, rtol=1e-10, atol=1e-10)


def test_electra_with_a_mean_over_padding_is_left_alone() -> None:
    model = make("Electra", "ForMultipleChoice", summary_type="mean")
    assert apply_unpadding(model) == 0


def test_positions_of_ones_own() -> None:
    stock, inputs = make("ModernBert"), batch(CLASSIFIER)
    inputs["position_ids"] = torch.randint(0, 30, inputs["input_ids"].shape)
    fast = copy.deepcopy(stock)
    apply_unpadding(fast)
    compare(stock, fast, CLASSIFIER, inputs)
    without = {name: x for name, x in inputs.items() if name != "position_ids"}
    assert not torch.allclose(fast(**without).logits, fast(**inputs).logits)


def test_an_attention_from_another_module_and_masks_that_are_no_tensors(caplog) -> None:
    """transformers 5 takes masks by kind of layer; and FSDP, for one, lays classes of its own over others."""
    stock, inputs = make("ModernBert"), batch(CLASSIFIER)
    fast = copy.deepcopy(stock)
    apply_unpadding(fast)
    for layer in fast.model.layers:
        layer.attn.__class__ = type("Laid", (type(layer.attn),), {"__module__": "torch.distributed.fsdp"})
    compare(stock, fast, CLASSIFIER, inputs)
    if hasattr(transformers, "ModernBertForMultipleChoice"):
        own = {"full_attention": None, "sliding_attention": None}
        given = inputs | {"attention_mask": own}
        packed_encoder._SAID.clear()
        with caplog.at_level(logging.WARNING, "composer_speedups"):
            assert torch.equal(fast(**given).logits, stock(**given).logits)
        assert "the attention mask is not as the ids [rows, length] (it is a dict)" in caplog.text


def test_its_modules_are_called_whoever_listens() -> None:
    model, seen = make("ModernBert"), set()
    expected = copy.deepcopy(model)
    apply_unpadding(model)
    for name, module in model.named_modules():
        module.register_forward_hook(lambda _, __, ___, name=name: seen.add(name))
    inputs = batch(CLASSIFIER)
    torch.testing.assert_close(model(**inputs).logits, expected(**inputs).logits, rtol=1e-10, atol=1e-10)
    lists = {name for name, module in model.named_modules() if isinstance(module, torch.nn.ModuleList)}
    assert {name for name, _ in model.named_modules()} - lists == seen


def test_is_left_alone_where_transformers_unpads_it(make_trainer) -> None:
    """In 4.53 with flash-attn its rotations take packed tokens only. A stand-in: the package needs a GPU."""

    class ModernBertUnpaddedRotaryEmbedding(torch.nn.Module):
        pass

    from composer.models import HuggingFaceModel

    model = make("ModernBert")
    model.model.layers[0].attn.rotary_emb = ModernBertUnpaddedRotaryEmbedding()
    with pytest.warns(NoEffectWarning, match="flash_attention_2 unpads itself"):
        make_trainer([Unpadding()], model=HuggingFaceModel(model, use_logits=True))


def test_compiled_layers_share_a_graph_with_those_of_their_kind() -> None:
    """The first has no norm before its attention; of the others some see everything, and some a window."""
    from torch._dynamo.utils import counters

    stock = make("ModernBert", num_hidden_layers=7, global_attn_every_n_layers=3)
    fast = copy.deepcopy(stock)
    apply_unpadding(fast, multiple_of=1)
    for layer in fast.model.layers:
        layer.compile(backend="aot_eager", dynamic=True, fullgraph=True)
    torch._dynamo.reset()
    counters.clear()
    compare(stock, fast, CLASSIFIER, batch(CLASSIFIER))
    for rows in (6, 5, 3):
        inputs = {name: x[-rows:] for name, x in batch(CLASSIFIER).items()}
        torch.testing.assert_close(fast(**inputs).logits, stock(**inputs).logits, rtol=1e-10, atol=1e-10)
    assert counters["stats"]["unique_graphs"] == 3 and not counters["graph_break"]
    torch._dynamo.reset()


def _no_window(attention: torch.nn.Module) -> int:
    return -1


def _narrower(attention: torch.nn.Module, right=packed_modernbert.window_of) -> int:
    return right(attention) - 1 if right(attention) >= 0 else -1


def _not_turned(attention, rotations, *tensors):
    return tensors


def _one_kind(self, like, positions, packing, right=packed_modernbert._Encoder.rotations):
    return [right(self, like, positions, packing)[0]] * len(self.layers)


def _columns_from_zero(self, like, positions, packing, right=packed_modernbert._Encoder.rotations):
    return right(self, like, positions * 0, packing)


@pytest.mark.parametrize(
    ("owner", "name", "fault"),
    [
        (packed_modernbert, "window_of", _no_window),
        (packed_modernbert, "window_of", _narrower),
        (packed_modernbert, "turned", _not_turned),
        (packed_modernbert._Encoder, "rotations", _one_kind),
        (packed_modernbert._Encoder, "rotations", _columns_from_zero),
    ],
)
def test_a_planted_fault_is_found(owner, name: str, fault, monkeypatch: pytest.MonkeyPatch) -> None:
    stock, inputs = make("ModernBert", "ForTokenClassification"), batch("ForTokenClassification")
    fast = copy.deepcopy(stock)
    apply_unpadding(fast)
    monkeypatch.setattr(owner, name, fault)
    with pytest.raises(AssertionError, match="not close"):
        compare(stock, fast, "ForTokenClassification", inputs)


def test_dropout_of_attention_is_drawn_in_training_only() -> None:
    model, inputs = make("ModernBert", attention_probs_dropout_prob=0.5), batch(CLASSIFIER)
    apply_unpadding(model)
    model.train()
    assert not torch.equal(model(**inputs).logits, model(**inputs).logits)
    model.eval()
    assert torch.equal(model(**inputs).logits, model(**inputs).logits)


def test_a_longer_text_than_its_window_by_far() -> None:
    stock = make("ModernBert", "Model", max_position_embeddings=400)
    fast, mask = copy.deepcopy(stock), torch.ones(2, 300, dtype=torch.long)
    apply_unpadding(fast)
    mask[1, 37:] = 0
    inputs = {"input_ids": torch.randint(5, 64, mask.shape), "attention_mask": mask}
    expected, out = (visible(model(**inputs), "Model", mask) for model in (stock, fast))
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)
    assert len(out) == 337
