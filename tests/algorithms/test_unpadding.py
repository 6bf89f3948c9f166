from __future__ import annotations

import copy
import functools
import gc
import io
import logging
import pickle
import re
from types import SimpleNamespace

import pytest
import torch
import transformers
from composer.algorithms import Alibi, SeqLengthWarmup
from composer.algorithms.warnings import NoEffectWarning
from composer.core.data_spec import _default_split_batch
from composer.devices.device import Device
from composer.models import HuggingFaceModel
from small import Doubled, checkpoint_blocks, config_of, stock_checkpointing

from composer_speedups import (
    MixedPrecision,
    SDPAttention,
    Unpadding,
    apply_fast_dropout,
    apply_last_layer_subset,
    apply_masked_token_head,
    apply_torch_compile,
    apply_unpadding,
    packed_bert,
    packed_distilbert,
    packed_encoder,
    packed_mpnet,
    packing,
)
from composer_speedups.algorithms import unpadding
from composer_speedups.errors import ConflictError
from composer_speedups.families import layers_of, stack_of
from composer_speedups.joint_linear import joint_linear
from composer_speedups.kernels import disentangled, distance_bias, fused_attention
from composer_speedups.kernels.disentangled import in_c
from composer_speedups.kernels.per_sequence import served_by
from composer_speedups.packing import (
    COUNTS,
    Holed,
    OnHost,
    Packing,
    Valued,
    count_on_host,
    count_tokens,
    counts_of,
    hand_over,
    tie_counts,
)

ROWS, LENGTH = 6, 16


class MeanPooler(torch.nn.Module):
    """As some put it into a stock model."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.dense = torch.nn.Linear(width, width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.dense(hidden.mean(1)).tanh()


def unpadding_of(model: torch.nn.Module) -> Unpadding:
    """The algorithm, installed in a Trainer's state of `model`."""
    algorithm = Unpadding()
    state = SimpleNamespace(model=model)
    algorithm.install(state, SimpleNamespace(log_hyperparameters=lambda _: None))
    return algorithm


FAMILIES = {  # and their padding ids
    "Bert": 0,
    "Roberta": 1,
    "XLMRoberta": 1,
    "Camembert": 1,
    "Electra": 0,
    "DistilBert": 0,
    "ModernBert": 0,
    "MPNet": 1,
    "DebertaV2": 0,
}
HEADS = ["ForSequenceClassification", "ForTokenClassification", "ForMaskedLM", "ForQuestionAnswering", "Model"]


def make(family: str = "Bert", head: str = "ForSequenceClassification", **changes: object) -> torch.nn.Module:
    values = dict(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        max_position_embeddings=40,
        num_labels=2,
        pad_token_id=FAMILIES[family],
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    if family == "Electra":
        values["embedding_size"] = 16
    values |= changes
    config = config_of(family, **values)
    model = getattr(transformers, family + head)(config).double()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)  # no zero bias, no row of zeros for the padding id: they hide faults
    return model


def batch(head: str, padding_id: int = 0, kind: str = "right") -> dict[str, torch.Tensor]:
    lengths = torch.tensor([16, 3, 9, 1, 12, 7])
    mask = (torch.arange(LENGTH) < lengths[:, None]).long()
    if kind == "holes":
        mask[0, 3:5] = mask[2, 1] = 0
    elif kind == "full":
        mask = torch.ones_like(mask)
    ids = torch.where(mask.bool(), torch.randint(5, 64, mask.shape), padding_id)
    if kind == "left":
        ids, mask = ids.flip(1), mask.flip(1)
    out = {"input_ids": ids, "attention_mask": mask}
    if head == "ForSequenceClassification":
        out["labels"] = torch.arange(ROWS) % 2
    elif head in ("ForTokenClassification", "ForMaskedLM"):
        out["labels"] = torch.where(mask.bool(), ids % 2, -100)
    return out


def visible(out, head: str, mask: torch.Tensor) -> torch.Tensor:
    """What the model says of real tokens."""
    if head == "ForSequenceClassification":
        return out.logits
    name = {"ForQuestionAnswering": "start_logits", "Model": "last_hidden_state"}.get(head, "logits")
    return getattr(out, name)[mask.bool()]


