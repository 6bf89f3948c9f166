"""Lay one recipe over another: `extends`, a suite's overrides, and `key=value` from the command line.

Works on `Item`s, so that every value keeps the place it came from.
"""

from __future__ import annotations

from composer_speedups.errors import RecipeError
from composer_speedups.recipes.schema import RecipeFields, nearest
from composer_speedups.recipes.yaml import Item, Where, read_text, show

__all__ = ["SECTIONS", "merge", "normalised", "override_all"]

COMMAND_LINE = Where("command line")
FREE = (("speedups",), ("loggers",), ("model", "config"))  # mappings of any names
SECTIONS = {"speedups": "speed-up", "loggers": "logger"}  # mappings of a name to arguments; null removes a name


def normalised(item: Item) -> Item:
    """The same recipe with `speedups` and `loggers` as mappings, whichever form they were written in."""
    assert isinstance(item.value, dict)
    values = dict(item.value)
    for section, noun in SECTIONS.items():
        if section in values:
            values[section] = _as_mapping(values[section], section, noun)
    return Item(values, item.where)


def _as_mapping(item: Item, section: str, noun: str) -> Item:
    if item.value is None:
        raise RecipeError(
            f"{item.where}: {section} is empty. Write {section}: {{}} for none, "
            "or NAME: null to remove an inherited one"
        )
    pairs: list[tuple[str, Item]] = []
    if isinstance(item.value, dict):
        pairs = list(item.value.items())
    elif isinstance(item.value, list):
        for entry in item.value:
            if isinstance(entry.value, str):
                pairs.append((entry.value, Item({}, entry.where)))
            elif isinstance(entry.value, dict) and len(entry.value) == 1:
                pairs.extend(entry.value.items())
            else:
                raise RecipeError(
                    f"{entry.where}: a {noun} in a list is a name, or one name with its arguments, got "
                    f"{show(entry.plain())}. Write e.g. {section}: [fused_adamw, {{torch_compile: {{scope: block}}}}]"
                )
    else:
        raise RecipeError(
            f"{item.where}: {section} must be a mapping or a list, got {show(item.plain())}. "
            f"Write e.g. {section}: {{NAME: {{}}}}"
        )
    result: dict[str, Item] = {}
    for name, arguments in pairs:
        if name in result:
            raise RecipeError(f"{arguments.where}: {noun} {show(name)} is listed twice. Keep one")
        result[name] = _arguments(name, arguments, section)
    return Item(result, item.where)


def _arguments(name: str, item: Item, section: str) -> Item:
    if item.value is True:
        return Item({}, item.where)
    if item.value is None or item.value is False:
        return Item(None, item.where)  # removed; `merge` acts on it
    if not isinstance(item.value, dict):
        raise RecipeError(
            f"{item.where}: {section}.{_word(name)} must be a mapping of its arguments, got {show(item.plain())}. "
            f"Write e.g. {_word(name)}: {{}}"
        )
    for argument, value in item.value.items():
        if isinstance(value.value, dict | list):
            raise RecipeError(
                f"{value.where}: {section}.{_word(name)}.{_word(argument)} must be a single value, "
                f"got {show(value.plain())}"
            )
    return item


def _word(name: str) -> str:
    return name if name.isidentifier() and len(name) <= 60 else show(name)


def merge(base: Item, top: Item, lenient: bool = False, path: tuple[str, ...] = ()) -> Item:
    """`base` with `top` laid over it. `lenient`: removing what is not there is no mistake.

    Mappings are merged; an empty one in the place of a mapping of any names means none of the inherited.
    """
    if not (isinstance(base.value, dict) and isinstance(top.value, dict)) or (path in FREE and not top.value):
        return top
    merged = dict(base.value)
    removing = len(path) == 1 and path[0] in SECTIONS
    # What belongs to the recipe's form is merged key by key; a speed-up's arguments too: a child adds or changes.
    for key, item in top.value.items():
        if removing and item.value is None:
            if merged.pop(key, None) is None and not lenient:
                raise RecipeError(
                    f"{item.where}: {path[0]}.{_word(key)} is null, which removes it, but nothing was inherited. "
                    f"Write {_word(key)}: {{}} to use it, or remove the line"
                )
        elif key in merged:
            merged[key] = merge(merged[key], item, lenient, (*path, key))
        elif isinstance(item.value, dict):
            merged[key] = merge(Item({}, item.where), item, lenient, (*path, key))
        else:
            merged[key] = item
    return Item(merged, top.where)


def override_all(items: list[Item], text: str) -> list[Item]:
    path, value = _parse_override(text)
    item = value
    for key in reversed(path):
        item = Item({key: item}, COMMAND_LINE)
    change = normalised(item)
    needs_it = path[0] in SECTIONS and (len(path) > 2 or (len(path) == 2 and value.value in (None, False)))
    if not needs_it:
        return [merge(base, change, lenient=True) for base in items]
    section, name = path[0], path[1]
    has = [isinstance(base.at((section,)).value, dict) and name in (base.plain().get(section) or {}) for base in items]
    if not any(has):
        present = sorted({n for base in items for n in base.plain().get(section) or {}})
        raise RecipeError(
            f"{COMMAND_LINE}: {show(text)}: no {SECTIONS[section]} {_word(name)} to change here. "
            f"{'There are: ' + ', '.join(present) if present else 'There are none'}. To add one: {section}.NAME={{}}"
        )
    return [merge(base, change, lenient=True) if h else base for base, h in zip(items, has, strict=True)]


def _parse_override(text: str) -> tuple[list[str], Item]:
    if not isinstance(text, str):
        raise TypeError(f"an override must be a string 'key=value', got {text!r}")
    key, equals, value = text.partition("=")
    path = key.strip().split(".")
    if not equals or not all(path):
        raise RecipeError(f"{COMMAND_LINE}: {show(text)} is not key=value. Write e.g. batch_size=16")
    if len(path) > 4:
        raise RecipeError(f"{COMMAND_LINE}: unknown key {show(key)}. {nearest(path[0], RecipeFields.model_fields)}")
    if path[0] == "extends":
        raise RecipeError(f"{COMMAND_LINE}: extends cannot be overridden. Name the other recipe instead")
    if len(text) > 5000:
        raise RecipeError(f"{COMMAND_LINE}: the value of {show(key)} is too long")
    return path, read_text(value, COMMAND_LINE, lines=False)
