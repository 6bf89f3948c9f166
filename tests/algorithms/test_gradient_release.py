"""GradientRelease: the plain optimizer's updates bit for bit, with few gradients there at once."""

from __future__ import annotations

import copy
import gc
from types import SimpleNamespace

import bitsandbytes
import pytest
import torch
import transformers
from composer import Callback, Trainer
from composer.algorithms import SAM, GradientClipping
from composer.algorithms.warnings import NoEffectWarning
from composer.callbacks import OptimizerMonitor
from composer.models import HuggingFaceModel
from composer.optim import DecoupledAdamW, DecoupledSGDW, LinearWithWarmupScheduler
from contract import batch, bert, loader

from composer_speedups import (
    FusedAdamW,
    GradientCheckpointing,
    GradientRelease,
    MixedPrecision,
    TorchCompile,
    Unpadding,
    apply_adafactor,
    apply_adamw_8bit,
    apply_fused_adamw,
    apply_gradient_release,
)
from composer_speedups.algorithms import gradient_release as module
from composer_speedups.errors import ConflictError, SpeedUpUnavailable
from composer_speedups.gradient_buckets import GradientBuckets, gradients_at_most, update_alone
from composer_speedups.measurement.memory_meters import OperationMeter, tensor_bytes

RATE = {"lr": 1e-2}
PLAIN = {**RATE, "foreach": False, "fused": False}


@pytest.fixture(autouse=True)
def _small_buckets(monkeypatch) -> None:
    """Of KiB: a model of some thousand weights has many."""
    monkeypatch.setattr(module, "_MB", 1024)


def groups(model: torch.nn.Module) -> list[dict]:
    """Two, whose parameters alternate in the model, as decay and no decay do."""
    small = [p for p in model.parameters() if p.ndim < 2]
    return [{"params": [p for p in model.parameters() if p.ndim > 1]}, {"params": small, "lr": 2e-2}]


def eight_bit(parameters) -> torch.optim.Optimizer:
    # Of the smallest tensors, too: theirs are 32-bit otherwise.
    return bitsandbytes.optim.AdamW8bit(parameters, **RATE, min_8bit_size=64)


OPTIMIZERS = {
    "AdamW, for-loop": lambda p: torch.optim.AdamW(p, **PLAIN),
    "AdamW, foreach": lambda p: torch.optim.AdamW(p, **RATE, foreach=True),
    "AdamW, fused": lambda p: torch.optim.AdamW(p, **RATE, fused=True),
    "AdamW, amsgrad": lambda p: torch.optim.AdamW(p, **PLAIN, amsgrad=True),
    "NAdam": lambda p: torch.optim.NAdam(p, **RATE),
    "SGD with momentum": lambda p: torch.optim.SGD(p, **RATE, momentum=0.9, nesterov=True),
    "Adafactor": lambda p: torch.optim.Adafactor(p, **RATE),
    "DecoupledAdamW": lambda p: DecoupledAdamW(p, **RATE, weight_decay=1e-3),
    "DecoupledSGDW": lambda p: DecoupledSGDW(p, **RATE, momentum=0.9),
    "bitsandbytes": lambda p: bitsandbytes.optim.AdamW32bit(p, **RATE),
    "bitsandbytes, 8-bit": eight_bit,
}


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3, head: str = "classification"):
    """Weights and states after some steps of a plain loop with a scheduler; all gradients are gone between them."""
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, total_iters=steps)
    for step in range(steps):
        torch.manual_seed(step)
        model(**batch(head, seed=step)).loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    states = [optimizer.state[p] for group in optimizer.param_groups for p in group["params"]]
    return [p.detach().clone() for p in model.parameters()], states


def same(found, expected) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_updates_are_the_plain_ones_bit_for_bit(kind: str) -> None:
    plain, released = bert(), bert()
    expected = train(plain, OPTIMIZERS[kind](groups(plain)))
    optimizer = OPTIMIZERS[kind](groups(released))
    count = len(list(released.parameters()))
    assert apply_gradient_release(optimizer, bucket_mb=1) == count
    buckets = GradientBuckets.of(optimizer)
    assert 8 < len(buckets) < count
    same(train(released, optimizer), expected)
    whole = tensor_bytes(released.parameters())
    # BERT's own largest, the word embeddings of 16 KiB, and what comes between matrices and vectors of a layer.
    assert 128 * 32 * 4 <= buckets.most < 0.45 * whole


