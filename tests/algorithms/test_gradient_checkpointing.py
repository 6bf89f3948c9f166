"""GradientCheckpointing: the plain model's gradients bit for bit, with every other speed-up, from far less memory."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import transformers
from composer.algorithms.warnings import NoEffectWarning
from composer.models import ComposerClassifier, HuggingFaceModel
from contract import batch, bert
from small import config_of, stock_checkpointing
from torch._dynamo.utils import counters

import composer_speedups
from composer_speedups import GradientCheckpointing, apply_gradient_checkpointing
from composer_speedups.algorithms import gradient_checkpointing as module
from composer_speedups.compat import own_checkpointing
from composer_speedups.errors import ConflictError
from composer_speedups.measurement.memory_meters import OperationMeter, SavedForBackward

DROPOUT = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}


def step(model: torch.nn.Module, data: dict | None = None, precision: str = "fp32"):
    """The gradients of one step from a fixed seed, and the bytes that autograd kept for them."""
    model.zero_grad()
    torch.manual_seed(3)
    data = batch() if data is None else data
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"), SavedForBackward(model) as saved:
        loss = model(**data)["loss"]
    loss.backward()
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()], saved.bytes


def equal(some: list, other: list) -> bool:
    return all((a is None and b is None) or torch.equal(a, b) for a, b in zip(some, other, strict=True))


def pair(**changes) -> tuple[torch.nn.Module, torch.nn.Module]:
    """A model in training with dropout, and its twin to be checkpointed."""
    model = bert(**{**DROPOUT, **changes}).train()
    return model, copy.deepcopy(model)


OTHERS = {
    "alone": (),
    "SDPA": ("sdp_attention",),
    "dropout": ("fast_dropout",),
    "blocks": ("fused_dropout_add_norm",),
    "norms": ("low_precision_norm",),
    "unpadded": ("unpadding", "last_layer_subset", "fast_dropout", "fused_dropout_add_norm"),
}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("first", [False, True], ids=["applied last", "applied first"])
@pytest.mark.parametrize("others", OTHERS)
def test_gradients_are_the_plain_models_bit_for_bit(others: str, first: bool, precision: str) -> None:
    plain, twin = pair()
    if first:
        assert apply_gradient_checkpointing(twin) == 2
    for model in (plain, twin):
        for key in OTHERS[others]:
            assert getattr(composer_speedups, f"apply_{key}")(model) > 0
    if not first:
        assert apply_gradient_checkpointing(twin) == 2
    expected, kept = step(plain, precision=precision)
    found, kept_here = step(twin, precision=precision)
    assert equal(found, expected)
    assert kept_here < kept / 3, "of each block its input is kept, which is a small part of it"


def test_casts_of_weights_are_gone_with_their_block() -> None:
    """Autocast keeps them to the end of the forward pass, for a weight that is used twice: half as much as weights."""
    held = {}
    for every in (0, 1):
        model = bert(hidden_size=128, intermediate_size=512, num_hidden_layers=6).train()
        assert every == 0 or apply_gradient_checkpointing(model) == 6
        with torch.autocast("cpu", torch.bfloat16), OperationMeter(model) as meter:
            loss = model(**batch(rows=1))["loss"]
            held[every] = meter.now
        del loss
    casts = sum(m.weight.nbytes // 2 for m in model.bert.encoder.modules() if isinstance(m, torch.nn.Linear))
    assert held[1] < casts / 8 < casts < held[0]


@pytest.mark.parametrize("family", ["albert", "albert of two groups", "deberta"])
def test_weights_that_are_used_more_than_once_under_autocast(family: str) -> None:
    """The gradients of their uses are added in 16 bits, as one cast was used: to be so with checkpointing, too."""
    sizes = dict(vocab_size=128, hidden_size=32, num_attention_heads=4, intermediate_size=64, num_labels=3)
    torch.manual_seed(0)
    if family == "deberta":  # one projection for keys and for the keys of positions
        config = config_of("DebertaV2", num_hidden_layers=2, **sizes)
        plain = transformers.DebertaV2ForSequenceClassification(config).train()
    else:
        groups = 1 if family == "albert" else 2
        config = transformers.AlbertConfig(num_hidden_layers=4, num_hidden_groups=groups, embedding_size=16, **sizes)
        plain = transformers.AlbertForSequenceClassification(config).train()
    twin = copy.deepcopy(plain)
    assert apply_gradient_checkpointing(twin) > 0
    assert equal(step(twin, precision="bf16")[0], step(plain, precision="bf16")[0])


@pytest.mark.parametrize("fault", ["random numbers", "autocast", "input"])
def test_planted_faults_are_seen(fault: str, monkeypatch) -> None:
    """Without its care for the generator, for autocast, or for the input, the gradients are others."""
    plain, twin = pair()
    apply_gradient_checkpointing(twin)
    stock = module.checkpoint
    precision = "bf16" if fault == "autocast" else "fp32"
    if fault == "random numbers":
        monkeypatch.setattr(module, "checkpoint", lambda *a, **kw: stock(*a, **kw, preserve_rng_state=False))
    elif fault == "autocast":
        nothing = {"enabled": False}
        monkeypatch.setattr(torch.utils.checkpoint, "_get_autocast_kwargs", lambda **kw: (nothing, nothing))
    else:

        def changing(run, x, *args, **kwargs):
            calls = []

            def again(y, *rest):
                calls.append(y)
                return run(y if len(calls) == 1 else y * 1.01, *rest)

            return stock(again, x, *args, **kwargs)

        monkeypatch.setattr(module, "checkpoint", changing)
    try:
        assert not equal(step(twin, precision=precision)[0], step(plain, precision=precision)[0])
    except torch.utils.checkpoint.CheckpointError as error:  # PyTorch has seen it first: other dtypes were recomputed
        assert fault == "autocast" and "different metadata" in str(error)


@pytest.mark.parametrize("every", [1, 2, 3, 9])
def test_every_nth_block(every: int) -> None:
    plain, twin = pair(num_hidden_layers=5)
    expected = -(-5 // every)
    assert apply_gradient_checkpointing(twin, every=every) == expected
    chosen = [isinstance(block, module._Checkpointed) for block in twin.bert.encoder.layer]
    assert chosen == [i % every == 0 for i in range(5)]
    (gradients, kept), (gradients_here, kept_here) = step(plain), step(twin)
    assert equal(gradients_here, gradients)
    share = expected / 5
    assert kept_here / kept == pytest.approx(1 - share, abs=0.2 * share + 0.05)
    assert apply_gradient_checkpointing(twin, every=every) == 0
    assert apply_gradient_checkpointing(twin) == 5 - expected


@pytest.mark.parametrize("scope", ["block", "model"])
@pytest.mark.parametrize("order", ["before", "after"])
def test_compiled(scope: str, order: str) -> None:
    if (scope, order) == ("model", "after"):
        pytest.skip("a compiled model takes no surgery afterwards")
    torch._dynamo.reset()
    counters.clear()
    plain, twin = pair()
    if order == "before":
        apply_gradient_checkpointing(twin)
    for model in (plain, twin):
        assert composer_speedups.apply_torch_compile(model, scope=scope, backend="aot_eager") > 0
    if order == "after":
        assert apply_gradient_checkpointing(twin) == 2
    (gradients, kept), (gradients_here, kept_here) = step(plain), step(twin)
    assert equal(gradients_here, gradients)
    assert kept_here < kept / 3
    assert not counters["graph_break"]
    torch._dynamo.reset()


def test_in_a_trainer_with_everything_else(make_trainer) -> None:
    """Composer's loop, bf16, unpadded, compiled, in microbatches, whatever the order listed."""
    from composer_speedups import (
        FastDropout,
        LastLayerSubset,
        LowPrecisionNorm,
        MixedPrecision,
        TorchCompile,
        Unpadding,
    )

    results = []
    for algorithms in ([], [GradientCheckpointing()]):
        torch._dynamo.reset()
        listed = [TorchCompile(scope="block", backend="aot_eager", dynamic=True), *algorithms, FastDropout()]
        listed += [LastLayerSubset(), LowPrecisionNorm(), MixedPrecision("bf16"), Unpadding()]
        model = bert(**DROPOUT)
        make_trainer(listed, model=HuggingFaceModel(model, use_logits=True), device_train_microbatch_size=4).fit()
        results.append([p.detach().clone() for p in model.parameters()])
        for algorithm in algorithms:
            assert algorithm.evidence == {"changed": 2, "blocks": 2}
    assert equal(*results)
    torch._dynamo.reset()


