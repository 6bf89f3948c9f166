"""YAML as data whose every value knows the file and line it came from.

Read is plain data only: mappings, lists and scalars. Tags, anchors and aliases are refused, so nothing can be
constructed, and nothing small can expand into something huge. Two quirks of YAML 1.1 are mended: `1e-4` is a
number, and `010`, `0x10` and `1:30` are not silently turned into other numbers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from composer_speedups.errors import RecipeError

__all__ = ["Item", "Where", "dump", "inline", "read_file", "read_text", "show"]

Scalar = str | int | float | bool | None

MAX_BYTES = 64 * 1024
MAX_DEPTH = 8
MAX_VALUES = 2000
MAX_KEY = 200

_NULL = re.compile(r"~|null|Null|NULL|")
_TRUE = re.compile(r"(?:yes|true|on)|(?:Yes|True|On)|(?:YES|TRUE|ON)")
_FALSE = re.compile(r"(?:no|false|off)|(?:No|False|Off)|(?:NO|FALSE|OFF)")
_INT = re.compile(r"[-+]?(?:0|[1-9][0-9_]{0,18})", re.ASCII)
_MANTISSA = r"[-+]?(?:[0-9][0-9_]{0,30}\.[0-9_]{0,30}|\.[0-9][0-9_]{0,30})"
_EXPONENT = r"[eE][-+]?[0-9]{1,5}"
_FLOAT = re.compile(rf"{_MANTISSA}(?:{_EXPONENT})?|[-+]?[0-9]{{1,30}}{_EXPONENT}", re.ASCII)
_NOT_FINITE = {".inf": math.inf, "+.inf": math.inf, "-.inf": -math.inf, ".nan": math.nan}


@dataclass(frozen=True)
class Where:
    """Where a value was written: a file and a line, or the command line (line 0)."""

    file: str
    line: int = 0

    def __str__(self) -> str:
        file = "".join(c if c.isprintable() else "?" for c in self.file)  # an error stays on one short line
        file = file if len(file) <= 300 else f"...{file[-297:]}"
        return f"{file}:{self.line}" if self.line else file


@dataclass(frozen=True)
class Item:
    """A value with its place. `value` is a scalar, a dict of Items, or a list of Items."""

    value: Scalar | dict[str, Item] | list[Item]
    where: Where

    def plain(self) -> Any:
        """The value alone, as ordinary Python data."""
        if isinstance(self.value, dict):
            return {key: item.plain() for key, item in self.value.items()}
        if isinstance(self.value, list):
            return [item.plain() for item in self.value]
        return self.value

    def at(self, path: Sequence[str | int]) -> Item:
        """The item at `path`, or the nearest enclosing one there is."""
        item = self
        for step in path:
            if isinstance(item.value, dict) and step in item.value:
                item = item.value[step]  # type: ignore[index]
            elif isinstance(item.value, list) and isinstance(step, int) and step < len(item.value):
                item = item.value[step]
            else:
                break
        return item

    def leaves(self, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Item]]:
        """Every scalar, list and empty mapping, with its path."""
        if isinstance(self.value, dict) and self.value:
            for key, item in self.value.items():
                yield from item.leaves((*path, key))
        else:
            yield path, self


def show(value: object, limit: int = 60) -> str:
    """`value` for an error message: on one line, printable, and not too long."""
    text = ascii(value) if not repr(value).isprintable() else repr(value)
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


# What PyYAML says of the mistakes that are made most, and what to do.
_REMEDIES = {
    "\\t": "Indent with spaces, not tabs",
    "mapping values are not allowed": "Is the line indented as those beside it? A text with ': ' in it needs quotes",
    "expected <block end>": "Is the line indented as those beside it?",
    "could not find expected ':'": "Write e.g. batch_size: 16",
}


def read_file(path: Path, name: str) -> Item:
    """Read the YAML file at `path`; `name` is how errors and provenance call it."""
    where = Where(name)
    try:
        if path.is_dir():
            raise RecipeError(f"{where}: is a folder. Name a YAML file in it")
        if not path.is_file():  # a device or a pipe might never end
            raise RecipeError(f"{where}: {'is no plain file' if path.exists() else 'there is no such file'}")
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except RecipeError:
        raise
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise RecipeError(f"{where}: cannot be read: {reason}") from None
    if len(raw) > MAX_BYTES:
        raise RecipeError(f"{where}: is larger than {MAX_BYTES // 1024} KiB: that is no recipe")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise RecipeError(f"{Where(name, line)}: is not UTF-8 text. Save it as UTF-8") from None
    return read_text(text, where)


def read_text(text: str, where: Where, lines: bool = True) -> Item:
    """Parse one YAML document; with `lines`, every value gets the line it stands on."""

    def place(line: int) -> Where:
        return Where(where.file, line + 1) if lines else where

    try:
        _refuse_unsafe(text, place)
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) if isinstance(error.position, int) else 0
        raise RecipeError(f"{place(line)}: cannot be read as YAML: {error.reason}") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        problem = show(error.problem or error.context or "unknown problem", 120)[1:-1]
        remedy = next((f". {words}" for part, words in _REMEDIES.items() if part in problem), "")
        raise RecipeError(f"{place(mark.line if mark else 0)}: cannot be read as YAML: {problem}{remedy}") from None
    if node is None:
        return Item(None, place(0))
    return _convert(node, place)


def _refuse_unsafe(text: str, place: Any) -> None:
    """Walk the events first: they are produced without recursion, whatever the nesting."""
    depth = values = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        where = place(event.start_mark.line)
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            raise RecipeError(f"{where}: anchors (&) and aliases (*) are not allowed. Use extends to share values")
        if getattr(event, "tag", None):
            raise RecipeError(f"{where}: the tag {show(event.tag)} is not allowed: recipes are plain data. Remove it")
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        values += isinstance(event, yaml.NodeEvent)
        if depth > MAX_DEPTH:
            raise RecipeError(f"{where}: nested deeper than {MAX_DEPTH} levels: that is no recipe")
        if values > MAX_VALUES:
            raise RecipeError(f"{where}: holds more than {MAX_VALUES} values: that is no recipe")


def _convert(node: yaml.Node, place: Any) -> Item:
    where = place(node.start_mark.line)
    if isinstance(node, yaml.ScalarNode):
        return Item(_scalar(node.value, plain=node.style is None, where=where), where)
    if isinstance(node, yaml.SequenceNode):
        return Item([_convert(child, place) for child in node.value], where)
    items: dict[str, Item] = {}
    for key, value in node.value:
        key_where = place(key.start_mark.line)
        if not isinstance(key, yaml.ScalarNode):
            raise RecipeError(f"{key_where}: a key must be a word, not a list or a mapping")
        name = _text(key.value, key_where)  # as written: `on:` is the key "on", not True
        if len(name) > MAX_KEY:
            raise RecipeError(f"{key_where}: a key of {len(name)} characters: that is no recipe")
        if name in items:
            first = items[name].where
            raise RecipeError(f"{key_where}: {show(name)} is given twice, first at line {first.line}. Keep one")
        child = _convert(value, place)
        # The key's line is where a reader looks, also for a mapping that starts on the next line.
        items[name] = Item(child.value, key_where)
    return Item(items, where)


def _scalar(text: str, plain: bool, where: Where) -> Scalar:
    if not plain:
        return _text(text, where)
    if _NULL.fullmatch(text):
        return None
    if _TRUE.fullmatch(text):
        return True
    if _FALSE.fullmatch(text):
        return False
    number: int | float | None = None
    if _INT.fullmatch(text):
        number = int(text.replace("_", ""))
    elif text.lower() in _NOT_FINITE:
        number = _NOT_FINITE[text.lower()]
    elif _FLOAT.fullmatch(text):
        number = float(text.replace("_", ""))
    if number is None:
        return _text(text, where)
    if not math.isfinite(number):
        raise RecipeError(f"{where}: {text} is not a finite number. Write one, e.g. 1e-4")
    return number


def _text(text: str, where: Where) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise RecipeError(f"{where}: {show(text)} is no valid text (a lone surrogate). Remove it") from None
    if "\0" in text:
        raise RecipeError(f"{where}: {show(text)} holds a NUL character. Remove it")
    return text


def dump(item: Item, comments: bool = False) -> str:
    """YAML that reads back as `item`; with `comments`, each value is followed by the place it came from."""
    rows = list(_rows(item, 0))
    if not comments:
        return "".join(f"{text}\n" for text, _ in rows)
    width = max((len(text) for text, where in rows if where), default=0)
    width = min(width, 60)
    return "".join(f"{text:<{width}}  # {where}\n" if where else f"{text}\n" for text, where in rows)


def _rows(item: Item, indent: int) -> Iterator[tuple[str, Where | None]]:
    assert isinstance(item.value, dict)
    for key, child in item.value.items():
        head = f"{' ' * indent}{inline(key)}:"
        if isinstance(child.value, dict) and child.value:
            yield head, None
            yield from _rows(child, indent + 2)
        else:
            yield f"{head} {inline(child.plain())}", child.where


def inline(value: Any) -> str:
    """`value` on one line of YAML, as a recipe can have it.

    >>> inline({"dtype": "bf16", "on": "yes", "every": None, "views": True})
    "{dtype: bf16, 'on': 'yes', every: null, views: true}"
    """
    if isinstance(value, dict):
        return "{" + ", ".join(f"{inline(k)}: {inline(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(inline(v) for v in value) + "]"
    options: dict[str, Any] = {"width": math.inf, "allow_unicode": True, "Dumper": yaml.SafeDumper}
    if isinstance(value, str):
        # In a list, so that text which is only harmless in block style gets its quotes.
        text = yaml.dump([value], default_flow_style=True, **options).strip()[1:-1]
        quoted = text.startswith(("'", '"'))
        if not value.isprintable() or not (quoted or _scalar(text, True, Where("")) == value):
            options["allow_unicode"] = value.isprintable()
            text = yaml.dump([value], default_flow_style=True, default_style='"', **options).strip()[1:-1]
        return text
    return yaml.dump(value, **options).removesuffix("...\n").strip()