def compare(stock: torch.nn.Module, fast: torch.nn.Module, head: str, inputs: dict[str, torch.Tensor]) -> None:
    expected, out = stock(**inputs), fast(**inputs)
    mask = inputs["attention_mask"]
    # float64 on both sides: some hundred sums in another order.
    close = dict(rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(visible(out, head, mask), visible(expected, head, mask), **close)
    for result in (expected, out):
        (visible(result, head, mask).sin().sum() + (result.loss if "labels" in inputs else 0)).backward()
    for (name, p), q in zip(stock.named_parameters(), fast.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        if p.grad is not None:
            torch.testing.assert_close(q.grad, p.grad, **close, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("kind", ["right", "holes", "left", "full"])
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("family", FAMILIES)
def test_equals_the_padded_model(family: str, head: str, kind: str) -> None:
    stock = make(family, head)
    inputs = batch(head, FAMILIES[family], kind)
    for multiple_of in (1, 16):
        fast = copy.deepcopy(stock)
        stock.zero_grad()
        assert apply_unpadding(fast, multiple_of) == 2 and apply_unpadding(fast, multiple_of) == 0
        assert list(fast.state_dict()) == list(stock.state_dict())
        compare(stock, fast, head, inputs)


DEBERTAS = {  # what models of that family differ in
    "other layers for distances": {"share_att_key": False},
    "content to position only": {"pos_att_type": ["c2p"]},
    "position to content only": {"pos_att_type": ["p2c"], "share_att_key": False},
    "no buckets": {"position_buckets": -1, "norm_rel_ebd": "none"},
    "fewer distances than tokens": {"position_buckets": -1, "max_relative_positions": 6},
    "more tokens than buckets are made for": {"position_buckets": 8, "max_relative_positions": 5},
    "one bucket": {"position_buckets": 1},
    "no product with distances": {"pos_att_type": None},
    "no distances": {"relative_attention": False, "position_biased_input": True, "type_vocab_size": 2},
    "positions and token types": {"position_biased_input": True, "type_vocab_size": 2, "embedding_size": 16},
}


@pytest.mark.parametrize("kind", ["right", "left"])
@pytest.mark.parametrize("changes", DEBERTAS.values(), ids=DEBERTAS)
def test_equals_every_padded_deberta(changes: dict, kind: str) -> None:
    stock = make("DebertaV2", "ForTokenClassification", **changes)
    inputs = batch("ForTokenClassification", kind=kind)
    if "type_vocab_size" in changes:
        inputs["token_type_ids"] = torch.randint(0, 2, inputs["input_ids"].shape)
    fast = copy.deepcopy(stock)
    assert apply_unpadding(fast) == 2
    try:
        stock(**inputs)
    except ZeroDivisionError:  # since transformers 5.24
        assert changes == {"position_buckets": 1}
        pytest.skip("transformers itself divides by no bucket")
    compare(stock, fast, "ForTokenClassification", inputs)


@pytest.mark.parametrize("subset", [False, True])
def test_rows_longer_than_a_deberta_has_positions(subset: bool) -> None:
    """Distances are all that it knows of places, so that it has no longest row."""
    stock = make("DebertaV2", max_position_embeddings=12)
    fast = copy.deepcopy(stock)
    assert apply_unpadding(fast) == 2 and (not subset or apply_last_layer_subset(fast) == 1)
    compare(stock, fast, "ForSequenceClassification", batch("ForSequenceClassification"))


@pytest.mark.parametrize("pooler", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_returns_the_models_own_class_and_as_many_places(family: str, pooler: bool) -> None:
    """MPNet's has one for a pooler that it has not, and in 4.53 so have BERT's and RoBERTa's."""
    cls, config = getattr(transformers, f"{family}Model"), make(family).config
    poolless = family in ("DistilBert", "ModernBert", "DebertaV2", "Electra")
    if poolless and pooler:
        pytest.skip("it never has a pooler")
    stock = (cls(config) if poolless else cls(config, add_pooling_layer=pooler)).double().eval()
    fast, inputs = copy.deepcopy(stock), batch("Model", FAMILIES[family])
    apply_unpadding(fast)
    expected, found = (model(**inputs, return_dict=False) for model in (stock, fast))
    assert [x is None for x in found] == [x is None for x in expected]
    assert family != "MPNet" or len(found) == 2
    expected, found = (model(**inputs, return_dict=True) for model in (stock, fast))
    assert type(found) is type(expected) and [*found] == [*expected]


@pytest.mark.parametrize("unpadded", [False, True])
def test_mpnets_layer_takes_its_bias_by_name_and_by_place(unpadded: bool) -> None:
    from composer_speedups.compat import MPNET_AFTER_MASK

    model = make("MPNet").eval()
    apply_last_layer_subset(model)
    if unpadded:
        apply_unpadding(model, multiple_of=1)
        mask = Packing.of(torch.ones(2, 5), [5, 5])
        mask = mask._replace(places=packed_mpnet._places(64, torch.device("cpu")))
        hidden, bias = torch.randn(10, 32).double(), torch.randn(4, 32).double()
    else:
        mask, hidden, bias = None, torch.randn(2, 5, 32).double(), torch.randn(2, 4, 5, 5).double()
    layer = model.mpnet.encoder.layer[-1]
    for first in (True, False):
        before = [None] * MPNET_AFTER_MASK.index("position_bias")
        out = layer(hidden, mask, position_bias=bias, first_only=first)[0]
        for given in ((*before, bias), (*before, bias, False)):
            assert torch.equal(layer(hidden, mask, *given, first_only=first)[0], out)
        assert not torch.equal(layer(hidden, mask, position_bias=bias * 2, first_only=first)[0], out)


@pytest.mark.parametrize("family", [f for f in FAMILIES if f != "ModernBert"])  # which cannot on transformers 4.53
def test_shapes_without_numbers(family: str) -> None:
    model, inputs = make(family, "Model").float(), batch("Model", FAMILIES[family])
    apply_unpadding(model)
    counts = count_tokens(inputs["attention_mask"])
    inputs = {name: x.to("meta") for name, x in inputs.items()}
    tie_counts(inputs["attention_mask"], counts)
    assert model.to("meta")(**inputs).last_hidden_state.shape == (ROWS, LENGTH, 32)


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


def test_debertas_stack_is_called_whoever_listens() -> None:
    model, seen = make("DebertaV2"), {}
    apply_unpadding(model, multiple_of=1)
    for name, module in model.deberta.named_modules():
        module.register_forward_hook(lambda _, __, ___, name=name: seen.update({name: True}))
    model(**batch("ForSequenceClassification"))
    silent = {name for name, module in model.deberta.named_modules() if not isinstance(module, torch.nn.ModuleList)}
    unasked = {f"encoder.layer.{n}.attention.self.dropout" for n in (0, 1)} | {"encoder.rel_embeddings"}
    assert silent - set(seen) == unasked  # of the second the stock model, too, takes the weight alone


def test_a_kernel_is_tried_within_a_checkpoint_without_leaving_anything_there(monkeypatch) -> None:
    stock = make("DebertaV2", num_attention_heads=2).float().train()
    fast = copy.deepcopy(stock)
    apply_unpadding(fast)
    stock_checkpointing(fast)
    for owner in (disentangled.native, fused_attention.native):
        owner.cache_clear()
    inputs = batch("ForSequenceClassification")
    for model in (stock, fast):
        model(**inputs).loss.backward()
    for p, q in zip(stock.parameters(), fast.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad, rtol=1e-4, atol=1e-4 * float(p.grad.abs().max()) + 1e-6)


@pytest.mark.parametrize("unpadded", [False, True])
@pytest.mark.parametrize("subset", [False, True])
def test_float16_has_room_for_scores_as_they_are_scaled(unpadded: bool, subset: bool) -> None:
    stock = make("DebertaV2", share_att_key=False).float()
    with torch.no_grad():
        for layer in stock.deberta.encoder.layer:
            for linear in (layer.attention.self.query_proj, layer.attention.self.key_proj):
                linear.weight.zero_()
                linear.bias.fill_(100.0)  # of width 8: products are 80,000
    fast, inputs = copy.deepcopy(stock), batch("ForSequenceClassification")
    _ = unpadded and apply_unpadding(fast), subset and apply_last_layer_subset(fast)
    for model in (stock, fast):
        assert model.half()(**inputs).logits.isfinite().all()


def test_a_deberta_with_a_convolution_stays_padded() -> None:
    model = make("DebertaV2", conv_kernel_size=3)
    assert apply_unpadding(model) == 0
    assert "conv_kernel_size" in unpadding._why_not(model.deberta, model)


@pytest.mark.parametrize(("multiple_of", "filled"), [(1, 48), (16, 48), (20, 60), (64, 64), (1000, ROWS * LENGTH)])
def test_layers_see_real_tokens_and_little_more(multiple_of: int, filled: int) -> None:
    model, seen = make(), []
    apply_unpadding(model, multiple_of)
    for layer in model.bert.encoder.layer:
        layer.output.register_forward_hook(lambda _, args, __: seen.append(args[0].shape[0]))
    inputs = batch("ForSequenceClassification")
    model(**inputs)
    assert int(inputs["attention_mask"].sum()) == 48 and seen == [filled] * 2


def test_distilberts_modules_are_called_whoever_listens() -> None:
    """Its embeddings and attention are given packed tokens: by their own calls, so that hooks hear of them."""
    model, seen = make("DistilBert"), {}
    apply_unpadding(model, multiple_of=1)
    for name, module in model.distilbert.named_modules():
        module.register_forward_hook(lambda _, __, ___, name=name: seen.update({name: True}))
    inputs = batch("ForSequenceClassification")
    expected = make("DistilBert")
    expected.load_state_dict(model.state_dict())
    torch.testing.assert_close(model(**inputs).logits, expected(**inputs).logits, rtol=1e-10, atol=1e-10)
    named = {name for name, module in model.distilbert.named_modules() if not isinstance(module, torch.nn.ModuleList)}
    assert named - set(seen) == {f"transformer.layer.{n}.attention.dropout" for n in (0, 1)}, "as in the stock model"


@pytest.mark.parametrize("head", ["ForMaskedLM", "ForTokenClassification"])
def test_padding_has_no_part_in_anything(head: str) -> None:
    model, inputs = make(head=head), batch(head)
    apply_unpadding(model)
    out = model(**inputs)
    other = inputs | {"input_ids": torch.where(inputs["attention_mask"].bool(), inputs["input_ids"], 63)}
    assert torch.equal(model(**other).logits, out.logits)
    model.zero_grad()
    model(**other).loss.backward()
    if head != "ForMaskedLM":  # there the embeddings are the head's weights as well
        used = other["input_ids"][inputs["attention_mask"].bool()].unique().tolist()
        rows = model.bert.embeddings.word_embeddings.weight.grad.abs().sum(1).nonzero().flatten().tolist()
        assert rows == used, "padding got a gradient"


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("family", ["Bert", "Roberta", "MPNet", "DebertaV2"])  # whose heads work on packed tokens
def test_a_hook_may_change_what_the_masked_head_is_given(family: str, in_place: bool, mode) -> None:
    stock, inputs = make(family, "ForMaskedLM"), batch("ForMaskedLM", FAMILIES[family])

    def hook(_, __, out):
        hidden = out.last_hidden_state
        out.last_hidden_state = hidden.mul_(3) if in_place else hidden * 3
        return out

    stock.base_model.register_forward_hook(hook)
    fast, seen = copy.deepcopy(stock), []
    apply_unpadding(fast, multiple_of=1)
    head = next(module for module in fast.modules() if isinstance(module, packed_bert._MaskedHead))
    for dense in (module for module in head.modules() if isinstance(module, torch.nn.Linear)):
        dense.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[:-1].numel()))
    if mode is torch.enable_grad:
        compare(stock, fast, "ForMaskedLM", inputs)
    else:
        with mode():
            found, expected = (visible(m(**inputs), "ForMaskedLM", inputs["attention_mask"]) for m in (fast, stock))
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    assert set(seen) == {int(inputs["attention_mask"].sum()) if in_place else ROWS * LENGTH}


def test_what_is_returned_and_batches_can_be_saved_and_keep_nothing_alive() -> None:
    model, bare = make("Bert", "ForMaskedLM").eval(), make("Bert", "Model").eval()
    for each in (model, bare):
        apply_unpadding(each)
    gc.collect()
    inputs, before = batch("Model", kind="holes"), (len(packed_encoder._PACKED), len(packing._TIED))
    assert count_on_host(inputs) and hand_over(inputs)
    saved = io.BytesIO()
    hidden = [bare(**inputs).last_hidden_state]
    assert len(packed_encoder._PACKED) == before[0], "no head reads it"
    hidden.append(model.bert(**inputs).last_hidden_state)
    assert (len(packed_encoder._PACKED), len(packing._TIED)) == (before[0] + 1, before[1] + 1)
    assert not any(vars(x) for x in (*inputs.values(), *hidden))
    torch.save({"hidden": hidden, **inputs}, saved)
    saved.seek(0)
    loaded = torch.load(saved, weights_only=True)
    assert torch.equal(loaded["hidden"][1], hidden[1]) and torch.equal(loaded["input_ids"], inputs["input_ids"])
    del hidden, inputs
    gc.collect()
    assert (len(packed_encoder._PACKED), len(packing._TIED)) == before


# Each head once, and what families differ in: positions that count padding ids, embeddings of another width.
KINDS = [
    ("Bert", "ForSequenceClassification"),
    ("Roberta", "ForMaskedLM"),
    ("Electra", "ForTokenClassification"),
    ("XLMRoberta", "ForQuestionAnswering"),
    ("DistilBert", "ForSequenceClassification"),
    ("DistilBert", "ForMaskedLM"),
    ("ModernBert", "ForSequenceClassification"),
    ("ModernBert", "ForMaskedLM"),
    ("MPNet", "ForSequenceClassification"),
    ("MPNet", "ForMaskedLM"),
    ("DebertaV2", "ForSequenceClassification"),
    ("DebertaV2", "ForTokenClassification"),
]


def with_answers(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A question answering batch with labels, on real tokens."""
    last = inputs["attention_mask"].sum(1) - 1
    return inputs | {"start_positions": last // 2, "end_positions": last}


def labelled(family: str, head: str) -> dict[str, torch.Tensor]:
    inputs = batch(head, FAMILIES[family])
    return with_answers(inputs) if head == "ForQuestionAnswering" else inputs


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize(("family", "head"), KINDS)
def test_gradient_checkpointing(family: str, head: str, reentrant: bool) -> None:
    stock = make(family, head, attention_probs_dropout_prob=0.3, hidden_dropout_prob=0.2).train()
    apply_unpadding(stock)
    fast = copy.deepcopy(stock)
    checkpoint_blocks(fast, reentrant)
    inputs = labelled(family, head)
    for model in (stock, fast):
        torch.manual_seed(3)
        model(**inputs).loss.backward()
    for p, q in zip(stock.parameters(), fast.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad, rtol=1e-10, atol=1e-10)


def test_dropout_is_drawn_in_training_only() -> None:
    model, inputs = make(attention_probs_dropout_prob=0.5), batch("ForSequenceClassification")
    apply_unpadding(model)
    model.train()
    assert not torch.equal(model(**inputs).logits, model(**inputs).logits)
    model.eval()
    assert torch.equal(model(**inputs).logits, model(**inputs).logits)


def draws(model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> bool:
    with torch.no_grad():
        return not torch.equal(model(**inputs).logits, model(**inputs).logits)


def set_dropouts(model: torch.nn.Module, training: bool) -> None:
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.train(training)


@pytest.mark.parametrize("ways", [("unpadding",), ("subset",), ("unpadding", "subset")], ids="+".join)
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("family", FAMILIES)
def test_attention_dropout_has_the_flag_that_stock_code_reads(family: str, attention: str, ways: tuple) -> None:
    """Eager code of 4.53, MPNet and DeBERTa call a module: many set its flag alone, to draw in evaluation, or not to.

    All others read the attention's own.
    """
    if attention == "sdpa" and family in ("Electra", "MPNet", "DebertaV2"):
        pytest.skip("the first has no SDPA in 4.53, the others have none")
    config = make(family, attention_probs_dropout_prob=0.5).config
    cls = getattr(transformers, f"{family}ForSequenceClassification")
    stock, inputs = cls._from_config(config, attn_implementation=attention), batch("ForSequenceClassification")
    for parameter in stock.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    for module in stock.modules():  # what remains to draw is the attention
        if getattr(module, "out_drop", None) is not None:
            module.out_drop.p = 0.0
    fast = copy.deepcopy(stock)
    assert "unpadding" not in ways or apply_unpadding(fast) == 2
    assert "subset" not in ways or apply_last_layer_subset(fast) == int(family != "ModernBert")
    for training in (False, True):
        for model in (stock, fast):
            set_dropouts(model.train(training), not training)
        assert draws(fast, inputs) == draws(stock, inputs), f"a model with training={training}, its dropouts not"
        for model in (stock, fast):
            set_dropouts(model, training)
        assert draws(fast, inputs) == draws(stock, inputs) == training


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


@pytest.mark.parametrize("scope", ["model", "block"])
@pytest.mark.parametrize(("family", "head"), KINDS)
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("family", "head"), KINDS)
def test_as_near_to_float64_as_the_padded_model(family: str, head: str, dtype: torch.dtype, device: str) -> None:
    if (device, dtype) == ("cpu", torch.float16):
        pytest.skip("fp16 is for GPUs")
    exact, inputs, found = make(family, head), labelled(family, head), []
    with torch.no_grad():
        for parameter in exact.parameters():
            parameter.div_(3)  # in 16 bits larger logits are all rounding
    for kind in ("exact", "padded", "unpadded"):
        model = copy.deepcopy(exact) if kind == "exact" else copy.deepcopy(exact).float().to(device)
        if kind == "unpadded":
            assert apply_unpadding(model) == 2
        at = {name: x.to(next(model.parameters()).device) for name, x in inputs.items()}
        with torch.autocast(device, dtype, enabled=kind != "exact" and dtype != torch.float32):
            seen = visible(model(**at), head, at["attention_mask"])
        seen.double().sin().sum().backward()
        gradients = [p.grad.double().cpu().flatten() for p in model.parameters() if p.grad is not None]
        found.append((seen.detach().double().cpu(), torch.cat(gradients)))
    for expected, padded, unpadded in zip(*found, strict=True):
        allowed, error = (padded - expected).norm(), (unpadded - expected).norm()
        assert allowed < 0.1 * expected.norm(), "the padded model itself is off: this would see nothing"
        # As many roundings, in another order; 1e-6: where the padded model happens to be exact in float32.
        assert error <= 2 * allowed + 1e-6 * expected.norm()


@pytest.mark.parametrize("family", ["Bert", "Roberta"])
def test_answers_compete_with_no_padding_but_the_heads_bias(family: str) -> None:
    """transformers takes the softmax over padding, too: there the unpadded logits are the bias, whatever the ids."""
    stock = make(family, "ForQuestionAnswering")
    fast = copy.deepcopy(stock)
    apply_unpadding(fast)
    inputs = labelled(family, "ForQuestionAnswering")
    out, logits = fast(**inputs), stock(**inputs)
    mask, expected = inputs["attention_mask"].bool(), 0.0
    for kind, bias in zip(("start", "end"), stock.qa_outputs.bias, strict=True):
        scores = torch.where(mask, logits[f"{kind}_logits"], bias)
        expected = expected + torch.nn.functional.cross_entropy(scores, inputs[f"{kind}_positions"]) / 2
    torch.testing.assert_close(out.loss, expected, rtol=1e-10, atol=1e-10)
    out.loss.backward()
    expected.backward()
    for p, q in zip(stock.parameters(), fast.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad, rtol=1e-10, atol=1e-10)


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


@pytest.mark.parametrize(
    "extra, text",
    [
        ({"output_attentions": True}, "output_attentions"),
        ({"output_hidden_states": True}, "output_hidden_states"),
        (
            {"attention_mask": torch.ones(ROWS, LENGTH, LENGTH)},
            r"attention mask is not as the ids .*\(it is \(6, 16, 16\)\)",
        ),
    ],
)
@pytest.mark.parametrize("family", ["Bert", "DistilBert"])
def test_what_packing_cannot_give_takes_the_stock_forward(family: str, extra: dict, text: str, caplog) -> None:
    if family == "DistilBert" and "attention_mask" in extra:
        pytest.skip("the stock model takes no such mask either")
    head = "ForTokenClassification"
    cls = getattr(transformers, family + head)
    stock = cls._from_config(make(family).config, attn_implementation="eager").double()
    fast = copy.deepcopy(stock)
    apply_unpadding(fast)
    packed_encoder._SAID.clear()
    inputs = batch(head) | extra
    with caplog.at_level(logging.WARNING, "composer_speedups"):
        out = fast(**inputs)
        fast(**inputs)
    assert len(caplog.records) == 1, "said once"
    assert re.search(text, caplog.text)
    expected = stock(**inputs)
    for name in expected:
        a, b = out[name], expected[name]
        torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize("values", [(0, 1, 2), (0, 1, 0.5), (-1e4, 0, 0)], ids=["segments", "weights", "added"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("family", FAMILIES)
def test_masks_of_other_numbers_take_the_stock_forward(family: str, attention: str, values: tuple, caplog) -> None:
    if attention == "sdpa" and family in ("Electra", "MPNet", "DebertaV2"):
        pytest.skip("the first has no SDPA in 4.53, the others have none")
    cls = getattr(transformers, f"{family}ForSequenceClassification")
    stock = cls._from_config(make(family).config, attn_implementation=attention)
    for parameter in stock.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    fast, inputs = copy.deepcopy(stock), batch("ForSequenceClassification", FAMILIES[family])
    assert apply_unpadding(fast) == 2
    padding, real, odd = values
    mask = torch.where(inputs["attention_mask"].bool(), real, padding).to(torch.tensor(values).dtype)
    mask[0, 4:] = odd
    inputs["attention_mask"] = mask
    packed_encoder._SAID.clear()
    with caplog.at_level(logging.WARNING, "composer_speedups"):
        for model in (stock, fast, fast):
            try:
                out = model(**inputs).logits.detach()
            except RuntimeError as error:  # PyTorch's kernel takes no such mask
                out = str(error)
            if model is stock:
                expected = out
            assert out == expected if isinstance(out, str) else torch.equal(out, expected)
    assert caplog.text.count("an attention mask of other numbers than 0 and 1") == len(caplog.records) == 1


def test_says_it_once_whatever_the_shape(caplog) -> None:
    model, rows = make(), batch("Model")["input_ids"]
    apply_unpadding(model)
    packed_encoder._SAID.clear()
    with caplog.at_level(logging.WARNING, "composer_speedups"), torch.no_grad():
        for length in (5, 6, 7):
            model(rows[:, :length], torch.ones(ROWS, length, length))
    assert len(caplog.records) == len(packed_encoder._SAID) == 1 and "(6, 5, 5)" in caplog.text


def test_a_row_of_padding_only() -> None:
    inputs = batch("ForTokenClassification")
    inputs["attention_mask"][1] = 0
    inputs["labels"][1] = -100
    model = make(head="ForTokenClassification")
    apply_unpadding(model)
    out = model(**inputs)
    torch.testing.assert_close(out.logits[1], model.classifier.bias.expand(LENGTH, -1))  # of hidden states of zeros
    out.loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
    compare_to, fast = make(), None  # a classifier reads such a row: it stays the padded model's
    fast = copy.deepcopy(compare_to)
    apply_unpadding(fast)
    inputs["labels"] = torch.arange(ROWS) % 2
    assert torch.equal(fast(**inputs).logits, compare_to(**inputs).logits)


@pytest.mark.parametrize("family", ["Bert", "DistilBert"])
def test_masked_token_head_goes_with_it(family: str) -> None:
    stock, inputs = make(family, "ForMaskedLM").train(), batch("ForMaskedLM", kind="holes")
    inputs["labels"][:, ::2] = -100
    fast = copy.deepcopy(stock)
    apply_unpadding(fast)
    apply_masked_token_head(fast)
    for model in (stock, fast):
        model(**inputs).loss.backward()
    for p, q in zip(stock.parameters(), fast.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad, rtol=1e-10, atol=1e-10)


def test_pickles_copies_and_keeps_names(tmp_path) -> None:
    model, inputs = make(), batch("ForSequenceClassification")
    apply_unpadding(model)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(**inputs).logits, model(**inputs).logits)
        assert apply_unpadding(twin) == 0
    model.save_pretrained(tmp_path)
    stock = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path).double()
    torch.testing.assert_close(stock(**inputs).logits, model(**inputs).logits, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - {"ModernBert", "DebertaV2"}))  # their positions have no end
def test_more_tokens_than_positions_is_an_error_on_the_host(family: str) -> None:
    """On a GPU an index that is too large would end the process's work there."""
    model, ids = make(family), torch.randint(5, 64, (2, 50))
    apply_unpadding(model)
    with pytest.raises((RuntimeError, IndexError)) as found:
        model(ids, torch.ones_like(ids))
    if family in ("Bert", "DistilBert"):  # RoBERTa and its kind count positions, in the stock model, too
        assert not isinstance(found.value, IndexError)


@pytest.mark.parametrize("way", ["class", "instance"])  # a class of its own, or as Composer's Alibi does it
@pytest.mark.parametrize("part", ["encoder", "attention", "layer", "embeddings"])
@pytest.mark.parametrize("family", ["Bert", "DistilBert", "ModernBert", "DebertaV2"])
def test_a_forward_of_ones_own_is_left_alone(family: str, part: str, way: str) -> None:
    stock, head = make(family, "ForTokenClassification"), "ForTokenClassification"
    attention = dict.fromkeys(("Bert", "DebertaV2"), "encoder.layer.1.attention.self")
    attention["DistilBert"] = "transformer.layer.1.attention"
    module = stock.base_model
    if part == "attention":
        module = module.get_submodule(attention.get(family, "layers.1.attn"))
    elif part == "layer":
        module = layers_of(stack_of(module))[1]
    elif part == "embeddings":
        module = module.embeddings
    place = next(name for name, m in stock.named_modules() if m is module)
    if way == "class":
        module.__class__ = type(type(module).__name__, (Doubled, type(module)), {})
    fast = copy.deepcopy(stock)
    if way == "instance":
        there = fast.get_submodule(place)
        there.forward = functools.partial(there.forward)
    assert apply_unpadding(fast) == 0
    compare(stock, fast, head, batch(head))


@pytest.mark.parametrize("order", ["before", "after"])
def test_composers_alibi_is_refused_in_any_order(order: str, make_trainer) -> None:
    """It replaces the attention's forward on the object itself."""
    model = HuggingFaceModel(transformers.BertForTokenClassification(make(num_labels=2).config), use_logits=True)
    samples = [batch("ForTokenClassification")]
    samples = [{key: value[i % ROWS] for key, value in samples[0].items()} for i in range(8)]
    algorithms = [Alibi(40), Unpadding()]
    trainer = functools.partial(
        make_trainer, model=model, train_dataloader=torch.utils.data.DataLoader(samples, batch_size=4)
    )
    if order == "before":
        with pytest.warns(NoEffectWarning, match="BertSdpaSelfAttention has a forward of its own|SelfAttention has a"):
            trainer(algorithms)
    else:
        made = trainer(algorithms[::-1])
        with pytest.raises(ConflictError, match="Composer's Alibi"):
            made.fit()


@pytest.mark.parametrize("head", ["Model", "ForSequenceClassification"])
def test_a_pooler_of_ones_own_is_given_rows(head: str) -> None:
    """Its mean is over padding, too: zeros here; the stock model has there what its layers make of padding."""
    stock = make("Bert", head)
    stock.base_model.pooler = MeanPooler(32).double()
    fast = copy.deepcopy(stock)
    assert apply_unpadding(fast) == 2
    inputs = batch(head, kind="full")
    compare(stock, fast, head, inputs)
    inputs = batch(head)
    hidden = fast.base_model(inputs["input_ids"], inputs["attention_mask"])
    torch.testing.assert_close(hidden.pooler_output, fast.base_model.pooler(hidden.last_hidden_state))


def test_says_what_hooks_see(caplog) -> None:
    model = make()
    model.bert.encoder.layer[0].register_forward_hook(lambda *_: None)
    caplog.set_level(logging.WARNING, "composer_speedups")
    unpadding_of(model)
    assert "hooks on BertLayer see packed tokens" in caplog.text


def test_must_come_before_the_head_on_masked_tokens() -> None:
    model = make("Bert", "ForMaskedLM")
    assert apply_masked_token_head(model) == 1
    with pytest.raises(ValueError, match="before apply_masked_token_head"):
        apply_unpadding(model)
    assert not any(isinstance(module, packed_encoder.PackedAttention) for module in model.modules())


def test_decoders_are_left_alone() -> None:
    model = transformers.BertLMHeadModel(transformers.BertConfig(**make().config.to_diff_dict() | {"is_decoder": True}))
    assert apply_unpadding(model) == 0


class TestPacking:
    @pytest.mark.parametrize("kind", ["right", "left", "holes", "full"])
    def test_there_and_back(self, kind: str) -> None:
        mask = batch("Model", kind=kind)["attention_mask"]
        packing, x = Packing.of(mask, count_tokens(mask)), torch.randn(ROWS, LENGTH, 3)
        assert torch.equal(packing.pack(x), x[mask.bool()])
        assert torch.equal(packing.pad(packing.pack(x)), x * mask[..., None])
        assert packing.lengths.host.tolist() == mask.sum(1).tolist()

    @pytest.mark.parametrize("kind", ["right", "left", "holes", "full"])
    def test_filled_up(self, kind: str) -> None:
        mask = batch("Model", kind=kind)["attention_mask"]
        packing, x = Packing.of(mask, count_tokens(mask), 32), torch.randn(ROWS, LENGTH, 3)
        packed, real = packing.pack(x), int(mask.sum())
        assert len(packed) == packing.lengths.host.sum() == packing.lengths.cumulative[-1] == -(-real // 32) * 32
        assert torch.equal(packed[:real], x[mask.bool()])
        assert torch.equal(packing.pad(packed), x * mask[..., None])
        first = x[torch.arange(ROWS), mask.argmax(1)]
        assert torch.equal(packing.first(packed), first)
        filled = packing.lengths.host[ROWS:].tolist()
        assert sum(filled) == -real % 32 and max(filled) <= LENGTH, "attention costs the square of a sequence"
        assert len(filled) == -(-32 // LENGTH), "as many whatever is filled: a graph has them in it"
        assert packing.ones().host.tolist() == [1] * ROWS + [0] * len(filled)
        assert len(Packing.of(mask, count_tokens(mask), 10**6).lengths.host) == 2 * ROWS, "no more than can be filled"
        assert packing.steady().lengths.longest == LENGTH >= packing.lengths.longest

    @pytest.mark.parametrize("wrong", [0, -8, 1.5, True, "64"])
    def test_a_wrong_multiple_is_refused(self, wrong) -> None:
        with pytest.raises(
            ValueError if type(wrong) is int else TypeError, match="multiple_of must be a positive integer"
        ):
            Unpadding(multiple_of=wrong)

    def test_counts_travel_with_their_mask_only(self) -> None:
        inputs = {"attention_mask": torch.tensor([[1, 1, 0], [0, 1, 1], [0, 0, 0]])}
        assert count_on_host(inputs) and inputs[COUNTS].counts() == [2, -2, 0]
        inputs["attention_mask"] = mask = inputs["attention_mask"].to("meta")  # a device that cannot even be asked
        assert hand_over(inputs) and COUNTS not in inputs
        assert counts_of(mask) == [2, -2, 0]
        assert count_on_host(inputs) and inputs.pop(COUNTS).counts() == [2, -2, 0], "no need to count again"
        for other in (mask.clone(), mask[:, :], mask.mul_(1)):  # another one, a part, and the same changed in place
            with pytest.raises((NotImplementedError, RuntimeError)):
                counts_of(other)
        assert not hand_over(inputs) and not hand_over([1])

    @pytest.mark.parametrize("cut", [lambda mask: mask[:, :2], lambda mask: mask[:2]], ids=["length", "rows"])
    def test_counts_that_do_not_fit_their_mask_are_not_taken(self, cut) -> None:
        mask = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 0, 0]])
        inputs = {"attention_mask": cut(mask).to("meta"), COUNTS: OnHost.of(count_tokens(mask))}
        hand_over(inputs)
        with pytest.raises((NotImplementedError, RuntimeError)):
            counts_of(inputs["attention_mask"])

    def test_on_the_host_they_are_counted_again(self) -> None:
        mask = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 0, 0]])
        inputs = {"attention_mask": mask.flip(0), COUNTS: OnHost.of(count_tokens(mask))}
        hand_over(inputs)
        assert counts_of(inputs["attention_mask"]) == [1, 2, 3]

    def test_in_inference_mode_they_are_counted_when_asked_for(self) -> None:
        """There nothing tells whether a tensor was changed."""
        with torch.inference_mode():
            inputs = {"attention_mask": torch.tensor([[1, 1, 1], [1, 1, 0]])}
            assert count_on_host(inputs) and hand_over(inputs) and COUNTS not in inputs
            assert counts_of(inputs["attention_mask"]) == [3, 2]
            inputs["attention_mask"][0, 2] = 0
            assert counts_of(inputs["attention_mask"]) == [2, 2]
        assert counts_of(inputs["attention_mask"]) == [2, 2]

    @pytest.mark.parametrize("split", ["composer", "tensors", "rows", "named", "lists"])
    def test_they_come_through_whatever_splits_a_batch(self, split: str) -> None:
        """To a device that cannot even be asked. A batch that is made anew, without them, is counted there."""
        batch = {"attention_mask": torch.tensor([[1, 1, 1], [1, 0, 1], [0, 1, 1], [1, 0, 0]]), "labels": torch.ones(4)}
        assert count_on_host(batch)
        parts = SPLITS[split](batch, 2)
        assert len(parts) == 2
        for part, expected in zip(parts, ([3, Holed(2)], [-2, 1]), strict=True):
            sent = Device.batch_to_device(SimpleNamespace(tensor_to_device=lambda x: x.to("meta")), copy.deepcopy(part))
            assert hand_over(sent) == (split != "named") and COUNTS not in sent
            if split != "named":
                counts = counts_of(sent["attention_mask"])
                assert counts == expected and list(map(type, counts)) == list(map(type, expected))

    def test_what_kind_of_mask_it_was_travels_with_the_counts(self) -> None:
        mask = torch.tensor([[1, 1, 0], [1, 0, 1], [1, 2, 0], [0, 3, 1], [2, 0, 1]])
        kinds = [int, Holed, Valued, Valued, Valued]
        for given in (mask, mask.to(torch.uint8), mask.half()):
            counts = count_tokens(given)
            assert counts == OnHost.of(counts).counts() == [2, 2, 2, -2, 2]
            assert list(map(type, counts)) == list(map(type, OnHost.of(counts).counts())) == kinds
        assert set(map(type, count_tokens(mask != 0))) == {int, Holed}

    def test_strange_batches_are_left_alone(self) -> None:
        four = {"attention_mask": torch.ones(1, 1, 2, 2)}
        assert not count_on_host([1]) and not count_on_host(four) and list(four) == ["attention_mask"]