def test_of_gradients_only_a_bucket_is_there() -> None:
    """Counted by what tensors hold in the backward pass, and not by ours."""
    layers = torch.nn.Sequential(*(torch.nn.Linear(64, 64, bias=False) for _ in range(16)))
    x, each = torch.ones(1, 64), 64 * 64 * 4

    def most(optimizer: torch.optim.Optimizer) -> int:
        with OperationMeter(layers) as meter:
            layers(x).sum().backward()
        found = meter.peak
        optimizer.step()
        optimizer.zero_grad()
        return found

    optimizer = torch.optim.SGD(layers.parameters(), lr=1e-3, foreach=False)
    assert most(optimizer) >= 16 * each
    assert apply_gradient_release(optimizer, bucket_mb=2 * each // 1024) == 16
    # A bucket of two and the one that comes next; the activations are some hundred bytes.
    assert 2 * each <= most(optimizer) < 3.5 * each
    assert gradients_at_most([optimizer]) == 2 * each
    assert gradients_at_most([torch.optim.SGD(layers.parameters())]) == 0


@pytest.mark.parametrize("hidden", [True, False])
def test_other_gradients_wait_for_their_own_bucket(hidden: bool, monkeypatch) -> None:
    """Those that are there already are not updated twice; the test of all updates would tell."""
    if not hidden:  # planted: all that is there is updated with each bucket
        monkeypatch.setattr(module, "update_alone", lambda optimizer, _: torch.optim.AdamW.step.__wrapped__(optimizer))
    plain, released = bert(), bert()
    expected = train(plain, torch.optim.AdamW(groups(plain), **PLAIN))[0]
    optimizer = torch.optim.AdamW(groups(released), **PLAIN)
    apply_gradient_release(optimizer, bucket_mb=1)
    found = train(released, optimizer)[0]
    assert all(map(torch.equal, found, expected)) == hidden


def test_an_update_that_fails_leaves_the_other_gradients() -> None:
    layers = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    optimizer = torch.optim.AdamW(layers.parameters(), **PLAIN)
    apply_gradient_release(optimizer)  # one bucket
    layers(torch.ones(1, 4)).sum().backward()
    for p in layers.parameters():
        p.grad = torch.ones_like(p)
    optimizer.param_groups[0]["betas"] = None  # it fails in the middle
    with pytest.raises(TypeError):
        update_alone(optimizer, [layers[1].weight])
    assert all(p.grad is not None for p in layers.parameters())


def test_twice_is_once_and_the_optimizer_may_change_meanwhile() -> None:
    plain, released = bert(), bert()
    expected = torch.optim.AdamW(plain.parameters(), **PLAIN)
    apply_fused_adamw(expected)
    optimizer = torch.optim.AdamW(released.parameters(), **PLAIN)
    assert apply_gradient_release(optimizer, 1) == len(list(released.parameters()))
    assert apply_gradient_release(optimizer, 1) == 0
    assert apply_fused_adamw(optimizer) > 0
    assert apply_gradient_release(optimizer, 1) == 0
    assert all(len(p._post_accumulate_grad_hooks) == 1 for p in released.parameters())
    same(train(released, optimizer), train(plain, expected))


def test_bitsandbytes_finds_what_it_was_told_of_a_parameter() -> None:
    """`adamw_8bit` keeps the embeddings' moments in 32 bits, by their place among all parameters."""
    released = bert(hidden_size=64, intermediate_size=128)
    optimizer = torch.optim.AdamW(released.parameters(), **PLAIN)
    apply_adamw_8bit(optimizer, released)
    apply_gradient_release(optimizer, 1)
    train(released, optimizer, steps=1)
    kinds = {name: optimizer.state[p]["state1"].dtype for name, p in released.named_parameters()}
    assert kinds["bert.embeddings.word_embeddings.weight"] == torch.float32
    assert kinds["bert.encoder.layer.1.intermediate.dense.weight"] == torch.uint8


class Sometimes(torch.nn.Module):
    """Layers of which some are used in some steps only."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(32, 32) for _ in range(4))
        self.never = torch.nn.Linear(32, 32)

    def forward(self, x: torch.Tensor, used: tuple[int, ...]) -> torch.Tensor:
        for number in used:
            x = self.layers[number](x)
        return x.square().mean()


def test_parameters_that_are_not_always_used() -> None:
    torch.manual_seed(0)
    plain = Sometimes()
    released, x = copy.deepcopy(plain), torch.randn(8, 32)
    optimizers = [torch.optim.AdamW(m.parameters(), **PLAIN) for m in (plain, released)]
    apply_gradient_release(optimizers[1], bucket_mb=6)  # KiB: two layers, or one and `never`
    left = []
    for used in ((0, 1, 2, 3), (0, 1, 2, 3), (0, 2, 3), (0, 1, 2, 3), (3, 2, 1, 0), (1,)):
        for model, optimizer in zip((plain, released), optimizers, strict=True):
            model(x, used).backward()
            if model is released:
                left.append(sum(p.grad is not None for p in model.parameters()))
            optimizer.step()
            optimizer.zero_grad()
        same(list(released.parameters()), list(plain.parameters()))
    # At first `never` is waited for, with the last layer beside it; then it is not.
    assert left[0] > 0 and left[1] == 0
    # Whoever did not come once stays to the end when it comes again.
    assert left[3] > 0


def test_frozen_parameters_and_those_frozen_later() -> None:
    plain, released = bert(), bert()
    for model in (plain, released):
        model.bert.embeddings.requires_grad_(False)
    optimizers = [torch.optim.AdamW(m.parameters(), **PLAIN) for m in (plain, released)]
    trained = sum(p.requires_grad for p in released.parameters())
    assert apply_gradient_release(optimizers[1], 1) == trained
    same(train(released, optimizers[1]), train(plain, optimizers[0]))
    for model in (plain, released):
        model.bert.encoder.layer[0].requires_grad_(False)
        model.bert.embeddings.requires_grad_(True)
    same(train(released, optimizers[1]), train(plain, optimizers[0]))


def test_tied_weights_are_updated_once() -> None:
    plain, released = bert("mlm"), bert("mlm")
    optimizers = [torch.optim.AdamW(m.parameters(), **PLAIN) for m in (plain, released)]
    apply_gradient_release(optimizers[1], 1)
    same(train(released, optimizers[1], head="mlm"), train(plain, optimizers[0], head="mlm"))


@pytest.mark.parametrize("reentrant", [False, True])
def test_with_transformers_own_checkpointing(reentrant: bool) -> None:
    from small import stock_checkpointing

    plain, released = bert().train(), bert().train()
    stock_checkpointing(released, reentrant)
    optimizers = [torch.optim.AdamW(m.parameters(), **PLAIN) for m in (plain, released)]
    apply_gradient_release(optimizers[1], 1)
    same(train(released, optimizers[1]), train(plain, optimizers[0]))


def test_two_backward_passes_to_a_step_are_told() -> None:
    model = bert()
    optimizer = torch.optim.AdamW(model.parameters(), **PLAIN)
    apply_gradient_release(optimizer, 1)
    model(**batch()).loss.backward()
    with pytest.raises(
        ConflictError, match=r"there are two to one optimizer.step\(\): gradients are accumulated"
    ) as told:
        model(**batch()).loss.backward()
    assert "\n" not in str(told.value)


def test_whoever_listens_to_steps_hears_whole_ones() -> None:
    model, heard = bert(), []
    optimizer = torch.optim.AdamW(model.parameters(), **PLAIN)
    optimizer.register_step_pre_hook(lambda *_: heard.append("before"))
    apply_gradient_release(optimizer, 1)
    optimizer.register_step_post_hook(lambda *_: heard.append("after"))
    train(model, optimizer, steps=2)
    assert heard == ["before", "after"] * 2


def test_another_optimizer_for_the_same_model() -> None:
    plain, released = bert(), bert()
    first = torch.optim.AdamW(released.parameters(), **PLAIN)
    apply_gradient_release(first, 1)
    with pytest.raises(
        ConflictError, match=r"another optimizer updates these parameters .* delete the other optimizer"
    ):
        apply_gradient_release(torch.optim.AdamW(released.parameters(), **PLAIN), 1)
    del first
    gc.collect()
    same(
        train(released, torch.optim.AdamW(released.parameters(), **PLAIN)),
        train(plain, torch.optim.AdamW(plain.parameters(), **PLAIN)),
    )
    assert not any(p._post_accumulate_grad_hooks for p in released.parameters())


def test_ddp_of_one_process_is_told() -> None:
    """It writes gradients back from its buckets: each update would come twice."""
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters(), **PLAIN)
    apply_gradient_release(optimizer)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        wrapped = torch.nn.parallel.DistributedDataParallel(model)
        wrapped(torch.ones(2, 8)).sum().backward()
        with pytest.raises(ConflictError, match=r"there again\. DistributedDataParallel writes them back") as told:
            optimizer.step()
        assert "\n" not in str(told.value)
    finally:
        torch.distributed.destroy_process_group()


def test_after_a_step_that_was_broken_off() -> None:
    """A loop of one's own goes on with `step`, and nothing is forgotten of what comes in each step."""
    model, x = torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(6))), torch.ones(2, 32)
    optimizer = torch.optim.AdamW(model.parameters(), **PLAIN)
    apply_gradient_release(optimizer, bucket_mb=8)  # KiB: two layers

    def fail(grad: torch.Tensor) -> None:
        raise RuntimeError("planted")

    y = model[:3](x)
    y.register_hook(fail)
    with pytest.raises(RuntimeError, match="planted"):  # with the fourth layer's gradients there, and not the third's
        model[3:](y).sum().backward()
    optimizer.zero_grad()
    with pytest.raises(ConflictError, match=r"After a step that was broken off call optimizer.step\(\) first"):
        model(x).sum().backward()
    optimizer.zero_grad()
    optimizer.step()
    for _ in range(2):
        model(x).sum().backward()
        assert all(p.grad is None for p in model.parameters())
        optimizer.step()
        optimizer.zero_grad()


