"""Tune every row of a study before it starts, so that each is shown at its own best batch and learning rate."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape

from composer_speedups.ablation.estimate import seconds_per_sample
from composer_speedups.ablation.plans import TUNED, WITHOUT
from composer_speedups.ablation.study import Entries
from composer_speedups.errors import NothingFits, RecipeError, SpeedUpUnavailable, UserError
from composer_speedups.isolation.isolate import Isolation
from composer_speedups.tasks.inputs import Mark, changed, marks, read_by
from composer_speedups.tuning.search import BATCH_TRIES
from composer_speedups.tuning.settings import Settings
from composer_speedups.tuning.tries import ENTRIES
from composer_speedups.tuning.tune import START, tune

if TYPE_CHECKING:
    from composer_speedups.recipes import Recipe

__all__ = ["expected_tuning", "tune_rows"]


def tune_rows(
    recipes: Sequence[Recipe],
    baseline: str,
    folder: Path,
    settings: Settings,
    *,
    command: str = "",
    console: Console | None = None,
    entries: Entries = ENTRIES,
) -> tuple[list[Recipe], str] | None:
    """The recipes, tuned, and the name of the tuned baseline; None if it was stopped.

    The tuned recipes are files in `folder`; those that are there already are not made again. What cannot run on this
    machine, or fits in no batch, stays as it is: the study says why.
    """
    from composer_speedups.recipes import load_recipe
    from composer_speedups.recipes.files import recipe_names

    console = console or Console()
    names = {recipe.name for recipe in recipes}
    rows: list[Recipe] = []
    chosen = baseline
    known = marks({path: kind for recipe in recipes for path, kind in read_by(recipe.to_dict()).items()})
    with Isolation(entries.train, entries.preload) as isolation:
        for number, recipe in enumerate(recipes, start=1):
            path = _path(folder, recipe)
            if other := changed(known):
                raise UserError(f"{other} has changed since the tuning began: put back what it held")
            inputs = {path: known[path] for path in read_by(recipe.to_dict()) if path in known}
            mark = f"of {_digest(recipe, settings, inputs)}"
            # A recipe of an earlier version does not say what it was tuned on. It is taken, as hours may have gone into
            # it, and the study that is made of it watches the same data.
            marked = {mark, f"of {_digest(recipe, settings, {})}"}
            name = _name(recipe.name, baseline)
            if name in names:
                raise RecipeError(f"{name} is the name of a row already: give that recipe another name")
            console.print(f"\n[bold]Tuning row {number} of {len(recipes)}[/]: {escape(recipe.name)}", highlight=False)
            if os.path.exists(path):
                head = path.read_text(encoding="utf-8").partition("\n")[0]
                if not any(one in head for one in marked):
                    raise UserError(
                        f"{path} was tuned from another recipe, or with another budget, or on other data. Remove it, "
                        f"or choose another --out"
                    )
                console.print(f"{path} is there already", highlight=False, markup=False)
            else:
                shipped = recipe.name in recipe_names()
                try:
                    done = tune(
                        recipe,
                        out=path,
                        base=load_recipe(recipe.name, check_arguments=False) if shipped else None,
                        extends=recipe.name if shipped else None,
                        settings=settings,
                        command=f"{mark}, {command}" if command else mark,
                        name=name,
                        console=console,
                        entries=entries,
                        isolation=isolation,
                    )
                except SpeedUpUnavailable as error:
                    console.print(f"not tuned: {error}", style="dim", highlight=False, markup=False)
                    rows.append(recipe)
                    continue
                except NothingFits as error:
                    console.print(f"not tuned: {error}", style="yellow", highlight=False, markup=False)
                    rows.append(recipe)
                    continue
                if done.recipe is None:
                    return None
            rows.append(load_recipe(path, check_arguments=False))
            if recipe.name == baseline:
                chosen = name
    return rows, chosen


def expected_tuning(
    recipes: Sequence[Recipe], folder: Path, settings: Settings, peaks: Mapping[str, float], hardware: str
) -> tuple[int, float | None]:
    """How many rows `tune_rows` would tune, and in about how many seconds; None if the attainable speed is not known.

    Args:
        recipes: those that can run on this machine.
        folder: of the tuned recipes: those that are there are not made again.
        settings: of the search for each row.
        peaks: FLOP/s of a plain matmul by precision.
        hardware: `cpu` or `cuda`.
    """
    left = [recipe for recipe in recipes if not os.path.exists(_path(folder, recipe))]
    total = len(left) * (BATCH_TRIES + 2 * settings.trials) * START
    for recipe in left:
        per_sample = seconds_per_sample(recipe.to_dict(), peaks, hardware)
        if per_sample is None:
            return len(left), None
        total += settings.short * per_sample
    return len(left), total


def _path(folder: Path, recipe: Recipe) -> Path:
    return folder / f"{recipe.name.replace('/', '.')}.yaml"


def _name(name: str, baseline: str) -> str:
    """Of the tuned row; what is the baseline without something stays so: BASE.tuned.without_X."""
    if name.startswith(baseline + WITHOUT):
        return f"{baseline}{TUNED}{name.removeprefix(baseline)}"
    return f"{name}{TUNED}"


def _digest(recipe: Recipe, settings: Settings, inputs: Mapping[str, Mark]) -> str:
    """What a tuned recipe depends on, in twelve digits."""
    read = {path: mark.content for path, mark in inputs.items()}
    content = json.dumps([recipe.to_dict(), settings.asked(), *([read] if read else [])], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:12]
