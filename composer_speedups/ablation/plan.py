"""Which runs a study makes, in what order, and how long one may take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["TIMEOUT", "PlannedRun", "interleave"]

TIMEOUT = 2 * 3600.0  # seconds


@dataclass(frozen=True)
class PlannedRun:
    """One recipe with one seed. Runs are made in the order of `position`."""

    recipe: str
    seed: int
    position: int


def interleave(recipes: Sequence[str], seeds: Sequence[int]) -> list[PlannedRun]:
    """Every recipe once a seed, every second round backwards, every second pair of rounds from the middle.

    A machine that slowly warms up or gets busier then burdens all recipes alike: with two rounds the mean
    position of every recipe is the same. Starting from the middle spreads the baseline, which is first of
    `recipes`, over the study: it is measured again at the start, on the way, and at the end.

    >>> [(run.recipe, run.seed) for run in interleave(["fp32", "bf16"], [0, 1])]
    [('fp32', 0), ('bf16', 0), ('bf16', 1), ('fp32', 1)]
    """
    runs: list[PlannedRun] = []
    middle = len(recipes) // 2
    for number, seed in enumerate(seeds):
        start = middle if number // 2 % 2 else 0
        order = [*recipes[start:], *recipes[:start]]
        for recipe in order if number % 2 == 0 else reversed(order):
            runs.append(PlannedRun(recipe, seed, len(runs)))
    return runs
