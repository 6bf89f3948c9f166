"""Where `Unpadding` keeps the stock forward, refuses, or says what is different: nothing is silently wrong."""

from __future__ import annotations

import copy
import functools
import logging
import re
from types import SimpleNamespace

import pytest
import torch
import transformers
from composer.algorithms import Alibi
from composer.algorithms.warnings import NoEffectWarning
from composer.functional import apply_alibi
from composer.models import HuggingFaceModel
from small import Doubled
from unpadded import EAGER_ONLY, FAMILIES, LENGTH, ROWS, batch, compare, make, with_random_weights

from composer_speedups import SDPAttention, Unpadding, apply_masked_token_head, apply_unpadding
from composer_speedups.errors import ConflictError
from composer_speedups.families import layers_of, stack_of, unwrapped
from composer_speedups.packed import encoder as packed_encoder
from composer_speedups.packed.unpaddable import why_not


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


def test_a_deberta_with_a_convolution_stays_padded() -> None:
    model = make("DebertaV2", conv_kernel_size=3)
    assert apply_unpadding(model) == 0
    assert "conv_kernel_size" in why_not(model.deberta, model)


def test_an_albert_with_several_layers_in_a_group_stays_padded() -> None:
    model = make("Albert", inner_group_num=2)
    assert apply_unpadding(model) == 0
    assert "inner_group_num" in why_not(model.albert, model)


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


class Neighbours(torch.nn.Module):
    """A convolution over tokens, as a feed-forward block may have it."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = torch.nn.Conv1d(32, 48, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.convolution(x.transpose(-1, -2)).transpose(-1, -2).relu()


class Gate(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * x.mean(-2, keepdim=True).sigmoid()


class Swish(torch.nn.Module):
    per_token = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * x.sigmoid()


class Scaled(torch.nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 2


OWN = {
    "convolution": (lambda bert: setattr(bert.encoder.layer[1], "intermediate", Neighbours().double()), "Neighbours"),
    "gate": (lambda bert: setattr(bert.encoder.layer[0].output, "dropout", Gate()), "Gate"),
    "in the embeddings": (lambda bert: setattr(bert.embeddings, "dropout", Gate()), "Gate"),
    "per token": (lambda bert: setattr(bert.encoder.layer[0].intermediate, "intermediate_act_fn", Swish()), None),
    "linear": (lambda bert: setattr(bert.encoder.layer[0].output, "dense", Scaled(48, 32).double()), None),
}


@pytest.mark.parametrize("kind", ["right", "full"])
@pytest.mark.parametrize("name", OWN)
def test_a_module_of_ones_own_in_a_layer_may_look_at_other_tokens(name: str, kind: str) -> None:
    (change, foreign), stock = OWN[name], make()
    change(stock.bert)
    fast = copy.deepcopy(stock)
    assert apply_unpadding(fast) == (0 if foreign else 2)
    assert (why_not(stock.bert, stock) or "").startswith(foreign or "") and (foreign or why_not(stock.bert) is None)
    compare(stock, fast, "ForSequenceClassification", batch("ForSequenceClassification", kind=kind))


def test_one_that_comes_later_is_refused_when_training_starts(make_trainer) -> None:
    model = make().float()
    trainer = make_trainer([Unpadding()], model=HuggingFaceModel(model, metrics=[], use_logits=True))
    model.bert.encoder.layer[0].output.dropout = Gate()
    with pytest.raises(ConflictError, match=r"Gate came into a layer after Unpadding .* per_token = True"):
        trainer.fit()


@pytest.mark.parametrize("values", [(0, 1, 2), (0, 1, 0.5), (-1e4, 0, 0)], ids=["segments", "weights", "added"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("family", FAMILIES)
def test_masks_of_other_numbers_take_the_stock_forward(family: str, attention: str, values: tuple, caplog) -> None:
    if attention == "sdpa" and family in EAGER_ONLY:
        pytest.skip("transformers has no SDPA for it")
    cls = getattr(transformers, f"{family}ForSequenceClassification")
    stock = with_random_weights(cls._from_config(make(family).config, attn_implementation=attention))
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
            if isinstance(expected, str):
                assert out == expected
            else:  # ESM's embeddings divide by the sum of the mask
                torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)
    assert caplog.text.count("an attention mask of other numbers than 0 and 1") == len(caplog.records) == 1


def test_says_it_once_whatever_the_shape(caplog) -> None:
    model, rows = make(), batch("Model")["input_ids"]
    apply_unpadding(model)
    packed_encoder._SAID.clear()
    with caplog.at_level(logging.WARNING, "composer_speedups"), torch.no_grad():
        for length in (5, 6, 7):
            model(rows[:, :length], torch.ones(ROWS, length, length))
    assert len(caplog.records) == len(packed_encoder._SAID) == 1 and "(6, 5, 5)" in caplog.text


@pytest.mark.parametrize("way", ["class", "instance"])  # a class of its own, or as Composer's Alibi does it
@pytest.mark.parametrize("part", ["encoder", "attention", "layer", "embeddings"])
@pytest.mark.parametrize("family", ["Bert", "DistilBert", "ModernBert", "DebertaV2", "Albert"])
def test_a_forward_of_ones_own_is_left_alone(family: str, part: str, way: str) -> None:
    stock, head = make(family, "ForTokenClassification"), "ForTokenClassification"
    attention = dict.fromkeys(("Bert", "DebertaV2"), "encoder.layer.1.attention.self")
    attention["DistilBert"] = "transformer.layer.1.attention"
    attention["Albert"] = "encoder.albert_layer_groups.1.albert_layers.0.attention"
    module = stock.base_model
    if part == "attention":
        module = module.get_submodule(attention.get(family, "layers.1.attn"))
    elif part == "layer":
        module = unwrapped(layers_of(stack_of(module))[1])  # of ALBERT's groups the layer
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


@pytest.mark.parametrize("order", ["before", "after", "by hand"])
def test_composers_alibi_keeps_the_padding(order: str, make_trainer) -> None:
    """It replaces the attention's forward on the object itself."""
    model = HuggingFaceModel(transformers.BertForTokenClassification(make(num_labels=2).config), use_logits=True)
    samples = [batch("ForTokenClassification")]
    samples = [{key: value[i % ROWS] for key, value in samples[0].items()} for i in range(8)]
    algorithms = [Alibi(40), Unpadding()][:: -1 if order == "after" else 1]
    trainer = functools.partial(
        make_trainer, model=model, train_dataloader=torch.utils.data.DataLoader(samples, batch_size=4)
    )
    if order == "by hand":
        made = trainer([Unpadding()])
        apply_alibi(made.state.model, max_sequence_length=40)
        with pytest.raises(ConflictError, match="Composer's Alibi"):
            made.fit()
    else:
        with pytest.warns(NoEffectWarning, match="BertSdpaSelfAttention has a forward of its own|SelfAttention has a"):
            trainer(algorithms)


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


