"""Where the real tokens of a padded batch are, and how to get there and back.

`Packing` tells it. What it needs on the host (how many tokens each row has) is counted by `CountTokens`, a collator
around the user's own, while the batch is still in memory that the host can read. The counts travel in the batch as
a list of ints, which Composer neither moves to the device nor fails to split into microbatches; `hand_over` takes
them out again and ties them to the attention mask itself, so that they cannot be read with another one.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any, NamedTuple

import torch

from composer_speedups.kernels.varlen_attention import Lengths

__all__ = ["COUNTS", "CountTokens", "Packing", "count_tokens", "counts_of", "hand_over"]

COUNTS = "real_token_counts"  # the key in a batch
_TIED = "_composer_speedups_counts"


class Packing(NamedTuple):
    """How [rows, length] became [total]. Given to layers in place of an attention mask.

    Attributes:
        indices: [total] int64, positions of the real tokens in the flattened batch; None if all are real.
        lengths: of the rows without padding.
        rows: of the padded batch.
        length: of the padded rows.
    """

    indices: torch.Tensor | None
    lengths: Lengths
    rows: int
    length: int

    @classmethod
    def of(cls, mask: torch.Tensor, counts: list[int]) -> Packing:
        """From a mask [rows, length] and how many of each row are not zero, without waiting for the device.

        >>> Packing.of(torch.tensor([[1, 1, 0], [1, 0, 1]]), [2, 2]).indices
        tensor([0, 1, 3, 5])
        """
        rows, length = mask.shape
        lengths = Lengths.of([abs(count) for count in counts], mask.device)
        total = sum(abs(count) for count in counts)
        if total == mask.numel():
            return cls(None, lengths, rows, length)
        real = mask.flatten() != 0
        if mask.device.type == "cpu":
            return cls(real.nonzero().flatten(), lengths, rows, length)
        # `nonzero` would wait to learn how many there are. A stable sort puts them first, in order.
        return cls(real.logical_not().byte().argsort(stable=True)[:total], lengths, rows, length)

    def pack(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, length, ...] -> [total, ...]."""
        flat = x.expand(self.rows, self.length, *x.shape[2:]).flatten(0, 1)
        return flat if self.indices is None else flat.index_select(0, self.indices)

    def pad(self, x: torch.Tensor) -> torch.Tensor:
        """[total, ...] -> [rows, length, ...], with zeros for padding, to which no gradient flows."""
        if self.indices is not None:
            x = x.new_zeros(self.rows * self.length, *x.shape[1:]).index_copy(0, self.indices, x)
        return x.unflatten(0, (self.rows, self.length))

    def first(self, x: torch.Tensor) -> torch.Tensor:
        """[total, ...] -> [rows, ...], the first real token of each row; each row must have one."""
        return x.index_select(0, self.lengths.cumulative[:-1])

    def ones(self) -> Lengths:
        """One token in each row: the lengths of what `first` returns."""
        device = self.lengths.cumulative.device
        cumulative = torch.arange(self.rows + 1, dtype=torch.int32, device=device)
        return Lengths(cumulative, torch.ones(self.rows, dtype=torch.int32), 1)


def count_tokens(mask: torch.Tensor) -> list[int]:
    """How many tokens of each row are real; negative where the row's first position is padding.

    For a mask on a device this waits for it, once.

    >>> count_tokens(torch.tensor([[1, 1, 0], [0, 1, 1], [0, 0, 0]]))
    [2, -2, 0]
    """
    real = mask != 0
    counts = real.sum(1)
    return torch.where(real[:, 0], counts, -counts).tolist()


def counts_of(mask: torch.Tensor) -> list[int]:
    """The counts tied to `mask` by `hand_over`, or else counted now."""
    counts = getattr(mask, _TIED, None)
    return counts if counts is not None and len(counts) == len(mask) else count_tokens(mask)


class CountTokens:
    """A collator that also counts the real tokens of each row.

    >>> batch = CountTokens(torch.utils.data.default_collate)([{"attention_mask": torch.tensor([1, 1, 0])}])
    >>> batch["real_token_counts"]
    [2]
    """

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self.collate = collate

    def __call__(self, examples: Any) -> Any:
        batch = self.collate(examples)
        mask = batch.get("attention_mask") if isinstance(batch, MutableMapping) else None
        if isinstance(mask, torch.Tensor) and mask.dim() == 2 and mask.shape[1]:
            batch[COUNTS] = count_tokens(mask)
        return batch

    @staticmethod
    def wrap(loader: Any) -> bool:
        """Let a `DataLoader` count; False if `loader` is none, or counts already, or its workers have started."""
        if not isinstance(loader, torch.utils.data.DataLoader) or isinstance(loader.collate_fn, CountTokens):
            return False
        if loader.batch_sampler is None or getattr(loader, "_iterator", None) is not None:
            return False
        with warnings.catch_warnings():
            loader.collate_fn = CountTokens(loader.collate_fn)
        return True

    @staticmethod
    def unwrap(loader: Any) -> None:
        if isinstance(getattr(loader, "collate_fn", None), CountTokens):
            loader.collate_fn = loader.collate_fn.collate


def hand_over(batch: Any) -> bool:
    """Take the counts out of `batch` and tie them to its attention mask; whether there were any."""
    counts = batch.pop(COUNTS, None) if isinstance(batch, MutableMapping) else None
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    if counts is None or not isinstance(mask, torch.Tensor):
        return False
    setattr(mask, _TIED, counts)
    return True
