"""Where the real tokens of a padded batch are, and how to get there and back.

`Packing` tells it. What it needs on the host, how many tokens each row has, is counted while the batch is still there
(`count_on_host`): on the device, counting would wait for all that is queued. The counts travel in the batch as a tensor
that stays on the host, which whoever splits batches into microbatches splits with the others; `hand_over` takes them
out again and ties them to the attention mask itself, so that they are not read with a later one. In between, on a GPU,
a `DataSpec`'s `microbatch_transforms` must leave the mask's rows as they were.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any, NamedTuple

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from composer_speedups.ignored import IGNORED
from composer_speedups.kernels.disentangled import Places
from composer_speedups.kernels.varlen_attention import Lengths
from composer_speedups.packed.fixed_total import FixedTotal

__all__ = [
    "COUNTS",
    "Holed",
    "OnHost",
    "Packing",
    "Valued",
    "count_on_host",
    "count_tokens",
    "counts_of",
    "hand_over",
    "labels_at_padding",
    "tie_counts",
]

COUNTS = "real_token_counts"  # the key in a batch
# By mask: its counts, and its version when they were made. Not attributes of it: those are pickled and copied with it.
_TIED = WeakTensorKeyDictionary()


class Packing(NamedTuple):
    """How [rows, length] became [total]. Given to layers in place of an attention mask.

    So that totals come again, they may be filled up with tokens of padding, which nobody reads: sequences of their own
    after the last row's, none longer than a row, as many whatever is filled.

    Attributes:
        indices: [total] int64, positions of the packed tokens in the flattened batch; None if all are real.
        lengths: of the rows without padding, and after them, where totals are filled up, of the filling.
        rows: of the padded batch.
        length: of the padded rows.
        real: how many of the packed tokens are real: the first; on the device, where the total was fixed beforehand.
        places: of distances within a sequence, for layers that add something for them to scores and know no others.
        rotations: cosine and sine [total, width of a head] of each token's place, for layers that know no others.
    """

    indices: torch.Tensor | None
    lengths: Lengths
    rows: int
    length: int
    real: int | torch.Tensor
    places: Places | None = None
    rotations: tuple[torch.Tensor, torch.Tensor] | None = None

    @classmethod
    def of(cls, mask: torch.Tensor, counts: list[int], multiple_of: int = 1) -> Packing:
        """From a mask [rows, length] and how many of each row are not zero, without waiting for the device.

        The total is filled up to a multiple of `multiple_of`, as far as there is padding.

        >>> Packing.of(torch.tensor([[1, 1, 0], [1, 0, 1]]), [2, 2]).indices
        tensor([0, 1, 3, 5])
        >>> filled = Packing.of(torch.tensor([[1, 1, 0], [1, 0, 0]]), [2, 1], multiple_of=6)
        >>> filled.indices, filled.lengths.host
        (tensor([0, 1, 3, 2, 4, 5]), tensor([2, 1, 3, 0], dtype=torch.int32))
        """
        rows, length = mask.shape
        sizes = [abs(count) for count in counts]
        real = sum(sizes)
        filling = min(-real % multiple_of, mask.numel() - real)
        # Attention costs the square of a sequence.
        begins = range(0, min(multiple_of, mask.numel()), length)
        filled = [min(length, max(filling - begin, 0)) for begin in begins]
        lengths = Lengths.of(sizes if multiple_of == 1 else [*sizes, *filled], mask.device)
        if real == mask.numel():
            return cls(None, lengths, rows, length, real)
        padding = mask.flatten() == 0
        if mask.device.type == "cpu":
            indices = padding.logical_not().nonzero().flatten()
            if filling:
                indices = torch.cat([indices, padding.nonzero().flatten()[:filling]])
        else:  # `nonzero` would wait to learn how many there are. A stable sort puts the real ones first, in order.
            indices = padding.byte().argsort(stable=True)[: real + filling]
        return cls(indices, lengths, rows, length, real)

    @classmethod
    def on_device(cls, mask: torch.Tensor, total: FixedTotal) -> Packing:
        """From a mask [rows, length] alone, for a total that has room for its real tokens; nobody waits for them.

        >>> packing = Packing.on_device(torch.tensor([[1, 1, 0], [1, 0, 0]]), FixedTotal(5, 4))
        >>> packing.indices, packing.lengths.cumulative, packing.real
        (tensor([0, 1, 3, 2, 4]), tensor([0, 2, 3, 5, 5], dtype=torch.int32), tensor(3))
        """
        rows, length = mask.shape
        padding = mask == 0
        sizes = length - padding.sum(1)
        real = sizes.sum()
        begins = torch.arange(0, total.filling, length, device=mask.device)
        ends = torch.cat([sizes, (total.tokens - real - begins).clamp(0, length)]).cumsum(0)
        lengths = Lengths(
            torch.cat([ends.new_zeros(1), ends]).int(),
            torch.full((len(ends),), length, dtype=torch.int32, device="cpu"),
            length,
        )
        return cls(padding.flatten().byte().argsort(stable=True)[: total.tokens], lengths, rows, length, real)

    def pack(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, length, ...] -> [total, ...]."""
        flat = x.expand(self.rows, self.length, *x.shape[2:]).flatten(0, 1)
        return flat if self.indices is None else flat.index_select(0, self.indices)

    def pad(self, x: torch.Tensor) -> torch.Tensor:
        """[total, ...] -> [rows, length, ...], with zeros for padding, to which no gradient flows."""
        if isinstance(self.real, torch.Tensor):
            filling = torch.arange(len(x), device=x.device) >= self.real
            x = x.masked_fill(filling.view(-1, *[1] * (x.dim() - 1)), 0)
            x = x.new_zeros(self.rows * self.length, *x.shape[1:]).index_copy_(0, self.indices, x)
        elif self.indices is not None:
            zeros = x.new_zeros(self.rows * self.length, *x.shape[1:])
            x = zeros.index_copy_(0, self.indices[: self.real], x[: self.real])  # in place: else it copies the zeros
        return x.unflatten(0, (self.rows, self.length))

    def first(self, x: torch.Tensor) -> torch.Tensor:
        """[total, ...] -> [rows, ...], the first real token of each row; each row must have one."""
        return x.index_select(0, self.lengths.cumulative[: self.rows])

    def steady(self) -> Packing:
        """The same for what only looks at `lengths`, with nothing but `lengths.cumulative` that differs between batches
        of one shape: a CUDA graph has all else in it. No kernel for CUDA reads more of `lengths.host` than its length.

        >>> Packing.of(torch.tensor([[1, 1, 0], [1, 0, 0]]), [2, 1], multiple_of=4).steady().lengths.longest
        3
        """
        lengths = Lengths(self.lengths.cumulative, torch.full_like(self.lengths.host, self.length), self.length)
        return Packing(None, lengths, self.rows, self.length, self.rows * self.length)

    def ones(self) -> Lengths:
        """One token in each row, none of the filling: the lengths of what `first` returns."""
        ends = torch.arange(len(self.lengths.cumulative), dtype=torch.int32, device=self.lengths.cumulative.device)
        host = (torch.arange(len(self.lengths.host)) < self.rows).int()
        return Lengths(ends.clamp(max=self.rows), host, 1)


