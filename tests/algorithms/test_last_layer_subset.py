from __future__ import annotations

import copy
import inspect
import sys
import threading
from collections.abc import Callable

import pytest
import torch
import transformers
from composer.algorithms.warnings import NoEffectWarning
from small import Doubled, checkpoint_blocks, stock_checkpointing
from unpadded import EAGER_ONLY, FAMILIES, tiny_config, with_random_weights

from composer_speedups import (
    LastLayerSubset,
    Unpadding,
    apply_fused_dropout_add_norm,
    apply_gradient_checkpointing,
    apply_last_layer_subset,
    apply_unpadding,
)
from composer_speedups.families import attention_of, layers_of, stack_of
from composer_speedups.joint_linear import joint_linear, part_of_linear
from composer_speedups.packed.by_family import BY_FAMILY
from composer_speedups.packed.first import FirstOnly

_ALIKE = (
    "Roberta",
    "Electra",
    "Data2VecText",
    "Ernie",
    "JinaEmbeddingsV3",
    "Gte",
)  # as another family, but for what their heads are
MODELS = [family for family in FAMILIES if family not in ("XLMRoberta", "Camembert", "Albert")]
EACH_KIND = pytest.mark.parametrize("family", [family for family in MODELS if family not in _ALIKE])
LAST_LINEAR = {
    "DistilBert": "ffn.lin2",
    "ModernBert": "mlp.Wo",
    "NomicBert": "mlp.down_proj",
    "EuroBert": "mlp.down_proj",
}


def make(family: str = "Bert", attention: str = "sdpa", **changes: object) -> torch.nn.Module:
    own: dict[str, object] = {"num_labels": 3}
    if family in EAGER_ONLY:
        attention = "eager"
    if family == "ModernBert":
        own |= {"num_hidden_layers": 3, "classifier_pooling": "cls"}  # of which the second sees a window
        if attention == "eager":  # in float64 the stock one is NaN for tokens that see nothing but padding
            own["local_attention"] = 30
    config = tiny_config(family, **(own | changes))
    cls = getattr(transformers, f"{family}ForSequenceClassification")
    return with_random_weights(cls._from_config(config, attn_implementation=attention).double())


def batch(kind: str = "right", padding_id: int = 0) -> dict[str, torch.Tensor]:
    mask = (torch.arange(16) < torch.tensor([16, 3, 9, 1, 12])[:, None]).long()
    if kind == "holes":
        mask[0, 3:5] = 0
    ids = torch.where(mask.bool(), torch.randint(5, 64, mask.shape), padding_id)
    if kind == "left":
        ids, mask = ids.flip(1), mask.flip(1)
    out = {"input_ids": ids, "attention_mask": mask, "labels": torch.arange(5) % 3}
    if kind == "none":
        del out["attention_mask"]
    return out


def error(model: torch.nn.Module) -> dict[str, float]:
    """float64: sums in another order; but some eager attention has its softmax in float32 whatever comes."""
    in_float32 = model.config.model_type in ("modernbert", "eurobert") and model.config._attn_implementation == "eager"
    return dict.fromkeys(("rtol", "atol"), 1e-4 if in_float32 else 1e-10)


