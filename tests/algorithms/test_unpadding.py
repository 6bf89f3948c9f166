"""`Unpadding` equals the padded model: outputs and all gradients, for all families, heads, masks and dtypes."""

from __future__ import annotations

import copy
import gc
import io
import pickle

import pytest
import torch
import transformers
from small import checkpoint_blocks, stock_checkpointing
from unpadded import (
    EAGER_ONLY,
    FAMILIES,
    HEADS,
    KINDS,
    LENGTH,
    ROWS,
    batch,
    compare,
    draws,
    labelled,
    make,
    set_dropouts,
    tiny_config,
    visible,
    with_random_weights,
)

from composer_speedups import apply_last_layer_subset, apply_masked_token_head, apply_unpadding
from composer_speedups.families import UNPADDABLE
from composer_speedups.joint_linear import joint_linear
from composer_speedups.kernels import disentangled, fused_attention
from composer_speedups.packed import bert as packed_bert
from composer_speedups.packed import distilbert as packed_distilbert
from composer_speedups.packed import encoder as packed_encoder
from composer_speedups.packed import mpnet as packed_mpnet
from composer_speedups.packed import packing
from composer_speedups.packed.by_family import BY_FAMILY
from composer_speedups.packed.packing import Packing, count_on_host, count_tokens, hand_over, tie_counts


def test_every_family_is_tested() -> None:
    """And none is packed, or has its last layer cut, as another is because nobody said how."""
    tested = {tiny_config(family).model_type for family in FAMILIES}
    there = {family for family in UNPADDABLE if family in transformers.CONFIG_MAPPING}
    assert tested == there, "FAMILIES in tests/unpadded.py has the others"
    assert BY_FAMILY.keys() == set(UNPADDABLE)


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


@pytest.mark.parametrize("kind", ["right", "left", "holes"])
@pytest.mark.parametrize("head", HEADS)
def test_alberts_layers_of_the_same_weights(head: str, kind: str) -> None:
    stock, inputs = make("Albert", head, num_hidden_layers=5, num_hidden_groups=2), batch(head, kind=kind)
    inputs["token_type_ids"] = torch.randint(0, 2, inputs["input_ids"].shape)
    fast = copy.deepcopy(stock)
    assert apply_unpadding(fast) == 2 and apply_last_layer_subset(fast) == 0
    compare(stock, fast, head, inputs)


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
    poolless = family in ("DistilBert", "ModernBert", "DebertaV2", "Electra", "EuroBert")
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


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("family", FAMILIES)
def test_padding_has_no_part_in_anything(family: str, head: str, checkpointed: bool) -> None:
    """Whatever tokens stand under padding, no number changes, and their embeddings get no gradient."""
    model, inputs = make(family, head), labelled(family, head)
    apply_unpadding(model)
    if checkpointed:
        checkpoint_blocks(model.train(), reentrant=False)
    real = inputs["attention_mask"].bool()
    ids = inputs["input_ids"].clamp(max=62)  # 63 is under padding alone
    found = []
    for padding in (FAMILIES[family], 63):
        out = model(**inputs | {"input_ids": torch.where(real, ids, padding)})
        model.zero_grad()
        (out.loss if "loss" in out else out[0].sin().sum()).backward()
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        found.append({"": visible(out, head, inputs["attention_mask"]), **gradients})
    assert found[0].keys() == found[1].keys() and len(found[0]) > 10
    assert not [name for name, value in found[0].items() if not torch.equal(value, found[1][name])]


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("family", ["Bert", "Roberta", "MPNet", "DebertaV2", "Albert"])  # their heads are packed, too
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