@pytest.mark.parametrize(
    "order", [("ForSequenceClassification", "ForMaskedLM"), ("ForMaskedLM", "ForSequenceClassification")]
)
@pytest.mark.parametrize("family", ["Roberta", "DistilBert", "ModernBert"])
def test_the_first_position_is_kept_where_one_of_two_heads_reads_it(family: str, order: tuple) -> None:
    """Two tasks with one encoder: what the head listed last may spare, the other one may need."""
    heads = {head: make(family, head).eval() for head in order}
    setattr(heads[order[1]], heads[order[1]].base_model_prefix, heads[order[0]].base_model)
    inputs = batch("ForSequenceClassification", FAMILIES[family], "left")
    stock = heads["ForSequenceClassification"](**inputs).logits
    assert apply_unpadding(torch.nn.ModuleList(heads[head] for head in order)) > 0
    torch.testing.assert_close(heads["ForSequenceClassification"](**inputs).logits, stock, rtol=0, atol=1e-10)


def test_each_head_of_an_encoder_is_asked_whether_it_reads_padding() -> None:
    choosing = make("Electra", "ForMultipleChoice", summary_type="mean")
    other = make("Electra", "ForTokenClassification")
    other.electra = choosing.electra
    assert apply_unpadding(torch.nn.ModuleList([choosing, other])) == 0
    assert apply_unpadding(torch.nn.ModuleList([other, choosing])) == 0
    assert apply_unpadding(other) > 0


def test_must_come_before_the_head_on_masked_tokens() -> None:
    model = make("Bert", "ForMaskedLM")
    assert apply_masked_token_head(model) == 1
    with pytest.raises(ValueError, match="before apply_masked_token_head"):
        apply_unpadding(model)
    assert not any(isinstance(module, packed_encoder.PackedAttention) for module in model.modules())


def test_decoders_are_left_alone() -> None:
    model = transformers.BertLMHeadModel(transformers.BertConfig(**make().config.to_diff_dict() | {"is_decoder": True}))
    assert apply_unpadding(model) == 0


def test_is_the_attention(make_trainer) -> None:
    with pytest.raises(ConflictError, match="attention"):
        make_trainer([Unpadding(), SDPAttention()])


def test_warns_when_there_is_no_encoder(make_trainer) -> None:
    from composer.models import ComposerClassifier

    with pytest.warns(NoEffectWarning, match="no encoder of bert"):
        make_trainer([Unpadding()], model=ComposerClassifier(torch.nn.Linear(2, 2), num_classes=2))


@pytest.mark.parametrize("wrong", [0, -8, 1.5, True, "64"])
def test_a_wrong_multiple_is_refused(wrong) -> None:
    with pytest.raises(ValueError if type(wrong) is int else TypeError, match="multiple_of must be a positive integer"):
        Unpadding(multiple_of=wrong)
