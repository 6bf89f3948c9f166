"""What two speed-ups do to each other, on speeds whose interaction is known."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

from composer_speedups.ablation.interactions import interactions, sentence
from composer_speedups.ablation.plans import equal_batch, expand, root
from composer_speedups.ablation.store import Run
from composer_speedups.recipes import load_recipe

FIRST, SECOND, BASE = "demo/fp32+foreach_adamw", "demo/fp32+mixed_precision", "demo/fp32"
PAIR = f"{FIRST}+mixed_precision"
NAMES = {"base": BASE, "first": FIRST, "second": SECOND, "pair": PAIR}


def planned(*overrides: str) -> dict[str, dict[str, Any]]:
    """The rows that `--plan pairs` makes of demo/bf16."""
    recipe = load_recipe("demo/bf16", overrides, check_arguments=False)
    rows, baseline = expand("pairs", [recipe], root(recipe))
    assert baseline == BASE and [row.name for row in rows] == [BASE, FIRST, SECOND, PAIR]
    return {row.name: row.to_dict() for row in rows}


def measured(
    speeds: dict[str, float], seeds: int = 3, noise: float = 0.0, chance: int = 0, key: str = "samples_per_second"
) -> list[Run]:
    """Runs whose rounds differ by much: only what is paired by seed can tell a small interaction."""
    rng = random.Random(chance)
    runs = []
    for seed in range(seeds):
        burden = 0.5 + rng.random()
        for name, speed in speeds.items():
            value = speed * burden * math.exp(rng.gauss(0, noise))
            runs.append(Run(len(runs), name, seed, 0, "ok", result={key: value}))
    return runs


def speeds(pair: float, **others: float) -> dict[str, float]:
    return {NAMES[k]: v for k, v in {"base": 100.0, "first": 120.0, "second": 150.0, "pair": pair, **others}.items()}


@pytest.mark.parametrize(
    ("pair", "verdict"),
    [
        (1.2 * 1.5 * 1.1, "more than their product"),
        (1.2 * 1.5 * 0.9, "less than their product"),
        (1.2 * 1.5, "no interaction shown"),
    ],
)
def test_the_pair_is_set_against_the_product(pair: float, verdict: str):
    (found,) = interactions(planned(), measured(speeds(100 * pair), seeds=5, noise=0.005), BASE)
    assert (found.pair, found.first, found.second, found.verdict) == (PAIR, FIRST, SECOND, verdict)
    assert found.value == pytest.approx(pair / 1.8, rel=0.03)
    assert found.low is not None and found.high is not None and found.low < found.value < found.high
    text = sentence(found)
    assert text.startswith(f"fp32+foreach_adamw+mixed_precision: {found.value:.2f} times the product of what ")
    assert f"(99 % interval {found.low:.2f} to {found.high:.2f}): {verdict}" in text


def test_the_interval_holds_the_truth():
    """At 99 % it may miss once in a hundred; noise that is counted for two runs, not four, misses more often."""
    missed = 0
    for chance in range(60):
        (found,) = interactions(planned(), measured(speeds(180.0), noise=0.02, chance=chance), BASE)
        missed += found.verdict != "no interaction shown"
    assert missed <= 2


def test_one_seed_is_not_judged():
    (found,) = interactions(planned(), measured(speeds(250.0), seeds=1), BASE)
    assert (found.verdict, found.low, found.high) == ("not judged", None, None)
    assert found.value == pytest.approx(250 / 180)
    assert sentence(found).endswith("bring: not judged; one seed tells nothing about the spread: run 3 or more")


def test_only_seeds_with_all_four_runs_count():
    runs = measured(speeds(200.0), seeds=3)
    gone = {(FIRST, 0), (BASE, 1)}
    (found,) = interactions(planned(), [r for r in runs if (r.recipe, r.seed) not in gone], BASE)
    assert found.verdict == "not judged" and "one seed" in found.note
    assert interactions(planned(), [r for r in runs if r.recipe != SECOND], BASE) == []
    for run in runs:
        if run.recipe == PAIR:
            run.status = "failed"
    assert interactions(planned(), runs, BASE) == []


@pytest.mark.parametrize("far", [(), (0, 1, 2), (0, 1, 2, 3, 4)], ids=["none", "three", "all"])
def test_runs_made_another_day_do_not_count(far: tuple[int, ...]) -> None:
    """A machine half as fast again on the day when the pair was made once more."""
    runs = measured(speeds(180.0), seeds=5)
    for number, run in enumerate(runs):
        another_day = run.recipe == PAIR and run.seed in far
        run.started = 1e9 + 100 * number + 86_400 * another_day
        run.finished = run.started + 60
        run.result["samples_per_second"] *= 1.5 if another_day else 1.0
    found = interactions(planned(), runs, BASE)
    if len(far) == 5:
        assert found == []
    else:
        assert found[0].value == pytest.approx(1.0)
        assert found[0].verdict == ("not judged" if far else "no interaction shown")
        note = "not made in one round (seed 0, 1, 2): compare them in another --out"
        assert sentence(found[0]).endswith(note) == bool(far)


def test_a_pair_that_regroups_is_judged_by_its_tokens():
    recipes = planned()
    for name in (SECOND, PAIR):
        recipes[name]["speedups"]["length_grouped_batches"] = recipes[name]["speedups"].pop("mixed_precision")
    runs = measured(speeds(220.0))
    for run in runs:
        lucky = 10.0**run.seed if run.recipe == PAIR else 1.0  # which lengths came up
        run.result["real_tokens_per_second"] = 60 * run.result["samples_per_second"]
        run.result["samples_per_second"] *= lucky
    (found,) = interactions(recipes, runs, BASE)
    assert found.value == pytest.approx(220 / 180) and found.verdict == "more than their product"
    for run in runs:
        if run.recipe == BASE:
            del run.result["real_tokens_per_second"]
    (found,) = interactions(recipes, runs, BASE)
    assert found.value == pytest.approx(10 * 220 / 180), "one unit for all four"


def test_another_batch_is_not_judged_but_the_row_at_the_baseline_s_is():
    """What the batch brings is in the pair once and in the product twice."""
    recipe = load_recipe("demo/bf16", check_arguments=False)
    rows, _ = expand("pairs", [recipe], root(recipe))
    rows = [rows[0], *(row.model_copy(update={"batch_size": 64}) for row in rows[1:])]  # as tuning may
    gain = {FIRST: 240.0, SECOND: 300.0, PAIR: 360.0, BASE: 100.0}
    (found,) = interactions({r.name: r.to_dict() for r in rows}, measured(gain), BASE)
    assert (found.verdict, found.low) == ("not judged", None) and found.value == pytest.approx(0.5)
    assert sentence(found).endswith("Add --equal-batch")
    both = equal_batch(rows, rows[0])
    gain |= {f"{name}.equal_batch": speed for name, speed in speeds(180.0).items() if name != BASE}
    (found,) = interactions({r.name: r.to_dict() for r in both}, measured(gain), BASE)
    assert found.pair == f"{PAIR}.equal_batch" and found.first == f"{FIRST}.equal_batch"
    assert found.value == pytest.approx(1.0) and found.verdict == "no interaction shown"


def test_tuned_rows_are_judged_at_their_own_batches():
    recipes = {f"{name}.tuned": recipe for name, recipe in planned().items()}
    for batch, recipe in enumerate(recipes.values(), start=40):
        recipe["batch_size"] = batch
    runs = measured({f"{name}.tuned": speed for name, speed in speeds(220.0).items()})
    (found,) = interactions(recipes, runs, f"{BASE}.tuned")
    assert (found.pair, found.first) == (f"{PAIR}.tuned", f"{FIRST}.tuned")
    assert found.verdict == "more than their product"


def test_studies_without_pairs_have_none():
    recipe = load_recipe("demo/compile", check_arguments=False)
    for plan in ("one-at-a-time", "leave-one-out", "ladder"):
        rows, baseline = expand(plan, [recipe], root(recipe))
        assert interactions({r.name: r.to_dict() for r in rows}, measured({r.name: 1.0 for r in rows}), baseline) == []


def test_an_interaction_has_the_noise_of_four_runs():
    """What scatters in its two speed-ups alone cancels out here, so that the width is the study's noise and no more."""
    scatter = {(FIRST, 0): 0.02, (FIRST, 1): -0.02, (SECOND, 0): -0.02, (SECOND, 1): 0.02}
    runs = measured(speeds(180.0))
    for one in runs:
        one.result["samples_per_second"] *= math.exp(scatter.get((one.recipe, one.seed), 0.0))
    (found,) = interactions(planned(), runs, BASE)
    # Squares of 4 * 0.02^2 in 6 degrees of freedom; 6 of 8 parts are it, four times; over 3 seeds. Two rows scatter
    # more than the others: t of 99 % with 4 degrees of freedom.
    half = 4.604 * math.sqrt(6 / 8 * 4 * (4 * 0.02**2 / 6) / 3)
    assert found.value == pytest.approx(1.0) and found.pair == PAIR
    assert (math.log(found.low), math.log(found.high)) == pytest.approx((-half, half), rel=1e-3)
