"""Texts with labels, split in two: the form in which every task's raw data is handed to the tokenizer."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Texts", "pick", "split_sizes"]


@dataclass
class Texts:
    """Raw data of a task. Labels are positions in `label_names`, or what else `labels.Labels` makes of them; pairs, of
    texts that have one, the second text."""

    train: list[str]
    train_labels: list[Any]
    evaluation: list[str]
    evaluation_labels: list[Any]
    label_names: list[str]
    notes: list[str] = field(default_factory=list)
    train_pairs: list[str] | None = None
    evaluation_pairs: list[str] | None = None

    def save(self, folder: Path) -> None:
        (folder / "texts.json").write_text(json.dumps(asdict(self)))

    @classmethod
    def load(cls, folder: Path) -> Texts:
        return cls(**json.loads((folder / "texts.json").read_text()))


def split_sizes(available: int, train: int | None, evaluation: int | None) -> tuple[int, int]:
    """How many of `available` texts to train and to evaluate on, if None means "all there are".

    >>> split_sizes(100, 30, 20)
    (30, 20)
    >>> split_sizes(100, 300, 100)
    (75, 25)
    >>> split_sizes(100, None, None)
    (90, 10)
    """
    if train is not None and evaluation is not None:
        if train + evaluation <= available:
            return train, evaluation
        n_eval = max(1, available * evaluation // (train + evaluation))
        return available - n_eval, n_eval
    if evaluation is not None:
        n_eval = min(evaluation, available // 2)
        return available - n_eval, n_eval
    n_eval = max(1, available // 10)
    return min(train or available, available - n_eval), n_eval


def pick(available: int, wanted: int | None, seed: int) -> list[int]:
    """`wanted` of `available` positions (None: all), drawn with `seed`, in ascending order."""
    import numpy

    if wanted is None or wanted >= available:
        return list(range(available))
    draw = numpy.random.Generator(numpy.random.Philox(seed)).random(available)
    return sorted(numpy.argsort(draw, kind="stable")[:wanted].tolist())
