"""What the measured numbers allow to be said, and what they do not.

Runs with the same seed stand side by side: they were made in the same round, so what the machine did in
that round burdens both, and their ratio (or difference) is free of it.

An interval is the wider of two: the bootstrap of the median, which assumes nothing but is too narrow for
a handful of seeds (of three values it can never leave their range), and Student's t, which is honest about
few seeds but assumes a bell curve (of the logarithms, for ratios).

Speeds are judged at 99 %, not 95 %: a study compares a dozen recipes, and who compares twenty with
themselves at 95 % expects one false claim and gets two or more in a quarter of the studies (26 %); at 99 %
in 1.7 %. What that costs with three seeds (Student's t goes from 4.3 to 9.9 standard errors) is won back
by pooling: machine noise is much the same for all rows, so each row's own variance, of two degrees of
freedom, is averaged with that of the whole study, weighted as `_PRIOR` degrees of freedom. Averaged, not
replaced: a row that is noisier than the others must keep a wider interval. This is the moderated t of
Smyth, "Linear models and empirical Bayes methods ...", 2004, with a fixed weight in place of a fitted one.

Quality stays at 95 %, one-sided: there the costly mistake is to say that it holds, and pooling does not
apply, as recipes do differ in how much their accuracy scatters.
"""

from __future__ import annotations

import math
import statistics
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = [
    "CONFIDENCE",
    "METRICS",
    "QUALITY_CONFIDENCE",
    "Drift",
    "Margins",
    "Noise",
    "Quality",
    "Ratio",
    "compare_quality",
    "compare_speed",
    "drift",
    "hardly_learnt",
    "median_interval",
    "pooled_noise",
]

CONFIDENCE = 0.99  # of speeds and drift
METRICS = {"eval_accuracy": "accuracy", "final_loss": "final loss"}  # what quality is judged by, in words
QUALITY_CONFIDENCE = 0.95  # of non-inferiority, one-sided
_MEDIANS = 0.95  # of what was measured, without a claim
_PRIOR = 6  # degrees of freedom that the study's noise counts for in each row, at most
_RESAMPLES = 5000
_FEWEST = 3  # seeds: Student's t of two is 64 standard errors wide, and says nothing but that it knows nothing
_MOST_SEEDS = 30  # more than this many is no advice


@dataclass(frozen=True)
class Margins:
    """How much worse than the baseline still counts as no loss of quality.

    Attributes:
        accuracy: points of evaluation accuracy, as a fraction: 0.01 is one point of a hundred.
        loss: of the loss, as a share of the baseline's...
        loss_floor: ...but never less than this: a share of a loss near zero is nothing.
    """

    accuracy: float = 0.01
    loss: float = 0.05
    loss_floor: float = 0.02

    def of_loss(self, reference: float) -> float:
        """By how much a loss may exceed the baseline's, `reference`."""
        return max(self.loss * abs(reference), self.loss_floor)


@dataclass(frozen=True)
class Ratio:
    """Speed against the baseline's. `low` and `high` are None where the seeds are too few to tell the spread."""

    value: float | None
    low: float | None
    high: float | None
    seeds: int
    verdict: str  # faster, slower, no difference shown, not judged
    seeds_needed: int | None = None
    note: str = ""


@dataclass(frozen=True)
class Quality:
    """Quality against the baseline's. Differences are positive where the recipe is worse."""

    verdict: str  # quality holds, quality not shown to hold, unstable, not judged
    stable: bool | None
    note: str
    worse_by: dict[str, dict[str, float | None]]  # metric -> value, high (upper bound), margin
    seeds_needed: int | None = None


def median_interval(values: Sequence[float]) -> tuple[float, float, float] | None:
    """The median and its bootstrap interval at 95 %: for up to five values that is the lowest and the highest.

    >>> median_interval([3.0, 1.0, 2.0])
    (2.0, 1.0, 3.0)
    """
    if not values:
        return None
    return (statistics.median(values), *_bootstrap(values, _MEDIANS))


@dataclass(frozen=True)
class Noise:
    """What the whole study tells of the scatter of one run: standard deviation of the logarithm of its speed."""

    deviation: float
    freedom: int


