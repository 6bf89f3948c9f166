"""What `run` trains with, and how it counts: rates, seeds, optimizers, microbatches, tokens, losses."""

from __future__ import annotations

import math
import os
import signal
from types import SimpleNamespace

import pytest
import torch
from tiny_recipe import TINY, tiny

from composer_speedups.measurement import measure
from composer_speedups.recipes import load_recipe
from composer_speedups.tasks import build_task
from composer_speedups.training import run as training
from composer_speedups.training.run import run

FULL = (  # every row has 32 real tokens
    "task={name: dummy, max_length: 32, vocabulary: 256, train_samples: 64, eval_samples: 16}",
    *TINY[1:], "evaluate=false",
)  # fmt: skip


def test_the_final_loss_is_the_mean_of_the_last_tenth() -> None:
    result = run(tiny("duration=3ep", "evaluate=false"))
    assert result.steps == 24 and result.losses[-1] != result.losses[-2]
    assert result.final_loss == pytest.approx(sum(result.losses[-2:]) / 2)


def test_steps_that_compiled_are_not_counted(monkeypatch) -> None:
    asked = []

    def statistics() -> dict[str, float]:
        asked.append(None)  # when the fit starts, and after each step
        return {"compile_seconds": 10.0 * (len(asked) > 5)}

    monkeypatch.setattr(training, "compile_statistics", statistics)
    result = run(tiny("evaluate=false"))
    assert result.warmup_steps == 4, "three, and the fifth, in which it compiled"
    counted = [result.step_seconds[i] for i in (3, 5, 6, 7)]
    assert result.samples_per_second == pytest.approx(8 * 4 / sum(counted))


@pytest.mark.parametrize(
    ("name", "after"),
    [
        ("cosine", lambda share: (1 + math.cos(math.pi * share)) / 2),
        ("linear", lambda share: 1 - share),
        ("constant", lambda share: 1.0),
    ],
)
def test_the_rate_of_each_step(name: str, after, monkeypatch) -> None:
    rates = []

    def make(*args, make=training.build_optimizer):
        optimizer = make(*args)
        optimizer.register_step_pre_hook(lambda one, *_: rates.append(one.param_groups[0]["lr"]))
        return optimizer

    monkeypatch.setattr(training, "build_optimizer", make)
    run(tiny(f"schedule.name={name}", "learning_rate=1e-3", "evaluate=false"))
    # Two batches of warm-up, and six to the end. Composer has the rate of the batch before, but for the first.
    expected = [0.0, 0.0, 0.5, *(after(batch / 6) for batch in range(5))]
    assert rates == pytest.approx([1e-3 * factor for factor in expected])


@pytest.mark.parametrize("name", ["adamw", "decoupled_adamw"])
def test_the_optimizer_is_the_one_that_the_recipe_describes(name: str) -> None:
    """`weight_decay` means the same in both: without a gradient a step makes weights smaller by the rate times it."""
    recipe = tiny(
        f"optimizer={{name: {name}, betas: [0.8, 0.95], eps: 1.0e-6, weight_decay: 0.5}}", "learning_rate=1e-2"
    )
    layer = torch.nn.Linear(3, 3)
    optimizer, before = training.build_optimizer(recipe, layer), layer.weight.detach().clone()
    group = optimizer.param_groups[0]
    assert (group["lr"], group["betas"], group["eps"]) == (1e-2, (0.8, 0.95), 1e-6)
    for parameter in layer.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    torch.testing.assert_close(layer.weight.detach(), before * (1 - 1e-2 * 0.5))


def test_a_resumed_epoch_has_its_own_masks(tmp_path, monkeypatch) -> None:
    """Masks are drawn anew in each epoch, and Composer tells nobody which one it goes on with."""
    monkeypatch.setattr(measure, "_REPORT_EVERY", 0.0)
    recipe = tiny("task.objective=mlm", "duration=2ep", "evaluate=false")
    whole, signalled = run(recipe), []

    def interrupt(progress) -> None:
        if progress.phase == "train" and progress.step >= 10 and not signalled:
            signalled.append(progress.step)
            os.kill(os.getpid(), signal.SIGINT)

    first = run(recipe, save=tmp_path, report=interrupt, checkpoint_interval="1ba")
    assert first.status == "interrupted" and 8 < first.steps < 16, "in the second epoch"
    second = run(recipe, save=tmp_path, resume=True, checkpoint_interval="1ba")
    assert first.losses + second.losses == whole.losses  # bit for bit


