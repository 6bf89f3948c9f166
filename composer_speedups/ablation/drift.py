"""How much a machine's speed changed while a study was made.

A round, the runs of one seed, is the unit: what burdens one of its runs, a warm room or a neighbour, burdens the
next. Taken for independent, runs showed a drift that was none in a quarter of simulated studies whose rounds
scattered among themselves as much as runs do within one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from composer_speedups.ablation.statistics import CONFIDENCE

__all__ = ["Drift", "drift"]

_FEWEST = 4  # rounds: a line goes through two, and of one more nothing is learnt but that it is wide


@dataclass(frozen=True)
class Drift:
    """How much the machine's speed changed from the first round to the last: -0.03 is 3 % slower at the end."""

    change: float
    low: float
    high: float
    rounds: int

    @property
    def shown(self) -> bool:
        return self.low > 0 or self.high < 0


def drift(runs: Iterable[tuple[str, int, float, float]]) -> Drift | None:
    """The trend over time that all recipes share; None where too few rounds tell.

    Args:
        runs: recipe, seed, when it started, and its speed, for every run. Recipes that lack a seed are left out.
    """
    import numpy as np
    from scipy import stats

    by_recipe: dict[str, dict[int, tuple[float, float]]] = {}
    for recipe, seed, start, speed in runs:
        if speed > 0 and math.isfinite(speed):
            by_recipe.setdefault(recipe, {})[seed] = (start, math.log(speed))
    seeds = {seed for found in by_recipe.values() for seed in found}
    whole = [[found[seed] for seed in seeds] for found in by_recipe.values() if len(found) == len(seeds)]
    if not whole or len(seeds) < _FEWEST:
        return None
    time, speed = np.asarray(whole).mean(axis=0).T
    length = float(time.max() - time.min())
    if length <= 0:
        return None
    time, speed = (time - time.mean()) / length, speed - speed.mean()
    slope = float((time * speed).sum() / (time**2).sum())
    freedom = len(seeds) - 2
    error = math.sqrt(float(((speed - slope * time) ** 2).sum()) / freedom / float((time**2).sum()))
    half = float(stats.t.ppf(0.5 + CONFIDENCE / 2, freedom)) * error
    change, low, high = (math.expm1(min(value, 50.0)) for value in (slope, slope - half, slope + half))
    return Drift(change, low, high, len(seeds))