@dataclass(frozen=True)
class Drift:
    """How much the machine's speed changed from the first run to the last: -0.03 is 3 % slower at the end."""

    change: float
    low: float
    high: float
    runs: int

    @property
    def shown(self) -> bool:
        return self.low > 0 or self.high < 0


def pooled_noise(speeds: Iterable[Mapping[int, float]]) -> Noise | None:
    """The scatter that is left when every recipe has its own speed and every seed (its round) its own burden.

    Args:
        speeds: for each recipe, speed by seed. Recipes that lack a seed are left out.

    >>> pooled_noise([{0: 1.0, 1: 2.0}, {0: 3.0, 1: 6.0}]).deviation < 1e-9  # one is three times the other
    True
    """
    import numpy as np

    tables = [{s: v for s, v in by_seed.items() if v > 0 and math.isfinite(v)} for by_seed in speeds]
    seeds = sorted({seed for table in tables for seed in table})
    whole = [[math.log(table[s]) for s in seeds] for table in tables if len(table) == len(seeds)]
    if len(whole) < 2 or len(seeds) < 2:
        return None
    freedom = (len(whole) - 1) * (len(seeds) - 1)
    data = np.asarray(whole)
    rest = data - data.mean(axis=1, keepdims=True) - data.mean(axis=0, keepdims=True) + data.mean()
    return Noise(float(math.sqrt((rest**2).sum() / freedom)), freedom)


def drift(runs: Iterable[tuple[str, float, float]]) -> Drift | None:
    """The trend over time that all recipes share; None where too few of them ran more than once.

    Args:
        runs: recipe, when it started, and its speed, for every run.
    """
    import numpy as np
    from scipy import stats

    by_recipe: dict[str, list[tuple[float, float]]] = {}
    for recipe, start, speed in runs:
        if speed > 0 and math.isfinite(speed):
            by_recipe.setdefault(recipe, []).append((start, math.log(speed)))
    groups = [np.asarray(points) for points in by_recipe.values() if len(points) > 1]
    if not groups:
        return None
    starts = [start for points in by_recipe.values() for start, _ in points]
    length = max(starts) - min(starts)
    centred = np.concatenate([group - group.mean(axis=0) for group in groups])
    time, speed = centred[:, 0] / (length or 1.0), centred[:, 1]
    freedom = len(centred) - len(groups) - 1
    if length <= 0 or freedom < 1 or not (time**2).sum():
        return None
    slope = float((time * speed).sum() / (time**2).sum())
    error = math.sqrt(float(((speed - slope * time) ** 2).sum()) / freedom / float((time**2).sum()))
    half = float(stats.t.ppf(0.5 + CONFIDENCE / 2, freedom)) * error
    change, low, high = (math.expm1(min(value, 50.0)) for value in (slope, slope - half, slope + half))
    return Drift(change, low, high, len(centred))


def compare_speed(measured: Mapping[int, float], baseline: Mapping[int, float], noise: Noise | None = None) -> Ratio:
    """The speed-up over the seeds that both have.

    Args:
        measured: speed (more is better) by seed.
        baseline: likewise.
        noise: of all runs of the study, from `pooled_noise`.

    >>> compare_speed({0: 2.0, 1: 2.02, 2: 1.98}, {0: 1.0, 1: 1.0, 2: 1.0}).verdict
    'faster'
    """
    ratios = [measured[s] / baseline[s] for s in sorted(measured.keys() & baseline.keys()) if baseline[s] > 0]
    ratios = [r for r in ratios if r > 0 and math.isfinite(r)]
    if not ratios:
        return Ratio(None, None, None, 0, "not judged", note="the baseline has no run with the same seed")
    value = statistics.median(ratios)
    if len(ratios) < _FEWEST:
        tell = "one seed tells nothing" if len(ratios) == 1 else "two seeds tell too little"
        note = f"{tell} about the spread: run {_FEWEST} or more"
        return Ratio(value, None, None, len(ratios), "not judged", _FEWEST, note)
    logs = [math.log(r) for r in ratios]
    deviation, freedom = _moderated(statistics.stdev(logs), len(logs) - 1, noise)
    low, high = (math.exp(bound) for bound in _interval(logs, CONFIDENCE, deviation, freedom))
    if low > 1:
        verdict = "faster"
    elif high < 1:
        verdict = "slower"
    else:
        verdict = "no difference shown"
    needed, note = None, ""
    if verdict == "no difference shown":
        effect = abs(statistics.mean(logs))
        needed = _seeds_needed(deviation, effect, len(ratios), CONFIDENCE, freedom - len(logs) + 1)
        count = f"about {needed}" if needed is not None else f"more than {_MOST_SEEDS}"
        note = f"if it is real, {count} seeds would show it"
    return Ratio(value, low, high, len(ratios), verdict, needed, note)


