"""Whether two speed-ups together bring more or less than the product of what each brings alone.

What it says: 1.10 means that the pair is 10 % faster than its two speed-ups, each measured alone, let expect; 0.90,
that they get in each other's way, or save the same time. 1 is no interaction: the factors multiply.

Formula: (pair / base) / ((first / base) * (second / base)) = pair * base / (first * second), of speeds with the same
seed, made in the same round; centre and interval are those of `statistics.compare_speed`. Four runs scatter
where a speed-up has two, so the study's noise counts for sqrt(2) times as much.

What it takes: four rows that differ in nothing but the two speed-ups. With another batch than the baseline's, what the
batch brings would be in the pair once and in the product twice: such a pair is not judged. Tuned rows are the
exception: each of the four stands at its own best. A pair and its speed-ups are known by what their recipes set and
the baseline's does not.

Source: the two-factor interaction of Fisher, "The Design of Experiments", 1935, on a logarithmic scale, as speed-ups
multiply.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

from composer_speedups.ablation.pairs import apart, by_seed, speed_key
from composer_speedups.ablation.plans import TUNED
from composer_speedups.ablation.statistics import CONFIDENCE, Noise, compare_speed, pooled_noise
from composer_speedups.ablation.store import Run
from composer_speedups.recipes.schema import DESCRIPTIVE

__all__ = ["Interaction", "interactions", "sentence"]

_VERDICTS = {
    "faster": "more than their product",
    "slower": "less than their product",
    "no difference shown": "no interaction shown",
}
_OWN = (*DESCRIPTIVE, "speedups")  # in which rows with the same settings may differ


@dataclass(frozen=True)
class Interaction:
    """What two speed-ups do to each other. `low` and `high` are None where it is not judged.

    Attributes:
        pair: the row with both.
        first: the row with one of them alone.
        second: the row with the other.
        value: the pair's speed-up over the product of the others'.
        low: of the interval...
        high: ...at `CONFIDENCE`.
        verdict: more than their product, less than their product, no interaction shown, not judged.
        note: why it is not judged, or how many seeds would show it.
    """

    pair: str
    first: str
    second: str
    value: float
    low: float | None
    high: float | None
    verdict: str
    note: str = ""


def interactions(recipes: Mapping[str, Mapping[str, Any]], runs: Sequence[Run], baseline: str) -> list[Interaction]:
    """Of each pair whose two speed-ups were measured alone, too; left out where no seed has all four in one round.

    Args:
        recipes: resolved recipes by name.
        runs: all runs of the study.
        baseline: the recipe that has none of the speed-ups.
    """
    base = recipes[baseline]
    switches = {name: _switches(recipe, base) for name, recipe in recipes.items()}
    measured = {name: by_seed(_of(runs, name), speed_key([recipe])) for name, recipe in recipes.items()}
    noise = pooled_noise({name: found for name, found in measured.items() if found})
    pairs = [name for name, keys in switches.items() if len(keys) == 2]
    fair = {name for name in pairs if _settings(recipes[name]) == _settings(base)}
    found = []
    for pair in pairs:
        tuned = all(name.endswith(TUNED) for name in (pair, baseline))
        comparable = pair in fair or tuned
        if not comparable and any(set(switches[other]) == set(switches[pair]) for other in fair):
            continue  # at the baseline's batch it is there already
        singles = []
        for switch in switches[pair]:
            alone = [name for name, keys in switches.items() if keys == [switch]]
            like = [name for name in alone if _settings(recipes[name]) == _settings(recipes[pair])]
            like += [name for name in alone if tuned and name.endswith(TUNED)]
            singles += like[:1]
        if len(singles) == 2:
            rows = (pair, singles[0], singles[1], baseline)
            of = [_of(runs, name) for name in rows]
            key = speed_key((recipes[n] for n in rows), lambda key, of=of: all(by_seed(some, key) for some in of))
            four = [by_seed(some, key) for some in of]
            one = _judged(rows, four, _apart(runs, rows), noise and noise.of(*rows), comparable)
            found += [one] if one is not None else []
    return found


def sentence(interaction: Interaction) -> str:
    """One interaction in words, for the notes under a table."""
    pair, first, second = (n.rpartition("/")[2] for n in (interaction.pair, interaction.first, interaction.second))
    text = f"{pair}: {interaction.value:.2f} times the product of what {first} and {second} bring"
    if interaction.low is not None and interaction.high is not None:
        text += f" ({CONFIDENCE * 100:.0f} % interval {interaction.low:.2f} to {interaction.high:.2f})"
    return f"{text}: {interaction.verdict}" + (f"; {interaction.note}" if interaction.note else "")


def _judged(
    rows: tuple[str, str, str, str],
    speeds: Sequence[Mapping[int, float]],
    left_out: set[int],
    noise: Noise | None,
    comparable: bool,
) -> Interaction | None:
    pair, first, second, base = speeds
    seeds = (pair.keys() & first.keys() & second.keys() & base.keys()) - left_out
    # Four runs scatter where a speed-up has two: twice the variance.
    doubled = None if noise is None else replace(noise, deviation=noise.deviation * math.sqrt(2))
    ratio = compare_speed(
        {seed: pair[seed] * base[seed] for seed in seeds}, {seed: first[seed] * second[seed] for seed in seeds}, doubled
    )
    if ratio.value is None:
        return None
    if not comparable:
        note = "they do not train with the baseline's batch and learning rate. Add --equal-batch"
        return Interaction(*rows[:3], ratio.value, None, None, "not judged", note)
    verdict = _VERDICTS.get(ratio.verdict, "not judged")
    if verdict == "not judged" and left_out:
        which = ", ".join(map(str, sorted(left_out)))
        ratio = replace(ratio, note=f"not made in one round (seed {which}): compare them in another --out")
    return Interaction(*rows[:3], ratio.value, ratio.low, ratio.high, verdict, ratio.note)


def _switches(recipe: Mapping[str, Any], base: Mapping[str, Any]) -> list[str]:
    """What it sets, with arguments, and the baseline does not; nothing if it lacks what the baseline sets."""
    own, its = recipe.get("speedups") or {}, base.get("speedups") or {}
    if its.keys() - own.keys():
        return []
    return [
        json.dumps([key, value], sort_keys=True) for key, value in own.items() if key not in its or its[key] != value
    ]


def _settings(recipe: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in recipe.items() if key not in _OWN}


def _apart(runs: Sequence[Run], rows: Sequence[str]) -> set[int]:
    """Seeds of which two of the rows' runs were not made side by side."""
    good = [{run.seed: run for run in runs if run.recipe == name and run.status == "ok"} for name in rows]
    return {seed for two in combinations(good, 2) for seed in apart(*two, runs)}


def _of(runs: Sequence[Run], name: str) -> list[Run]:
    return [run for run in runs if run.recipe == name]