def test_nothing_is_recomputed_without_gradients(monkeypatch) -> None:
    _, twin = pair()
    apply_gradient_checkpointing(twin)
    monkeypatch.setattr(module, "checkpoint", lambda *a, **kw: pytest.fail("recomputation was prepared"))
    with torch.no_grad():
        twin(**batch())
    with torch.inference_mode():
        twin.eval()(**batch())


class Own(torch.nn.Module):
    """A user's own model: blocks called with keywords, which return a pair and draw random numbers themselves."""

    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(8, 8)

        def forward(self, x, *, scale, flags=None):
            noise = torch.rand_like(x)
            return torch.tanh(self.linear(x)) * scale + noise * flags["noise"], scale * 2

    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(self.Block() for _ in range(4))
        self.head = torch.nn.Linear(8, 1)

    def forward(self, x, scale):
        for block in self.blocks:
            x, scale = block(x=x, scale=scale, flags={"noise": 0.1})
        return {"loss": self.head(x).sum() + scale.sum()}


def test_a_model_of_ones_own() -> None:
    torch.manual_seed(1)
    plain = Own()
    twin = copy.deepcopy(plain)
    assert apply_gradient_checkpointing(twin) == 4
    data = {"x": torch.randn(64, 8), "scale": torch.ones(1, requires_grad=True)}
    (gradients, kept), (gradients_here, kept_here) = step(plain, data), step(twin, data)
    assert equal(gradients_here, gradients)
    assert kept_here < 0.6 * kept, "of three tensors a block"