class TestTrainer:
    def test_counts_on_the_host(self, make_trainer, monkeypatch) -> None:
        algorithm, counted = Unpadding(), []

        def look(mask: torch.Tensor) -> list[int]:
            counted.append(packing._tied(mask) is not None)
            return counts_of(mask)

        monkeypatch.setattr(packed_encoder, "counts_of", look)
        make_trainer([algorithm], device_train_microbatch_size=4).fit()
        assert algorithm.evidence["changed"] == 2
        assert algorithm.evidence["kernel"] == f"per sequence: {served_by(torch.ones(1, 1, 8))}"
        assert algorithm.evidence["counted_on_host"]
        assert len(counted) == 8 and all(counted), "a count was made anew"

    @pytest.mark.parametrize("split", ["composer", "tensors", "rows", "named", "lists"])
    def test_a_split_of_ones_own(self, make_trainer, split: str, device: str) -> None:
        """As of a `DataSpec(split_batch=...)`: it is given what its dataloader yields, and on a GPU a tensor more."""
        algorithm, seen = Unpadding(), []
        options = {"device": "gpu" if device == "cuda" else "cpu", "device_train_microbatch_size": 4}
        trainer = make_trainer([algorithm], **options)

        def watched(batch: dict, size: int) -> list[dict]:
            seen.append(COUNTS in batch)
            return SPLITS[split](batch, size)

        trainer._train_data_spec.split_batch = watched
        trainer.fit()
        assert set(seen) == {device == "cuda"}
        assert algorithm.evidence.get("counted_on_host", False) == (device == "cpu" or split != "named")

    @pytest.mark.parametrize("around", [False, True])
    @pytest.mark.parametrize("family", ["Bert", "DebertaV2"])
    def test_tells_the_kernel_of_the_precision_that_runs(self, make_trainer, family: str, around: bool, monkeypatch):
        model, queries = make(family, num_attention_heads=2).float(), []
        serves = fused_attention.serves
        monkeypatch.setattr(fused_attention, "serves", lambda q, k, v: queries.append(q) or serves(q, k, v))
        columns = batch("ForSequenceClassification")
        samples = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
        rows = torch.utils.data.DataLoader(samples, batch_size=3)
        algorithms = [*([] if around else [MixedPrecision("bf16")]), Unpadding()]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        trainer = make_trainer(algorithms, model=HuggingFaceModel(model), optimizer=optimizer, train_dataloader=rows)
        with torch.autocast("cpu", torch.bfloat16, enabled=around):  # a user's own
            trainer.fit()
        asked, *real = queries
        assert {q.dtype for q in real} == {asked.dtype} == {torch.bfloat16}
        own = family == "Bert" or in_c(*real[:1] * 3)
        assert algorithms[-1].evidence["kernel"] == (f"per sequence: {served_by(real[0])}" if own else "padded sdpa")

    @pytest.mark.parametrize("at_padding", [-100, 0])
    def test_labels_at_padding_are_told_of_once(self, make_trainer, at_padding: int, caplog) -> None:
        columns = batch("ForTokenClassification")
        columns["labels"] = torch.where(columns["attention_mask"].bool(), columns["labels"], at_padding)
        samples = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
        rows = torch.utils.data.DataLoader(samples, batch_size=2)
        model = HuggingFaceModel(make(head="ForTokenClassification").float())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with caplog.at_level(logging.WARNING, "composer_speedups"):
            make_trainer([Unpadding()], model=model, optimizer=optimizer, train_dataloader=rows).fit()
        assert caplog.text.count("labels at padding are not all -100") == int(at_padding != -100)

    def test_others_may_change_the_batch(self, make_trainer) -> None:
        """Composer's algorithms that cut batches, and transforms that mask tokens, come before the count."""
        stock = make(head="ForTokenClassification").float()
        rows = [dict(zip(TOKENS, row, strict=True)) for row in zip(*TOKENS.values(), strict=True)]
        trained = []
        for speedups in ([], [Unpadding()]):
            model = copy.deepcopy(stock)
            loader = torch.utils.data.DataLoader(rows, batch_size=3)
            warmup = SeqLengthWarmup(duration=0.5, min_seq_length=8, max_seq_length=LENGTH, step_size=4)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            options = dict(model=HuggingFaceModel(model), optimizer=optimizer, train_dataloader=loader)
            trainer = make_trainer([*speedups, warmup], max_duration="4ep", **options)
            trainer._train_data_spec.batch_transforms = _without_last
            trainer.fit()
            trained.append(model)
        for p, q, before in zip(*(model.parameters() for model in (*trained, stock)), strict=True):
            moved = (p - before).detach().abs().max()  # float32 gradients, summed in another order, of 8 steps
            torch.testing.assert_close(q, p, rtol=0, atol=float(1e-3 * moved + 1e-6))

    def test_trains_as_the_padded_model(self, tiny_bert, make_trainer) -> None:
        twin = copy.deepcopy(tiny_bert)
        make_trainer([Unpadding()]).fit()
        make_trainer([], model=twin).fit()
        for p, q in zip(tiny_bert.parameters(), twin.parameters(), strict=True):
            # Adam's first steps have the size of the learning rate whatever the gradient's: where that is nothing but
            # rounding (keys' biases), 4 steps of 1e-3 may differ in sign.
            torch.testing.assert_close(p, q, rtol=1e-3, atol=8e-3)
        close = [(p - q).abs().max() < 1e-5 for p, q in zip(tiny_bert.parameters(), twin.parameters(), strict=True)]
        assert sum(close) >= 0.9 * len(close)

    def test_is_the_attention(self, make_trainer) -> None:
        with pytest.raises(ConflictError, match="attention"):
            make_trainer([Unpadding(), SDPAttention()])

    def test_warns_when_there_is_no_encoder(self, make_trainer) -> None:
        from composer.models import ComposerClassifier

        with pytest.warns(NoEffectWarning, match="no encoder of bert"):
            make_trainer([Unpadding()], model=ComposerClassifier(torch.nn.Linear(2, 2), num_classes=2))


