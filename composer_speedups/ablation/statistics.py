"""What the measured speeds allow to be said, and what they do not. (For quality: `quality.py`.)

Runs with the same seed stand side by side: they were made in the same round, so what the machine did in
that round burdens both, and their ratio is free of it.

An interval is the wider of two: the bootstrap of the median, which assumes nothing but is too narrow for
a handful of seeds (of three values it can never leave their range), and Student's t, which is honest about
few seeds but assumes a bell curve of the logarithms.

Speeds are judged at 99 %, not 95 %: a study compares a dozen recipes, and who compares twenty with
themselves at 95 % expects one false claim and gets two or more in a quarter of the studies (26 %); at 99 %
in 1.7 %. What that costs with three seeds (Student's t goes from 4.3 to 9.9 standard errors) is won back
by pooling: machine noise is much the same for all rows, so each row's own variance, of two degrees of
freedom, is averaged with that of the whole study, weighted as `_PRIOR` degrees of freedom. This is the
moderated t of Smyth, "Linear models and empirical Bayes methods ...", 2004, with a fixed weight in place of a
fitted one.

Not all rows are alike: a fast recipe's steps are over in less time, and a row may scatter several times as
much as the rest. Averaged with theirs its interval is too narrow: of nine rows with three seeds, one of them three to
five times as noisy as the others, that one differed "from itself" in 6 to 10 % of simulated studies, and all others
from a baseline as noisy. So where a row's scatter is larger than the others' (F test, `_UNEVEN`), its own counts if
that is more than the average, and the study's for `_LITTLE` degrees of freedom only: then it was 3 to 4.5 %, with five
seeds 1.5 to 2 %. Where all rows are alike this widens an interval by a twentieth in the median.
"""

from __future__ import annotations

import math
import statistics
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

__all__ = [
    "CONFIDENCE",
    "FEWEST",
    "MOST_SEEDS",
    "Noise",
    "Ratio",
    "compare_speed",
    "interval",
    "is_number",
    "median_interval",
    "pooled_noise",
    "seeds_needed",
    "too_few",
]

CONFIDENCE = 0.99  # of speeds and drift
FEWEST = 3  # seeds: Student's t of two is 64 standard errors wide, and says nothing but that it knows nothing
MOST_SEEDS = 30  # more than this many is no advice
_MEDIANS = 0.95  # of what was measured, without a claim
_POWER = 0.8  # of the number of seeds that is advised
_PRIOR = 6  # degrees of freedom that the study's noise counts for in each row, at most
_LITTLE = 2  # and in one that scatters more than the others
_RESAMPLES = 5000
_UNEVEN = 0.2  # of rows that scatter as the others do, so many are taken for noisier, and get a wider interval


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


def median_interval(values: Sequence[float]) -> tuple[float, float, float] | None:
    """The median, and where the true one is with at least 95 %: from the k-th lowest value to the k-th highest.

    Up to five values cannot tell so much: then it is the lowest and the highest.

    >>> median_interval([3.0, 1.0, 2.0])
    (2.0, 1.0, 3.0)
    """
    from scipy import stats

    if not values:
        return None
    ordered, k = sorted(values), 1
    while 2 * stats.binom.cdf(k, len(ordered), 0.5) <= 1 - _MEDIANS:
        k += 1
    return statistics.median(ordered), ordered[k - 1], ordered[-k]


@dataclass(frozen=True)
class Noise:
    """What the whole study tells of the scatter of one run.

    Attributes:
        deviation: standard deviation of the logarithm of its speed.
        freedom: degrees of freedom of that.
        noisier: recipes that scatter more than the others.
        uneven: it is used for one of them.
    """

    deviation: float
    freedom: int
    noisier: frozenset[str] = frozenset()
    uneven: bool = False

    def of(self, *recipes: str) -> Noise:
        """For comparing `recipes`: it tells less of those that scatter more."""
        return replace(self, uneven=bool(self.noisier & {*recipes}))


