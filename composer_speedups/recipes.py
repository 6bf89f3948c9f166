"""Recipes: named YAML files that say what is trained, with which speed-ups, batch size and learning rate.

A recipe `extends` another and says only what differs. Loading resolves the chain, applies `key=value` overrides,
and remembers for every value the file and line that it came from. A mistake is one line with file, line and remedy.

Imports neither torch nor Composer; `load_recipe` does, to check the speed-ups' arguments, unless told not to.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from pydantic import BaseModel, PrivateAttr, ValidationError

from composer_speedups import registry
from composer_speedups.errors import ConflictError, RecipeError, UserError
from composer_speedups.recipe_merge import SECTIONS, merge, normalised, override_all
from composer_speedups.recipe_schema import LOGGERS, RecipeFields, SuiteFields, explain, nearest
from composer_speedups.recipe_yaml import Item, Where, dump, read_file, show

if TYPE_CHECKING:
    from composer_speedups.speedup import SpeedUp

__all__ = [
    "SUITE_SECTIONS",
    "Recipe",
    "RecipeInfo",
    "Suite",
    "check_speedups",
    "list_recipes",
    "load_recipe",
    "load_recipes",
    "load_suite",
    "make_recipe",
    "recipe_names",
    "suite_names",
]

Fields = TypeVar("Fields", bound=BaseModel)
PathLike = str | os.PathLike[str]

DEFAULT = Where("default")
NOT_INHERITED = ("name", "description", "extends", "published")  # they belong to one recipe, not to its children
MAX_CHAIN = 30
# What a suite has for a kind of hardware (`hardware.suite_section`) instead of the values at its top; and the section
# whose values hold where it has none of its own.
SUITE_SECTIONS: dict[str, str | None] = {"cpu": None, "cuda": None, "cpu_without_bf16": "cpu"}
HINTS = {  # what people call things -> how a recipe says it
    "fp16": "mixed_precision: {dtype: fp16}",
    "bf16": "mixed_precision: {dtype: bf16}",
    "amp": "mixed_precision: {dtype: fp16}",
    "tf32": "matmul_precision: {precision: high}",
    "compile": "torch_compile: {}",
    "flash_attention": "sdp_attention: {}",
}


class Recipe(RecipeFields):
    """A recipe with everything resolved. Fields: see `RecipeFields`."""

    _written: Item | None = PrivateAttr(None)  # what the files and the command line said; None if built in Python

    @property
    def provenance(self) -> dict[str, str]:
        """Dotted path of every value -> `file:line`, `command line` or `default`."""
        return {".".join(path): str(item.where) for path, item in self._placed().leaves()}

    def where(self, *path: str) -> Where:
        """The place where the value at `path` was written."""
        return self._placed().at(path).where

    def _placed(self) -> Item:
        return _with_places(self.to_dict(), self._written)

    def algorithms(self) -> list[SpeedUp]:
        """The speed-ups, newly built, for `Trainer(algorithms=...)`."""
        return [registry.build(key, **arguments) for key, arguments in self.speedups.items()]

    def to_dict(self) -> dict[str, Any]:
        """Everything resolved, as plain data that loads again; `extends` is left out, as nothing is left to inherit."""
        return self.model_dump(mode="json", exclude={"extends"})

    def to_yaml(self, comments: bool = False, without: Collection[str] = ()) -> str:
        """Everything resolved, as YAML that loads again; with `comments`, each value says where it came from.

        `without` names keys that are left out.
        """
        placed = self._placed()
        return dump(Item({key: x for key, x in placed.value.items() if key not in without}, placed.where), comments)

    @classmethod
    def _resolved(cls, item: Item) -> Recipe:
        recipe = _validate(cls, item)
        recipe._written = item
        return recipe


@dataclass(frozen=True)
class Suite:
    """Recipes to be compared, resolved for one kind of hardware.

    Attributes:
        name: `demo` for a shipped one, else the file's name.
        description: a line or two.
        baseline: the name of the recipe against which speed-ups are counted.
        recipes: in the order of the table.
        hardware: `cpu`, `cuda` or `cpu_without_bf16`.
    """

    name: str
    description: str
    baseline: str
    recipes: list[Recipe]
    hardware: str


class RecipeInfo(NamedTuple):
    """What a list of recipes shows."""

    name: str
    description: str
    batch_size: int
    learning_rate: float
    samples_per_second: float | None


def load_recipe(name_or_path: PathLike, overrides: Sequence[str] = (), check_arguments: bool = True) -> Recipe:
    """Load a shipped recipe by name, or any recipe by the path of its YAML file.

    Args:
        name_or_path: `finetune/fp32`, a unique last part such as `adamw_8bit_low_precision_norm`, or a path.
        overrides: `key=value` with dotted keys: `task.max_length=128`, `speedups.fused_adamw={}`,
            `speedups.foreach_adamw=null`.
        check_arguments: also build the speed-ups, to find wrong arguments and contradictions. Imports Composer.

    >>> recipe = load_recipe("finetune/fp32", ["batch_size=8"], check_arguments=False)
    >>> recipe.batch_size, recipe.provenance["batch_size"]
    (8, 'command line')
    """
    return load_recipes([name_or_path], overrides, check_arguments)[0]


def load_recipes(
    names_or_paths: Iterable[PathLike], overrides: Sequence[str] = (), check_arguments: bool = True
) -> list[Recipe]:
    """Load several recipes. An override of a speed-up's argument, or its removal, is for those that have it."""
    library = _Library()
    items = [library.load(*library.find(name)) for name in names_or_paths]
    return _finish(items, overrides, check_arguments)


