"""`benchmarks/contenders.py`: every entry can run, all do comparable work, and the bare loop applies what it should."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest
import torch
from benchmarked import TINY

from benchmarks import compiling, contenders, growth, harness, peers
from composer_speedups import registry
from composer_speedups.compat import read_float32_precision
from composer_speedups.recipes import load_recipe
from composer_speedups.tasks import build_model, build_task


def _all_entries() -> dict[str, harness.Entry]:
    found = {f"{hardware}: {name}": e for hardware, some in peers.ENTRIES.items() for name, e in some.items()}
    for hardware, recipes in growth._RECIPES.items():
        for point in growth.points(hardware):
            for recipe in recipes:
                found[f"{hardware}: growth {point} {recipe}"] = harness.Entry("ours", recipe, growth.overrides(point))
    return found | {f"compiling: {name}": entry for name, entry in compiling._entries("/nowhere").items()}


ENTRIES = _all_entries()


def job(recipe: str, *overrides: str, steps: int = 3, counted: int = 2) -> contenders.Job:
    return contenders.Job(load_recipe(recipe, (*TINY, *overrides)), steps, counted, seed=5)


@pytest.mark.parametrize("name", ENTRIES)
def test_every_entry_can_be_built(name: str) -> None:
    entry = ENTRIES[name]
    recipe = load_recipe(entry.recipe, entry.overrides)  # with the arguments of all speed-ups checked
    # A batch more than the steps take: nobody who looks ahead may find the end.
    assert harness.large_enough(entry, 12).task.train_samples >= 13 * recipe.batch_size
    assert all(algorithm.slot != "batches" for algorithm in recipe.algorithms()), "every contender has the same batches"
    inspect.signature(contenders.CONTENDERS[entry.contender]).bind(job("cpu/fp32"), **entry.arguments)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(
    "name",
    [
        *("cpu/fastest", "finetune/fastest", "finetune/fastest_eager", "finetune/fastest_compiled"),
        *("mlm/fastest", "mlm/fastest_compiled"),
    ],
)
def test_the_bare_loop_calls_every_function_as_it_wants_to_be_called(
    name: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = load_recipe(name, TINY)
    task = build_task(recipe.task, recipe.model, seed=1)
    model = build_model(recipe.model, task, seed=1)
    optimizer = torch.optim.AdamW(model.parameters())
    loader = contenders._loader(task, contenders.Job(recipe, 3, 2, 1))
    called: dict[str, Any] = {}
    real = registry.function

    def stub(key: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> int:
            bound = inspect.signature(real(key)).bind(*args, **kwargs)
            called[key] = next(iter(bound.arguments.values()), None)
            return 1

        return call

    monkeypatch.setattr(registry, "function", stub)
    kept = contenders.apply_functions(recipe, model, optimizer, loader, torch.device(device))
    left_out = {"sync_free_loop"} | ({"prefetch_batches"} if device == "cpu" else set())
    assert set(called) == set(recipe.speedups) - left_out
    assert len(kept) == len(called)
    for key, first in called.items():
        if key == "prefetch_batches":
            assert first is loader
        elif key not in ("matmul_precision", "reuse_host_memory"):
            assert first is (optimizer if "adamw" in key else model), key


def test_the_bare_loop_takes_the_decay_off_what_the_class_would() -> None:
    norm, linear = torch.nn.LayerNorm(4), torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW([*norm.parameters(), *linear.parameters()], weight_decay=0.1)
    recipe = load_recipe(
        "cpu/fp32", ["speedups.fused_adamw={no_decay_on_bias_and_norm: true}", "speedups.matmul_precision=null"]
    )
    assert contenders.apply_functions(recipe, linear, optimizer, None, torch.device("cpu")) == [4]
    assert optimizer.defaults["fused"] is True
    decayed = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert decayed == {id(linear.weight): 0.1} | {id(p): 0 for p in (*norm.parameters(), linear.bias)}


def test_the_bare_loop_refuses_other_batches() -> None:
    with pytest.raises(ValueError, match="length_grouped_batches"):
        contenders.apply_functions(load_recipe("cpu/length_grouped_batches"), None, None, None, torch.device("cpu"))


@pytest.mark.parametrize(
    ("contender", "recipe"),
    [
        *(("ours", "cpu/fp32"), ("ours", "cpu/fastest"), ("composer", "cpu/fp32"), ("huggingface", "cpu/fp32")),
        *(("huggingface_best", "cpu/fp32"), ("bare_loop", "cpu/fp32"), ("bare_loop", "cpu/fastest")),
    ],
)
@pytest.mark.filterwarnings("ignore:.torch.cpu.amp.autocast:FutureWarning")  # by transformers 4.53, in bf16 on a CPU
def test_contenders_run_and_do_the_same_samples(
    contender: str, recipe: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    if contender.startswith("huggingface"):
        pytest.importorskip("accelerate")
    before = read_float32_precision()
    this = job(recipe, steps=10)  # a tenth of it is a step of warm-up: Composer warns at none
    payload = {"contender": contender, "recipe": this.recipe.to_dict(), "arguments": {}}
    found = contenders.measure(payload | {"steps": 10, "counted": 6, "seed": 5}, print)
    assert len(found["seconds"]) == len(found["losses"]) == len(found["tokens"]) == len(found["flops"]) == 10
    assert min(found["seconds"]) > 0 and found["peak_memory_bytes"] > 0
    assert read_float32_precision() == before, "a setting of the process outlives the contender"
    # Weights, samples and no dropout: the first loss is everybody's, to the rounding of bf16.
    if contender != "huggingface_best":
        expected = _first_loss(this)
        assert found["losses"][0] == pytest.approx(expected, rel=1e-2 if "fastest" in recipe else 1e-5)


def test_a_step_of_the_bare_loop_that_fails_leaves_the_process_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    before, within = read_float32_precision(), []

    def fail(batch: object) -> None:
        within.append(read_float32_precision())
        raise RuntimeError("a step that fails")

    monkeypatch.setattr(contenders, "hand_over", fail)
    with pytest.raises(RuntimeError, match="a step that fails"):
        contenders.CONTENDERS["bare_loop"](job("cpu/fastest", steps=10))
    assert within and within[0] != before, "the recipe sets nothing: choose another"
    assert read_float32_precision() == before


def _first_loss(this: contenders.Job) -> float:
    task, model = contenders._make(this)
    order = list(contenders._sampler(task, this))[: this.recipe.batch_size]
    with torch.no_grad():
        return float(model(**task.collate_train([task.train[i] for i in order])).loss)


@pytest.mark.parametrize("contender", ["ours", "composer", "huggingface", "huggingface_best", "bare_loop"])
@pytest.mark.filterwarnings("ignore:.torch.cpu.amp.autocast:FutureWarning")
def test_nobody_comes_to_the_end_of_the_samples(contender: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At it the workers of a DataLoader are shut down, and the last step that counts would wait for that."""
    from torch.utils.data import dataloader

    if contender.startswith("huggingface"):
        pytest.importorskip("accelerate")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    ended, drawn, real = [], [], dataloader._BaseDataLoaderIter.__next__

    def draw(self: Any) -> Any:
        try:
            batch = real(self)
        except StopIteration:
            ended.append(self)
            raise
        drawn.append(batch)
        return batch

    monkeypatch.setattr(dataloader._BaseDataLoaderIter, "__next__", draw)
    exactly = (*TINY[:-1], "batch_size=8", "task.train_samples=8")  # of 64 that are there, 80 and more are needed
    recipe = harness.large_enough(harness.Entry(contender, "cpu/fp32", exactly), 10)
    assert recipe.task.train_samples == 11 * 8
    contenders.CONTENDERS[contender](contenders.Job(recipe, 10, 6, seed=5))
    assert not ended and len(drawn) in (10, 11)


