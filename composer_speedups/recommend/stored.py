"""What an earlier call of `recommend` has left in its folders: studies to go on with, if they are of the same question.

Nothing here changes anything, so that folders may be looked at in any order.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from composer_speedups import hardware
from composer_speedups.ablation.aside import STORE
from composer_speedups.ablation.store import BAD, Store
from composer_speedups.errors import UserError
from composer_speedups.recipes.files import NOT_INHERITED
from composer_speedups.recipes.schema import explain
from composer_speedups.recommend.choice import PLAIN

if TYPE_CHECKING:
    from composer_speedups.recipes import Recipe

__all__ = ["check_machine", "plain_failed", "planned_seeds", "stored_rows"]


def check_machine(folders: Sequence[Path], here: dict[str, Any]) -> None:
    """What was measured on another machine is no answer for this one.

    Raises:
        UserError: it was, in one of `folders`.
    """
    for folder in folders:
        if not os.path.isfile(folder / STORE):
            continue
        with Store(folder / STORE, create=False) as store:
            stored = list(store.environments().values())
        difference = next((text for there in stored if (text := hardware.same_machine(there, here))), "")
        if difference:
            raise UserError(f"{folder} was measured on another machine or stack ({difference}). Choose another --out")


def stored_rows(folder: Path, base: Recipe, own_batch: bool) -> list[Recipe]:
    """The recipes of the study in `folder`, the plain one first; none if there is none yet.

    Raises:
        UserError: it is a study of another recipe than `base`, or, if that is the user's, of another batch.
    """
    from composer_speedups.recipes import Recipe

    if not os.path.isfile(folder / STORE):
        return []
    with Store(folder / STORE, create=False) as store:
        recipes = store.recipes()
    try:
        stored = [Recipe.model_validate(recipe) for recipe in recipes.values()]
    except ValidationError as error:
        why = explain(error, Recipe)[1].partition(". ")[0]  # without what a user would write instead
        raise UserError(f"{folder} holds a study of another version ({why}). Choose another --out") from None
    if not stored:
        return []
    plain = stored[0]
    same = plain.name == PLAIN and _identity(plain) == _identity(base)
    if not same or (own_batch and plain.batch_size != base.batch_size):
        raise UserError(f"{folder} holds another study. Choose another --out, or remove that folder")
    return stored


def planned_seeds(folder: Path) -> list[int]:
    """The seeds of the study in `folder`."""
    with Store(folder / STORE, create=False) as store:
        return list(dict.fromkeys(run.seed for run in store.runs()))


def plain_failed(folder: Path) -> bool:
    """Whether the study in `folder` is worth nothing, as what it compares with did not run."""
    with Store(folder / STORE, create=False) as store:
        return any(run.recipe == PLAIN and run.status in BAD for run in store.runs())


def _identity(recipe: Recipe) -> dict[str, Any]:
    """What of a recipe bears on speed, in the form that is measured."""
    free = {*NOT_INHERITED, "batch_size", "eval_batch_size"}
    return {key: value for key, value in recipe.short(1).to_dict().items() if key not in free}
