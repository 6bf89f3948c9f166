"""Labels as they are written in the data, and as the numbers that a loss compares with: a kind for each objective."""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from composer_speedups.errors import TaskError
from composer_speedups.ignored import IGNORED

__all__ = [
    "ClassOfText", "ClassOfWords", "Labels", "Number", "SeveralClasses", "as_cell", "class_names", "clean", "majority",
    "shares",
]  # fmt: skip

_LIST = "\x1f"  # before each item of what is a list in the data: a character that no text holds
_SPACE = "\u00a0"  # for white space inside a word: all tokenizers end a word there, and `split(" ")` does not
_MOST_CLASSES = 1000
_FAR = 50.0  # times, or a part of, what the outputs of a new head deviate by: many steps away
_LARGEST = float(np.finfo(np.float32).max)


def as_cell(items: Sequence[str]) -> str:
    """A list of the data as the text of one cell, which `Labels` take apart again; of none it is not empty, either."""
    return "".join(_LIST + item for item in items) or _LIST


class Labels(ABC):
    """How one objective's labels are written, and what they are as numbers.

    Attributes:
        are_classes: they are names out of some; else numbers.
        in_lists: the columns, by their keys of the task, whose cells may hold lists.
    """

    are_classes = True
    in_lists: tuple[str, ...] = ()

    def cleaned(self, text: str, label: str) -> tuple[str, str]:
        """Text and label as the other methods take them; one that is empty then is of no use."""
        return clean(text), label.strip()

    @abstractmethod
    def items(self, label: str) -> list[str]:
        """The classes that a cleaned label names."""

    @abstractmethod
    def encoded(self, label: str, number: Mapping[str, int]) -> Any:
        """A cleaned label as a number, or as one for each class or word; `number` is that of each class."""

    def names(self, labels: Sequence[str], column: str, order: Sequence[str]) -> list[str]:
        """All classes that `labels` name, those of `order` first.

        Raises:
            TaskError: they are no classes.
        """
        found = {item for label in labels for item in self.items(label)}
        if len(found) < 2:
            one = f"one label only, {next(iter(found))!r}" if found else "no label"
            raise TaskError(f"column {column!r} holds {one}: classification needs two")
        self._check(found, column, len(labels))
        first = [name for name in order if name in found]
        others = found - set(first)
        try:
            return first + sorted(others, key=lambda name: (int(name), name))  # "1" and "01": in one order always
        except ValueError:
            return first + sorted(others)

    def notes(self, labels: Sequence[str], column: str) -> list[str]:
        """What the user should know of them."""
        return []

    def _check(self, found: Collection[str], column: str, rows: int) -> None:
        if len(found) > _MOST_CLASSES or (len(found) > 10 and len(found) > rows // 2):
            raise TaskError(
                f"column {column!r} holds {len(found):,} different values in {rows:,} rows: that is no label. "
                "Name another task.label_column, or use task.objective=mlm, or regression of numbers"
            )


class ClassOfText(Labels):
    """One class a text: its number."""

    def items(self, label: str) -> list[str]:
        return [label]

    def encoded(self, label: str, number: Mapping[str, int]) -> int:
        return number[label]


class SeveralClasses(Labels):
    """Any of several classes a text: a list of them, or names with commas between; a 1 or a 0 for each class."""

    in_lists = ("label_column",)

    def items(self, label: str) -> list[str]:
        items = label.split(_LIST) if label.startswith(_LIST) else label.split(",")
        return [item.strip() for item in items if item.strip()]

    def cleaned(self, text: str, label: str) -> tuple[str, str]:
        # Not `strip`, for which the mark of a list is white space.
        return clean(text), label if label.startswith(_LIST) else label.strip()

    def names(self, labels: Sequence[str], column: str, order: Sequence[str]) -> list[str]:
        """As of one class a text, but for what other ways to write several look like."""
        rows = [self.items(label) for label in labels]
        found = {item for row in rows for item in row}
        why, separated = "", [item for item in found if {*item} & {*";|"}]
        if found and found <= {"0", "1"} and any(len(row) != len(set(row)) or len(row) == 1 for row in rows):
            why = "holds 0 and 1, and no names: name the classes, or give each a column (task.label_columns)"
        elif any(item.startswith("[") or item.endswith("]") for item in found):
            why = "holds lists that are written as text: write names with commas between, or lists into jsonl"
        elif separated and not any("," in label or _LIST in label[1:] for label in labels):
            why = f"holds {separated[0]!r}: write commas between names"
        elif len(found) > 1 and len({frozenset(row) for row in rows}) == 1:
            why = "holds the same labels in every row: there is nothing to learn"
        if why:
            raise TaskError(f"column {column!r} {why}")
        return super().names(labels, column, order)

    def notes(self, labels: Sequence[str], column: str) -> list[str]:
        none = sum(not self.items(label) for label in labels)
        return [f"{none:,} of {len(labels):,} texts are of none of the classes"] if none else []

    def encoded(self, label: str, number: Mapping[str, int]) -> list[int]:
        named = {number[item] for item in self.items(label)}
        return [int(n in named) for n in range(len(number))]


class Number(Labels):
    """A number a text."""

    are_classes = False

    def items(self, label: str) -> list[str]:
        return []

    def names(self, labels: Sequence[str], column: str, order: Sequence[str]) -> list[str]:
        """The column's: the one output is called so."""
        if len(values := {self._number(label, column) for label in labels}) < 2:
            raise TaskError(f"column {column!r} holds one number only, {values.pop():g}: there is nothing to learn")
        return [column]

    def encoded(self, label: str, number: Mapping[str, int]) -> float:
        return float(label)

    def notes(self, labels: Sequence[str], column: str) -> list[str]:
        values = np.array([float(label) for label in labels])
        if 1 / _FAR <= (deviation := values.std()) <= _FAR:
            return []
        return [
            f"the numbers of column {column!r} deviate by {deviation:,.5g} from their mean: scale them, as models "
            "learn those best that deviate by about 1"
        ]

    @staticmethod
    def _number(label: str, column: str) -> float:
        try:
            value = float(label)
        except ValueError:
            value = math.nan
        if not abs(value) <= _LARGEST:
            raise TaskError(
                f"column {column!r} holds {label[:40]!r}, which is no number: write one with a decimal point, or "
                "leave it empty, and its text is left out"
            )
        return value


class ClassOfWords(Labels):
    """A class a word, as of names in texts: text and labels are lists, or texts with white space between the words.

    As numbers they are one a word, `IGNORED` for the label -100.
    """

    in_lists = ("text_column", "label_column")

    def cleaned(self, text: str, label: str) -> tuple[str, str]:
        words, classes = self._parts(text), self._parts(label)
        if words and classes and len(words) != len(classes):
            raise TaskError(
                f"the text {' '.join(words)[:40]!r} has {len(words)} words and {len(classes)} labels: "
                "task.objective=token_classification needs one for each word"
            )
        if not classes:
            return " ".join(filter(None, words)), ""
        kept = [(w, name or str(IGNORED)) for w, name in zip(words, classes, strict=True) if w] if words else []
        return " ".join(word for word, _ in kept), " ".join(name for _, name in kept)

    @staticmethod
    def _parts(cell: str) -> list[str]:
        parts = cell.split(_LIST)[1:] if cell.startswith(_LIST) else re.split("[ \t\r\n]+", cell.strip(" \t\r\n"))
        if parts == [""]:
            return []
        return [_SPACE.join(clean(part).split()) for part in parts]

    def items(self, label: str) -> list[str]:
        return [name for name in label.split(" ") if name != str(IGNORED)]

    def encoded(self, label: str, number: Mapping[str, int]) -> list[int]:
        return [number.get(name, IGNORED) for name in label.split(" ")]

    def _check(self, found: Collection[str], column: str, rows: int) -> None:
        if len(found) > _MOST_CLASSES:
            raise TaskError(f"column {column!r} holds {len(found):,} different labels of words: name another column")


def clean(text: str) -> str:
    # A lone surrogate (JSON can escape one) cannot be encoded by a tokenizer.
    return text.strip().encode("utf-8", "replace").decode()


def class_names(feature: Any) -> Sequence[str] | None:
    """The names that a column of `datasets` has for its numbers, or for those in its lists; None where it has none."""
    inner = feature[0] if isinstance(feature, list) else getattr(feature, "feature", feature)
    return getattr(inner, "names", None)


def shares(labels: np.ndarray, classes: int) -> np.ndarray:
    """Of the texts (or words) that have a label, the share of each class.

    Args:
        labels: int64 of each text or token, or float32 [texts, classes].
        classes: how many there are.

    >>> shares(np.array([0, 2, 2, IGNORED]), 3).round(2).tolist()
    [0.33, 0.0, 0.67]
    """
    if labels.ndim == 2:
        return labels.mean(0, dtype=np.float64)
    known = labels[labels != IGNORED]
    return np.bincount(known, minlength=classes) / max(1, len(known))


def majority(labels: np.ndarray) -> float:
    """The accuracy of always giving the most frequent answer; of several classes a text, for each of them.

    >>> majority(np.array([0, 2, 2, 2])), majority(np.array([[1.0, 0.0], [1.0, 1.0], [1.0, 0.0]]))
    (0.75, 0.8333333333333334)
    """
    found = shares(labels, 1)
    return float(np.maximum(found, 1 - found).mean() if labels.ndim == 2 else found.max())