class Holed(int):
    """The count of a row that has padding between its real tokens."""


class Valued(Holed):
    """The count of a row whose mask has other numbers than 0 and 1, of which each family makes something else."""


_KINDS = (int, Holed, Valued)  # of counts


class OnHost(torch.Tensor):
    """[rows, 2] int64, as a batch brings them: each row's count, and its place in `_KINDS`.

    A tensor, as a `DataSpec`'s own `split_batch` may expect nothing else; but no device's, as that would be asked.
    """

    @classmethod
    def of(cls, counts: list[int]) -> OnHost:
        pairs = [[int(count), _KINDS.index(type(count))] for count in counts]
        return torch.tensor(pairs, device="cpu").as_subclass(cls)

    def to(self, *args: Any, **kwargs: Any) -> OnHost:
        return self

    cuda = pin_memory = to

    def __deepcopy__(self, memo: dict[int, Any]) -> OnHost:
        return self.clone()  # Composer copies batches, and PyTorch's own way knows no subclass with such a `to`

    def counts(self) -> list[int]:
        """
        >>> OnHost.of([2, Holed(-1)])[1:].counts()
        [-1]
        """
        return [_KINDS[kind](count) for count, kind in self.tolist()]


def count_tokens(mask: torch.Tensor) -> list[int]:
    """How many tokens of each row are real; negative where the row's first position is padding.

    For a mask on a device this waits for it, once.

    >>> count_tokens(torch.tensor([[1, 1, 0], [0, 1, 1], [0, 0, 0], [1, 0, 1]]))
    [2, -2, 0, 2]
    >>> [type(count).__name__ for count in count_tokens(torch.tensor([[1, 1, 0], [1, 0, 1], [1, 2, 0]]))]
    ['int', 'Holed', 'Valued']
    """
    real = mask != 0
    valued = (real & (mask != 1)).any(1)
    counts = real.sum(1)
    begins = real[:, 0] + (real[:, 1:] > real[:, :-1]).sum(1)
    signed, kinds = torch.stack((torch.where(real[:, 0], counts, -counts), (begins > 1) + 2 * valued)).tolist()
    return [_KINDS[min(kind, 2)](n) for n, kind in zip(signed, kinds, strict=True)]


