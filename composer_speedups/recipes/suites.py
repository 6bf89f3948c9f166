"""Suites: YAML files that name the recipes of a table; and the list of all shipped recipes, in their order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from composer_speedups.errors import RecipeError
from composer_speedups.recipes import Recipe, finish, validated
from composer_speedups.recipes.files import Library, PathLike, recipe_names, shipped_folder, suite_names
from composer_speedups.recipes.merge import merge, normalised
from composer_speedups.recipes.schema import RecipeFields, SuiteFields, nearest
from composer_speedups.recipes.yaml import Item, show

__all__ = ["SUITE_SECTIONS", "RecipeInfo", "Suite", "list_recipes", "load_suite"]

# What a suite has for a kind of hardware (`hardware.suite_section`) instead of the values at its top; and the section
# whose values hold where it has none of its own.
SUITE_SECTIONS: dict[str, str | None] = {"cpu": None, "cuda": None, "cpu_without_bf16": "cpu"}


@dataclass(frozen=True)
class Suite:
    """Recipes to be compared, resolved for one kind of hardware.

    Attributes:
        name: `demo` for a shipped one, else the file's name.
        description: a line or two.
        baseline: the name of the recipe against which speed-ups are counted.
        recipes: in the order of the table.
    """

    name: str
    description: str
    baseline: str
    recipes: list[Recipe]


class RecipeInfo(NamedTuple):
    """What a list of recipes shows."""

    name: str
    description: str
    batch_size: int
    learning_rate: float
    samples_per_second: float | None


def load_suite(
    name_or_path: PathLike, hardware: str = "cpu", overrides: Sequence[str] = (), check_arguments: bool = True
) -> Suite:
    """Load a shipped suite by name (`demo`), or any suite by the path of its YAML file.

    Args:
        name_or_path: as in `load_recipe`.
        hardware: `cpu`, `cuda` or `cpu_without_bf16` (`hardware.suite_section`): which section of the file is meant,
            if it has any.
        overrides: applied to every recipe, after the suite's own.
        check_arguments: as in `load_recipe`.
    """
    if hardware not in SUITE_SECTIONS:
        raise ValueError(f"hardware must be {', '.join(map(repr, SUITE_SECTIONS))}, got {hardware!r}")
    library = Library()
    path, name = library.find(name_or_path, kind="suite")
    variants = _suite_variants(library.read(path))
    fields = {key: validated(SuiteFields, item) for key, item in variants.items()}  # all, whichever is asked for
    item, chosen = variants[hardware], fields[hardware]
    items, files = [], []
    for index, entry in enumerate(chosen.recipes):
        where = item.at(("recipes", index)).where
        try:
            file, known_as = library.find(entry, relative_to=path.parent)
            loaded = library.load(file, known_as)
        except RecipeError as error:
            raise RecipeError(f"{where}: {error}") from None
        files.append(file)
        changes = item.at(("overrides",)) if "overrides" in item.value else Item({}, where)  # type: ignore[operator]
        items.append(merge(loaded, normalised(changes), lenient=True))
    recipes = finish(items, overrides, check_arguments)
    names = [recipe.name for recipe in recipes]
    for index, recipe in enumerate(names):
        if recipe in names[:index]:
            where = item.at(("recipes", index)).where
            if files[index] in files[:index]:
                raise RecipeError(f"{where}: {recipe} is listed twice. Keep one")
            raise RecipeError(f"{where}: two files make a recipe called {recipe}. Give one of them a name: of its own")
    where = item.at(("baseline",)).where
    baseline = chosen.baseline
    if baseline not in names:
        try:
            file, baseline = library.find(baseline, path.parent)
        except RecipeError as error:
            raise RecipeError(f"{where}: baseline: {error}") from None
        if file not in files:
            raise RecipeError(f"{where}: baseline {chosen.baseline} is none of the recipes. {nearest(baseline, names)}")
        baseline = names[files.index(file)]
    return Suite(name, chosen.description, baseline, recipes)


def list_recipes() -> list[RecipeInfo]:
    """The shipped recipes in the order of their suites, quickly: without torch and Composer, without checking them."""
    library = Library()
    order: dict[str, int] = {}
    for suite in suite_names():
        for variant in _suite_variants(library.read(shipped_folder() / "suites" / f"{suite}.yaml")).values():
            for name in variant.at(("recipes",)).plain():
                order.setdefault(name, len(order))
    defaults = RecipeFields.model_fields
    found = []
    for name in sorted(recipe_names(), key=lambda n: (n.rpartition("/")[0], order.get(n, len(order)), n)):
        item = library.load(shipped_folder() / f"{name}.yaml", name).plain()
        published = item.get("published") or {}
        found.append(
            RecipeInfo(
                name,
                item.get("description", ""),
                item.get("batch_size", defaults["batch_size"].default),
                item.get("learning_rate", defaults["learning_rate"].default),
                published.get("samples_per_second"),
            )
        )
    return found


def _suite_variants(item: Item) -> dict[str, Item]:
    """The suite as it is on each kind of hardware: a section's values replace those at the top."""
    assert isinstance(item.value, dict)
    top = {key: value for key, value in item.value.items() if key not in SUITE_SECTIONS}
    variants: dict[str, Item] = {}
    for hardware, parent in SUITE_SECTIONS.items():
        section = item.value.get(hardware, Item({}, item.where))
        if not isinstance(section.value, dict):
            raise RecipeError(
                f"{section.where}: {hardware} must be a mapping, got {show(section.plain())}. "
                f"Write e.g. {hardware}: {{recipes: [demo/fp32, demo/bf16], baseline: demo/fp32}}"
            )
        inherited = variants[parent].value if parent else top
        variants[hardware] = Item({**inherited, **section.value}, item.where)
    return variants
