from __future__ import annotations

import math
import random

import pytest
from scipy import stats

from composer_speedups.ablation.drift import drift
from composer_speedups.ablation.plan import interleave
from composer_speedups.ablation.quality import Margins, compare_quality
from composer_speedups.ablation.statistics import compare_speed, median_interval, pooled_noise


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


@pytest.mark.elsewhere
@pytest.mark.parametrize("count", [2, 3, 5, 10])
def test_the_same_recipe_twice_seldom_differs(count: int):
    """At 99 % confidence one in a hundred may; 300 tries with a rate of 1 % exceed 7 once in a hundred times."""
    rng = random.Random(count)
    claims = sum(
        compare_speed(lognormal(rng, count, 100, 0.03), lognormal(rng, count, 100, 0.03)).verdict
        in ("faster", "slower")
        for _ in range(300)
    )
    assert claims <= 7


def noisy_study(rng: random.Random, recipes: int, seeds: int) -> list[dict[int, float]]:
    """The same recipe many times on a bad machine: it slows down by a tenth, every twentieth run is disturbed by up
    to 40 %, the rest has tails heavier than a bell's (t with 3 degrees of freedom, scaled to 2 %)."""
    speeds: list[dict[int, float]] = [{} for _ in range(recipes)]
    runs = interleave([str(n) for n in range(recipes)], range(seeds))
    for run in runs:
        tail = rng.gauss(0, 1) / math.sqrt(rng.gammavariate(1.5, 2) / 3)
        disturbed = rng.uniform(0.1, 0.5) if rng.random() < 0.05 else 0.0
        slower = 0.1 * run.position / len(runs)
        speeds[int(run.recipe)][run.seed] = 100 * math.exp(0.02 * tail - disturbed - slower)
    return speeds


def of_all(speeds: list[dict[int, float]]):
    return pooled_noise({str(n): by_seed for n, by_seed in enumerate(speeds)})


def claims(rng: random.Random, recipes: int, seeds: int) -> int:
    speeds = noisy_study(rng, recipes, seeds)
    noise = of_all(speeds)
    return sum(
        compare_speed(s, speeds[0], noise and noise.of("0", str(n))).verdict != "no difference shown"
        for n, s in enumerate(speeds)
        if n
    )


def test_the_same_recipe_twice_twenty_times_differs_once_at_most():
    """Twenty A/A studies: two claims or more of them with a rate of 1 % have a chance of 1.7 %, 15 times over."""
    rng = random.Random(20)
    counts = [sum(claims(rng, 2, 3) for _ in range(20)) for _ in range(15)]
    assert sum(count > 1 for count in counts) <= 1, counts


@pytest.mark.elsewhere
@pytest.mark.parametrize("seeds", [3, 5])
def test_twenty_copies_in_one_study_differ_once_at_most(seeds: int):
    """Here all rows share one baseline: if it is off, all are. Still one study in ten at most may claim two."""
    rng = random.Random(seeds)
    counts = [claims(rng, 21, seeds) for _ in range(20)]
    assert sum(count > 1 for count in counts) <= 2, counts


def test_pooling_shows_what_three_seeds_alone_cannot():
    rng = random.Random(6)
    speeds = [lognormal(rng, 3, 100, 0.02) for _ in range(11)] + [lognormal(rng, 3, 118, 0.02)]
    alone = compare_speed(speeds[-1], speeds[0])
    pooled = compare_speed(speeds[-1], speeds[0], of_all(speeds).of("0", "11"))
    assert pooled.verdict == "faster"
    assert pooled.high / pooled.low < alone.high / alone.low


def test_a_noisy_row_keeps_a_wide_interval():
    quiet = [{s: 100.0 + 0.01 * s for s in range(3)} for _ in range(9)]
    noisy = {0: 90.0, 1: 130.0, 2: 105.0}
    noise = of_all([*quiet, noisy])
    assert noise.noisier == {"9"} and noise.of("0", "9").uneven and not noise.of("0", "8").uneven
    for shared in (noise, noise.of("0", "9")):  # averaged with the others', its own still counts
        found = compare_speed(noisy, quiet[0], shared)
        assert found.verdict == "no difference shown" and found.low < 0.9 and found.high > 1.3


