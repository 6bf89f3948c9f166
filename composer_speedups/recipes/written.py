"""The recipe that a search ends with: it says only what differs from the old one, and in comments, why."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from composer_speedups.errors import UserError
from composer_speedups.files import whole
from composer_speedups.recipes.files import NOT_INHERITED, recipe_names
from composer_speedups.recipes.recipe import Recipe, load_recipe
from composer_speedups.recipes.yaml import Item, Where, dump

__all__ = ["check_output", "check_writable", "extends_as", "write_recipe"]

_WHERE = Where("search")


def check_output(out: Path, overwrite: bool) -> None:
    """Raise unless a recipe can be written to `out`."""
    if out.suffix not in (".yaml", ".yml"):
        raise UserError(f"--out {out} is no recipe's file: end it with .yaml")
    _check_place(out)
    if os.path.isdir(out):
        raise UserError(f"--out {out} is a folder: name a .yaml file in it")
    if os.path.exists(out) and not overwrite:
        raise UserError(f"{out} exists: add --overwrite to replace it, or choose another --out")
    check_writable(out.parent)


def check_writable(folder: Path) -> None:
    """Raise unless files can be made in `folder`, which need not be there yet."""
    _check_place(folder)
    there = next(path for path in (folder, *folder.absolute().parents) if os.path.exists(path))
    try:
        tempfile.TemporaryFile(dir=there).close()
    except OSError as error:
        raise UserError(f"--out: cannot write to {there}: {error.strerror}. Choose another --out") from error


def _check_place(path: Path) -> None:
    """Raise where nothing can ever be: the name is too long, or in a folder that may not be looked into."""
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):  # the one may be made; what the other is, is found out later
        return
    except OSError as error:
        raise UserError(f"--out: cannot write to {path}: {error.strerror}. Choose another --out") from error


def extends_as(asked: str, out: Path) -> str:
    """How a recipe at `out` names the one that was asked for: a shipped one by its name, a file by its path."""
    matches = [name for name in recipe_names() if asked in (name, name.rpartition("/")[2])]
    if asked in recipe_names() or (len(matches) == 1 and not asked.endswith((".yaml", ".yml"))):
        return asked if asked in recipe_names() else matches[0]
    try:
        path = os.path.relpath(os.path.realpath(asked), os.path.realpath(out.parent))
    except ValueError:  # another drive
        path = os.path.abspath(asked)
    return path if path.startswith(("../", "/")) else f"./{path}"


def write_recipe(
    out: Path,
    recipe: Recipe,
    base: Recipe | None,
    extends: str | None,
    *,
    description: str,
    evidence: Sequence[str],
    reasons: dict[str, str],
    overwrite: bool = False,
    name: str | None = None,
) -> None:
    """Write `recipe` to `out`, and check that it loads as the same.

    Args:
        out: the file; never half written, and replaced only if `overwrite`.
        recipe: what is to be loaded again.
        base: what `extends` loads as; None writes every value, as is done where the difference cannot be said.
        extends: how the file names `base`.
        description: of the new recipe.
        evidence: lines of the comment at the top.
        reasons: by top-level key: a comment after its value.
        overwrite: replace a file that is there.
        name: of the recipe, if not the file's.
    """
    wanted = {key: value for key, value in recipe.to_dict().items() if key not in NOT_INHERITED}
    head: dict[str, Any] = {"name": name} if name else {}
    if base is not None:
        head["extends"] = extends
    head["description"] = description
    values = {k: v for k, v in wanted.items() if v is not None} if base is None else _changes(base.to_dict(), wanted)
    for key in ("batch_size", "learning_rate"):  # said even where they stayed: they were found to be right
        values[key] = wanted[key]
    order = [key for key in wanted if key in values]
    lines = [f"# {_one_line(line)}".rstrip() for line in evidence]
    for key, value in [*head.items(), *((key, values[key]) for key in order)]:
        text = dump(_item({key: value})).rstrip("\n").split("\n")
        if key in reasons:
            text[0] += f" # {_one_line(reasons[key])}"
        lines += text
    out.parent.mkdir(parents=True, exist_ok=True)
    try:
        with whole(out, overwrite=overwrite) as file:  # beside it, as a path in `extends` is relative to the file
            file.write_text("\n".join(lines) + "\n", encoding="utf-8")
            loaded = load_recipe(str(file), check_arguments=False).to_dict()
            if different := [key for key, value in wanted.items() if loaded[key] != value]:
                raise _LoadsAsAnother(", ".join(different))
    except FileExistsError:
        raise UserError(f"{out} exists: add --overwrite to replace it, or choose another --out") from None
    except OSError as error:
        raise UserError(f"{out} cannot be written ({error.strerror}): choose another --out") from error
    except _LoadsAsAnother as error:
        if base is None:
            raise RuntimeError(f"the recipe that was written loads with another {error}") from None
        # What `extends` gives cannot always be taken away: one argument of a speed-up, one of several of a model's
        # configuration.
        words = {"description": description, "evidence": evidence, "reasons": reasons, "name": name}
        write_recipe(out, recipe, None, None, overwrite=overwrite, **words)


class _LoadsAsAnother(Exception):
    """Nothing was written, as it would load with other values of these keys."""


def _one_line(text: str) -> str:
    """A comment ends with its line, so a command's newlines are spaces, and so is what YAML does not allow."""
    return "".join(c if c.isprintable() else " " for c in text)


def _changes(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """What `new` must say when it is laid over `old`: null takes a speed-up away, an empty mapping all of it."""
    found: dict[str, Any] = {}
    for key, value in new.items():
        before = old.get(key)
        if value == before:
            continue
        if value and isinstance(value, dict) and isinstance(before, dict):
            inner = _changes(before, value)
            inner |= {name: None for name in before if name not in value}
            found[key] = inner
        else:
            found[key] = value
    return found


def _item(value: Any) -> Item:
    if isinstance(value, dict):
        return Item({key: _item(inner) for key, inner in value.items()}, _WHERE)
    return Item([_item(v) for v in value] if isinstance(value, list) else value, _WHERE)