@pytest.mark.parametrize("ways", [("unpadding",), ("subset",), ("unpadding", "subset")], ids="+".join)
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("family", FAMILIES)
def test_attention_dropout_has_the_flag_that_stock_code_reads(family: str, attention: str, ways: tuple) -> None:
    """Eager code of 4.53, MPNet and DeBERTa call a module: many set its flag alone, to draw in evaluation, or not to.

    All others read the attention's own.
    """
    if attention == "sdpa" and family in EAGER_ONLY:
        pytest.skip("transformers has no SDPA for it")
    config = make(family, attention_probs_dropout_prob=0.5).config
    cls = getattr(transformers, f"{family}ForSequenceClassification")
    stock = with_random_weights(cls._from_config(config, attn_implementation=attention))
    inputs = batch("ForSequenceClassification")
    for module in stock.modules():  # what remains to draw is the attention
        if getattr(module, "out_drop", None) is not None:
            module.out_drop.p = 0.0
    fast = copy.deepcopy(stock)
    assert "unpadding" not in ways or apply_unpadding(fast) == 2
    assert "subset" not in ways or apply_last_layer_subset(fast) == int(family not in ("ModernBert", "Albert"))
    for training in (False, True):
        for model in (stock, fast):
            set_dropouts(model.train(training), not training)
        assert draws(fast, inputs) == draws(stock, inputs), f"a model with training={training}, its dropouts not"
        for model in (stock, fast):
            set_dropouts(model, training)
        assert draws(fast, inputs) == draws(stock, inputs) == training


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


ENDLESS = {"ModernBert", "DebertaV2", "Esm", "NomicBert", "JinaEmbeddingsV3", "Gte", "EuroBert"}  # their positions


@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - ENDLESS))
def test_more_tokens_than_positions_is_an_error_on_the_host(family: str) -> None:
    """On a GPU an index that is too large would end the process's work there."""
    model, ids = make(family), torch.randint(5, 64, (2, 50))
    apply_unpadding(model)
    with pytest.raises((RuntimeError, IndexError)) as found:
        model(ids, torch.ones_like(ids))
    if family in ("Bert", "DistilBert"):  # RoBERTa and its kind count positions, in the stock model, too
        assert not isinstance(found.value, IndexError)


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
        encoder = packed_bert.PackedBert if family == "Bert" else packed_distilbert._Encoder
        monkeypatch.setattr(encoder, "positions_of", _restarts_nowhere)
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


@pytest.mark.filterwarnings("ignore:.torch.jit.script")  # with which torch.func's own derivatives are made
def test_transforms_of_torch_func_take_the_stock_forward_pass() -> None:
    stock, data = make(attn_implementation="eager").train(), batch("ForSequenceClassification")  # SDPA has no jvp
    model = copy.deepcopy(stock)
    apply_unpadding(model)
    parameters = {name: p.detach() for name, p in stock.named_parameters()}

    def loss_of(of: torch.nn.Module):
        return lambda parameters: torch.func.functional_call(of, parameters, kwargs=data).loss

    gradients = torch.func.grad(loss_of(stock))(parameters)
    torch.testing.assert_close(torch.func.grad(loss_of(model))(parameters), gradients)
    products = [torch.func.jvp(loss_of(of), (parameters,), (parameters,)) for of in (model, stock)]
    torch.testing.assert_close(*products)
    model(**data).loss.backward()
    torch.testing.assert_close(model.classifier.weight.grad, gradients["classifier.weight"])


@pytest.mark.parametrize("family", [f for f in FAMILIES if f != "Esm"])
def test_neftune_adds_as_much_noise_as_without(family: str) -> None:
    """It divides by the root of the numbers of a row, which packed are those of the batch. Here all noise is 1."""

    def noise(module: torch.nn.Module, given: tuple, out: torch.Tensor) -> torch.Tensor:
        return out + module.neftune_noise_alpha / (out.shape[-2] * out.shape[-1]) ** 0.5

    stock = make(family).train()
    words, data = stock.get_input_embeddings(), labelled(family, "ForSequenceClassification")
    words.register_forward_hook(noise)
    words.neftune_noise_alpha = 50.0
    model = copy.deepcopy(stock)
    apply_unpadding(model)
    torch.testing.assert_close(model(**data).logits, stock(**data).logits)
    model.get_input_embeddings().neftune_noise_alpha = 0.0  # switched off: packed again, as a hook sees
    seen = []
    model.get_input_embeddings().register_forward_hook(lambda module, given, out: seen.append(given[0].numel()))
    model(**data)
    assert len(seen) == 1 and seen[0] < data["input_ids"].numel()