def make_recipe(values: dict[str, Any], overrides: Sequence[str] = ()) -> Recipe:
    """A recipe that no file holds, from plain values, as the command line gives them; checked as one from a file.

    >>> make_recipe({"task": {"name": "dummy"}}, ["batch_size=8"]).batch_size
    8
    """

    def item(value: Any) -> Item:
        return Item({k: item(v) for k, v in value.items()} if isinstance(value, dict) else value, Where("command line"))

    return _finish([normalised(item(values))], overrides, check_arguments=False)[0]


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
    library = _Library()
    path, name = library.find(name_or_path, kind="suite")
    variants = _suite_variants(library.read(path))
    fields = {key: _validate(SuiteFields, item) for key, item in variants.items()}  # all, whichever is asked for
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
    recipes = _finish(items, overrides, check_arguments)
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
    return Suite(name, chosen.description, baseline, recipes, hardware)


def list_recipes() -> list[RecipeInfo]:
    """The shipped recipes in the order of their suites, quickly: without torch and Composer, without checking them."""
    library = _Library()
    order: dict[str, int] = {}
    for suite in suite_names():
        for variant in _suite_variants(library.read(_folder() / "suites" / f"{suite}.yaml")).values():
            for name in variant.at(("recipes",)).plain():
                order.setdefault(name, len(order))
    defaults = RecipeFields.model_fields
    found = []
    for name in sorted(recipe_names(), key=lambda n: (n.rpartition("/")[0], order.get(n, len(order)), n)):
        item = library.load(_folder() / f"{name}.yaml", name).plain()
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


def recipe_names() -> tuple[str, ...]:
    """The names of the shipped recipes."""
    return tuple(name for name in _shipped() if not name.startswith("suites/"))


def suite_names() -> tuple[str, ...]:
    """The names of the shipped suites."""
    return tuple(name.removeprefix("suites/") for name in _shipped() if name.startswith("suites/"))


@cache
def _folder() -> Path:
    """The shipped YAML: inside the package in a wheel, beside it in a checkout."""
    package = Path(__file__).resolve().parent
    inside = package / "recipe_data"
    return inside if inside.is_dir() else package.parent / "recipes"


@cache
def _shipped() -> tuple[str, ...]:
    folder = _folder()
    return tuple(sorted(path.relative_to(folder).with_suffix("").as_posix() for path in folder.rglob("*.yaml")))


