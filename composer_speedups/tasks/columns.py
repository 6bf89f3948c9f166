"""The columns of a table that a task reads: which they are, and what a row says in them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from composer_speedups.errors import TaskError
from composer_speedups.tasks.labels import Labels, as_cell
from composer_speedups.tasks.records import as_text

__all__ = ["Columns"]

_SAID = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False, "": False}


@dataclass(frozen=True)
class Columns:
    """Columns by the key of the task that names them.

    Attributes:
        by_key: the name of each.
        lists: keys of those whose cells may hold lists.
        classes: columns of one class each, with a 1 where a text is of it.
    """

    by_key: Mapping[str, str]
    lists: Collection[str] = ()
    classes: Sequence[str] = ()

    @classmethod
    def of(cls, labels: Labels | None, label_columns: Sequence[str] | None = None, **by_key: str | None) -> Columns:
        """Those that are named; of labels only where there are any to read, each class's own or all in one."""
        if labels is None or label_columns:
            by_key["label_column"] = None
        named = {key: name for key, name in by_key.items() if name is not None}
        classes = () if labels is None else tuple(label_columns or ())
        return cls(named, () if labels is None else labels.in_lists, classes)

    def items(self) -> Iterator[tuple[str, str]]:
        """Keys and names, of several classes one for each."""
        yield from self.by_key.items()
        yield from (("label_columns", name) for name in self.classes)

    @property
    def names(self) -> list[str]:
        return list(dict.fromkeys(name for _, name in self.items()))

    def without(self, key: str) -> Columns:
        return replace(self, by_key={other: name for other, name in self.by_key.items() if other != key})

    def cells(self, row: Mapping[str, Any], file: Path, number: int) -> dict[str, str]:
        """What `row`, the one of that number in `file`, says: by key, of several classes under `label_column`."""
        cells = {k: as_text(row[name], file, number, k, name, k in self.lists) for k, name in self.by_key.items()}
        if self.classes:
            own = {name: as_text(row[name], file, number, "label_columns", name) for name in self.classes}
            cells["label_column"] = as_cell([name for name, cell in own.items() if _is_said(cell, name)])
        return cells


def _is_said(cell: str, name: str) -> bool:
    word = cell.strip().lower().removesuffix(".0")
    if word not in _SAID:
        raise TaskError(f"column {name!r} of task.label_columns says {cell[:40]!r}: write 1 where it holds, else 0")
    return _SAID[word]