@pytest.mark.parametrize("noise", [0.06, 0.10])
def test_a_row_noisier_than_the_others_is_not_judged_by_their_noise(noise: float):
    """Nine rows of one recipe at 2 %, but one at 6 or 10 %: averaged with the others' it claimed in 7 and 11 %."""
    rng = random.Random(11)
    claimed, tries = 0, 300
    for _ in range(tries):
        speeds = [lognormal(rng, 3, 100, 0.02) for _ in range(8)] + [lognormal(rng, 3, 100, noise)]
        found = of_all(speeds)
        claimed += compare_speed(speeds[-1], speeds[0], found.of("0", "8")).verdict != "no difference shown"
    assert claimed / tries <= 0.05


def test_drift_is_found_and_seldom_invented():
    rng = random.Random(7)
    names = [str(n) for n in range(6)]

    def study(slope: float, burden: float = 0.0) -> list[tuple[str, int, float, float]]:
        """Rounds that scatter by `burden` beside what each run does."""
        of_round = [rng.gauss(0, burden) for _ in range(5)]
        return [
            (
                r.recipe,
                r.seed,
                60.0 * r.position,
                math.exp(slope * r.position / 29 + of_round[r.seed] + rng.gauss(0, 0.01)),
            )
            for r in interleave(names, range(5))
        ]

    found = drift(study(-0.2))
    assert found is not None and found.shown
    # From the middle of the first round to that of the last are four fifths of the time.
    assert found.low < math.expm1(-0.2 * 24 / 29) < found.high
    assert found.change == pytest.approx(math.expm1(-0.2 * 24 / 29), abs=0.03)
    assert sum(drift(study(0.0)).shown for _ in range(200)) <= 6  # 2 expected
    assert sum(drift(study(0.0, burden=0.05)).shown for _ in range(200)) <= 6, "runs of a round are not independent"
    assert drift([("a", 0, 0.0, 1.0), ("b", 0, 1.0, 2.0)]) is None
    assert drift([("a", seed, 0.0, 1.0 + seed) for seed in range(5)]) is None
    assert drift([("a", seed, seed, 1.0 + seed) for seed in range(3)]) is None, "three rounds do not tell"


def test_interval_holds_the_true_ratio():
    rng = random.Random(1)
    inside = 0
    for _ in range(200):
        ratio = compare_speed(lognormal(rng, 4, 130, 0.02), lognormal(rng, 4, 100, 0.02))
        inside += ratio.low <= 1.3 <= ratio.high
    assert inside >= 194  # 198 expected, less 2.8 standard deviations


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


def test_two_seeds_have_no_interval():
    """A t of one degree of freedom made 0.00 to 1e8 of them, and pooled noise claims: of a spread seen once."""
    noise = of_all([{0: 1.0, 1: 1.001}, {0: 1.5, 1: 1.501}, {0: 1.2, 1: 1.201}])
    for measured in ({0: 150.0, 1: 190.0}, {0: 150.0, 1: 150.1}):
        found = compare_speed(measured, {0: 100.0, 1: 100.0}, noise)
        assert (found.low, found.high, found.verdict, found.seeds_needed) == (None, None, "not judged", 3)
        assert found.value == pytest.approx(sum(measured.values()) / 200) and "two seeds tell too little" in found.note


def test_only_common_seeds_count():
    assert compare_speed({0: 2.0, 1: 9.0}, {0: 1.0, 2: 1.0}).seeds == 1
    assert compare_speed({0: 2.0}, {1: 1.0}).verdict == "not judged"


def test_the_interval_of_a_median():
    assert median_interval([]) is None and median_interval([2.0]) == (2.0, 2.0, 2.0)
    assert median_interval([5.0, 1.0, 2.0, 3.0, 4.0]) == (3.0, 1.0, 5.0), "of five values it is their range"
    values = [float(n) for n in range(1, 16)]
    middle, low, high = median_interval(values) or (0, 0, 0)
    assert middle == 8.0 and 1.0 < low <= 6.0 and 10.0 <= high < 15.0
    rng = random.Random(3)
    intervals = [median_interval([rng.gauss(10, 1) for _ in range(9)]) for _ in range(200)]
    missed = sum(not i[1] <= 10 <= i[2] for i in intervals if i is not None)
    assert missed <= 20, "one in twenty of 200 may miss the true median, give or take three deviations"
    assert median_interval([float(n) for n in range(1, 10)]) == (5.0, 2.0, 8.0), "96.1 % by the binomial distribution"


def test_how_many_seeds_would_show_it():
    found = compare_speed({0: 1.00, 1: 1.06, 2: 1.06}, {0: 1.0, 1: 1.0, 2: 1.0})
    assert found.verdict == "no difference shown"
    # Mean of the logarithms 0.0388, deviation 0.0336: t(n-1) * 0.0336 / sqrt(n) < 0.0388 first at n = 12, where t of
    # 99 % is 3.106, and 0.876 more are there in four studies of five.
    assert found.seeds_needed == 12


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


