"""The texts of which `verify` makes a batch: from the shortest to the longest, and others for the last step."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from composer.utils import dist
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset

from composer_speedups.batches.loaders import sample_lengths
from composer_speedups.errors import UserError

__all__ = ["Texts", "one_batch"]

_AMONG = 16  # times the batch: its samples are taken from so many


class Texts(Dataset):
    """Some samples of `dataset`; and for the last step their neighbours in length, so that no batch is computed twice.

    Args:
        dataset: any that has a length.
        first: of the samples.
        second: as many others; the longest is the same, so that batches have one width.
    """

    def __init__(self, dataset: Any, first: Sequence[int], second: Sequence[int]) -> None:
        self.dataset, self.first, self.second = dataset, first, second
        self.others = False

    def __len__(self) -> int:
        return len(self.first)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[(self.second if self.others else self.first)[index]]


def one_batch(loader: DataLoader, samples: int, which: int = 0) -> DataLoader:
    """One batch of `samples` samples, from the shortest to the longest of some more, as far as lengths are known.

    Another one for another `which`, as far as there are samples. Of several ranks each has its part of it, the same
    samples at each step, and of those the longest in the last one, too, so that its batches have one width.
    """
    dataset, ranks = loader.dataset, dist.get_world_size()
    if samples % ranks:
        raise UserError(f"samples {samples} cannot be shared by {ranks} ranks: choose a multiple of {ranks}")
    if len(dataset) < samples:
        raise UserError(f"the data has {len(dataset)} samples, fewer than the {samples} of the batch: lower samples")
    there = min(len(dataset), _AMONG * samples)
    order = [(which * there + i) % len(dataset) for i in range(there)]
    with contextlib.suppress(Exception):  # whatever samples are
        lengths = sample_lengths(Subset(dataset, order))
        order = [order[int(i)] for i in np.argsort(lengths, kind="stable")]
    # From the longest down: of one sample it is that one.
    places = [there - 1 - round(i * (there - 1) / max(1, samples - 1)) for i in range(samples)]
    places = [(place + 5 * which) % there for place in places]
    places.sort(reverse=True)  # the ranks take turns: the first ones are their longest
    first = [order[place] for place in places]
    second = [order[place if number < ranks else place + 1] for number, place in enumerate(places)]
    texts = Texts(dataset, first, second)
    own = DistributedSampler(texts, ranks, dist.get_global_rank(), shuffle=False) if ranks > 1 else None
    return DataLoader(
        texts,
        batch_size=samples // ranks,
        sampler=own,
        shuffle=own is None,
        collate_fn=loader.collate_fn,
        num_workers=loader.num_workers,
        pin_memory=loader.pin_memory,
    )