@dataclass
class _Library:
    """Finds and reads recipe files; each file once."""

    _files: dict[Path, Item] = field(default_factory=dict)

    def find(self, name: PathLike, relative_to: Path = Path(), kind: str = "recipe") -> tuple[Path, str]:
        """The file and the name of a shipped recipe or suite, or of a file given by its path."""
        text = os.fspath(name)
        if not isinstance(text, str) or not text.strip():
            raise RecipeError(f"{show(text)} is no name of a {kind}")
        known = suite_names() if kind == "suite" else recipe_names()
        folder = _folder() / "suites" if kind == "suite" else _folder()
        is_path = not isinstance(name, str) or text.endswith((".yaml", ".yml")) or text.startswith(("./", "../", "/"))
        if not is_path:
            matches = [text] if text in known else [n for n in known if n.rpartition("/")[2] == text]
            if len(matches) == 1:
                return folder / f"{matches[0]}.yaml", matches[0]
            if matches:
                raise RecipeError(f"{show(text)} is the name of {len(matches)} recipes. Write {' or '.join(matches)}")
            other = recipe_names() if kind == "suite" else suite_names()
            if text in other:
                rows = f"suite: its rows are shown by `composer-speedups ablate {text} --dry-run`"
                raise RecipeError(f"{show(text)} is a {'recipe, not a suite' if kind == 'suite' else rows}")
            raise RecipeError(f"unknown {kind} {show(text)}. {nearest(text, (*other, *known))}")
        path = Path(os.path.realpath(relative_to / text)) if "\0" not in text else Path(text)
        for shipped in known:
            if path == folder / f"{shipped}.yaml":
                return path, shipped
        stem = re.sub(r"[^A-Za-z0-9_.+-]", "_", path.stem).lstrip(".+-")[:100]
        return path, stem or kind

    def read(self, path: Path) -> Item:
        if path not in self._files:
            item = read_file(path, _display(path))
            if not isinstance(item.value, dict):
                what = "is empty" if item.value is None else f"must hold keys and values, got {show(item.plain())}"
                raise RecipeError(f"{item.where}: {what}. Write e.g. batch_size: 32")
            self._files[path] = item
        return self._files[path]

    def load(self, path: Path, name: str) -> Item:
        """The recipe with its whole chain of `extends` merged, named `name` unless it names itself."""
        item = self._chain(path, ())
        assert isinstance(item.value, dict)
        return Item({"name": Item(name, item.where), **item.value}, item.where)

    def _chain(self, path: Path, children: tuple[Path, ...]) -> Item:
        item = normalised(self.read(path))
        assert isinstance(item.value, dict)
        if "extends" not in item.value or item.value["extends"].value is None:
            return merge(Item({}, item.where), item)
        parent = item.value["extends"]
        if not isinstance(parent.value, str):
            raise RecipeError(
                f"{parent.where}: extends must be the name or the path of one recipe, got {show(parent.plain())}. "
                "Write e.g. extends: finetune/fp32"
            )
        chain = (*children, path)
        try:
            parent_path, parent_name = self.find(parent.value, relative_to=path.parent)
            if parent_path in chain:
                raise RecipeError(f"{show(parent.value)} leads back to {_display(parent_path)}: break the circle")
            if len(chain) > MAX_CHAIN:
                raise RecipeError(f"more than {MAX_CHAIN} recipes in one chain")
            if not parent_path.is_file():
                raise RecipeError(f"there is no file {_display(parent_path)}")
        except (RecipeError, OSError, ValueError) as error:
            raise RecipeError(f"{parent.where}: extends: {error}") from None
        base = self._chain(parent_path, chain)
        assert isinstance(base.value, dict)
        inherited = {key: value for key, value in base.value.items() if key not in NOT_INHERITED}
        # Its name, or a path that holds from whatever folder it is looked up later.
        known = Item(parent_name if parent_name in recipe_names() else str(parent_path), parent.where)
        return merge(Item(inherited, base.where), Item(item.value | {"extends": known}, item.where))