def test_the_generator_of_every_tensor_is_looked_at(monkeypatch) -> None:
    """PyTorch keeps the state of the devices of the arguments by position: there must be no others."""
    seen = []
    monkeypatch.setattr(module, "checkpoint", lambda run, *args, use_reentrant: (seen.append(args), run(*args))[1])
    model = Own()
    apply_gradient_checkpointing(model)
    model(torch.randn(2, 8), torch.ones(1))
    assert len(seen) == 4
    assert all([type(a) for a in args] == [torch.Tensor, torch.Tensor, dict] for args in seen)


@pytest.mark.parametrize("every", [1, 2])
def test_a_decoder_that_keeps_a_cache_by_default(every: int) -> None:
    config = transformers.GPT2Config(vocab_size=128, n_positions=64, n_embd=32, n_layer=3, n_head=4, pad_token_id=0)
    config.bos_token_id = config.eos_token_id = None
    assert config.use_cache, "or this tests nothing"
    torch.manual_seed(1)
    plain = transformers.GPT2ForSequenceClassification(config).train()
    twin = copy.deepcopy(plain)
    assert apply_gradient_checkpointing(twin, every=every) == (3 if every == 1 else 2)
    data = batch() | {"labels": torch.zeros(6, dtype=torch.long)}
    with_cache, without = step(plain, data)[0], step(plain, data | {"use_cache": False})
    gradients, kept = step(twin, data)
    assert every > 1 or equal(gradients, without[0])  # every other block still fills its cache
    for found, expected in zip(gradients, with_cache, strict=True):  # a cache copies keys: attention rounds otherwise
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5 * expected.abs().max().item())
    assert kept < without[1] / (3 if every == 1 else 1.5)
    twin.eval()
    plain.eval()
    ids = data["input_ids"][:, :4]
    caches = [model(input_ids=ids, use_cache=True).past_key_values for model in (plain, twin)]
    lengths = [cache.get_seq_length() if hasattr(cache, "get_seq_length") else cache[0][0].shape[2] for cache in caches]
    assert lengths == [4, 4], "asked for in evaluation, it is filled once, gradients or not"