TOKENS = batch("ForTokenClassification")
SPLITS = {
    "composer": _default_split_batch,
    "tensors": lambda batch, n: _rows({name: x.split(n) for name, x in batch.items()}),
    "rows": lambda batch, n: _rows({name: [x[i : i + n] for i in range(0, len(x), n)] for name, x in batch.items()}),
    "lists": lambda batch, n: _rows({name: _stacked(list(x), n) for name, x in batch.items()}),
    "named": lambda batch, n: _rows(
        {name: x.split(n) for name, x in batch.items() if not name.startswith("real_token")}
    ),
}


def _rows(parts: dict[str, list[torch.Tensor]]) -> list[dict[str, torch.Tensor]]:
    return [dict(zip(parts, part, strict=True)) for part in zip(*parts.values(), strict=True)]


def _stacked(rows: list[torch.Tensor], n: int) -> list[torch.Tensor]:
    return [torch.stack(rows[i : i + n]) for i in range(0, len(rows), n)]


def _without_last(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The batch with each row's last token but one masked."""
    mask = inputs["attention_mask"]
    ends = mask.sum(1, keepdim=True)
    mask = mask * ~((mask.cumsum(1) == ends) & (ends > 1))
    return inputs | {"attention_mask": mask, "labels": torch.where(mask.bool(), inputs["labels"], -100)}


def _restarts_nowhere(self, ids):  # positions in the packed row, not in the sequence
    return torch.arange(ids.numel()).clamp(max=39).view(ids.shape)


@pytest.mark.parametrize("family", ["Bert", "DistilBert"])
@pytest.mark.parametrize("fault", ["mask", "positions", "types", "qkv", "first"])
def test_a_planted_fault_is_found(fault: str, family: str, monkeypatch) -> None:
    if family == "DistilBert" and fault in ("types", "first"):
        pytest.skip("it has no token types, and no pooler that is given first tokens")
    head = "ForSequenceClassification"
    stock = make(family)
    fast = copy.deepcopy(stock)
    apply_unpadding(fast)
    types = {"token_type_ids": torch.arange(ROWS * LENGTH).view(ROWS, LENGTH) % 2}
    inputs = batch(head) | (types if family == "Bert" else {})
    compare(stock, fast, head, inputs)
    stock.zero_grad()
    fast.zero_grad()
    if fault == "mask":
        of = Packing.of
        monkeypatch.setattr(Packing, "of", staticmethod(lambda m, *_: of(torch.ones_like(m), [LENGTH] * len(m))))
    elif fault == "positions":
        surgery = packed_bert if family == "Bert" else packed_distilbert
        monkeypatch.setattr(surgery._Encoder, "positions_of", _restarts_nowhere)
    elif fault == "types":
        inputs_fast = inputs | {"token_type_ids": None}
        forward = fast.forward
        monkeypatch.setattr(fast, "forward", lambda **kw: forward(**inputs_fast))
    elif fault == "qkv":
        monkeypatch.setattr(packed_encoder, "joint_linear", lambda layers, x: joint_linear(layers, x)[::-1])
    else:
        monkeypatch.setattr(Packing, "first", lambda self, x: x[: self.rows])
    with pytest.raises(AssertionError, match="close"):
        compare(stock, fast, head, inputs)
