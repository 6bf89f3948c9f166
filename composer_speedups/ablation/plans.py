"""Which recipes a study compares: those asked for, or what a plan makes of them.

- `ladder`: the recipes as they are listed; of one recipe, its speed-ups added one after the other, and at the end
  the recipe itself, with its own batch, microbatch and learning rate.
- `leave-one-out`: one recipe, and the same without each of its speed-ups. It is the baseline itself: a row
  at 0.80x says that the speed-up left out brings a factor of 1.25 on top of the others.
- `one-at-a-time`: the baseline, and the baseline with each speed-up alone.
- `pairs`: that, and the baseline with every two of them: what two bring together is seldom the product.

Rows that a plan makes have the baseline's batch and learning rate, so that a difference is the switches' own.

What the baseline sets itself, such as true float32 matmuls, is no speed-up: it stays in every row, and
leaving out a speed-up that replaces such a setting brings the baseline's back.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import combinations
from typing import TYPE_CHECKING, Any

from composer_speedups.errors import RecipeError
from composer_speedups.recipes.schema import DESCRIPTIVE

if TYPE_CHECKING:
    from composer_speedups.recipes import Recipe

__all__ = ["PLANS", "TUNED", "WITHOUT", "equal_batch", "expand", "root"]

PLANS = ("ladder", "leave-one-out", "one-at-a-time", "pairs")
WITHOUT = ".without_"  # between a recipe's name and what leave-one-out takes away
TUNED = ".tuned"  # ends the name of a row that `--tune` made

_SEARCHED = ("batch_size", "learning_rate", "microbatch_size")  # by `--tune`

SpeedUps = dict[str, dict[str, Any]]
Switch = tuple[str, dict[str, Any]]


def expand(plan: str, recipes: Sequence[Recipe], baseline: Recipe) -> tuple[list[Recipe], str]:
    """The recipes to compare, and the name of their baseline.

    Args:
        plan: one of `PLANS`.
        recipes: what was asked for: one recipe, or the rows of a suite.
        baseline: has none of the speed-ups.
    """
    if plan not in PLANS:
        raise RecipeError(f"unknown plan {plan!r}. Choose {', '.join(PLANS[:-1])} or {PLANS[-1]}")
    if plan == "ladder":
        return _ladder(recipes, baseline), baseline.name
    if plan == "leave-one-out":
        best = max(recipes, key=lambda r: (len(_switches(r, baseline)), list(recipes).index(r)))
        return _leave_one_out(best, baseline), best.name
    found: dict[str, tuple[Switch, Recipe]] = {}
    for recipe in recipes:
        for switch in _switches(recipe, baseline):
            found.setdefault(json.dumps(switch, sort_keys=True), (switch, recipe))
    if not found:
        raise RecipeError(f"{recipes[0].name} has no speed-up that {baseline.name} lacks: nothing to compare")
    labels = _labels([switch for switch, _ in found.values()])
    rows = [baseline]
    items = [(*pair, label) for pair, label in zip(found.values(), labels, strict=True)]
    for switch, source, label in items:
        rows.append(_made(source, baseline, f"+{label}", dict([switch]), f"{_last(baseline.name)} + {label}"))
    if plan == "pairs":
        for (one, _, label), (two, source, other) in combinations(items, 2):
            if one[0] != two[0]:  # the same speed-up with other arguments is no second one
                words = f"{_last(baseline.name)} + {label} + {other}"
                rows.append(_made(source, baseline, f"+{label}+{other}", dict([one, two]), words))
    return rows, baseline.name


def equal_batch(recipes: Sequence[Recipe], baseline: Recipe, untuned: Sequence[Recipe] | None = None) -> list[Recipe]:
    """Each recipe, and after it, where its batch size or learning rate is its own, one with the baseline's.

    The second shows what the mechanism brings, the first what the user gets.

    Args:
        recipes: the rows, tuned or not.
        baseline: the row that they are compared with, as it is measured.
        untuned: the rows as they were before tuning, in the same order; None: they were not tuned.
    """
    rows: list[Recipe] = []
    same = _tuned(baseline)
    for recipe, source in zip(recipes, untuned or recipes, strict=True):
        rows.append(recipe)
        if _tuned(recipe) != same and not any(
            other.name.startswith(f"{baseline.name}+") and other.speedups == source.speedups and _tuned(other) == same
            for other in recipes  # a ladder of one recipe has that row already
        ):
            words = f"{source.description or _last(source.name)}, batch and LR of {_last(baseline.name)}"
            changes = same | {"name": f"{recipe.name.removesuffix(TUNED)}.equal_batch", "description": words}
            rows.append(_copy(source, published=None, **changes, **_counted_in_batches(source, baseline)))
    return rows


def _counted_in_batches(recipe: Recipe, baseline: Recipe) -> dict[str, Any]:
    """What is counted in batches is the baseline's, too: tuning changes it along with the batch."""
    changes: dict[str, Any] = {}
    if recipe.duration.endswith("ba") and baseline.duration.endswith("ba"):
        changes["duration"] = baseline.duration
    if recipe.schedule.warmup.endswith("ba") and changes.get("duration", recipe.duration) == baseline.duration:
        changes["schedule"] = recipe.schedule.model_copy(update={"warmup": baseline.schedule.warmup})
    if str(recipe.evaluate).endswith("ba") and str(baseline.evaluate).endswith("ba"):
        changes["evaluate"] = baseline.evaluate
    return changes