def test_sparse_gradients() -> None:
    plain = torch.nn.Embedding(50, 8, sparse=True)
    released, ids = copy.deepcopy(plain), torch.tensor([3, 3, 7])
    for table in (plain, released):
        optimizer = torch.optim.SparseAdam(table.parameters(), lr=1e-2)
        if table is released:
            apply_gradient_release(optimizer)
        for _ in range(2):
            table(ids).square().sum().backward()
            assert table is plain or table.weight.grad is None
            optimizer.step()
            optimizer.zero_grad()
    same(released.weight, plain.weight)
    assert gradients_at_most([optimizer]) == 3 * (8 * 4 + 8), "an index and a row for each token"


def test_each_group_has_buckets_of_its_own() -> None:
    """Biases and norms of all layers are a group as a rule, which is complete when the first layer is."""
    model = torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(8)))
    optimizer = torch.optim.AdamW(groups(model), **PLAIN)
    apply_gradient_release(optimizer, bucket_mb=8)  # KiB: two layers
    model(torch.ones(1, 32)).sum().backward()
    # Of two layers the matrices, and the biases of all until the first one's, which comes before its matrix.
    assert gradients_at_most([optimizer]) == 2 * 32 * 32 * 4 + 6 * 32 * 4


def test_an_optimizer_that_becomes_one_which_counts_for_all_is_refused() -> None:
    layer = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(layer.parameters(), **PLAIN)
    apply_gradient_release(optimizer)
    optimizer.__class__ = type(lookalike_of_apex(layer.parameters()))
    with pytest.raises(SpeedUpUnavailable, match=r"apex\.optimizers\.fused_adam\.FusedAdam, whose update may look"):
        layer(torch.ones(1, 2)).sum().backward()


