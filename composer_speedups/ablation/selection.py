"""Which rows a study has: the suite or recipes that were asked for, and what a plan makes of them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from composer_speedups.errors import RecipeError, UserError
from composer_speedups.recipes.yaml import inline

if TYPE_CHECKING:
    from rich.console import Console

    from composer_speedups.recipes import Recipe

__all__ = ["check_trainings", "find_baseline", "load_rows", "overrides_in", "plan_rows"]

# A row may differ from the baseline in these, as a user may want to see what they cost.
_PADDING = ("padding", "pad_to_multiple_of")


def load_rows(what: list[str]) -> tuple[str, list[Recipe], str]:
    """Name, recipes and baseline of what was asked for: one suite, or recipes."""
    from composer_speedups import hardware
    from composer_speedups.recipes import load_recipes
    from composer_speedups.recipes.files import suite_names
    from composer_speedups.recipes.suites import load_suite

    overrides = overrides_in(what)
    names = [word for word in what if "=" not in word]
    if not names:
        raise RecipeError("name a suite or a recipe: composer-speedups ablate demo")
    suites = [n for n in names if n in suite_names() or _is_suite_file(n)]
    if suites and len(names) > 1:
        raise RecipeError(f"{suites[0]} is a suite: name one suite, or recipes, not both")
    # The speed-ups' arguments are checked in the first fresh process: this one stays free of torch.
    if suites:
        suite = load_suite(suites[0], hardware.suite_section(), overrides, check_arguments=False)
        return suite.name, suite.recipes, suite.baseline
    recipes = load_recipes(names, overrides, check_arguments=False)
    return recipes[0].name.rpartition("/")[2] if len(recipes) == 1 else "study", recipes, recipes[0].name


def plan_rows(
    plan: str | None, recipes: list[Recipe], baseline: str | None, default: str, overrides: list[str]
) -> tuple[list[Recipe], str]:
    """The rows that a plan makes of the recipes, and their baseline."""
    from composer_speedups.ablation.plans import expand, root

    names = [recipe.name for recipe in recipes]
    if baseline and baseline not in names and not any(n.endswith(f"/{baseline}") for n in names):
        base = _outside(baseline, overrides)
        if base.name in names:
            base = _same(base, recipes)
    elif baseline or len(recipes) > 1:
        wanted = find_baseline(baseline, recipes, overrides) if baseline else default
        base = recipes[names.index(wanted)]
    else:
        base = root(recipes[0])
    chosen = base.name
    if plan is not None:
        recipes, chosen = expand(plan, recipes, base)
    elif base.name not in names:
        recipes = [base, *recipes]
    return recipes, chosen


def check_trainings(recipes: list[Recipe], baseline: str, console: Console) -> None:
    """Refuse a row with another task than the baseline's; warn of another padding, model or length of the training."""
    base = next(recipe for recipe in recipes if recipe.name == baseline)
    warnings: dict[str, list[str]] = {}
    for recipe in recipes:
        for key in type(base.task).model_fields:
            value, wanted = getattr(recipe.task, key), getattr(base.task, key)
            if value == wanted:
                continue
            words, remedy = f"task.{key} {value}", f"add task.{key}={inline(wanted)}"
            if key not in _PADDING:
                raise UserError(
                    f"{recipe.name} has {words}, the baseline {baseline} {wanted}: their speeds cannot be "
                    f"compared. Name another baseline, or {remedy}"
                )
            text = f"{words}, the baseline {wanted}: speeds differ by that, too. To compare the rest, {remedy}"
            warnings.setdefault(text, []).append(recipe.name)
        for key, value in recipe.model.model_dump().items():
            if value != (other := getattr(base.model, key)):
                text = f"model.{key} {value}, the baseline {other}: speeds differ by that, too. Give all rows one model"
                warnings.setdefault(text, []).append(recipe.name)
        if not _as_long(recipe, base):
            text = (
                f"duration {recipe.duration}, the baseline {base.duration}: wall-clock and quality cannot be "
                f"compared. For one length, add duration={base.duration}"
            )
            warnings.setdefault(text, []).append(recipe.name)
    for text, names in warnings.items():
        console.print(f"{', '.join(names)}: {text}", style="yellow", highlight=False, markup=False, soft_wrap=True)


def overrides_in(what: list[str]) -> list[str]:
    return [word for word in what if "=" in word]


def _is_suite_file(name: str) -> bool:
    """Whether a YAML file is a suite: it lists recipes."""
    path = Path(name)
    if path.suffix not in (".yaml", ".yml") or not os.path.isfile(path):
        return False
    from composer_speedups.recipes.suites import SUITE_SECTIONS
    from composer_speedups.recipes.yaml import read_file

    value = read_file(path, str(path)).value
    sections = [value, *(value[k].value for k in SUITE_SECTIONS if k in value)] if isinstance(value, dict) else []
    return any(isinstance(section, dict) and "recipes" in section for section in sections)


def find_baseline(asked: str, recipes: list[Recipe], overrides: list[str]) -> str:
    """The name of the one that is meant: by its name, the last part of it, or its file."""
    names = [recipe.name for recipe in recipes]
    if asked in names:
        return asked
    if os.path.isfile(asked) and (base := _outside(asked, overrides)).name in names:
        return _same(base, recipes).name
    ends = [n for n in names if n.rpartition("/")[2] == asked]
    if len(ends) != 1:
        raise RecipeError(f"the baseline {asked!r} is none of the recipes: {', '.join(names)}")
    return ends[0]


def _same(base: Recipe, recipes: list[Recipe]) -> Recipe:
    """The row that a baseline given by its file is."""
    row = next(recipe for recipe in recipes if recipe.name == base.name)
    if row.to_dict() != base.to_dict():
        raise RecipeError(f"two files make a recipe called {base.name}: give one of them a name: of its own")
    return row


def _outside(baseline: str, overrides: list[str]) -> Recipe:
    """A baseline that is none of the recipes, with the overrides that hold for them.

    Those of a speed-up's arguments, and its removal, are for the recipes that have it.
    """
    from composer_speedups.recipes import load_recipe
    from composer_speedups.recipes.merge import COMMAND_LINE, SECTIONS
    from composer_speedups.recipes.yaml import read_text

    plain = load_recipe(baseline, check_arguments=False)

    def meant(override: str) -> bool:
        key, _, value = override.partition("=")
        section, *path = key.strip().split(".")
        if section not in SECTIONS or not path or path[0] in getattr(plain, section):
            return True
        return len(path) == 1 and read_text(value, COMMAND_LINE, lines=False).value not in (None, False)

    return load_recipe(baseline, [o for o in overrides if meant(o)], check_arguments=False)


def _as_long(recipe: Recipe, base: Recipe) -> bool:
    """Whether both train for the same duration, or as many samples, as far as whole batches allow."""
    from composer_speedups.recipes.schema import count_and_unit, in_samples

    if recipe.duration == base.duration:
        return True
    if "ep" in {count_and_unit(r.duration)[1] for r in (recipe, base)}:  # an epoch's samples are not known here
        return False
    one, other = (in_samples(r.duration, 0, r.batch_size) for r in (recipe, base))
    return abs(one - other) <= max(recipe.batch_size, base.batch_size) / 2