def test_real_tokens_are_those_of_the_samples() -> None:
    this = job("cpu/fp32")
    task = build_task(this.recipe.task, this.recipe.model, seed=this.seed)
    work = contenders._work(this, None)
    batches = list(contenders._loader(task, this))[:3]
    assert work["tokens"] == [float(batch["attention_mask"].sum()) for batch in batches]
    chosen = list(range(20, 32))
    assert work["mean_length"] == pytest.approx(task.train.lengths.mean())
    assert sum(contenders._work(this, chosen)["tokens"]) == task.train.lengths[20:32].sum()


def test_grouped_batches_are_a_whole_epochs_in_miniature() -> None:
    from transformers.trainer_pt_utils import LengthGroupedSampler

    lengths = np.random.default_rng(3).integers(10, 257, 8000)
    this = contenders.Job(load_recipe("cpu/fp32"), 12, 8, seed=5)
    order = contenders._grouped(lengths, this)
    assert len(order) == 13 * 32, "and a batch that is only looked at"
    counted = lengths[order[: 12 * 32]].reshape(12, 32)[4:]
    epoch = lengths[list(LengthGroupedSampler(32, lengths=lengths.tolist()))].reshape(250, 32)

    def padding(batches: np.ndarray) -> float:
        return 1 - batches.sum() / (32 * batches.max(1).sum())

    assert padding(epoch) < 0.05 < padding(lengths.reshape(250, 32)), "the sampler does group"
    assert padding(counted) == pytest.approx(padding(epoch), abs=0.02)
    assert counted.mean() == pytest.approx(epoch.mean(), rel=0.03)
    assert counted[0].mean() > counted[-1].mean(), "the longest come first"
