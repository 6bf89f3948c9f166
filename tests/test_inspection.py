"""A look inside after a run: it disturbs no number, and memory is what was predicted."""

from __future__ import annotations

import pytest
from test_training import tiny

from composer_speedups import inspection
from composer_speedups.memory import KINDS
from composer_speedups.training import run


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
    assert set(result.memory) == set(KINDS) and set(result.memory_predicted) == {*KINDS, "peak"}
    for kind in KINDS:
        assert result.memory_predicted[kind] == pytest.approx(result.memory[kind], rel=0.1), kind
    assert sum(result.step_profile.values()) > 0 and "optimizer" in result.step_profile
    assert not any("cannot be told" in warning for warning in result.warnings)


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