def test_a_cache_with_something_in_it_is_refused() -> None:
    cache = transformers.DynamicCache()
    cache.update(torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 4), 0)
    model = Own()
    apply_gradient_checkpointing(model)
    with pytest.raises(ConflictError, match="fill the cache given as past_key_values twice"):
        model.blocks[0](torch.randn(2, 8), scale=torch.ones(1), flags={"noise": 0.0}, past_key_values=cache)


def test_frozen_layers_and_input_without_gradient() -> None:
    plain, twin = pair()
    apply_gradient_checkpointing(twin)
    for model in (plain, twin):
        model.bert.embeddings.requires_grad_(False)
        model.bert.encoder.layer[0].requires_grad_(False)
    expected, found = step(plain)[0], step(twin)[0]
    assert equal(found, expected) and sum(g is None for g in found) > 16


def test_albert_calls_one_block_for_all_layers() -> None:
    config = transformers.AlbertConfig(
        vocab_size=128, embedding_size=16, hidden_size=32, num_hidden_layers=3, num_attention_heads=4,
        intermediate_size=64, hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1, num_labels=3,
    )  # fmt: skip
    torch.manual_seed(1)
    plain = transformers.AlbertForSequenceClassification(config).train()
    twin = copy.deepcopy(plain)
    assert apply_gradient_checkpointing(twin) == 1
    (gradients, kept), (gradients_here, kept_here) = step(plain), step(twin)
    assert equal(gradients_here, gradients) and kept_here < kept / 3


def test_hidden_states_and_attentions_are_given() -> None:
    plain, twin = pair()
    apply_gradient_checkpointing(twin)
    outputs = []
    for model in (plain, twin):
        torch.manual_seed(1)
        outputs.append(model(**batch(), output_hidden_states=True, output_attentions=True))
    for name in ("hidden_states", "attentions"):
        assert len(outputs[0][name]) == len(outputs[1][name]) > 1
        assert all(torch.equal(a, b) for a, b in zip(outputs[0][name], outputs[1][name], strict=True))


def test_copies_and_pickles() -> None:
    plain, model = pair()
    apply_gradient_checkpointing(model)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert equal(step(twin)[0], step(plain)[0])
        assert apply_gradient_checkpointing(twin) == 0


def test_twice_by_another_way_is_refused(make_trainer) -> None:
    model = bert()
    stock_checkpointing(model)
    with pytest.raises(ConflictError, match="_checkpointing_disable") as refused:
        make_trainer([GradientCheckpointing()], model=HuggingFaceModel(model))
    remedy = str(refused.value).split("Call model.")[1].split("()")[0]
    getattr(model, remedy)()
    assert apply_gradient_checkpointing(model) == 2


def test_twice_by_another_way_is_refused_when_that_comes_later(make_trainer) -> None:
    model = bert()
    trainer = make_trainer([GradientCheckpointing()], model=HuggingFaceModel(model))
    stock_checkpointing(model)
    with pytest.raises(ConflictError, match="_checkpointing_disable") as refused:
        trainer.fit()
    assert trainer.state.timestamp.batch == 0
    getattr(model, str(refused.value).split("Call model.")[1].split("()")[0])()
    trainer.fit()
    assert trainer.state.timestamp.batch > 0


@pytest.mark.parametrize("compiled", [None, "block", "model"])
def test_a_loop_that_switches_the_models_own_on_is_refused(compiled: str | None, tmp_path) -> None:
    """As the Hugging Face Trainer does after all that its user has applied."""
    torch._dynamo.reset()
    model = bert()
    assert apply_gradient_checkpointing(model) == 2
    if compiled:
        assert composer_speedups.apply_torch_compile(model, scope=compiled, backend="aot_eager") > 0
    rows = batch()
    samples = [{name: column[i] for name, column in rows.items()} for i in range(len(rows["labels"]))]
    settings = {"num_train_epochs": 1, "use_cpu": True, "report_to": "none", "disable_tqdm": True}
    settings |= {"save_strategy": "no", "logging_strategy": "no", "dataloader_pin_memory": False}

    def train(**more):
        arguments = transformers.TrainingArguments(str(tmp_path), **settings, **more)
        return transformers.Trainer(model, arguments, train_dataset=samples).train()

    with pytest.raises(ConflictError, match="_checkpointing_disable"):
        train(**{own_checkpointing(): True})
    getattr(model, f"{own_checkpointing()}_disable")()
    assert train().global_step == 1
    torch._dynamo.reset()


