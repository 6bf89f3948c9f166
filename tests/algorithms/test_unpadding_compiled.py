"""`Unpadding` under torch.compile: the same numbers, no graph breaks, no endless recompiles."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers
from unpadded import FAMILIES, KINDS, batch, compare, draws, labelled, make, set_dropouts

from composer_speedups import apply_fast_dropout, apply_last_layer_subset, apply_torch_compile, apply_unpadding
from composer_speedups.kernels import disentangled, distance_bias, fused_attention
from composer_speedups.packed import mpnet as packed_mpnet


@pytest.mark.parametrize("subset", [False, True])
def test_a_compiled_model_sees_the_dropouts_flag(subset: bool) -> None:
    config = make(attention_probs_dropout_prob=0.5).config
    stock = transformers.BertForSequenceClassification._from_config(config, attn_implementation="eager")
    fast, inputs = copy.deepcopy(stock), batch("ForSequenceClassification")
    assert apply_unpadding(fast) == 2 and (not subset or apply_last_layer_subset(fast) == 1)
    apply_fast_dropout(fast)
    assert apply_torch_compile(fast, scope="block", backend="aot_eager") == 2
    for training, dropping in ((False, False), (False, True), (True, True), (True, False)):
        for model in (stock, fast):
            set_dropouts(model.train(training), dropping)
        assert draws(fast, inputs) == draws(stock, inputs), (training, dropping)
    torch._dynamo.reset()


# Blocks have no part of the head: one of each family does. Whole models take ten seconds and more each.
BLOCKS = [(family, head, "block") for family, head in dict(KINDS).items()]
EVERYWHERE = (("Bert", "ForSequenceClassification"), ("ModernBert", "ForMaskedLM"))
WHOLE = [pytest.param(*kind, "model", marks=[] if kind in EVERYWHERE else pytest.mark.elsewhere) for kind in KINDS]


@pytest.mark.parametrize(("family", "head", "scope"), WHOLE + BLOCKS)
def test_compiled(family: str, head: str, scope: str) -> None:
    stock = make(family, head)
    fast = copy.deepcopy(stock)
    apply_unpadding(fast)
    assert apply_torch_compile(fast, scope=scope, backend="aot_eager") == (1 if scope == "model" else 2)
    for rows in (6, 4):
        inputs = {name: x[-rows:] for name, x in batch(head, FAMILIES[family]).items()}
        stock.zero_grad()
        fast.zero_grad()
        compare(stock, fast, head, inputs)
    torch._dynamo.reset()


# What Inductor makes of it; the others look at what is traced, which takes a tenth of the time. In float32: in float64
# nothing of ours is in C.
@pytest.mark.parametrize(
    ("family", "head", "scope"),
    [
        ("Bert", "ForMaskedLM", "block"),
        pytest.param("Roberta", "ForTokenClassification", "model", marks=pytest.mark.slow),
        pytest.param("Bert", "ForQuestionAnswering", "model", marks=pytest.mark.slow),
    ],
)
def test_compiled_by_inductor(family: str, head: str, scope: str) -> None:
    stock = make(family, head, hidden_size=64).float()  # heads of a width that C takes
    fast = copy.deepcopy(stock)
    apply_unpadding(fast)
    assert apply_torch_compile(fast, scope=scope) == (1 if scope == "model" else 2)
    for rows in (6, 4):
        inputs = {name: x[-rows:] for name, x in labelled(family, head).items()}
        compare(stock, fast, head, inputs, rtol=2e-3, atol=2e-4)
        assert any(p.grad.abs().max() > 1e-2 for p in fast.parameters() if p.grad is not None)
        stock.zero_grad()
        fast.zero_grad()
    torch._dynamo.reset()


# Filled up, totals may stay while the rows change: one graph more, when a total changes, too. None for the first layer.
@pytest.mark.parametrize(("multiple_of", "graphs"), [(1, 1), (64, 2)])
def test_block_compile_without_breaks_or_endless_recompiles(multiple_of: int, graphs: int) -> None:
    from torch._dynamo.utils import counters

    stock, head = make(), "ForSequenceClassification"
    fast = copy.deepcopy(stock)
    apply_unpadding(fast, multiple_of)
    for layer in fast.bert.encoder.layer:
        layer.compile(backend="aot_eager", fullgraph=True)
    compare(stock, fast, head, batch(head))
    counters.clear()
    for rows in (6, 5, 4, 3):
        inputs = {name: x[-rows:] for name, x in batch(head).items()}
        torch.testing.assert_close(fast(**inputs).logits, stock(**inputs).logits, rtol=1e-10, atol=1e-10)
    assert not counters["graph_break"]
    assert counters["stats"]["unique_graphs"] <= graphs, "a graph for each number of tokens"
    torch._dynamo.reset()


def test_debertas_blocks_compile_whole() -> None:
    stock, head = make("DebertaV2"), "ForSequenceClassification"
    fast = copy.deepcopy(stock)
    apply_unpadding(fast)
    apply_last_layer_subset(fast)
    for layer in fast.deberta.encoder.layer:
        layer.compile(backend="aot_eager", fullgraph=True)
    for rows in (6, 5, 4):
        inputs = {name: x[-rows:] for name, x in batch(head).items()}
        torch.testing.assert_close(fast(**inputs).logits, stock(**inputs).logits, rtol=1e-10, atol=1e-10)
    torch._dynamo.reset()


@pytest.mark.parametrize(("dtype", "compiled", "made"), [
    (torch.float64, False, 1), (torch.float32, False, 0), (torch.float32, True, 1),
], ids=["float64", "C", "compiled"])  # fmt: skip
def test_mpnets_layers_share_their_padded_bias(monkeypatch, dtype: torch.dtype, compiled: bool, made: int) -> None:
    if disentangled.native() is None or fused_attention.native(torch.float32) is None:
        pytest.skip("no compiler, or a CPU without the instructions")
    calls = []
    for module in (packed_mpnet, distance_bias):
        own = module.padded_bias
        monkeypatch.setattr(module, "padded_bias", lambda *args, own=own: calls.append(args) or own(*args))
    stock = make("MPNet", hidden_size=64, num_hidden_layers=3).to(dtype)  # heads of a width that C takes
    fast = copy.deepcopy(stock)
    assert apply_unpadding(fast) == 3 and apply_last_layer_subset(fast) == 1
    if compiled:
        assert apply_torch_compile(fast, scope="block", backend="aot_eager") == 3
    inputs = batch("ForSequenceClassification", FAMILIES["MPNet"])
    for model in (stock, fast):
        model(**inputs).loss.backward()
    assert len(calls) == made
    assert not calls or calls[0][3] == dtype
    close = {torch.float64: dict(rtol=1e-10, atol=1e-10), torch.float32: dict(rtol=1e-3, atol=1e-4)}[dtype]
    for (name, p), q in zip(stock.named_parameters(), fast.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad, **close, msg=lambda text, name=name: f"{name}: {text}")
    torch._dynamo.reset()