def pooled_noise(speeds: Mapping[str, Mapping[int, float]]) -> Noise | None:
    """The scatter that is left when every recipe has its own speed and every seed (its round) its own burden.

    Args:
        speeds: for each recipe, speed by seed. Recipes that lack a seed are left out.

    >>> pooled_noise({"a": {0: 1.0, 1: 2.0}, "b": {0: 3.0, 1: 6.0}}).deviation < 1e-9  # one is three times the other
    True
    """
    import numpy as np

    tables = {name: {s: v for s, v in of.items() if v > 0 and math.isfinite(v)} for name, of in speeds.items()}
    seeds = sorted({seed for table in tables.values() for seed in table})
    whole = {name: [math.log(table[s]) for s in seeds] for name, table in tables.items() if len(table) == len(seeds)}
    if len(whole) < 2 or len(seeds) < 2:
        return None
    freedom = (len(whole) - 1) * (len(seeds) - 1)
    data = np.asarray([*whole.values()])
    rest = data - data.mean(axis=1, keepdims=True) - data.mean(axis=0, keepdims=True) + data.mean()
    squares = dict(zip(whole, (rest**2).sum(axis=1).tolist(), strict=True))
    return Noise(math.sqrt(sum(squares.values()) / freedom), freedom, _noisier(squares, freedom))


def _noisier(squares: Mapping[str, float], freedom: int) -> frozenset[str]:
    """Recipes whose squares (sums of them) are larger than the others' by more than chance; of two nothing tells."""
    from scipy import stats

    total, own = sum(squares.values()), freedom / len(squares)
    if len(squares) < 3:
        return frozenset()
    found = set()
    for name, square in squares.items():
        others = (total - square) / (freedom - own)
        if square > 0 and (others <= 0 or stats.f.sf(square / own / others, own, freedom - own) < _UNEVEN):
            found.add(name)
    return frozenset(found)


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
        missing = "the baseline has no run with the same seed" if measured else "no speed was measured"
        return Ratio(None, None, None, 0, "not judged", note=missing)
    value = statistics.median(ratios)
    if len(ratios) < FEWEST:
        return Ratio(value, None, None, len(ratios), "not judged", FEWEST, too_few(len(ratios)))
    logs = [math.log(r) for r in ratios]
    deviation, freedom = _moderated(statistics.stdev(logs), len(logs) - 1, noise)
    low, high = (math.exp(bound) for bound in interval(logs, CONFIDENCE, deviation, freedom))
    if low > 1:
        verdict = "faster"
    elif high < 1:
        verdict = "slower"
    else:
        verdict = "no difference shown"
    needed, note = None, ""
    if verdict == "no difference shown":
        effect = abs(statistics.mean(logs))
        needed = seeds_needed(deviation, effect, len(ratios), CONFIDENCE, freedom - len(logs) + 1)
        count = f"about {needed}" if needed is not None else f"more than {MOST_SEEDS}"
        note = f"if it is real, {count} seeds would show it"
    return Ratio(value, low, high, len(ratios), verdict, needed, note)


def _moderated(own: float, freedom: int, noise: Noise | None) -> tuple[float, int]:
    """A ratio's standard deviation and its degrees of freedom, its own averaged with the study's."""
    if noise is None or noise.freedom <= freedom:  # two recipes: the study's noise is this row's
        return own, freedom
    prior = min(_PRIOR, noise.freedom)
    # Both runs of a ratio scatter, hence twice.
    variance = (prior * 2 * noise.deviation**2 + freedom * own**2) / (prior + freedom)
    if noise.uneven:
        return max(math.sqrt(variance), own), min(_LITTLE, prior) + freedom
    return math.sqrt(variance), prior + freedom


def interval(
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


def too_few(seeds: int) -> str:
    """Why so many seeds are not judged: one, or two."""
    tell = "one seed tells nothing" if seeds == 1 else "two seeds tell too little"
    return f"{tell} about the spread: run {FEWEST} or more"


def seeds_needed(deviation: float, effect: float, at_least: int, confidence: float, prior: int = 0) -> int | None:
    """How many seeds would show an effect of this size in four studies of five, if the spread stays.

    None if over thirty. An interval that just excludes no effect on average does so in one study of two only.
    """
    from scipy import stats

    if effect <= 0:
        return None
    for n in range(max(at_least + 1, 3), MOST_SEEDS + 1):
        errors = sum(stats.t.ppf(share, n - 1 + prior) for share in (0.5 + confidence / 2, _POWER))
        if errors * deviation / math.sqrt(n) < effect:
            return n
    return None


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