def test_the_order_of_samples_is_the_seeds() -> None:
    recipe = tiny()
    task = build_task(recipe.task, recipe.model, seed=1)
    orders = [[*training.build_loader(recipe, task, seed, train=True).sampler] for seed in (1, 1, 2)]
    assert orders[0] == orders[1] != orders[2] and sorted(orders[2]) == list(range(64))
    evaluated = [[*training.build_loader(recipe, task, seed, train=False).sampler] for seed in (1, 2)]
    assert evaluated == [list(range(16))] * 2


@pytest.mark.parametrize("ranks", [1, 2])
def test_tokens_and_flops_of_mlm_are_those_of_all_ranks(ranks: int, monkeypatch) -> None:
    """The samples that are counted are of all ranks already; of a sample's 32 tokens the head predicts 15 %."""

    monkeypatch.setattr("composer_speedups.training.run_result.summed", lambda sums: sums * ranks)
    found = run(load_recipe("demo/fp32", [*FULL, "task.objective=mlm"]))
    assert found.real_tokens_per_second == pytest.approx(ranks * 32 * found.samples_per_second)
    layer, head = 4 * 32**2 + 2 * 32 * 64, 32**2 + 32 * 256
    sample = 6 * 32 * 2 * layer + 12 * 2 * 32 * 32**2 + 6 * 0.15 * 32 * head
    assert found.model_flops_per_second == pytest.approx(ranks * sample * found.samples_per_second)


def test_a_long_training_keeps_no_more_for_each_step_than_a_few_numbers(monkeypatch) -> None:
    """What lies on the device is read and dropped on the way: a million steps of it would count as the model's."""
    held, made = [], []

    def watched(*arguments, make=measure.Measurement, **keywords):
        measurement = make(*arguments, **keywords)
        made.append(measurement)
        end = measurement.batch_end
        monkeypatch.setattr(
            measurement,
            "batch_end",
            lambda *given: (end(*given), held.append(max(len(measurement._ticks), len(measurement._lengths)))),
        )
        return measurement

    monkeypatch.setattr(training, "Measurement", watched)
    recipe = load_recipe("demo/fp32", [*FULL, "duration=2ep"])
    whole = run(recipe)
    monkeypatch.setattr(measure, "_KEPT", 2)
    held.clear()
    found = run(recipe)
    assert found.steps == len(found.step_seconds) == len(held) == 16 and max(held) <= 4
    assert [made[1].tokens(), found.padding_share] == [made[0].tokens(), whole.padding_share]
    assert all(seconds > 0 for seconds in found.step_seconds)


def test_losses_that_are_not_finite_now_and_then_end_nothing(monkeypatch) -> None:
    """Loss scaling skips such a step: only many in a row say that nothing comes of it any more."""
    monkeypatch.setattr(measure, "_NAN_PATIENCE", 3)
    count, stopped, nan = SimpleNamespace(sample=0), [], math.nan
    state = SimpleNamespace(
        device=SimpleNamespace(_device=torch.device("cpu")), max_duration=None, dataloader_len=None, timestamp=count,
        previous_timestamp=count, total_loss_dict={}, evaluators=[1], stop_training=lambda: stopped.append(None),
    )  # fmt: skip
    measurement = measure.Measurement()
    measurement.fit_start(state, None)
    for loss in (nan, nan, 1.0, nan, nan, math.inf, 1.0):
        state.total_loss_dict["loss/train/total"] = loss
        measurement.batch_end(state, None)
        if stopped:
            break
    assert measurement.gave_up and len(measurement.losses) == 6 and state.evaluators == []


def test_evaluation_sees_every_sample_in_batches_of_its_own() -> None:
    recipe = tiny("task.eval_samples=13", "eval_batch_size=5")
    task = build_task(recipe.task, recipe.model, seed=1)
    for train, sizes in ((False, [5, 5, 3]), (True, [8] * 8)):
        assert [len(batch["labels"]) for batch in training.build_loader(recipe, task, 1, train=train)] == sizes


def test_a_pass_has_as_many_samples_as_a_microbatch(monkeypatch) -> None:
    sizes, stock = [], training.HuggingFaceModel.forward

    def forward(self, batch):
        sizes.append(len(batch["labels"]))
        return stock(self, batch)

    monkeypatch.setattr(training.HuggingFaceModel, "forward", forward)
    run(tiny("microbatch_size=2", "evaluate=false", "duration=2ba", "schedule.warmup=0ba"))
    assert sizes == [2] * 8
