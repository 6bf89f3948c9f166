"""From rows that somebody else wrote to texts with labels: what can be used, what is evaluated on, and what to say."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from composer_speedups.errors import TaskError
from composer_speedups.tasks.labels import Labels, clean
from composer_speedups.tasks.texts import Texts

__all__ = ["Part", "Row", "part_of", "split"]

Part = Literal["train", "evaluation"]

_TRAIN = {"train", "training"}
_EVALUATION = {"test", "eval", "evaluation", "validation", "valid", "val", "dev"}


class Row(NamedTuple):
    """One text as it was written.

    Attributes:
        text: the text, or the first of two.
        label: None where none is asked for; empty where it is missing.
        part: None where the data does not say.
        pair: the second text; None where none is asked for.
    """

    text: str
    label: str | None
    part: Part | None
    pair: str | None = None

    @classmethod
    def of(cls, cells: Mapping[str, str], part: Part | None) -> Row:
        """From the cells of a table's row, by the key of the task that names their column."""
        return cls(cells["text_column"], cells.get("label_column"), part, cells.get("text_pair_column"))


class _Chosen(NamedTuple):
    hash: bytes
    text: str
    pair: str
    label: Any  # as `Labels.encoded` gives it; 0 where none is asked for
    classes: frozenset[int]  # that it names


def part_of(word: str) -> Part | None:
    """What a word says that is in a column, or a file's or a split's name.

    >>> part_of("Validation"), part_of("train"), part_of("extra")
    ('evaluation', 'train', None)
    """
    word = word.strip().lower()
    return "train" if word in _TRAIN else "evaluation" if word in _EVALUATION else None


def split(
    rows: Sequence[Row],
    source: str,
    *,
    labels: Labels | None,
    label_column: str = "label",
    eval_source: str | None = None,
    train: int | None = None,
    evaluation: int | None = None,
    seed: int = 0,
    order: Sequence[str] = (),
    told_alike: Mapping[str, str] | None = None,
    read: float = 1.0,
    remedy: str = "give more, or task.eval_path",
) -> Texts:
    """Texts to train and to evaluate on, at most as many as asked for, and notes on what was left out.

    What is evaluated on: what the rows say; or else a tenth of the texts, chosen by a hash of the text, so that equal
    texts (of pairs, those with the same first text) fall on one side.

    Args:
        rows: of both parts.
        source: where they are from, for errors and notes.
        labels: how they are written; None leaves them out (MLM).
        label_column: its name, for errors.
        eval_source: where those to evaluate on are from, if elsewhere.
        train: at most so many; None is all.
        evaluation: the same to evaluate on.
        seed: of the choice.
        order: labels in the order that they have where they are from; others follow.
        told_alike: other names for labels.
        read: which share of the rows to train on that there are these are.
        remedy: what to do where one part has no text.
    """
    kept, notes = _cleaned(rows, source, labels)
    names = ["none"]
    if labels is not None:
        written = [row.label or "" for row in kept]
        names = labels.names(written, label_column, order)
        notes += labels.notes(written, label_column)
        if absent := [name for name in order if name not in names]:
            notes.append(f"no text has the label {', '.join(map(repr, absent))}: left out")
    number = {name: i for i, name in enumerate(names)}
    ordered = sorted(((_chosen(row, seed, labels, number), row.part) for row in kept), key=lambda x: x[0][:4])
    told = any(row.part == "evaluation" for row in rows)
    parts = _as_told(ordered) if told else _by_hash([chosen for chosen, _ in ordered], evaluation, notes)
    for part, what in (("train", "train"), ("evaluation", "evaluate")):
        if not parts[part]:
            raise TaskError(f"{source!r} leaves no text to {what} on ({len(kept):,} texts): {remedy}")
    if told and labels is not None and labels.are_classes:
        # In a part of a few texts, chosen by their hash, it happens.
        _check_labels(parts, names, eval_source or source)
    chosen_train, chosen_eval = parts["train"][:train], parts["evaluation"][:evaluation]
    known = _classes(chosen_train)
    new = [row.classes - known for row in chosen_eval if row.classes - known]
    if new:
        notes.append(
            f"{len(new):,} of {len(chosen_eval):,} texts to evaluate on have labels that no text to train on has: "
            f"{_some(frozenset().union(*new), names)}"
        )
    if train is not None and train < len(parts["train"]):
        there = f"{len(parts['train']):,}" if read == 1.0 else f"about {round(len(parts['train']) / read):,}"
        notes.append(f"{train:,} of {there} texts to train on are used: task.train_samples=null takes all")
    paired = any(row.pair is not None for row in kept)
    return Texts(
        train=[row.text for row in chosen_train],
        train_labels=[row.label for row in chosen_train],
        evaluation=[row.text for row in chosen_eval],
        evaluation_labels=[row.label for row in chosen_eval],
        label_names=[(told_alike or {}).get(name, name) for name in names],
        notes=notes,
        train_pairs=[row.pair for row in chosen_train] if paired else None,
        evaluation_pairs=[row.pair for row in chosen_eval] if paired else None,
    )


