"""A look inside after a run: it disturbs no number, and memory is what was predicted."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from tiny_recipe import tiny

from composer_speedups.measurement import inspection
from composer_speedups.measurement.results import MEMORY_KINDS
from composer_speedups.training.run import run


@pytest.mark.parametrize(
    "recipe",
    [
        {"name": "demo/fp32"},
        {"name": "demo/fastest"},
        {"name": "demo/bf16", "overrides": ("task.objective=mlm", "speedups.masked_token_head={}")},
        {"name": "demo/adamw_8bit", "overrides": ("microbatch_size=2",)},
    ],
    ids=["fp32", "fastest", "mlm", "8 bit, microbatches"],
)
def test_memory_is_what_was_predicted(recipe: dict):
    result = run(tiny(*recipe.get("overrides", ()), name=recipe["name"]), inspect=True)
    kinds = set(MEMORY_KINDS) - {"buckets"}  # which only several ranks have
    assert set(result.memory) == kinds and set(result.memory_predicted) == {*kinds, "peak"}
    for kind in kinds:
        assert result.memory_predicted[kind] == pytest.approx(result.memory[kind], rel=0.1), kind
    assert sum(result.step_profile.values()) > 0 and "optimizer" in result.step_profile
    assert not any("cannot be told" in warning for warning in result.warnings)


@pytest.mark.parametrize(
    ("name", "overrides", "expected"),
    [
        ("demo/fp32", (), ("torch AdamW (for-loop)", False, "flash", "float32")),
        (
            "demo/bf16",
            ("speedups={foreach_adamw: null, fused_adamw: {}}",),
            ("torch AdamW (fused)", True, "flash", "float32"),  # a stock norm ends the encoder: autocast widens it
        ),
        ("demo/fastest", (), ("torch AdamW (fused)", True, "per sequence", "bfloat16")),
        ("demo/fp32", ("optimizer.name=decoupled_adamw",), ("composer DecoupledAdamW", None, "flash", "float32")),
        ("demo/fp32", ("model.attn_implementation=eager",), ("torch", False, "no fused", "float32")),
    ],
    ids=["fp32", "fused bf16", "unpadded", "decoupled", "eager attention"],
)
def test_a_run_says_what_it_ran_with(name: str, overrides: tuple[str, ...], expected: tuple):
    optimizer, fused, attention, dtype = expected
    result = run(tiny("duration=3ba", "evaluate=false", *overrides, name=name), inspect=True)
    assert not any("cannot be told" in warning for warning in result.warnings)
    facts = result.as_it_ran
    assert facts["optimizer"].startswith(optimizer) and facts["attention"].startswith(attention)
    assert facts.get("fused") is fused and facts["encoder_output"] == dtype
    assert not torch.autograd._profiler_enabled()
    json.dumps(facts)


def test_a_compiled_run_says_it_without_a_hook():
    ran = inspection.AsItRan(None)
    model = torch.nn.Linear(2, 2)
    state = SimpleNamespace(optimizers=[torch.optim.SGD(model.parameters())], algorithms=[])
    x = torch.ones(1, 1, 4, 8)
    ran.before_forward(state, None)
    torch.nn.functional.scaled_dot_product_attention(x, x, x)
    ran.after_forward(state, None)
    assert ran.facts["attention"] == "flash" and "encoder_output" not in ran.facts
    ran.before_forward(state, None)
    assert not torch.autograd._profiler_enabled(), "one look is enough"


def test_what_a_compiler_ran_is_not_taken_for_the_run(monkeypatch: pytest.MonkeyPatch):
    seconds = iter([0.0, 2.0, 2.0, 2.0])
    monkeypatch.setattr(inspection, "compile_statistics", lambda: {"compile_seconds": next(seconds)})
    ran = inspection.AsItRan(None)
    state = SimpleNamespace(optimizers=[torch.optim.SGD([torch.ones(1)])], algorithms=[])
    for known in (False, True):
        ran.before_forward(state, None)
        ran.after_forward(state, None)
        assert ("attention" in ran.facts) is known


def test_the_numbers_are_those_of_a_run_without_it():
    plain, inspected = run(tiny("duration=6ba")), run(tiny("duration=6ba"), inspect=True)
    assert inspected.losses == plain.losses and inspected.eval_loss == plain.eval_loss
    assert len(inspected.step_seconds) == inspected.steps == plain.steps == 6
    assert plain.memory == plain.step_profile == {}


def test_what_goes_wrong_there_costs_the_run_nothing(monkeypatch: pytest.MonkeyPatch):
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no shapes today")

    monkeypatch.setattr(inspection, "predict", fail)
    result = run(tiny(), inspect=True)
    assert result.status == "ok" and result.memory and not result.memory_predicted
    assert any("cannot be told: RuntimeError: no shapes today" in warning for warning in result.warnings)


def test_of_several_ranks_the_one_that_fails_ends_all(monkeypatch: pytest.MonkeyPatch):
    """It is waited for: an error that was kept would be a hang."""

    def fail(*_: object) -> None:
        raise RuntimeError("rank 1 has no memory")

    monkeypatch.setattr(inspection, "_more_steps", fail)
    monkeypatch.setattr(inspection, "dist", SimpleNamespace(get_world_size=lambda: 2))
    with pytest.raises(RuntimeError, match="rank 1 has no memory"):
        run(tiny("duration=3ba", "evaluate=false"), inspect=True)
    assert not torch.autograd._profiler_enabled()


def test_a_failed_step_leaves_nothing_counting(monkeypatch: pytest.MonkeyPatch):
    model = torch.nn.Linear(2, 2)
    probe, state = inspection.MemoryProbe(), SimpleNamespace(model=model, batch=None)
    kept = []  # what it goes on counting

    def count(self, tensor):
        kept.append(tensor)
        return tensor

    monkeypatch.setattr(inspection.SavedForBackward, "_pack", count)
    for _ in range(2):  # a forward pass that ran out of memory is tried again
        probe.before_forward(state, None)
    assert torch.ones(9, requires_grad=True).exp().requires_grad and len(kept) == 1
    probe.close(state, None)
    torch.ones(9, requires_grad=True).exp()
    assert len(kept) == 1


def test_a_look_that_fails_stops_all_that_looks(monkeypatch: pytest.MonkeyPatch):
    stopped = []
    for watcher in (inspection.MemoryProbe, inspection.StepProfiler, inspection.AsItRan):
        monkeypatch.setattr(watcher, "stop", lambda self: stopped.append(type(self).__name__))

    def fail(*_: object, **__: object) -> None:
        stopped.clear()
        raise RuntimeError("out of luck")

    monkeypatch.setattr(inspection, "_more_steps", fail)
    result = run(tiny(), inspect=True)
    assert any("out of luck" in warning for warning in result.warnings)
    assert sorted(set(stopped)) == ["AsItRan", "MemoryProbe", "StepProfiler"]
