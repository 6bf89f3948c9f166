"""How two runs of one seed are compared: in which unit, whether they were made side by side, and how fast one would
have been alone on the machine.

Runs are paired by their seed because a round's runs are made one after the other. They are not where a row that had
failed is made again a day later, or where a study was stopped in the middle of a round: then their ratio tells of two
days of a machine as much as of two recipes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from composer_speedups import registry
from composer_speedups.ablation.store import Run
from composer_speedups.isolation.contention import NOTABLE

__all__ = ["SAMPLES", "TOKENS", "apart", "by_seed", "speed_key", "undisturbed", "waited"]

SAMPLES, TOKENS = "samples_per_second", "real_tokens_per_second"

_LONGEST = 3600.0  # seconds between two runs of a pair in which the study did nothing
_OVERLAPPED = 0.5  # of its speed another run beside it may have taken; how much it did, nobody has measured


def apart(one: Mapping[int, Run], other: Mapping[int, Run], runs: Sequence[Run]) -> list[int]:
    """Seeds whose two runs have over an hour between them in which nothing ran.

    Args:
        one: runs by seed.
        other: likewise.
        runs: all of the study: what ran in between is no pause.
    """
    spans = [(run.started, run.finished) for run in runs if run.started and run.finished]
    return [seed for seed in sorted(one.keys() & other.keys()) if _pause(one[seed], other[seed], spans) > _LONGEST]


def _pause(one: Run, other: Run, spans: Iterable[tuple[float, float]]) -> float:
    """Seconds from the end of the first to the beginning of the second, without those in which something ran."""
    if not (one.started and one.finished and other.started and other.finished):
        return 0.0  # a store from elsewhere: nobody knows
    first, second = sorted((one, other), key=lambda run: run.started or 0.0)
    begin, end, pause = first.finished or 0.0, second.started or 0.0, 0.0
    for start, stop in sorted(spans):
        if start > begin:
            pause += max(0.0, min(start, end) - begin)
        begin = max(begin, stop)
        if begin >= end:
            return pause
    return pause


def by_seed(runs: Iterable[Run], key: str) -> dict[int, float]:
    """By seed, what runs that ended well have as `key`, which is a speed: one of 0, as of a clock that stood still, is
    none."""
    values = {run.seed: run.result.get(key) for run in runs if run.status == "ok"}
    return {seed: float(value) for seed, value in values.items() if isinstance(value, (int, float)) and value > 0}


def speed_key(recipes: Iterable[Mapping[str, Any]], measured: Callable[[str], bool] = lambda key: True) -> str:
    """The field of results in which recipes are compared: samples/s, or real tokens/s as soon as one regroups samples.

    A batch of such a recipe holds other lengths than one of the others. `measured` says whether all have a field, as
    tokens are not counted everywhere.
    """
    regrouping = registry.regrouping()
    regroups = any(regrouping & (recipe.get("speedups") or {}).keys() for recipe in recipes)
    return TOKENS if regroups and measured(TOKENS) else SAMPLES


def waited(run: Run) -> float:
    """The share of its time in which other work kept a run from a core; 0 if it is too small to tell of."""
    share = run.result.get("waited") or 0.0
    return share if share >= NOTABLE else 0.0


def undisturbed(run: Run, speed: float) -> float:
    """At most how fast a run would have been alone on the machine."""
    share = max(waited(run), _OVERLAPPED if run.result.get("overlapped") else 0.0)
    return speed / (1.0 - min(share, 0.9))
