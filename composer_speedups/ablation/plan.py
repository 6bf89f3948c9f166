"""Which runs a study makes, and in what order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["PlannedRun", "interleave"]


@dataclass(frozen=True)
class PlannedRun:
    """One recipe with one seed. Runs are made in the order of `position`."""

    recipe: str
    seed: int
    position: int


def interleave(recipes: Sequence[str], seeds: Sequence[int]) -> list[PlannedRun]:
    """Every recipe once a seed, every second round backwards.

    A machine that slowly warms up or gets busier then burdens all recipes alike: with two rounds the
    mean position of every recipe is the same.

    >>> [(run.recipe, run.seed) for run in interleave(["fp32", "bf16"], [0, 1])]
    [('fp32', 0), ('bf16', 0), ('bf16', 1), ('fp32', 1)]
    """
    runs: list[PlannedRun] = []
    for number, seed in enumerate(seeds):
        for recipe in recipes if number % 2 == 0 else reversed(recipes):
            runs.append(PlannedRun(recipe, seed, len(runs)))
    return runs