def test_applied_again_says_so(make_trainer) -> None:
    model = bert()
    apply_gradient_checkpointing(model)
    with pytest.warns(NoEffectWarning, match="its blocks are checkpointed already"):
        make_trainer([GradientCheckpointing()], model=HuggingFaceModel(model))


def test_warns_when_there_are_no_blocks(make_trainer) -> None:
    model = ComposerClassifier(torch.nn.Linear(2, 2), num_classes=2)
    with pytest.warns(NoEffectWarning, match="no list of equal blocks in the model"):
        make_trainer([GradientCheckpointing()], model=model)


@pytest.mark.parametrize(("every", "error"), [(0, ValueError), (-1, ValueError), (True, TypeError), ("2", TypeError)])
def test_wrong_arguments(every, error) -> None:
    with pytest.raises(error, match="every must be a positive integer, got"):
        GradientCheckpointing(every=every)
    with pytest.raises(error, match="every must be a positive integer, got"):
        apply_gradient_checkpointing(torch.nn.Linear(2, 2), every)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
def test_gradients_on_the_gpu(precision: str) -> None:
    """Dropout on: the device's generator must be put back, for hidden states given by position as by name."""
    plain, twin = (model.cuda() for model in pair())
    apply_gradient_checkpointing(twin)
    results = []
    for model in (plain, twin):
        data = {name: value.cuda() for name, value in batch().items()}
        dtype = {"fp16": torch.float16}.get(precision, torch.bfloat16)
        torch.manual_seed(3)
        with torch.autocast("cuda", dtype, enabled=precision != "fp32"):
            loss = model(**data)["loss"]
        loss.backward()
        results.append([p.grad.clone() for p in model.parameters()])
    # Embedding gradients are summed by atomic adds, in any order: a few roundings of float32.
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5 * a.abs().max().item())


def by_ours(model: torch.nn.Module) -> None:
    apply_gradient_checkpointing(model)
    composer_speedups.apply_torch_compile(model, scope="block", backend="eager")


def by_hand(model: torch.nn.Module) -> None:
    layers = model.bert.encoder.layer
    model.bert.encoder.layer = torch.nn.ModuleList(torch.compile(layer, backend="eager") for layer in layers)
    apply_gradient_checkpointing(model)


def forwards_by_hand(model: torch.nn.Module) -> None:
    for layer in model.bert.encoder.layer:
        layer.forward = torch.compile(layer.forward, backend="eager")
    apply_gradient_checkpointing(model)


@pytest.mark.parametrize("compiled", [by_ours, by_hand, forwards_by_hand])
def test_autocast_ends_in_blocks_that_dynamo_runs_itself(compiled) -> None:
    """Recomputing ends early by an exception, which jumps over the ends of autocast in Dynamo's code; casts of weights
    would be kept for good then, and the next training in this process would go on with old ones."""
    model = bert().train()
    composer_speedups.apply_low_precision_norm(model)
    compiled(model)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(**batch())["loss"]
    loss.backward()
    nested = torch.autocast_increment_nesting() - 1
    for _ in range(nested + 1):  # whatever is found: other tests come after this one
        torch.autocast_decrement_nesting()
    torch.clear_autocast_cache()
    assert nested == 0


@pytest.mark.parametrize("asked", [True, False])
def test_whether_recomputing_ends_early_is_the_users_choice(asked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    really = module.checkpoint

    def look(*args, **kwargs):
        seen.append(torch.utils.checkpoint._enable_checkpoint_early_stop)
        return really(*args, **kwargs)

    monkeypatch.setattr(module, "checkpoint", look)
    model = bert().train()
    apply_gradient_checkpointing(model)
    with torch.utils.checkpoint.set_checkpoint_early_stop(asked):
        model(**batch())["loss"].backward()
    assert seen == [asked, asked]