def test_copies_are_as_ever() -> None:
    model = bert()
    apply_gradient_release(optimizer := torch.optim.AdamW(model.parameters(), **PLAIN), 1)
    twin = copy.deepcopy(model)
    twin(**batch()).loss.backward()
    assert all(p.grad is not None for p in twin.parameters())
    assert GradientBuckets.of(optimizer) is not None


class OwnAdamW(torch.optim.AdamW):
    """A user's, whose step may do anything."""


def lookalike_of_apex(parameters) -> torch.optim.Optimizer:
    cls = type("FusedAdam", (torch.optim.AdamW,), {"__module__": "apex.optimizers.fused_adam"})
    return cls(parameters)


@pytest.mark.parametrize("make", [OwnAdamW, torch.optim.LBFGS, lookalike_of_apex])
def test_whose_update_may_look_at_all_gradients_is_refused(make) -> None:
    layer = torch.nn.Linear(2, 2)
    with pytest.raises(SpeedUpUnavailable, match=r"may look at all gradients together. Use one of torch.optim") as told:
        apply_gradient_release(make(layer.parameters()))
    assert "\n" not in str(told.value) and not layer.weight._post_accumulate_grad_hooks


def test_ranks_are_refused(monkeypatch) -> None:
    monkeypatch.setattr(module.dist, "get_world_size", lambda: 2)
    with pytest.raises(SpeedUpUnavailable, match="for one process: DDP keeps all gradients in its buckets"):
        apply_gradient_release(torch.optim.AdamW(torch.nn.Linear(2, 2).parameters()))