def _display(path: Path) -> str:
    """Relative to the working folder where the file is in it: short, and what editors open."""
    try:
        return str(path.relative_to(Path.cwd().resolve()))
    except (ValueError, OSError):
        return str(path)


def _finish(items: list[Item], overrides: Sequence[str], check_arguments: bool) -> list[Recipe]:
    """Apply the overrides, validate, and check the speed-ups."""
    if isinstance(overrides, str):
        raise TypeError(f"overrides must be a list of 'key=value', got the string {overrides!r}")
    for override in overrides:
        items = override_all(items, override)
    recipes = [Recipe._resolved(item) for item in items]
    for recipe in recipes:
        _check_names(recipe)
        if check_arguments:
            check_speedups(recipe)
    return recipes


def _validate(model: type[Fields], item: Item) -> Fields:
    try:
        return model.model_validate(item.plain())
    except ValidationError as error:
        path, message = explain(error, model)
        raise RecipeError(f"{item.at(path).where if path else _place(message, item)}: {message}") from None


def _place(message: str, item: Item) -> Where:
    """Of a mistake of several values: where the first of those it names stands that is in the recipe's own file."""
    places = [item.at(word.split(".")).where for word in message.split()]
    return next((where for where in places if where != item.where and where.file == item.where.file), item.where)


def _with_places(data: Any, item: Item | None) -> Item:
    """`data` as Items, each with the place it has in `item`, or `default`."""
    where = item.where if item is not None else DEFAULT
    if not isinstance(data, dict):
        return Item([Item(v, where) for v in data] if isinstance(data, list) else data, where)
    known = item.value if item is not None and isinstance(item.value, dict) else {}
    return Item({key: _with_places(value, known.get(key)) for key, value in data.items()}, where)


def _check_names(recipe: Recipe) -> None:
    """Every speed-up and logger must exist."""
    for section, known in (("speedups", registry.keys()), ("loggers", LOGGERS)):
        for name in getattr(recipe, section):
            if name not in known:
                hint = f"Write {HINTS[name]}" if name in HINTS and section == "speedups" else nearest(name, known)
                raise RecipeError(f"{recipe.where(section, name)}: unknown {SECTIONS[section]} {show(name)}. {hint}")


def check_speedups(recipe: Recipe) -> list[SpeedUp]:
    """The speed-ups, newly built: every argument must be right, and no two may fill one slot.

    Raises:
        RecipeError: an argument is wrong.
        ConflictError: two contradict each other, or one cannot be had with accumulated gradients.
    """
    from composer_speedups.speedup import conflict, contradicted  # imports Composer

    built = []
    for key, arguments in recipe.speedups.items():
        where = recipe.where("speedups", key)
        try:
            for name, value in arguments.items():
                where = recipe.where("speedups", key, name)
                registry.check_arguments(key, {name: value})
            where = recipe.where("speedups", key)
            built.append(registry.build(key, **arguments))
        except UserError as error:
            raise RecipeError(f"{where}: {error}") from None
    if clash := conflict(built):
        other, key, place = clash[0].key(), clash[1].key(), clash[2]
        raise ConflictError(
            f"{recipe.where('speedups', key)}: {other} ({recipe.where('speedups', other)}) and {key} contradict each "
            f"other: both set the {place}. Keep one; {other}: null removes an inherited one"
        )
    if found := contradicted(built):
        key = found[0].key()
        raise ConflictError(f"{recipe.where('speedups', key)}: {found[1]}; {key}: null removes an inherited one")
    if recipe.accumulates and (at_once := next((one.key() for one in built if one.at_once), None)):
        raise ConflictError(
            f"{recipe.where('microbatch_size')}: microbatch_size {recipe.microbatch_size} of {recipe.batch_size} "
            f"accumulates gradients, and {at_once} ({recipe.where('speedups', at_once)}) uses them as they come. Set "
            f"microbatch_size: null, with gradient_checkpointing if the batch is too large, or {at_once}: null"
        )
    return built


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