def _chosen(row: Row, seed: int, labels: Labels | None, number: Mapping[str, int]) -> _Chosen:
    of = (0, frozenset[int]())
    if labels is not None:
        label = row.label or ""
        of = labels.encoded(label, number), frozenset(number[name] for name in labels.items(label))
    return _Chosen(_hash(seed, row.text), row.text, row.pair or "", *of)


def _cleaned(rows: Sequence[Row], source: str, labels: Labels | None) -> tuple[list[Row], list[str]]:
    """The rows that have what is needed, and words on the others."""
    made = [_clean_row(row, labels) for row in rows]
    whole = [row for row in made if row.text and row.pair != ""]
    kept = [row for row in whole if row.label or labels is None]
    notes = []
    if empty := len(made) - len(whole):
        paired = any(row.pair is not None for row in made)
        lack = "no text, or no second one" if paired else "no text"
        notes.append(f"{empty:,} of {len(made):,} rows of {source} dropped: {lack}")
    if unlabelled := len(whole) - len(kept):
        notes.append(f"{unlabelled:,} of {len(made):,} rows of {source} dropped: no label")
    if not kept:
        raise TaskError(
            f"{source!r} holds no row with both text and label ({len(made):,} rows read): check the columns"
        )
    return kept, notes


def _clean_row(row: Row, labels: Labels | None) -> Row:
    pair = None if row.pair is None else clean(row.pair)
    if labels is None:
        return Row(clean(row.text), row.label, row.part, pair)
    return Row(*labels.cleaned(row.text, row.label or ""), row.part, pair)


def _as_told(ordered: Iterable[tuple[_Chosen, Part | None]]) -> dict[Part, list[_Chosen]]:
    """As the rows say themselves."""
    parts: dict[Part, list[_Chosen]] = {"train": [], "evaluation": []}
    for chosen, part in ordered:
        parts[part or "train"].append(chosen)
    return parts


def _by_hash(ordered: Sequence[_Chosen], evaluation: int | None, notes: list[str]) -> dict[Part, list[_Chosen]]:
    """A tenth to evaluate on, or fewer where fewer are asked for.

    Equal texts stay on one side, those of which there are too many on that to train on.
    """
    tenth = len(ordered) // 10
    wanted = max(1, tenth if evaluation is None else min(evaluation, tenth))
    groups = [list(group) for _, group in itertools.groupby(ordered, key=lambda row: row.hash)]
    parts: dict[Part, list[_Chosen]] = {"train": [], "evaluation": []}
    for group in groups:
        there = len(parts["evaluation"])
        fits = there < wanted and there + len(group) <= 2 * wanted
        parts["evaluation" if fits else "train"] += group
    if not parts["evaluation"] and len(groups) > 1:
        least = min(groups, key=len)
        parts = {"train": [row for group in groups if group is not least for row in group], "evaluation": least}
    if not wanted / 2 <= len(parts["evaluation"]) <= 2 * wanted:
        notes.append(
            f"{len(parts['evaluation']):,} of {len(ordered):,} texts are kept to evaluate on, not a tenth: equal texts "
            "(of pairs, those with the same first text) stay on one side"
        )
    return parts


def _check_labels(parts: Mapping[Part, Sequence[_Chosen]], names: Sequence[str], source: str) -> None:
    """Raise if no label to evaluate on is one to train on."""
    known, asked = (_classes(parts[part]) for part in ("train", "evaluation"))
    if asked and not known & asked:
        raise TaskError(
            f"the labels to evaluate on ({_some(asked, names)}), as {source} has them, do not occur among "
            f"those to train on ({_some(known, names)}): write them alike"
        )


def _classes(rows: Sequence[_Chosen]) -> frozenset[int]:
    return frozenset().union(*(row.classes for row in rows))


def _some(labels: frozenset[int], names: Sequence[str]) -> str:
    shown = ", ".join(repr(names[n]) for n in sorted(labels)[:5])
    return f"{shown} and {len(labels) - 5} more" if len(labels) > 5 else shown


def _hash(seed: int, text: str) -> bytes:
    return hashlib.blake2b(f"{seed}:{text}".encode(), digest_size=12).digest()