@pytest.mark.parametrize("value", [0, -1, True, 1.5, "32"])
def test_wrong_sizes(value) -> None:
    with pytest.raises((TypeError, ValueError), match="bucket_mb must be a positive integer"):
        GradientRelease(value)


# ---- in a Trainer


def fit(algorithms, model=None, optimizer=None, **settings):
    model = bert(hidden_dropout_prob=0.1) if model is None else model
    optimizer = torch.optim.AdamW(model.parameters(), **PLAIN) if optimizer is None else optimizer
    trainer = Trainer(
        model=HuggingFaceModel(model, metrics=[], use_logits=True),
        optimizers=optimizer,
        schedulers=LinearWithWarmupScheduler(t_warmup="2ba"),
        algorithms=algorithms,
        train_dataloader=loader(),
        **{"max_duration": "6ba", "seed": 7, "device": "cpu", "progress_bar": False, "loggers": [], **settings},
    )
    try:
        trainer.fit()
    finally:
        trainer.close()
    return model, trainer


BESIDE = {
    "nothing": lambda: [],
    "bf16": lambda: [MixedPrecision("bf16")],
    "fused": lambda: [FusedAdamW(no_decay_on_bias_and_norm=True)],
    "unpadding": lambda: [MixedPrecision("bf16"), Unpadding(), FusedAdamW()],
    "checkpointing": lambda: [GradientCheckpointing()],
    "blocks compiled": lambda: [TorchCompile(scope="block", backend="aot_eager")],
}


@pytest.mark.parametrize("beside", BESIDE)
def test_a_trainer_ends_where_it_would(beside: str) -> None:
    plain = fit(BESIDE[beside]())[0]
    torch._dynamo.reset()
    release = GradientRelease(1)
    released = fit([release, *BESIDE[beside]()])[0]
    torch._dynamo.reset()
    same(list(released.parameters()), list(plain.parameters()))
    whole = tensor_bytes(plain.parameters()) / 1024
    assert release.evidence["buckets"] > 5
    assert 0 < release.evidence["gradients_mb"] < whole / 2
    assert not any(p._post_accumulate_grad_hooks for p in released.parameters()), "a closed Trainer leaves nothing"


def made(algorithms, model, optimizer, callbacks=(), **settings) -> Trainer:
    return Trainer(
        model=HuggingFaceModel(model, metrics=[], use_logits=True),
        optimizers=optimizer,
        algorithms=algorithms,
        callbacks=list(callbacks),
        **{"train_dataloader": loader(), "max_duration": "2ba", "device": "cpu", "progress_bar": False, "loggers": []}
        | settings,
    )


class Left(Callback):
    """How many gradients are there when the backward pass is over."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def after_train_batch(self, state, logger) -> None:
        self.seen.append(sum(p.grad is not None for p in state.model.parameters()))


def own_backward_passes(model: torch.nn.Module) -> None:
    """The user's: as many as they like, and no weight moves."""
    before = [p.detach().clone() for p in model.parameters()]
    for _ in range(2):
        model(**batch()).loss.backward()
    assert all(p.grad is not None for p in model.parameters())
    same(list(model.parameters()), before)