def count_on_host(batch: Any) -> bool:
    """Put the counts into `batch` if they can be had without waiting for a device; whether they could.

    To be called when nothing will change the mask any more.

    >>> batch = {"attention_mask": torch.tensor([[1, 1, 0]])}
    >>> count_on_host(batch), batch["real_token_counts"].counts()
    (True, [2])
    """
    mask = _mask(batch)
    if mask is None or not isinstance(batch, MutableMapping):
        return False
    counts = _tied(mask) or (count_tokens(mask) if mask.device.type == "cpu" else None)
    if counts is not None:
        batch[COUNTS] = OnHost.of(counts)
    return counts is not None


def hand_over(batch: Any) -> bool:
    """Take the counts out of `batch` and tie them to its attention mask; whether they were had without waiting.

    Whatever has changed the mask since they were made is only seen where it is on the host, and can be counted again.
    """
    brought = batch.pop(COUNTS, None) if isinstance(batch, MutableMapping) else None
    mask = _mask(batch)
    if mask is None:
        return False
    if mask.device.type == "cpu":
        tie_counts(mask, count_tokens(mask))
    elif isinstance(brought, OnHost) and brought.shape == (len(mask), 2):
        tie_counts(mask, brought.counts())
    else:
        return False
    return True


def labels_at_padding(batch: Any) -> bool:
    """Whether `batch` has a label for a token of padding; False where a device would have to be asked.

    >>> batch = {"attention_mask": torch.tensor([[1, 1, 0]]), "labels": torch.tensor([[2, -100, 0]])}
    >>> labels_at_padding(batch), labels_at_padding(batch | {"labels": torch.tensor([[2, -100, -100]])})
    (True, False)
    """
    mask = _mask(batch)
    labels = None if mask is None else batch.get("labels")
    if not isinstance(labels, torch.Tensor) or labels.shape != mask.shape:
        return False
    return mask.is_cpu and labels.is_cpu and bool(((mask == 0) & (labels != IGNORED)).any())


def tie_counts(mask: torch.Tensor, counts: list[int]) -> None:
    """Let `counts_of` this tensor find them, as long as nobody changes it.

    A tensor made in inference mode does not tell whether somebody has: it is counted again.
    """
    if not mask.is_inference():
        _TIED[mask] = counts, mask._version


def counts_of(mask: torch.Tensor) -> list[int]:
    """The counts tied to `mask`, or else counted now."""
    return _tied(mask) or count_tokens(mask)


def _tied(mask: torch.Tensor) -> list[int] | None:
    counts, version = _TIED.get(mask, (None, None))
    rows, length = mask.shape
    fits = counts is not None and version == mask._version and len(counts) == rows
    return counts if fits and max(map(abs, counts), default=0) <= length else None


def _mask(batch: Any) -> torch.Tensor | None:
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    return mask if isinstance(mask, torch.Tensor) and mask.dim() == 2 and mask.shape[1] else None