def root(recipe: Recipe) -> Recipe:
    """The recipe at the end of the chain of `extends`; without one, the recipe itself without its speed-ups."""
    from composer_speedups.recipes import load_recipe, plain_speedups

    found = recipe
    for _ in range(30):
        if not found.extends:
            break
        found = load_recipe(found.extends, check_arguments=False)
    if found is not recipe:
        # Overrides given on the command line hold for the baseline, too: only the switches and the tuning are its own.
        tuned = [key for key in _SEARCHED if recipe.provenance.get(key) != "command line"]
        own = {key: getattr(found, key) for key in (*DESCRIPTIVE, *tuned)}
        return _copy(recipe, speedups=found.speedups, **own)
    own = {"name": f"{recipe.name}.plain", "description": "no speed-up", "published": None}
    return _copy(recipe, speedups=plain_speedups(), **own)


def _ladder(recipes: Sequence[Recipe], baseline: Recipe) -> list[Recipe]:
    if len(recipes) > 1:
        outside = baseline.name not in {recipe.name for recipe in recipes}
        return [baseline, *recipes] if outside else list(recipes)
    target, taken, rows = recipes[0], {}, [baseline]
    switches = _switches(target, baseline)
    # The recipe itself is the last row; with a batch or rate of its own it is a row more, so that no switch gets the
    # credit for that.
    steps = switches[:-1] if _tuned(target) == _tuned(baseline) else switches
    for (key, arguments), label in zip(steps, _labels(switches), strict=False):
        taken[key] = arguments
        suffix = f"+{key}" if len(taken) == 1 else f"+..+{key}"
        rows.append(_made(target, baseline, suffix, dict(taken), f"+ {label}"))
    return [*rows, target] if switches else rows


def _leave_one_out(best: Recipe, baseline: Recipe) -> list[Recipe]:
    switches = _switches(best, baseline)
    if not switches:
        raise RecipeError(f"{best.name} has no speed-up that {baseline.name} lacks: nothing to leave out")
    rows = [best]
    for key, _ in switches:
        kept: SpeedUps = {k: v for k, v in best.speedups.items() if k != key}
        if key in baseline.speedups:
            kept[key] = baseline.speedups[key]
        words = f"{_last(best.name)} without {key}"
        rows.append(_copy(best, name=f"{best.name}{WITHOUT}{key}", description=words, published=None, speedups=kept))
    return rows


def _tuned(recipe: Recipe) -> dict[str, Any]:
    return {key: getattr(recipe, key) for key in _SEARCHED}


def _switches(recipe: Recipe, baseline: Recipe) -> list[Switch]:
    """The speed-ups, with their arguments, that the baseline lacks or sets otherwise."""
    return [(k, v) for k, v in recipe.speedups.items() if baseline.speedups.get(k) != v]


def _made(source: Recipe, baseline: Recipe, suffix: str, switches: SpeedUps, words: str) -> Recipe:
    """The baseline with some switches on, at its own batch and learning rate.

    What else a switch needs, such as texts that are not padded to one length, comes from its `source`.
    """
    own = _tuned(baseline) | _counted_in_batches(source, baseline)
    own |= {"name": baseline.name + suffix, "description": words, "published": None}
    return _copy(source, speedups=dict(baseline.speedups) | switches, **own)


def _copy(recipe: Recipe, **changes: Any) -> Recipe:
    return recipe.model_copy(deep=True, update=changes)


def _labels(switches: Sequence[Switch]) -> list[str]:
    """Keys; with their arguments where two have the same key."""
    keys = [key for key, _ in switches]
    return [
        key if keys.count(key) == 1 else ".".join([key, *(_word(v) for v in arguments.values())])
        for key, arguments in switches
    ]


def _word(value: Any) -> str:
    return "".join(c if c.isalnum() or c in "_.-" else "_" for c in str(value))


def _last(name: str) -> str:
    return name.rpartition("/")[2]