def test_only_fits_release_and_each_of_them_does() -> None:
    model, left = bert(), Left()
    trainer = made([GradientRelease(1)], model, torch.optim.AdamW(model.parameters(), **PLAIN), [left])
    for _ in range(2):
        own_backward_passes(model)
        trainer.fit(duration="2ba")
    own_backward_passes(model)
    assert left.seen == [0] * 4
    trainer.close()


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("event", ["after_backward", "batch_end"])
def test_a_fit_that_was_broken_off(error, event: str) -> None:
    class Fails(Callback):
        done = False

        def fail(self, state, logger) -> None:
            if not self.done:
                self.done = True
                raise error("planted")

    failing = Fails()
    setattr(failing, event, failing.fail)
    model, left = bert(), Left()
    trainer = made([GradientRelease(1)], model, torch.optim.AdamW(model.parameters(), **PLAIN), [failing, left])
    with pytest.raises(error, match="planted"):
        trainer.fit()
    own_backward_passes(model)
    left.seen.clear()
    trainer.fit(duration="2ba")
    assert left.seen == [0, 0]
    trainer.close()


@pytest.mark.parametrize("first", ["open", "closed later", "dropped"])
@pytest.mark.parametrize("same_optimizer", [True, False])
def test_another_trainer_for_the_model(first: str, same_optimizer: bool) -> None:
    """As a notebook's cell that is run again makes it, with the old one still somewhere."""
    model = bert()
    optimizer = torch.optim.AdamW(model.parameters(), **PLAIN)
    old = made([GradientRelease(1)], model, optimizer)
    old.fit()
    left, again = Left(), GradientRelease(1)
    if not same_optimizer:
        optimizer = torch.optim.AdamW(model.parameters(), **PLAIN)
    trainer = made([again], model, optimizer, [left])
    if first == "closed later":
        old.close()
    elif first == "dropped":
        del old
        gc.collect()
    trainer.fit(duration="2ba")
    assert left.seen == [0, 0] and again.evidence["buckets"] > 5
    trainer.close()
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
    assert not optimizer._optimizer_step_post_hooks and not optimizer._optimizer_step_pre_hooks


def test_a_trainer_that_could_not_be_made_is_in_nobodys_way(tmp_path) -> None:
    model = bert()
    with pytest.raises(FileNotFoundError) as told:
        made(
            [GradientRelease(1)],
            model,
            torch.optim.AdamW(model.parameters(), **PLAIN),
            load_path=str(tmp_path / "x.pt"),
        )
    optimizer = torch.optim.AdamW(model.parameters(), **PLAIN)
    assert apply_gradient_release(optimizer, 1) > 0
    del told


def test_an_optimizer_that_releases_already_goes_on_by_itself() -> None:
    model, left = bert(), Left()
    optimizer = torch.optim.AdamW(model.parameters(), **PLAIN)
    apply_gradient_release(optimizer, 1)
    with pytest.warns(NoEffectWarning, match="the model has it already"):
        trainer = made([GradientRelease(1)], model, optimizer, [left])
    trainer.fit()
    trainer.close()
    assert left.seen == [0, 0]
    assert GradientBuckets.of(optimizer) is not None, "the user's own, and not the Trainer's to take away"


class MyClipping(GradientClipping):
    pass


@pytest.mark.filterwarnings("ignore:SAM has known issues")
@pytest.mark.parametrize(
    ("others", "message"),
    [
        (lambda: {"algorithms": [GradientClipping("norm", 1.0)]}, "before GradientClipping could look at all"),
        (lambda: {"algorithms": [MyClipping("norm", 1.0)]}, "before MyClipping could look at all of them. Remove one"),
        (lambda: {"algorithms": [SAM()]}, "before SAM could look at all of them"),
        (lambda: {"callbacks": [OptimizerMonitor()]}, "before OptimizerMonitor could look at all of them"),
        (lambda: {"algorithms": [TorchCompile()]}, "Use torch_compile with scope: block"),
        (lambda: {"device_train_microbatch_size": 2}, "where gradients are accumulated .*is 2 of 8"),
        (
            lambda: {"device_train_microbatch_size": 2, "train_dataloader": without_batch_size()},
            "where gradients are accumulated .*is 2 of 8",
        ),
    ],
    ids=["clipping", "own clipping", "SAM", "monitor", "compiled", "microbatches", "microbatches of a sampler"],
)
def test_what_looks_at_all_gradients_is_refused_before_training(others, message) -> None:
    for before_it in (True, False):
        model, settings = bert(), others()
        algorithms = settings.pop("algorithms", [])
        listed = [*algorithms, GradientRelease()] if before_it else [GradientRelease(), *algorithms]
        before = [p.detach().clone() for p in model.parameters()]
        with pytest.raises((ConflictError, SpeedUpUnavailable), match=message) as told:
            made(listed, model, torch.optim.AdamW(model.parameters(), **PLAIN), **settings).fit()
        assert "\n" not in str(told.value)
        same(list(model.parameters()), before)


