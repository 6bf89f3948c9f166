"""Which of a run's figures a row is judged by."""

from __future__ import annotations

import pytest

from composer_speedups import registry
from composer_speedups.ablation.rows import REGROUPING, build_rows
from composer_speedups.ablation.store import Run
from composer_speedups.speedup import Stage


def run(recipe: str, seed: int, samples: float, tokens: float | None) -> Run:
    result = {"samples_per_second": samples, "real_tokens_per_second": tokens, "finite": True, "final_loss": 1.0}
    return Run(0, recipe, seed, 0, "ok", result=result)


@pytest.mark.parametrize("tokens", [True, False], ids=["tokens", "no tokens"])
def test_batches_of_like_lengths_are_judged_by_their_tokens(tokens: bool) -> None:
    recipes = {
        "base": {},
        "grouped": {"speedups": {"length_grouped_batches": {}}},
        "other": {"speedups": {"fused_adamw": {}}},
    }
    runs = []
    for seed in (1, 2, 3):
        lucky = 100.0 * seed  # which lengths came up
        runs += [
            run("base", seed, 100.0, 10_000.0 + seed if tokens else None),
            run("grouped", seed, lucky, 20_000.0 + seed),
            run("other", seed, 150.0, 14_000.0),
        ]
    rows = {row["recipe"]: row for row in build_rows(recipes, runs, "base")}
    assert rows["grouped"]["speedup"] == pytest.approx(2.0, rel=1e-3)
    assert rows["grouped"]["speed_verdict"] == ("faster" if tokens else "no difference shown")
    assert rows["other"]["speedup"] == pytest.approx(1.5)  # by samples, as its batches are the baseline's


def test_speed_ups_that_regroup_samples_are_known() -> None:
    classes = {key: registry.speedup_class(key) for key in registry.keys()}
    assert {k for k, c in classes.items() if c.stage is Stage.DATA and c.slot == "batches"} == REGROUPING