def test_a_baseline_that_diverged_is_no_measure_of_quality():
    good = {s: {"finite": True, "final_loss": 4.0, "eval_accuracy": 0.1} for s in range(3)}
    lost = {s: {"finite": False, "final_loss": None, "eval_accuracy": None} for s in (1, 2)}
    found = compare_quality(good, {0: {"finite": True, "final_loss": 1.0, "eval_accuracy": 0.9}} | lost)
    assert (found.verdict, found.stable) == ("not judged", None) and "seed 1, 2" in found.note


def test_what_only_one_seed_measured_is_open():
    base = {s: {"finite": True, "final_loss": 0.5, "eval_accuracy": 0.9} for s in range(3)}
    part = base | {s: base[s] | {"eval_accuracy": None} for s in (1, 2)}
    found = compare_quality(part, base)
    assert (found.verdict, found.stable) == ("quality not shown to hold", None)
    assert found.note == "accuracy was measured with one seed only; about 3 seeds would tell"


def test_how_many_seeds_would_show_a_loss_of_quality():
    """Worse by four points in the mean, where one is allowed: more of the same show that it is lost."""
    base = {s: {"finite": True, "eval_accuracy": 0.9} for s in range(9)}
    found = [0.90, 0.84, 0.82, 0.86, 0.88, 0.84, 0.86, 0.87, 0.85]
    worse = {s: {"finite": True, "eval_accuracy": accuracy} for s, accuracy in enumerate(found)}
    few = compare_quality({s: worse[s] for s in range(3)}, base)
    assert few.verdict == "quality not shown to hold" and few.seeds_needed is not None and few.seeds_needed <= 10
    assert compare_quality(worse, base).verdict == "unstable"


@pytest.mark.parametrize(("count", "why"), [(1, "one seed tells nothing"), (2, "two seeds tell too little")])
def test_few_seeds_leave_quality_open(count: int, why: str):
    run = {seed: {"finite": True, "final_loss": 0.5, "eval_accuracy": 0.9} for seed in range(count)}
    found = compare_quality(run, run)
    assert (found.verdict, found.stable) == ("not judged", None)
    assert found.note == f"{why} about the spread: run 3 or more"


def test_what_the_baseline_measured_and_the_row_did_not_is_open():
    base = {s: {"finite": True, "final_loss": 0.5, "eval_accuracy": 0.9} for s in range(4)}
    without = {s: run | {"eval_accuracy": None} for s, run in base.items()}
    found = compare_quality(without, base)
    assert (found.verdict, found.stable) == ("quality not shown to hold", None)
    assert found.note.startswith("accuracy was not measured")
    part = base | {0: without[0]}
    assert compare_quality(part, base).note.startswith("accuracy was measured with 3 of 4 seeds only")
    assert compare_quality(without, without).verdict == "quality holds", "where none asks for it, the loss tells"


def test_regression_is_judged_by_what_it_explains():
    def runs(r2: float) -> dict[int, dict[str, object]]:
        return {s: {"finite": True, "final_loss": 0.1, "eval_r2": r2 + s / 1e4, "losses": [1.0] * 3} for s in range(5)}

    assert compare_quality(runs(0.801), runs(0.8)).note.startswith("R² worse by at most 0, margin 0.01; final loss")
    assert compare_quality(runs(0.77), runs(0.8)).note == "R² worse by 0.03, margin 0.01"
    # Squared errors of labels between 0 and 0.1, of which a fall by 0.0008 is most of what there was to learn.
    small = {s: {"finite": True, "final_loss": 1e-4, "losses": [9e-4] * 3, "loss_unit": 8e-4} for s in range(3)}
    worse = {s: run | {"final_loss": 3e-4} for s, run in small.items()}
    assert compare_quality(small, small).verdict == "quality holds"
    assert compare_quality(worse, small).note == "final loss worse by 0.0002, margin 1.6e-05"
    found = compare_quality(runs(0.009), runs(0.009))
    assert (found.verdict, found.stable) == ("not judged", None)
    assert "the baseline's R² is 0.0092: hardly more than always answering the mean would have" in found.note


