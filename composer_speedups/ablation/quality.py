"""Whether a recipe keeps the baseline's quality: a test of non-inferiority over the seeds that both have.

At 95 %, one-sided: the costly mistake is to say that quality holds. Noise is not pooled over the rows, as it is for
speeds: recipes do differ in how much their accuracy scatters. The seeds are what is drawn: all are evaluated on the
same samples, and what another choice of those would tell is in no bound.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from composer_speedups.ablation.statistics import FEWEST, MOST_SEEDS, interval, is_number, seeds_needed, too_few

__all__ = ["METRICS", "QUALITY_CONFIDENCE", "Margins", "Quality", "compare_quality", "hardly_learnt"]

METRICS = {"eval_accuracy": "accuracy", "eval_r2": "R²", "final_loss": "final loss"}  # judged by these, in words
QUALITY_CONFIDENCE = 0.95  # of non-inferiority, one-sided

Pair = tuple[Mapping[str, Any], Mapping[str, Any]]  # runs of one seed: the recipe's, and the baseline's


@dataclass(frozen=True)
class Margins:
    """How much worse than the baseline still counts as no loss of quality.

    Attributes:
        accuracy: points of evaluation accuracy, as a fraction: 0.01 is one point of a hundred. The same of R², the
            share of the labels' variance that a regression explains.
        loss: of the loss, as a share of the baseline's...
        loss_floor: ...but never less than this, in the loss's unit: a share of a loss near zero is nothing...
        learnt: ...and never more than this share of what the baseline's loss fell by: in a short run 5 % of a loss
            that is still high can be most of what was learnt.
    """

    accuracy: float = 0.01
    loss: float = 0.05
    loss_floor: float = 0.02
    learnt: float = 0.2

    def of_loss(self, reference: float, fell: float | None = None, unit: float = 1.0) -> float:
        """By how much a loss may exceed the baseline's, `reference`, which fell by `fell` (None: nobody knows).

        `unit` is the variance of what a regression is to tell, whose squared errors are of any size.
        """
        margin = max(self.loss * abs(reference), self.loss_floor * unit)
        return margin if fell is None or fell <= 0 else min(margin, self.learnt * fell)


@dataclass(frozen=True)
class Quality:
    """Quality against the baseline's. Differences are positive where the recipe is worse."""

    verdict: str  # quality holds, quality not shown to hold, unstable, not judged
    stable: bool | None
    note: str
    worse_by: dict[str, dict[str, float | None]]  # metric -> value, high (upper bound), margin
    seeds_needed: int | None = None


