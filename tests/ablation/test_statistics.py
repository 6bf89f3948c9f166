from __future__ import annotations

import math
import random

import pytest

from composer_speedups.ablation.statistics import Margins, compare_quality, compare_speed


def lognormal(rng: random.Random, count: int, speed: float, noise: float) -> dict[int, float]:
    return {seed: speed * math.exp(rng.gauss(0, noise)) for seed in range(count)}


def quality(rng: random.Random, count: int, accuracy: float, loss: float) -> dict[int, dict[str, float]]:
    return {
        seed: {
            "finite": True,
            "eval_accuracy": accuracy + rng.gauss(0, 0.003),
            "final_loss": loss + rng.gauss(0, 0.003),
        }
        for seed in range(count)
    }


@pytest.mark.parametrize("count", [2, 3, 5, 10])
def test_the_same_recipe_twice_seldom_differs(count: int):
    """At 95 % confidence one in twenty may; 300 tries with a rate of 5 % exceed 24 once in twenty times."""
    rng = random.Random(count)
    claims = sum(
        compare_speed(lognormal(rng, count, 100, 0.03), lognormal(rng, count, 100, 0.03)).verdict
        != "no difference shown"
        for _ in range(300)
    )
    assert claims <= 24


def test_interval_holds_the_true_ratio():
    rng = random.Random(1)
    inside = 0
    for _ in range(200):
        ratio = compare_speed(lognormal(rng, 4, 130, 0.02), lognormal(rng, 4, 100, 0.02))
        inside += ratio.low <= 1.3 <= ratio.high
    assert inside >= 183  # 190 expected, less 2.3 standard deviations


@pytest.mark.parametrize(("speed", "verdict"), [(130, "faster"), (75, "slower"), (100.1, "no difference shown")])
def test_verdict_of_speed(speed: float, verdict: str):
    rng = random.Random(2)
    found = compare_speed(lognormal(rng, 5, speed, 0.02), lognormal(rng, 5, 100, 0.02))
    assert found.verdict == verdict
    assert found.low <= found.value <= found.high


def test_what_burdens_a_round_burdens_both():
    """A machine that gets slower from round to round does not hide a difference: seeds are paired."""
    drift = {0: 1.0, 1: 0.8, 2: 0.5, 3: 0.4}
    found = compare_speed({s: 110 * d for s, d in drift.items()}, {s: 100 * d for s, d in drift.items()})
    assert found.verdict == "faster" and found.value == pytest.approx(1.1)


def test_one_seed_is_not_judged_but_measured():
    found = compare_speed({0: 150.0}, {0: 100.0})
    assert (found.value, found.low, found.high, found.verdict, found.seeds_needed) == (1.5, None, None, "not judged", 3)


def test_only_common_seeds_count():
    assert compare_speed({0: 2.0, 1: 9.0}, {0: 1.0, 2: 1.0}).seeds == 1
    assert compare_speed({0: 2.0}, {1: 1.0}).verdict == "not judged"


def test_how_many_seeds_would_show_it():
    found = compare_speed({0: 1.00, 1: 1.06, 2: 1.06}, {0: 1.0, 1: 1.0, 2: 1.0})
    assert found.verdict == "no difference shown"
    # Mean of the logarithms 0.0388, deviation 0.0336: t(n-1) * 0.0336 / sqrt(n) < 0.0388 first at n = 6.
    assert found.seeds_needed == 6


@pytest.mark.parametrize(
    ("accuracy", "loss", "verdict", "stable"),
    [
        (0.900, 0.50, "quality holds", True),
        (0.920, 0.30, "quality holds", True),  # better is never worse
        (0.840, 0.50, "unstable", False),
        (0.900, 0.70, "unstable", False),
        (0.890, 0.50, "quality not shown to hold", None),  # at the margin
    ],
)
def test_verdict_of_quality(accuracy: float, loss: float, verdict: str, stable: bool | None):
    rng = random.Random(3)
    found = compare_quality(quality(rng, 5, accuracy, loss), quality(rng, 5, 0.9, 0.5), Margins(accuracy=0.01))
    assert (found.verdict, found.stable) == (verdict, stable), found.note
    assert found.note


def test_a_loss_of_quality_passes_once_in_twenty_at_most():
    """A recipe that is worse by exactly the margin is told to hold in at most 5 % of the tries."""
    rng = random.Random(4)
    margins = Margins(accuracy=0.01, loss=100.0)
    held = sum(
        compare_quality(quality(rng, 4, 0.89, 0.5), quality(rng, 4, 0.9, 0.5), margins).stable is True
        for _ in range(300)
    )
    assert held <= 24


def test_a_loss_that_is_not_finite_is_unstable_whatever_else():
    good = {0: {"finite": True, "final_loss": 0.5, "eval_accuracy": 0.9}}
    bad = {0: {"finite": False, "final_loss": None, "eval_accuracy": 0.9}}
    found = compare_quality(bad, good)
    assert (found.verdict, found.stable) == ("unstable", False)


def test_one_seed_leaves_quality_open():
    run = {0: {"finite": True, "final_loss": 0.5, "eval_accuracy": 0.9}}
    found = compare_quality(run, run)
    assert (found.verdict, found.stable) == ("not judged", None)


def test_nothing_measured_is_nothing_judged():
    run = {s: {"finite": True, "final_loss": None, "eval_accuracy": float("nan")} for s in range(3)}
    assert compare_quality(run, run).stable is None