def compare(stock: torch.nn.Module, fast: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> None:
    expected, out = stock(**inputs), fast(**inputs)
    close = error(stock)
    torch.testing.assert_close(out.logits, expected.logits, **close)
    expected.loss.backward()
    out.loss.backward()
    for p, q in zip(stock.parameters(), fast.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad, **close)


@pytest.mark.parametrize("kind", ["right", "holes", "left", "none"])
@pytest.mark.parametrize("order", ["alone", "before", "after"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("family", MODELS)
def test_equals_the_whole_layer(family: str, attention: str, order: str, kind: str) -> None:
    stock = make(family, attention)
    fast = copy.deepcopy(stock)
    if order == "after":
        apply_unpadding(fast)
    assert apply_last_layer_subset(fast) == 1 and apply_last_layer_subset(fast) == 0
    if order == "before":
        apply_unpadding(fast)
    assert list(fast.state_dict()) == list(stock.state_dict())
    compare(stock, fast, batch(kind, FAMILIES[family]))


@EACH_KIND
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("unpadded", [False, True])
def test_last_feed_forward_sees_one_token_a_row(unpadded: bool, attention: str, family: str) -> None:
    model, seen = make(family, attention), []
    apply_last_layer_subset(model)
    if unpadded:
        apply_unpadding(model, multiple_of=1)
    for layer in layers_of(stack_of(model.base_model)):
        last = layer.get_submodule(LAST_LINEAR.get(family, "output.dense"))
        last.register_forward_hook(lambda _, args, __: seen.append(args[0].shape[:-1].numel()))
    inputs = batch()
    model(**inputs)
    whole = [int(inputs["attention_mask"].sum()) if unpadded else 5 * 16] * (len(seen) - 1)
    assert len(seen) == model.config.num_hidden_layers and seen == [*whole, 5]


@pytest.mark.parametrize("unpadded", [False, True])
def test_a_row_of_padding_only(unpadded: bool) -> None:
    """As of a question with fewer choices: its scores are all the least number, and its gradients those of a mean."""
    stock, inputs = make(attention="eager"), batch()
    inputs["attention_mask"][3] = 0
    fast = copy.deepcopy(stock)
    apply_last_layer_subset(fast)
    if unpadded:
        apply_unpadding(fast)
    compare(stock, fast, inputs)


@EACH_KIND
def test_a_new_model_of_its_class_computes_all_tokens(family: str) -> None:
    """Its layers are stock ones, though the classifier's class came with the surgery."""
    stock, inputs = make(family), batch()
    changed = copy.deepcopy(stock)
    apply_last_layer_subset(changed)
    new = type(changed)(stock.config).double()
    new.load_state_dict(stock.state_dict())
    compare(stock, new, inputs)
    stock.zero_grad()
    del layers_of(stack_of(stock.base_model))[-1], layers_of(stack_of(changed.base_model))[-1]
    changed.zero_grad()
    compare(stock, changed, inputs)


@EACH_KIND
@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing(family: str, reentrant: bool) -> None:
    stock = make(family).train()
    fast = copy.deepcopy(stock)
    apply_last_layer_subset(fast)
    apply_unpadding(fast)
    checkpoint_blocks(fast, reentrant)
    compare(stock, fast, batch())


@pytest.mark.parametrize("unpadded", [False, True])
@pytest.mark.parametrize(
    ("family", "place"),
    [
        ("Bert", "attention"),
        ("Bert", "attention.self"),
        ("DistilBert", "attention"),
        ("ModernBert", "attn"),
        *((family, "self_attn") for family in ("NomicBert", "EuroBert") if family in FAMILIES),
    ],
)
def test_a_hook_on_its_attention_sees_all_tokens(family: str, place: str, unpadded: bool) -> None:
    stock, seen = make(family), []
    fast = copy.deepcopy(stock)
    apply_last_layer_subset(fast)
    if unpadded:
        apply_unpadding(fast, multiple_of=1)
    module = layers_of(stack_of(fast.base_model))[-1].get_submodule(place)
    handle = module.register_forward_hook(lambda *given: seen.append(given[2][0].shape[:-1].numel()))
    inputs = batch()
    compare(stock, fast, inputs)
    assert seen == [int(inputs["attention_mask"].sum()) if unpadded else 5 * 16]
    handle.remove()
    compare(stock, fast, inputs)
    assert len(seen) == 1


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_hook_for_one_step_of_several_with_checkpointing(reentrant: bool) -> None:
    stock = make().train()
    fast = copy.deepcopy(stock)
    apply_last_layer_subset(fast)
    stock_checkpointing(fast, reentrant)
    inputs, attention = batch(), fast.bert.encoder.layer[-1].attention
    compare(stock, fast, inputs)
    handle = attention.register_forward_hook(lambda *_: None)
    compare(stock, fast, inputs)
    handle.remove()
    compare(stock, fast, inputs)


@EACH_KIND
@pytest.mark.parametrize("unpadded", [False, True])
def test_hidden_states_and_attentions_are_whole(unpadded: bool, family: str) -> None:
    stock = make(family, attention="eager")
    fast = copy.deepcopy(stock)
    apply_last_layer_subset(fast)
    if unpadded:
        apply_unpadding(fast)
    inputs = batch()
    asked = inputs | {"output_hidden_states": True, "output_attentions": True}
    for name, value in stock(**asked).items():
        torch.testing.assert_close(fast(**asked)[name], value, **error(stock))
    fast.config.output_hidden_states = stock.config.output_hidden_states = True
    torch.testing.assert_close(fast(**inputs).hidden_states, stock(**inputs).hidden_states, **error(stock))
    fast.config.output_hidden_states = stock.config.output_hidden_states = False
    compare(stock, fast, inputs)  # and afterwards cut again


@EACH_KIND
def test_dropout_is_drawn_in_training_only(family: str) -> None:
    model, inputs = make(family, attention_probs_dropout_prob=0.5), batch()
    apply_last_layer_subset(model)
    model.train()
    assert not torch.equal(model(**inputs).logits, model(**inputs).logits)
    model.eval()
    assert torch.equal(model(**inputs).logits, model(**inputs).logits)


@EACH_KIND
@pytest.mark.parametrize("head", ["ForMaskedLM", "ForTokenClassification", "ForQuestionAnswering", "Model"])
def test_heads_that_read_every_token_are_left_alone(head: str, family: str) -> None:
    config = make(family).config
    config.num_labels = 2
    if not hasattr(transformers, f"{family}{head}"):
        pytest.skip(f"transformers has no {family}{head}")
    assert apply_last_layer_subset(getattr(transformers, f"{family}{head}")(config)) == 0


class MeanPoolForSequenceClassification(transformers.BertForSequenceClassification):
    def forward(self, input_ids=None, attention_mask=None, labels=None, **kwargs):
        hidden = self.bert(input_ids, attention_mask, **kwargs).last_hidden_state
        return self.classifier((hidden * attention_mask[..., None]).sum(1) / attention_mask.sum(1, keepdim=True))


class LargerForSequenceClassification(transformers.BertForSequenceClassification):
    def __init__(self, config) -> None:
        super().__init__(config)
        self.classifier = torch.nn.Sequential(torch.nn.Linear(config.hidden_size, 9), torch.nn.Linear(9, 3))


class MeanHead(torch.nn.Module):
    """A pooler or a head of one's own: it reads every token, whatever the model's class says."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.dense = torch.nn.Linear(32, outputs)

    def forward(self, hidden: torch.Tensor, **_: object) -> torch.Tensor:
        return self.dense(hidden.mean(1))


@pytest.mark.parametrize("family", ["Bert", "Roberta", "Electra", "MPNet", "DebertaV2"])
@pytest.mark.parametrize("when", ["before", "after", "instance"])
def test_a_head_of_ones_own_reads_every_token(family: str, when: str) -> None:
    stock = make(family)
    outputs = 32 if family in ("Bert", "DebertaV2") else 3
    owner, name = (stock.bert, "pooler") if family == "Bert" else (stock, "classifier")
    owner, name = (stock, "pooler") if family == "DebertaV2" else (owner, name)
    fast = copy.deepcopy(stock)
    other = fast.bert if owner is not stock else fast
    if when == "after":
        assert apply_last_layer_subset(fast) == 1
    for place in (owner, other):
        torch.manual_seed(5)
        own = MeanHead(outputs).double()
        if when == "instance":
            getattr(place, name).forward = own.forward
        else:
            setattr(place, name, own)
    assert apply_last_layer_subset(fast) == 0
    inputs = batch(padding_id=FAMILIES[family])
    torch.testing.assert_close(fast(**inputs).logits, stock(**inputs).logits, rtol=1e-9, atol=1e-9)


def test_a_forward_of_ones_own_is_left_alone() -> None:
    config = make().config
    assert apply_last_layer_subset(MeanPoolForSequenceClassification(config)) == 0
    larger = LargerForSequenceClassification(config).double()
    stock = copy.deepcopy(larger)
    assert apply_last_layer_subset(larger) == 1 and apply_last_layer_subset(larger) == 0
    compare(stock, larger, batch())


@pytest.mark.parametrize("kind", ["first", "mean", "last"])
def test_electra_may_sum_its_choices_up_otherwise(kind: str) -> None:
    config = make("Electra").config
    config.summary_type = kind
    assert apply_last_layer_subset(transformers.ElectraForMultipleChoice(config)) == (kind == "first")


@pytest.mark.skipif("EuroBert" not in FAMILIES, reason="transformers has no EuroBERT")
@pytest.mark.parametrize("pooling", ["mean", "late"])
@pytest.mark.parametrize("kind", ["right", "left", "none"])
def test_eurobert_may_read_more(pooling: str, kind: str) -> None:
    """Without padding it reads as much, wherever the padding was."""
    stock, inputs = make("EuroBert", classifier_pooling=pooling), batch(kind)
    fast = copy.deepcopy(stock)
    assert apply_last_layer_subset(fast) == 0 and apply_unpadding(fast) == 2
    compare(stock, fast, inputs)


@pytest.mark.parametrize("changes", [{"classifier_pooling": "mean"}, {"num_hidden_layers": 2}], ids=str)
def test_modernbert_may_read_more_or_see_a_window(changes: dict) -> None:
    assert apply_last_layer_subset(make("ModernBert", **changes)) == 0


def test_what_the_head_reads_may_be_changed_later() -> None:
    stock, inputs = make("ModernBert"), batch()
    fast = copy.deepcopy(stock)
    apply_last_layer_subset(fast)
    for model in (stock, fast):
        model.config.classifier_pooling = "mean"
    compare(stock, fast, inputs)


@EACH_KIND
@pytest.mark.parametrize("place", ["stack", "layer", "attention"])
def test_a_layer_of_ones_own_is_left_alone(place: str, family: str) -> None:
    model = make(family)
    stack = stack_of(model.base_model)
    layer = layers_of(stack)[-1]
    module = {"stack": stack, "layer": layer, "attention": attention_of(layer)}[place]
    module.__class__ = type(type(module).__name__, (Doubled, type(module)), {})
    assert apply_last_layer_subset(model) == 0


class Gate(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * x.mean(-2, keepdim=True).sigmoid()


@pytest.mark.parametrize("layer", [0, 1])
def test_a_module_of_ones_own_in_the_last_layer_may_look_at_all_tokens(layer: int) -> None:
    stock = make()
    stock.bert.encoder.layer[layer].output.dropout = Gate()
    fast = copy.deepcopy(stock)
    assert apply_last_layer_subset(fast) == (layer == 0)
    compare(stock, fast, batch())


@pytest.mark.parametrize("unpadded", [False, True])
def test_a_hook_on_what_would_be_taken_apart_or_another_layer_in_its_place(unpadded: bool) -> None:
    """Queries and keys are two parts of one weight, of which the first is multiplied with few tokens."""
    stock, inputs = make("ModernBert"), batch()
    fast = copy.deepcopy(stock)
    apply_last_layer_subset(fast)
    if unpadded:
        apply_unpadding(fast, multiple_of=1)
    seen, last = [], fast.model.layers[-1].attn
    handle = last.Wqkv.register_forward_hook(lambda *given: seen.append(given[2].shape[:-1].numel()))
    compare(stock, fast, inputs)
    assert seen == [int(inputs["attention_mask"].sum()) if unpadded else 5 * 16]
    handle.remove()
    for model in (stock, fast):
        model.zero_grad()
        last = model.model.layers[-1].attn
        last.Wqkv = torch.nn.Sequential(last.Wqkv, torch.nn.Tanh())
    compare(stock, fast, inputs)


@EACH_KIND
@pytest.mark.parametrize("unpadded", [False, True])
def test_the_encoder_by_itself_computes_all_tokens(unpadded: bool, family: str) -> None:
    stock, inputs = make(family), batch()
    fast = copy.deepcopy(stock)
    apply_last_layer_subset(fast)
    if unpadded:
        apply_unpadding(fast)
    labels = inputs.pop("labels")
    mask = inputs["attention_mask"][..., None]
    for _ in range(2):  # after the classifier has run, too
        expected, out = (model.base_model(**inputs).last_hidden_state for model in (stock, fast))
        torch.testing.assert_close(out * mask, expected * mask, rtol=1e-10, atol=1e-10)
        fast(**inputs, labels=labels)


@EACH_KIND
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("order", ["alone", "before", "after"])
def test_the_encoder_may_be_called_while_the_classifier_waits_for_its_backward(
    order: str, reentrant: bool, family: str
) -> None:
    if (order, reentrant, family) == ("alone", True, "DebertaV2"):
        pytest.skip("the stock model cannot: its layers share what it makes of distances, and are given it by name")
    stock, inputs = make(family).train(), batch()
    fast = copy.deepcopy(stock)
    if order == "after":
        apply_unpadding(fast)
    apply_last_layer_subset(fast)
    if order == "before":
        apply_unpadding(fast)
    checkpoint_blocks(fast, reentrant)
    expected, loss = stock(**inputs).loss, fast(**inputs).loss
    fast.eval()
    with torch.no_grad():
        looked = {name: value for name, value in inputs.items() if name != "labels"}
        assert fast.base_model(**looked).last_hidden_state.shape[1] == 16
        if family == "Bert":
            assert fast.bert.encoder(torch.zeros(2, 5, 32).double())[0].shape[1] == 5
    fast.train()
    expected.backward()
    loss.backward()
    for p, q in zip(stock.parameters(), fast.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad, rtol=1e-10, atol=1e-10)


@EACH_KIND
@pytest.mark.parametrize("reentrant", [True, False])
def test_the_encoder_trained_by_itself_computes_all_tokens_again_in_backward(reentrant: bool, family: str) -> None:
    if (reentrant, family) == (True, "DebertaV2"):
        pytest.skip("the stock model cannot: its layers are given distances by name")
    stock, inputs = make(family).train(), batch()
    fast = copy.deepcopy(stock)
    apply_last_layer_subset(fast)
    checkpoint_blocks(fast, reentrant)
    labels, mask = inputs.pop("labels"), inputs["attention_mask"][..., None]
    expected, out = (model.base_model(**inputs).last_hidden_state * mask for model in (stock, fast))
    fast(**inputs, labels=labels)  # a classifier's call in between
    expected.sin().sum().backward()
    out.sin().sum().backward()
    for p, q in zip(stock.parameters(), fast.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None)
        if p.grad is not None:
            torch.testing.assert_close(q.grad, p.grad, rtol=1e-10, atol=1e-10)


@EACH_KIND
@pytest.mark.parametrize("unpadded", [False, True])
def test_nothing_of_a_call_is_left_in_the_model(unpadded: bool, family: str) -> None:
    model, seen = make(family), []
    apply_last_layer_subset(model)
    if unpadded:
        apply_unpadding(model)
    before = {name: set(vars(module)) for name, module in model.named_modules()}
    last = layers_of(stack_of(model.base_model))[-1]
    last.register_forward_pre_hook(lambda _, args, kwargs: seen.append((args, kwargs)), with_kwargs=True)
    copies = []
    handle = last.register_forward_hook(lambda *_: copies.append(copy.deepcopy(model)))  # in the midst of it
    model(**batch())
    handle.remove()
    args, kwargs = seen.pop()
    assert kwargs.pop("first_only") and {name: set(vars(module)) for name, module in model.named_modules()} == before
    for layer in (last, layers_of(stack_of(copies[0].base_model))[-1]):
        out = layer(*args, **kwargs)
        assert (out if isinstance(out, torch.Tensor) else out[0]).shape == args[0].shape


def in_threads(*functions: Callable[[], None]) -> None:
    errors: list[BaseException] = []

    def guarded(function: Callable[[], None]) -> None:
        try:
            function()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(function,)) for function in functions]
    for act in (threading.Thread.start, threading.Thread.join):
        for thread in threads:
            act(thread)
    if errors:
        raise errors[0]


@pytest.mark.parametrize("unpadded", [False, True])
def test_threads_may_share_a_model(unpadded: bool) -> None:
    """A classifier's calls and an encoder's, with batches of several shapes: nobody gets what another asked for."""
    model = make().eval()
    apply_last_layer_subset(model)
    if unpadded:
        apply_unpadding(model)
    sizes, full = ((5, 16), (4, 12), (3, 9)), batch()
    labels = full.pop("labels")
    inputs = [{name: x[:rows, :length] for name, x in full.items()} for rows, length in sizes]
    expected = [[part(**given)[0] for given in inputs] for part in (model, model.bert)]

    def ask(number: int, part: int) -> None:
        with torch.no_grad():
            for _ in range(40):
                out = (model, model.bert)[part](**inputs[number])[0]
                torch.testing.assert_close(out, expected[part][number].detach(), rtol=1e-10, atol=1e-10)

    def train() -> None:
        apart = copy.deepcopy(model)  # gradients are one for all threads
        for _ in range(10):
            apart(**inputs[1], labels=labels[:4]).loss.backward()

    often, before = 1e-5, sys.getswitchinterval()
    sys.setswitchinterval(often)
    try:
        in_threads(train, *(lambda n=n, part=part: ask(n, part) for n in range(3) for part in (0, 1)))
    finally:
        sys.setswitchinterval(before)


@EACH_KIND
@pytest.mark.parametrize("order", ["checkpointing first", "subset first", "stock"])
def test_backward_in_another_thread_computes_again_what_was_asked(order: str, family: str) -> None:
    stock, inputs = make(family).train(), batch()
    if order == "stock" and not stock.supports_gradient_checkpointing:
        pytest.skip("transformers has no gradient checkpointing for this family")
    fast = copy.deepcopy(stock)
    if order == "checkpointing first":
        assert apply_gradient_checkpointing(fast) > 0
    apply_last_layer_subset(fast)
    if order == "subset first":
        assert apply_gradient_checkpointing(fast) > 0
    elif order == "stock":
        stock_checkpointing(fast)
    expected, loss = stock(**inputs).loss, fast(**inputs).loss
    in_threads(expected.backward)
    in_threads(loss.backward)
    for p, q in zip(stock.parameters(), fast.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("other", ["the same encoder", "another", "another's classifier"])
def test_a_model_that_is_called_while_a_classifier_runs(other: str) -> None:
    """As a teacher in a hook: it is not asked for what the classifier is, nor is the classifier's request forgotten."""
    stock, inputs = make(), batch()
    fast, shapes = copy.deepcopy(stock), []
    apply_last_layer_subset(fast)
    teacher = copy.deepcopy(fast)
    called = {"the same encoder": fast.bert, "another": teacher.bert, "another's classifier": teacher}[other]
    given = {name: x for name, x in inputs.items() if name != "labels"}
    seen: list[int] = []

    def look(*_: object) -> None:
        if not shapes:
            shapes.append(None)
            shapes[0] = called(**given)[0].shape

    fast.bert.encoder.layer[0].register_forward_hook(look)
    last = fast.bert.encoder.layer[-1].output.dense
    last.register_forward_hook(lambda _, args, __: seen.append(args[0].shape[1]))
    compare(stock, fast, inputs)
    asked = {"the same encoder": (5, 1, 32), "another": (5, 16, 32), "another's classifier": (5, 3)}[other]
    assert tuple(shapes[0]) == asked and set(seen) == {1}


@pytest.mark.parametrize("unpadded", [False, True])
def test_blocks_that_end_in_a_kernel_may_be_made_later(unpadded: bool) -> None:
    """Of DistilBERT they are whole layers: what lies over the last one must know what it is asked for."""
    stock, seen = make("DistilBert").eval(), []
    fast, inputs = copy.deepcopy(stock), batch()
    apply_last_layer_subset(fast)
    if unpadded:
        apply_unpadding(fast, multiple_of=1)
    assert apply_fused_dropout_add_norm(fast) > 0
    last = fast.distilbert.transformer.layer[-1].ffn.lin2
    last.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[:-1].numel()))
    torch.testing.assert_close(fast(**inputs).logits, stock(**inputs).logits, rtol=1e-10, atol=1e-10)
    assert seen == [5]


def test_compiled_without_breaks_for_whoever_asks() -> None:
    """And once for all threads. (PyTorch 2.11 crashes where one that is not the first compiles; here none does.)"""
    from torch._dynamo.utils import counters

    stock, inputs = make(), batch()
    fast = copy.deepcopy(stock)
    apply_last_layer_subset(fast)
    fast.compile(backend="aot_eager", fullgraph=True)
    encoder = torch.compile(fast.bert.forward, backend="aot_eager", fullgraph=True)
    ids, encoded = inputs["input_ids"], stock.bert(inputs["input_ids"])[0]

    def call() -> None:
        for _ in range(2):
            torch.testing.assert_close(fast(**inputs).logits, stock(**inputs).logits, rtol=1e-10, atol=1e-10)
            torch.testing.assert_close(encoder(ids)[0], encoded, rtol=1e-10, atol=1e-10)

    torch._dynamo.reset()
    counters.clear()
    call()
    graphs = counters["stats"]["unique_graphs"]
    in_threads(call)
    in_threads(call)
    assert counters["stats"]["unique_graphs"] == graphs and not counters["graph_break"]
    torch._dynamo.reset()


def test_works_inside_a_trainer(make_trainer) -> None:
    algorithms = [LastLayerSubset(), Unpadding()]
    make_trainer(algorithms).fit()
    assert algorithms[0].evidence["changed"] == 1 and algorithms[1].evidence["changed"] == 2


def test_warns_when_there_is_no_classifier(make_trainer) -> None:
    from composer.models import ComposerClassifier

    with pytest.warns(NoEffectWarning, match="no sequence classifier"):
        make_trainer([LastLayerSubset()], model=ComposerClassifier(torch.nn.Linear(2, 2), num_classes=2))


@EACH_KIND
@pytest.mark.parametrize("fault", ["mask", "first", "kv"])
def test_a_planted_fault_is_found(fault: str, family: str, monkeypatch) -> None:
    stock = make(family)
    fast = copy.deepcopy(stock)
    apply_last_layer_subset(fast)
    forward = FirstOnly.forward
    if fault == "mask":

        def maskless(self, x, mask=None, *args, attention_mask=None, **named):
            return forward(self, x, None, *args, **named)

        monkeypatch.setattr(FirstOnly, "forward", maskless)
    elif fault == "kv":
        home = sys.modules[BY_FAMILY[stock.config.model_type].first.__module__]
        if hasattr(home, "part_of_linear"):
            monkeypatch.setattr(home, "part_of_linear", lambda *given: part_of_linear(*given).flip(-1))
        else:
            monkeypatch.setattr(home, "joint_linear", lambda layers, x: joint_linear(layers, x)[::-1])
    else:
        monkeypatch.setattr(FirstOnly, "forward", lambda self, x, *a, **k: forward(self, x.flip(1), *a, **k))
    with pytest.raises(AssertionError, match="not close"):
        compare(stock, fast, batch())


def test_hidden_states_that_are_asked_for_by_position_are_whole() -> None:
    stock = make("Bert")
    if "output_hidden_states" not in inspect.signature(stock.forward).parameters:
        pytest.skip("transformers 5 takes it by name only")
    fast = copy.deepcopy(stock)
    assert apply_last_layer_subset(fast) == 1
    inputs = batch()
    asked = (inputs["input_ids"], inputs["attention_mask"], *[None] * 4, inputs["labels"], False, True)
    expected, found = stock(*asked), fast(*asked)
    torch.testing.assert_close(found.hidden_states, expected.hidden_states, **error(stock))