def compare_quality(
    measured: Mapping[int, Mapping[str, Any]],
    baseline: Mapping[int, Mapping[str, Any]],
    margins: Margins | None = None,
    confidence: float = QUALITY_CONFIDENCE,
) -> Quality:
    """Non-inferiority: is every metric, with this confidence, not worse than the baseline's by over its margin?

    Not judged where the baseline itself has hardly learnt: what stays at the loss of guessing is as good as that.

    Args:
        measured: by seed: `finite`, `final_loss`, `eval_loss`, `eval_accuracy`, `eval_majority`, `eval_r2`, each of
            them None if not measured, `loss_unit`, and `losses`, of each step.
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
    found = [
        one
        for metric in METRICS
        if (one := _compared(metric, [(measured[s], baseline[s]) for s in seeds], margins, confidence))
    ]
    worse_by = {one.metric: one.worse_by for one in found if one.worse_by}
    lost = [one.lost for one in found if one.lost]
    if lost:
        return Quality("unstable", False, "; ".join(lost), worse_by)
    if not found:
        return Quality("not judged", None, "no quality was measured", {})
    if len(seeds) < FEWEST:
        alone = len(measured) > len(seeds) == 1
        note = f"the baseline has only seed {seeds[0]} of these" if alone else too_few(len(seeds))
        return Quality("not judged", None, note, worse_by, FEWEST)
    if why := hardly_learnt([baseline[s] for s in seeds], margins):
        return Quality("not judged", None, f"the baseline's {why}: train longer to tell", worse_by)
    unclear = [one for one in found if one.unclear]
    if unclear:
        needed = [one.needed for one in unclear]
        count = None if None in needed else max(n for n in needed if n is not None)
        tell = f"about {count} seeds would tell" if count else f"more than {MOST_SEEDS} seeds would have to tell"
        note = "; ".join([*(one.unclear for one in unclear), tell])
        return Quality("quality not shown to hold", None, note, worse_by, count)
    note = "; ".join(
        f"{METRICS[name]} worse by at most {max(0.0, m['high'] or 0.0):.3g}, margin {m['margin']:.3g}"
        for name, m in worse_by.items()
    )
    return Quality("quality holds", True, note, worse_by)


@dataclass(frozen=True)
class _Compared:
    """One figure of quality: how much worse, and in words that it was lost or is unclear."""

    metric: str
    worse_by: dict[str, float | None] | None
    lost: str = ""
    unclear: str = ""
    needed: int | None = None


def _compared(metric: str, runs: Sequence[Pair], margins: Margins, confidence: float) -> _Compared | None:
    """None where the baseline has not measured it either."""
    word, asked = METRICS[metric], [pair for pair in runs if is_number(pair[1].get(metric))]
    pairs = [(float(m[metric]), float(b[metric])) for m, b in asked if is_number(m.get(metric))]
    if not asked:
        return None
    if not pairs:
        return _Compared(metric, None, unclear=f"{word} was not measured", needed=FEWEST)
    reference = statistics.median(b for _, b in pairs)
    of_loss = metric == "final_loss"
    base = [b for _, b in asked]
    margin = margins.of_loss(reference, _fall(base), _unit(base)) if of_loss else margins.accuracy
    differences = [m - b if of_loss else b - m for m, b in pairs]
    value = statistics.median(differences)
    if len(pairs) == 1:
        facts = {"value": value, "high": None, "margin": margin}
        return _Compared(metric, facts, unclear=f"{word} was measured with one seed only", needed=FEWEST)
    # One-sided: only being worse counts, so bounds are those of a two-sided interval (90 % for 95).
    low, high = interval(differences, 2 * confidence - 1)
    facts = {"value": value, "high": high, "margin": margin}
    if low > margin:
        return _Compared(metric, facts, lost=f"{word} worse by {value:.4g}, margin {margin:.3g}")
    if high > margin:
        gap = abs(margin - statistics.mean(differences))  # beyond the margin, more seeds would show the loss
        needed = seeds_needed(statistics.stdev(differences), gap, len(pairs), 2 * confidence - 1)
        text = f"{word} may be worse by up to {high:.4g}, margin {margin:.3g}"
        return _Compared(metric, facts, unclear=text, needed=needed)
    if len(pairs) < len(asked):
        text = f"{word} was measured with {len(pairs)} of {len(asked)} seeds only"
        return _Compared(metric, facts, unclear=text, needed=len(asked))
    return _Compared(metric, facts)


def hardly_learnt(runs: Sequence[Mapping[str, Any]], margins: Margins) -> str:
    """Why runs are no better than guesses, as their medians have it; empty if they are, or if nothing tells.

    The loss must have fallen from the mean of the first three steps. It also does where nothing is learnt but how
    frequent each class is, so the accuracy must beat that of always answering the most frequent one, too: by the
    margin, or where that class leaves less room, by half of what it leaves. Of numbers the mean must be beaten.
    """
    final, won, beaten, explained = [], [], [], []
    for run in runs:
        if is_number(run.get("final_loss")):
            final.append(run["final_loss"])
        if is_number(run.get("eval_accuracy")) and is_number(run.get("eval_majority")):
            won.append(run["eval_accuracy"] - run["eval_majority"])
            beaten.append(run["eval_majority"])
        if is_number(run.get("eval_r2")):
            explained.append(run["eval_r2"])
    if (fell := _fall(runs)) is not None and fell <= margins.of_loss(statistics.median(final), unit=_unit(runs)):
        return f"loss fell by {max(0.0, fell):.3g} only"
    if won:
        majority = statistics.median(beaten)
        if statistics.median(won) <= min(margins.accuracy, (1 - majority) / 2):
            return f"accuracy is hardly more than the {majority:.3g} of always answering the most frequent class"
    if explained and (r2 := statistics.median(explained)) <= margins.accuracy:
        return f"R² is {r2:.3g}: hardly more than always answering the mean would have"
    return ""


def _unit(runs: Sequence[Mapping[str, Any]]) -> float:
    """The losses' unit; 1 of runs that were stored before there was another."""
    return next((run["loss_unit"] for run in runs if is_number(run.get("loss_unit"))), 1.0)


def _fall(runs: Iterable[Mapping[str, Any]]) -> float | None:
    """By how much the loss fell from the mean of the first three steps, in the median; None where nobody knows."""
    fallen = []
    for run in runs:
        first = [loss for loss in (run.get("losses") or [])[:3] if is_number(loss)]
        if first and is_number(run.get("final_loss")):
            fallen.append(statistics.mean(first) - run["final_loss"])
    return statistics.median(fallen) if fallen else None