def test_a_third_of_what_was_learnt_is_no_small_loss():
    """Loss from 2.30 to 2.07, and to 2.15 only: within 5 % of 2.07, and a third of the way not gone."""
    rng = random.Random(8)
    learnt = {s: {"finite": True, "final_loss": 2.07 + rng.gauss(0, 0.002), "losses": [2.30] * 3} for s in range(5)}
    for more, verdict in ((0.08, "unstable"), (0.03, "quality holds")):
        worse = {s: run | {"final_loss": run["final_loss"] + more} for s, run in learnt.items()}
        found = compare_quality(worse, learnt)
        assert found.worse_by["final_loss"]["margin"] == pytest.approx(0.046, abs=0.001), "a fifth of what was learnt"
        assert found.verdict == verdict


def test_nothing_measured_is_nothing_judged():
    run = {s: {"finite": True, "final_loss": None, "eval_accuracy": float("nan")} for s in range(3)}
    assert compare_quality(run, run).stable is None


def with_losses(runs: dict[int, dict], first: float) -> dict[int, dict]:
    return {seed: run | {"losses": [first] * 3 + [run["final_loss"]]} for seed, run in runs.items()}


def test_what_learnt_nothing_is_not_said_to_keep_its_quality():
    """Everything that stays at the loss of guessing is as good as the baseline: that is no quality to keep."""
    rng = random.Random(1)
    stuck, same = (with_losses(quality(rng, 5, 0.1, 2.29), 2.30) for _ in range(2))
    found = compare_quality(same, stuck)
    assert (found.verdict, found.stable) == ("not judged", None) and "fell by 0.0" in found.note
    learnt = with_losses(quality(rng, 5, 0.1, 2.29), 3.0)
    assert compare_quality(same, learnt).verdict == "quality holds"
    wild = with_losses(quality(rng, 5, 0.1, 5.0), 2.30)
    assert compare_quality(wild, stuck).verdict == "unstable", "worse is worse, wherever the baseline stands"


@pytest.mark.parametrize(
    ("accuracy", "majority", "verdict"),
    [
        (0.900, 0.900, "not judged"),  # ln 2 -> the entropy of nine to one: the classes' shares, and nothing else
        (0.905, 0.900, "not judged"),
        (0.930, 0.900, "quality holds"),
        (0.998, 0.995, "quality holds"),  # half a point of a hundred is all there is to win
        (0.996, 0.995, "not judged"),
        (0.900, None, "quality holds"),  # measured before this was kept
    ],
)
def test_what_learnt_only_how_frequent_the_classes_are_keeps_no_quality(accuracy, majority, verdict: str):
    fell = {"finite": True, "losses": [0.693] * 3 + [0.325], "final_loss": 0.325, "eval_accuracy": accuracy}
    runs = {seed: fell | {"eval_majority": majority} for seed in range(3)}
    found = compare_quality(runs, runs)
    assert found.verdict == verdict
    if verdict == "not judged":
        assert found.note == (
            f"the baseline's accuracy is hardly more than the {majority:.3g} of always answering the most frequent "
            "class: train longer to tell"
        )


def test_more_seeds_than_anybody_runs_are_named():
    rng = random.Random(2)
    one, other = ({s: 100 * math.exp(rng.gauss(0, 0.3)) for s in range(3)} for _ in range(2))
    assert "more than 30 seeds would show it" in compare_speed(one, other).note


def test_the_bound_of_quality_is_that_of_95_percent_on_one_side():
    """Seven of nine seeds lose nothing, so that the median's bootstrap is narrow and Student's t decides."""
    base = {s: {"finite": True, "final_loss": 1.0} for s in range(9)}
    own = base | {0: {"finite": True, "final_loss": 0.997}, 8: {"finite": True, "final_loss": 1.003}}
    high = compare_quality(own, base).worse_by["final_loss"]["high"]
    assert high == pytest.approx(1.8595 * 0.0015 / 3, rel=1e-3), "t of 95 % with 8 degrees of freedom"


def test_the_interval_of_drift_is_that_of_99_percent():
    logs = [0.0, 0.02, -0.01, 0.03, 0.02]
    found = drift([("one", n, 60.0 * n, math.exp(log)) for n, log in enumerate(logs)])
    line = stats.linregress([n / 4 for n in range(5)], logs)
    half = 5.8409 * line.stderr  # t of 99 % with 3 degrees of freedom
    assert found is not None and found.change == pytest.approx(math.expm1(line.slope))
    assert (found.low, found.high) == pytest.approx(
        (math.expm1(line.slope - half), math.expm1(line.slope + half)), rel=1e-4
    )


def test_every_second_pair_of_rounds_starts_from_the_middle() -> None:
    order = "".join(run.recipe for run in interleave("abcd", range(6)))
    assert [order[i : i + 4] for i in range(0, 24, 4)] == ["abcd", "dcba", "cdab", "badc", "abcd", "dcba"]