def _moderated(own: float, freedom: int, noise: Noise | None) -> tuple[float, int]:
    """A ratio's standard deviation and its degrees of freedom, its own averaged with the study's."""
    if noise is None or noise.freedom <= freedom:  # two recipes: the study's noise is this row's
        return own, freedom
    prior = min(_PRIOR, noise.freedom)
    # Both runs of a ratio scatter, hence twice.
    variance = (prior * 2 * noise.deviation**2 + freedom * own**2) / (prior + freedom)
    return math.sqrt(variance), prior + freedom


def compare_quality(
    measured: Mapping[int, Mapping[str, Any]],
    baseline: Mapping[int, Mapping[str, Any]],
    margins: Margins | None = None,
    confidence: float = QUALITY_CONFIDENCE,
) -> Quality:
    """Non-inferiority: is every metric, with this confidence, not worse than the baseline's by over its margin?

    Not judged where the baseline itself has hardly learnt: what stays at the loss of guessing is as good as that.

    Args:
        measured: by seed: `finite`, `final_loss`, `eval_loss`, `eval_accuracy`, `eval_majority`, each of them None if
            not measured, and `losses`, of each step.
        baseline: likewise.
        margins: what still counts as no loss of quality.
        confidence: one-sided; a study's own is the default.
    """
    margins = margins or Margins()
    broken = [seed for seed, run in measured.items() if not run.get("finite", True)]
    if broken:
        which = ", ".join(map(str, broken))
        return Quality("unstable", False, f"the loss was not finite (seed {which})", {})
    seeds = sorted(measured.keys() & baseline.keys())
    if not seeds:
        return Quality("not judged", None, "the baseline has no run with the same seed", {})
    if adrift := [seed for seed in seeds if not baseline[seed].get("finite", True)]:
        which = ", ".join(map(str, adrift))
        return Quality("not judged", None, f"the baseline's own loss was not finite (seed {which})", {})
    worse_by: dict[str, dict[str, float | None]] = {}
    lost, open_, needed = [], [], []
    for metric, sign in (("eval_accuracy", -1.0), ("final_loss", 1.0)):
        pairs = [
            (float(measured[s][metric]), float(baseline[s][metric]))
            for s in seeds
            if _is_number(measured[s].get(metric)) and _is_number(baseline[s].get(metric))
        ]
        if not pairs:
            continue
        reference = statistics.median(b for _, b in pairs)
        margin = margins.accuracy if metric == "eval_accuracy" else margins.of_loss(reference)
        differences = [sign * (m - b) for m, b in pairs]
        value = statistics.median(differences)
        # One-sided: only being worse counts, so bounds are those of a two-sided interval (90 % for 95).
        low, high = _interval(differences, 2 * confidence - 1) if len(differences) > 1 else (None, None)
        worse_by[metric] = {"value": value, "high": high, "margin": margin}
        if low is None or high is None:
            open_.append(f"{METRICS[metric]} was measured with one seed only")
            needed.append(3)
        else:
            if low > margin:
                lost.append(f"{METRICS[metric]} worse by {value:.4g}, margin {margin:.3g}")
            elif high > margin:
                open_.append(f"{METRICS[metric]} may be worse by up to {high:.4g}, margin {margin:.3g}")
                gap = abs(margin - statistics.mean(differences))  # beyond the margin, more seeds would show the loss
                needed.append(_seeds_needed(statistics.stdev(differences), gap, len(differences), 2 * confidence - 1))
    if not worse_by:
        return Quality("not judged", None, "no quality was measured", {})
    if lost:
        return Quality("unstable", False, "; ".join(lost), worse_by)
    if len(seeds) == 1:
        note = "one seed tells nothing about the spread: run 3 or more"
        if len(measured) > 1:
            note = f"the baseline has only seed {seeds[0]} of these"
        return Quality("not judged", None, note, worse_by, 3)
    if why := hardly_learnt([baseline[s] for s in seeds], margins):
        return Quality("not judged", None, f"the baseline's {why}: train longer to tell", worse_by)
    if open_:
        known = [n for n in needed if n is not None]
        count = max(known) if known and len(known) == len(needed) else None
        tell = f"about {count} seeds would tell" if count else f"more than {_MOST_SEEDS} seeds would have to tell"
        note = "; ".join([*open_, tell])
        return Quality("quality not shown to hold", None, note, worse_by, count)
    note = "; ".join(
        f"{METRICS[name]} worse by at most {max(0.0, m['high'] or 0.0):.3g}, margin {m['margin']:.3g}"
        for name, m in worse_by.items()
    )
    return Quality("quality holds", True, note, worse_by)


