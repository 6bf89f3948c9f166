"""Where recipes and suites are, by name or path, and how one that `extends` others is put together.

Knows the files, and of what they say only `extends`: what else they may say is for `recipe.py`.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from composer_speedups.errors import RecipeError
from composer_speedups.recipes.merge import merge, normalised
from composer_speedups.recipes.schema import DESCRIPTIVE, nearest
from composer_speedups.recipes.yaml import Item, read_file, show

__all__ = ["NOT_INHERITED", "Library", "PathLike", "recipe_names", "shipped_folder", "suite_names"]

PathLike = str | os.PathLike[str]
NOT_INHERITED = (*DESCRIPTIVE, "extends")  # they belong to one recipe, not to its children
MAX_CHAIN = 30


def recipe_names() -> tuple[str, ...]:
    """The names of the shipped recipes."""
    return tuple(name for name in _shipped() if not name.startswith("suites/"))


def suite_names() -> tuple[str, ...]:
    """The names of the shipped suites."""
    return tuple(name.removeprefix("suites/") for name in _shipped() if name.startswith("suites/"))


@cache
def shipped_folder() -> Path:
    """The shipped YAML: inside the package in a wheel, beside it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    inside = package / "recipe_data"
    return inside if inside.is_dir() else package.parent / "recipes"


@cache
def _shipped() -> tuple[str, ...]:
    folder = shipped_folder()
    return tuple(sorted(path.relative_to(folder).with_suffix("").as_posix() for path in folder.rglob("*.yaml")))


@dataclass
class Library:
    """Finds and reads recipe files; each file once."""

    _files: dict[Path, Item] = field(default_factory=dict)

    def find(self, name: PathLike, relative_to: Path = Path(), kind: str = "recipe") -> tuple[Path, str]:
        """The file and the name of a shipped recipe or suite, or of a file given by its path."""
        text = os.fspath(name)
        if not isinstance(text, str) or not text.strip():
            raise RecipeError(f"{show(text)} is no name of a {kind}")
        if "=" in text and kind == "recipe" and not os.path.exists(os.path.join(relative_to, text)):
            raise RecipeError(f"name the recipe first: NAME {text}")
        known = suite_names() if kind == "suite" else recipe_names()
        folder = shipped_folder() / "suites" if kind == "suite" else shipped_folder()
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
