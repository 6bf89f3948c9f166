"""`Recipe`, and how one is loaded.

A recipe `extends` another and says only what differs. Loading resolves the chain, applies `key=value` overrides,
and remembers for every value the file and line that it came from. A mistake is one line with file, line and remedy.

Imports neither torch nor Composer; `load_recipe` does, to check the speed-ups' arguments, unless told not to.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel, PrivateAttr, ValidationError

from composer_speedups import registry
from composer_speedups.errors import ConflictError, RecipeError, UserError
from composer_speedups.recipes.files import Library, PathLike
from composer_speedups.recipes.merge import SECTIONS, normalised, override_all
from composer_speedups.recipes.schema import LOGGERS, RecipeFields, explain, nearest
from composer_speedups.recipes.yaml import Item, Where, dump, show

if TYPE_CHECKING:
    from composer_speedups.speedup import SpeedUp

__all__ = ["Recipe", "check_speedups", "finish", "load_recipe", "load_recipes", "make_recipe", "validated"]

Fields = TypeVar("Fields", bound=BaseModel)

DEFAULT = Where("default")
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
        recipe = validated(cls, item)
        recipe._written = item
        return recipe


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
    library = Library()
    items = [library.load(*library.find(name)) for name in names_or_paths]
    return finish(items, overrides, check_arguments)


def make_recipe(values: dict[str, Any], overrides: Sequence[str] = ()) -> Recipe:
    """A recipe that no file holds, from plain values, as the command line gives them; checked as one from a file.

    >>> make_recipe({"task": {"name": "dummy"}}, ["batch_size=8"]).batch_size
    8
    """

    def item(value: Any) -> Item:
        return Item({k: item(v) for k, v in value.items()} if isinstance(value, dict) else value, Where("command line"))

    return finish([normalised(item(values))], overrides, check_arguments=False)[0]


def plain_speedups() -> dict[str, dict[str, Any]]:
    """Of a recipe that has none to show: true float32, as Composer turns TF32 on by itself."""
    return {"matmul_precision": {"precision": "highest"}}


def finish(items: list[Item], overrides: Sequence[str], check_arguments: bool) -> list[Recipe]:
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


def validated(model: type[Fields], item: Item) -> Fields:
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