def hardly_learnt(runs: Sequence[Mapping[str, Any]], margins: Margins) -> str:
    """Why runs are no better than guesses, as their medians have it; empty if they are, or if nothing tells.

    The loss must have fallen from the mean of the first three steps. It also does where nothing is learnt but how
    frequent each class is, so the accuracy must beat that of always answering the most frequent one, too: by the
    margin, or where that class leaves less room, by half of what it leaves.
    """
    fallen, final, won, beaten = [], [], [], []
    for run in runs:
        first = [loss for loss in (run.get("losses") or [])[:3] if _is_number(loss)]
        if first and _is_number(run.get("final_loss")):
            fallen.append(statistics.mean(first) - run["final_loss"])
            final.append(run["final_loss"])
        if _is_number(run.get("eval_accuracy")) and _is_number(run.get("eval_majority")):
            won.append(run["eval_accuracy"] - run["eval_majority"])
            beaten.append(run["eval_majority"])
    if fallen and (fell := statistics.median(fallen)) <= margins.of_loss(statistics.median(final)):
        return f"loss fell by {max(0.0, fell):.3g} only"
    if won:
        majority = statistics.median(beaten)
        if statistics.median(won) <= min(margins.accuracy, (1 - majority) / 2):
            return f"accuracy is hardly more than the {majority:.3g} of always answering the most frequent class"
    return ""


def _interval(
    values: Sequence[float], confidence: float, deviation: float | None = None, freedom: int | None = None
) -> tuple[float, float]:
    """Of the values' centre. Deviation and degrees of freedom are the values' own unless given."""
    import numpy as np
    from scipy import stats

    data = np.asarray(values, dtype=float)
    centre = float(data.mean())
    deviation = float(data.std(ddof=1)) if deviation is None else deviation
    quantile = stats.t.ppf(0.5 + confidence / 2, len(data) - 1 if freedom is None else freedom)
    half = float(quantile) * deviation / math.sqrt(len(data))
    low, high = _bootstrap(values, confidence)
    return min(centre - half, low), max(centre + half, high)


def _bootstrap(values: Sequence[float], confidence: float) -> tuple[float, float]:
    """Of the median, by percentiles."""
    import numpy as np
    from scipy import stats

    data = np.asarray(values, dtype=float)
    if np.ptp(data) == 0:
        return float(data[0]), float(data[0])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", stats.DegenerateDataWarning)
        booted = stats.bootstrap(
            (data,),
            np.median,
            confidence_level=confidence,
            n_resamples=_RESAMPLES,
            method="percentile",
            vectorized=True,
            rng=np.random.default_rng(17),
        ).confidence_interval
    return float(booted.low), float(booted.high)


def _seeds_needed(deviation: float, effect: float, at_least: int, confidence: float, prior: int = 0) -> int | None:
    """How many seeds would show an effect of this size, if the spread stays; None if over thirty."""
    from scipy import stats

    if effect <= 0:
        return None
    for n in range(max(at_least + 1, 3), _MOST_SEEDS + 1):
        if stats.t.ppf(0.5 + confidence / 2, n - 1 + prior) * deviation / math.sqrt(n) < effect:
            return n
    return None


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