def without_batch_size() -> torch.utils.data.DataLoader:
    data = loader().dataset
    return torch.utils.data.DataLoader(data, batch_sampler=[[*range(8)], [*range(8, 16)]])


def state(**others) -> SimpleNamespace:
    plain = {"algorithms": [], "callbacks": [], "precision": module.Precision.AMP_BF16, "auto_microbatching": False}
    return SimpleNamespace(**{**plain, "optimizers": [None], **others})


@pytest.mark.parametrize(
    ("others", "message"),
    [
        ({"precision": module.Precision.AMP_FP16}, "Use mixed_precision with dtype: bf16"),
        ({"auto_microbatching": True}, "device_train_microbatch_size is 'auto'"),
    ],
    ids=["fp16", "automatic microbatches"],
)
def test_what_needs_a_gpu_to_be_refused(others, message) -> None:
    with pytest.raises(ConflictError, match=message):
        GradientRelease().on_event(module.Event.FIT_START, state(**others), None)


def test_with_the_hugging_face_trainer(tmp_path) -> None:
    """Which clips by the norm of all gradients unless it is told not to, and steps by itself."""
    results = []
    for release in (False, True):
        model = bert()
        optimizer = torch.optim.AdamW(model.parameters(), **PLAIN)
        if release:
            apply_gradient_release(optimizer, 1)
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path),
            max_steps=3,
            per_device_train_batch_size=8,
            max_grad_norm=0.0,
            report_to=[],
            save_strategy="no",
            use_cpu=True,
            disable_tqdm=True,
        )
        data = loader().dataset
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
        transformers.Trainer(model, arguments, train_dataset=data, optimizers=(optimizer, schedule)).train()
        results.append([p.detach().clone() for p in model.parameters()])
    same(results[1], results[0])


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["AdamW, fused", "AdamW, foreach", "bitsandbytes, 8-bit"])
def test_on_a_gpu(kind: str) -> None:
    """There the hooks run in a thread of the backward pass, and the allocator counts."""
    weights, peaks, each = [], [], 1024 * 1024 * 4
    for release in (False, True):
        torch.manual_seed(0)
        layers = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024, bias=False) for _ in range(16))).cuda()
        optimizer = OPTIMIZERS[kind](layers.parameters())
        if release:
            assert apply_gradient_release(optimizer, bucket_mb=2 * each // 1024) == 16
        x = torch.randn(8, 1024, device="cuda", generator=torch.Generator("cuda").manual_seed(1))
        for step in range(3):
            if step == 2:  # states and work space are there
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
            with torch.autocast("cuda", torch.bfloat16):
                loss = layers(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        peaks.append(torch.cuda.max_memory_allocated() - before)
        weights.append([p.detach().clone() for p in layers.parameters()])
    same(weights[1], weights[0])
    # The casts of weights, half of them; and of gradients all, or two and what a step of two takes.
    assert peaks[0] >= 16 * each and peaks[1] < peaks[0] - 4 * each


def test_adafactor_by_the_function() -> None:
    plain, released = bert(), bert()
    optimizers = [torch.optim.AdamW(m.parameters(), **PLAIN) for m in (plain, released)]
    for optimizer in optimizers:
        apply_adafactor(optimizer)
    apply_gradient_release(optimizers[1], 1)
    same(train(released, optimizers[1]), train(plain, optimizers[0]))
