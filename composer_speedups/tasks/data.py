"""Tokenised samples on disk or in memory, and the collators that make batches of them.

Ids lie end to end in one flat array with offsets: a memory map opens in milliseconds and shares its pages
among all processes of the machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import numpy as np
import torch

from composer_speedups.ignored import IGNORED

__all__ = ["Lengths", "MaskCollator", "PadCollator", "Sample", "TokenDataset", "TokenLabelCollator"]


class Sample(TypedDict):
    input_ids: torch.Tensor
    token_type_ids: NotRequired[torch.Tensor]
    label: int | float | np.ndarray | torch.Tensor
    index: int


class TokenDataset(torch.utils.data.Dataset):
    """Samples of token ids, special tokens included, none padded.

    `dataset[i]` is `{"input_ids": int64 [length], "label": int, "index": i}`; `dataset.lengths[i]` is its length.
    Where tokens have types, as of two texts for a BERT, there are `token_type_ids` int64 [length], too. The label is a
    float where it is a number, float32 [classes] where each is there or not, and int64 [length] where tokens have one.
    """

    def __init__(
        self,
        ids: np.ndarray,
        offsets: np.ndarray,
        labels: np.ndarray,
        types: np.ndarray | None = None,
        folder: Path | None = None,
    ) -> None:
        self.ids, self.offsets, self.labels, self.types = ids, offsets, labels, types
        self._folder = folder

    @classmethod
    def of(
        cls,
        rows: Sequence[Sequence[int]],
        labels: Sequence[Any],
        types: Sequence[Sequence[int]] | None = None,
        of_tokens: bool = False,
    ) -> TokenDataset:
        """`labels` are a class, a number or a 1 or 0 for each class a sample; `of_tokens` says a class a token."""
        offsets = np.zeros(len(rows) + 1, np.int64)
        np.cumsum([len(row) for row in rows], out=offsets[1:])

        def flat(values: Sequence[Sequence[int]], kind: type) -> np.ndarray:
            return np.fromiter((i for row in values for i in row), kind, count=int(offsets[-1]))

        typed = None if types is None else flat(types, np.int8)
        if of_tokens:
            return cls(flat(rows, np.int32), offsets, flat(labels, np.int64), typed)
        numbers = np.asarray(labels)
        kind = np.int64 if numbers.ndim == 1 and numbers.dtype.kind == "i" else np.float32
        return cls(flat(rows, np.int32), offsets, numbers.astype(kind), typed)

    def save(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        for name in ("ids", "offsets", "labels", "types"):
            if (array := getattr(self, name)) is not None:
                np.save(folder / f"{name}.npy", array)

    @classmethod
    def load(cls, folder: Path, typed: bool = True) -> TokenDataset:
        """What `save` wrote; without `typed`, as for a model that knows no types of tokens."""

        def mapped(name: str) -> np.ndarray:
            # The mapping is private: nothing that a caller does to an array can reach the file.
            return np.asarray(np.load(folder / f"{name}.npy", mmap_mode="c"))

        types = mapped("types") if typed and (folder / "types.npy").exists() else None
        return cls(mapped("ids"), np.load(folder / "offsets.npy"), np.load(folder / "labels.npy"), types, folder)

    def __reduce__(self) -> tuple[object, ...]:
        # A worker process opens the file again instead of receiving a copy of it.
        if self._folder is not None:
            return TokenDataset.load, (self._folder, self.types is not None)
        return TokenDataset, (self.ids, self.offsets, self.labels, self.types)

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.offsets)

    @property
    def _of_tokens(self) -> bool:
        return self.labels.ndim == 1 and len(self.labels) == len(self.ids) > len(self)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> Sample:
        index = int(index)
        if not -len(self) <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        index %= len(self)
        place = slice(self.offsets[index], self.offsets[index + 1])
        ids = torch.from_numpy(self.ids[place].astype(np.int64))
        label = torch.from_numpy(self.labels[place]) if self._of_tokens else self.labels[index]
        if np.ndim(label) == 0:
            label = label.item()
        sample: Sample = {"input_ids": ids, "label": label, "index": index}
        if self.types is not None:
            sample["token_type_ids"] = torch.from_numpy(self.types[place].astype(np.int64))
        return sample


@dataclass(frozen=True)
class Lengths:
    """Tokens per sample, special ones included; `padding` is the share of padding at full length."""

    mean: float
    longest: int
    padding: float

    @classmethod
    def of(cls, lengths: np.ndarray, max_length: int) -> Lengths:
        mean = float(lengths.mean())
        return cls(mean, int(lengths.max()), 1 - mean / max_length)


@dataclass
class PadCollator:
    """Batch of samples with a label each: `input_ids` and `attention_mask` int64 [rows, length], `labels` int64 [rows].

    Labels are float32 [rows] where they are numbers, and float32 [rows, classes] where several may hold. Of samples
    with types of tokens `token_type_ids` int64 [rows, length], too; padding has type 0.

    Attributes:
        pad_id: id that fills rows up.
        length: pad to this; None pads to the longest row.
        multiple_of: round the longest row's length up to a multiple of this.
    """

    pad_id: int
    length: int | None = None
    multiple_of: int | None = None

    def __call__(self, samples: Sequence[Sample]) -> dict[str, torch.Tensor]:
        rows = [sample["input_ids"] for sample in samples]
        width = self._width(max(map(len, rows)))
        ids = torch.full((len(rows), width), self.pad_id, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for i, row in enumerate(rows):
            ids[i, : len(row)] = row
            mask[i, : len(row)] = 1
        batch = {"input_ids": ids, "attention_mask": mask}
        if "token_type_ids" in samples[0]:
            batch["token_type_ids"] = types = torch.zeros_like(ids)
            for i, sample in enumerate(samples):
                types[i, : len(rows[i])] = sample["token_type_ids"]
        return batch | {"labels": self._labels(samples, ids)}

    def _width(self, longest: int) -> int:
        if self.length is not None:
            return self.length
        step = self.multiple_of or 1
        return -(-longest // step) * step

    def _labels(self, samples: Sequence[Sample], ids: torch.Tensor) -> torch.Tensor:
        labels = np.asarray([sample["label"] for sample in samples])
        return torch.from_numpy(labels.astype(np.float32) if labels.dtype.kind == "f" else labels)


@dataclass
class TokenLabelCollator(PadCollator):
    """The same of samples with a label a token: `labels` int64 [rows, length], -100 at padding and where none is."""

    def _labels(self, samples: Sequence[Sample], ids: torch.Tensor) -> torch.Tensor:
        labels = torch.full_like(ids, IGNORED)
        for i, sample in enumerate(samples):
            labels[i, : len(sample["input_ids"])] = torch.as_tensor(sample["label"])
        return labels


@dataclass
class MaskCollator(PadCollator):
    """Batch for masked language modelling, masked as BERT does it; `labels` int64 [rows, length], -100 if not asked.

    In each sample 15 % of the tokens (special ones never; at least one) are to be predicted: 80 % of those become
    [MASK], 10 % a random token and 10 % stay. Which, depends on (`seed`, epoch, the sample's index) alone: not on
    batch size, order, worker or rank. So runs that are compared see the same masks, and a resumed run goes on
    with those that it would have had.

    Attributes:
        mask_id: id of [MASK].
        special: ids that are never masked.
        replacements: ids that a random token is drawn from.
        probability: share of the tokens to predict.
        seed: of the masks.
    """

    mask_id: int = 0
    special: tuple[int, ...] = ()
    replacements: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    probability: float = 0.15
    seed: int = 0

    def __post_init__(self) -> None:
        # In shared memory: workers of the data loader that outlive an epoch see the next epoch's number, too.
        self._epoch = torch.zeros(1, dtype=torch.int64).share_memory_()
        if not len(self.replacements):
            raise ValueError("MaskCollator needs replacements: the ids that a random token is drawn from")
        # A table: looking 256 ids up in it takes a tenth of the time of numpy.isin.
        self._maskable = np.ones(max(self.replacements.max(), self.mask_id, *self.special, 0) + 1, bool)
        self._maskable[list(self.special)] = False

    @property
    def epoch(self) -> int:
        return int(self._epoch)

    def set_epoch(self, epoch: int) -> None:
        self._epoch[0] = epoch

    def _labels(self, samples: Sequence[Sample], ids: torch.Tensor) -> torch.Tensor:
        labels = torch.full_like(ids, IGNORED)
        epoch = self.epoch
        for i, sample in enumerate(samples):
            row = sample["input_ids"].numpy()
            places, masked = self.mask(row, epoch, sample["index"])
            labels[i, places] = torch.from_numpy(row[places])
            ids[i, : len(row)] = torch.from_numpy(masked)
        return labels

    def mask(self, row: np.ndarray, epoch: int, index: int) -> tuple[np.ndarray, np.ndarray]:
        """The places to predict in `row` (int64 [length]), and `row` with those masked."""
        # Philox is counter-based: each (seed, epoch, index) is a stream of its own, at no cost to set up.
        random = np.random.Generator(np.random.Philox(key=self.seed, counter=[0, 0, index, epoch]))
        allowed = np.flatnonzero(self._maskable[row])
        count = min(len(allowed), max(1, round(self.probability * len(allowed))))
        places = allowed[np.argsort(random.random(len(allowed)), kind="stable")[:count]]
        kind, draw = random.random((2, count))
        masked = row.copy()
        masked[places[kind < 0.8]] = self.mask_id
        swapped = kind >= 0.9
        masked[places[swapped]] = self.replacements[(draw[swapped] * len(self.replacements)).astype(np.int64)]
        return places, masked
