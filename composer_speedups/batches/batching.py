"""Which samples make a batch: lengths of samples, plans of an epoch, and collating without needless padding.

Everything here is decided by (seed, epoch), the same on every rank, so that a resumed run goes on with the
batches that it would have had. The samplers are `DistributedSampler`s, to which Composer and others call
`set_epoch`.
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
)

from composer_speedups.errors import SpeedUpUnavailable

__all__ = [
    "LengthGroupedSampler",
    "TokenBudgetSampler",
    "TrimPadding",
    "check_loader",
    "padding_share",
    "rebuild",
    "sample_lengths",
    "seed_of",
    "sharing",
]

log = logging.getLogger("composer_speedups")

# What may be cut beside the attention mask. Another tensor as wide as it may mean anything: then nothing is cut.
_PER_TOKEN = {
    "attention_mask", "bbox", "input_ids", "inputs_embeds", "labels", "offset_mapping", "position_ids",
    "special_tokens_mask", "token_type_ids",
}  # fmt: skip
IGNORED = -100  # the label that cross entropy leaves out


def sample_lengths(dataset: Dataset) -> np.ndarray:
    """Real tokens of every sample, int64: from `dataset.lengths` if it has them, else by reading all samples once.

    A sample is a mapping with `attention_mask` (its ones are counted) or `input_ids` (their number is).
    """
    lengths = _own_lengths(dataset)
    if lengths is None:
        with torch.random.fork_rng(devices=[]):
            lengths = np.fromiter((_length(dataset[i]) for i in range(len(dataset))), np.int64, count=len(dataset))
    if not len(lengths):
        raise SpeedUpUnavailable("the dataset has no sample: give one that has")
    if lengths.min() < 1:
        raise SpeedUpUnavailable(f"sample {int(lengths.argmin())} has no token: remove empty samples")
    return lengths


def _own_lengths(dataset: Dataset) -> np.ndarray | None:
    if isinstance(dataset, Subset):  # of which only some are asked for
        whole = _own_lengths(dataset.dataset)
        return None if whole is None else whole[np.asarray(dataset.indices, np.int64)]
    own = getattr(dataset, "lengths", None)
    return np.asarray(own, np.int64) if own is not None and len(own) == len(dataset) else None


def _length(sample: Any) -> int:
    if isinstance(sample, Mapping):
        if "attention_mask" in sample:
            return int(np.asarray(sample["attention_mask"]).sum())
        if "input_ids" in sample:
            return len(sample["input_ids"])
    kind = f"dict with the keys {sorted(sample)}" if isinstance(sample, Mapping) else type(sample).__name__
    raise SpeedUpUnavailable(
        f"how long a sample is cannot be told: it is a {kind}, not a dict with attention_mask or input_ids;"
        " give the dataset an attribute `lengths`, tokens per sample"
    )


class LengthGroupedSampler(DistributedSampler):
    """Order of samples in which every `batch_size` on end are of similar length, and batches come in random order.

    An epoch is shuffled, cut into pools of `pool` batches, each pool sorted by length and cut into batches, and the
    batches of all pools are shuffled. A batch left over at the end is made of random samples. The ranks share each
    batch as cards are dealt, so that their longest samples are neighbours in length, and shuffle their share: where it
    is split into microbatches, each with a mean over its tokens, those of short samples would else weigh more.
    """

    def __init__(
        self, dataset: Dataset, lengths: np.ndarray, *, batch_size: int, pool: int, seed: int, drop_last: bool,
        num_replicas: int, rank: int,
    ) -> None:  # fmt: skip
        super().__init__(dataset, num_replicas=num_replicas, rank=rank, seed=seed, drop_last=drop_last)
        self.lengths, self.batch_size, self.pool = lengths, batch_size, pool
        together = batch_size * num_replicas
        if drop_last:
            self.num_samples = len(lengths) // together * batch_size
        else:
            self.num_samples = math.ceil(len(lengths) / num_replicas)
        if not self.num_samples:
            raise SpeedUpUnavailable(
                f"the dataset has {len(lengths)} samples, a batch {together}, and drop_last=True leaves none: make "
                "batch_size smaller"
            )
        self.total_size = self.num_samples * num_replicas

    def __iter__(self) -> Iterator[int]:
        random = np.random.default_rng((self.seed, self.epoch, self.rank))
        shares = (batch[self.rank :: self.num_replicas] for batch in self.batches())
        return (int(i) for share in shares for i in random.permutation(share))

    def batches(self) -> list[np.ndarray]:
        """The epoch's batches, of all ranks together."""
        random = np.random.default_rng((self.seed, self.epoch))
        order = random.permutation(len(self.lengths))
        # As DistributedSampler does without drop_last, a few samples come twice if the ranks could not share evenly.
        order = np.resize(order, self.total_size)
        together = self.batch_size * self.num_replicas
        whole = len(order) // together * together
        batches: list[np.ndarray] = []
        for start in range(0, whole, self.pool * together):
            pool = order[start : min(start + self.pool * together, whole)]
            pool = pool[np.argsort(-self.lengths[pool], kind="stable")]
            batches += np.split(pool, len(pool) // together)
        batches = [batches[i] for i in random.permutation(len(batches))]
        return batches if whole == len(order) else [*batches, order[whole:]]


class TokenBudgetSampler(DistributedSampler):
    """Batches, as lists of indices, of about equally many tokens; every sample once in an epoch.

    The number of batches is the same in every epoch: the shuffled samples' tokens, end to end, are cut into that many
    equal stretches, and a sample belongs to the stretch that its middle lies in. So a batch has `tokens` tokens a
    rank on average and deviates by less than a sample. The ranks get equal shares, the longest samples dealt first; in
    each they are in the epoch's random order, so that microbatches, of equally many samples, differ by chance alone.

    Args:
        tokens: of a batch, on each rank.
        together: of a batch, on all ranks, where they do not depend on the number of ranks, as rounded `tokens` would.
    """

    def __init__(
        self, dataset: Dataset, lengths: np.ndarray, *, tokens: int, seed: int, num_replicas: int, rank: int,
        together: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__(dataset, num_replicas=num_replicas, rank=rank, seed=seed)
        self.lengths, self.tokens = lengths, tokens
        total, longest = int(lengths.sum()), int(lengths.max())
        self.steps = max(1, round(total / (together or tokens * num_replicas)))
        if (self.steps > 1 and total / self.steps < (num_replicas + 1) * longest) or len(lengths) < num_replicas:
            least = -(-(num_replicas + 1) * longest // num_replicas)
            raise SpeedUpUnavailable(
                f"batches of {tokens} tokens are too small for samples of up to {longest} tokens on {num_replicas} "
                f"rank{'s' * (num_replicas > 1)}: take tokens_per_batch of at least {least}, or more samples"
            )

    @property
    def sampler(self) -> TokenBudgetSampler:
        """Itself: around a batch sampler, Accelerate looks for `sampler.set_epoch`."""
        return self

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[list[int]]:
        return ([int(i) for i in shares[self.rank]] for shares in self.batches())

    def batches(self, epoch: int | None = None) -> list[list[list[int]]]:
        """For each batch of `epoch`, or of the present one, each rank's samples."""
        epoch = self.epoch if epoch is None else epoch
        order = np.random.default_rng((self.seed, epoch)).permutation(len(self.lengths))
        lengths = self.lengths[order]
        middle = np.cumsum(lengths) - lengths / 2
        stretch = np.minimum((middle * self.steps / lengths.sum()).astype(np.int64), self.steps - 1)
        cuts = np.searchsorted(stretch, np.arange(1, self.steps))
        return [self._share(batch) for batch in np.split(order, cuts)]

    def sizes(self) -> tuple[list[list[int]], list[float]]:
        """Of each of the epoch's batches: each rank's number of samples; this rank's tokens over the mean number."""
        batches = self.batches()
        samples = [[len(share) for share in batch] for batch in batches]
        mean = self.lengths.sum() / self.steps / self.num_replicas
        return samples, [float(self.lengths[batch[self.rank]].sum() / mean) for batch in batches]

    def samples_before(self, epoch: int, step: int) -> int:
        """How many samples, of all ranks, `epoch` has in its first `step` batches."""
        return sum(len(share) for batch in self.batches(epoch)[:step] for share in batch)

    @staticmethod
    def microbatches(samples: Sequence[int], most: float) -> int:
        """Into how many microbatches all ranks split a step that has `samples` on them, one size on each rank.

        All must do as many: under FSDP, and where DDP reduces after each, a rank with more would wait for the others
        forever. It is the least number that leaves at most `most` samples in each; where no number does, the next
        smaller one that all can do: 2 samples make no 5 microbatches, and 5 samples, in equal numbers, no 4.

        >>> TokenBudgetSampler.microbatches([5, 8], 4), TokenBudgetSampler.microbatches([2, 20], 4)
        (2, 2)
        >>> TokenBudgetSampler.microbatches([5, 7], 2)
        3
        """
        wanted, possible = max(math.ceil(count / most) for count in samples), min(samples)
        for number in (*range(wanted, possible + 1), *range(min(wanted, possible), 1, -1)):
            if all(math.ceil(count / math.ceil(count / number)) == number for count in samples):
                return number
        return 1

    def _share(self, batch: np.ndarray) -> list[list[int]]:
        if self.num_replicas == 1:
            return [batch.tolist()]
        shares: list[list[int]] = [[] for _ in range(self.num_replicas)]
        held = [0] * self.num_replicas
        for i in batch[np.argsort(-self.lengths[batch], kind="stable")]:
            least = held.index(min(held))
            shares[least].append(int(i))
            held[least] += int(self.lengths[i])
        place = {int(i): number for number, i in enumerate(batch)}
        return [sorted(share, key=place.__getitem__) for share in shares]


class TrimPadding:
    """A collator around another: cuts columns at the end in which all rows are padding.

    The width left is a multiple of `multiple_of`, if the batch was that wide. No token, and no label other than -100
    (of soft labels, [rows, columns, classes], other than 0), is cut. Batches without a two-dimensional
    `attention_mask` are passed on, and so are those with a tensor whose name does not say whether it is per token.
    """

    def __init__(self, collate: Callable[[list[Any]], Any], multiple_of: int = 8) -> None:
        self.collate, self.multiple_of = collate, multiple_of
        self._warned = False

    def __call__(self, samples: list[Any]) -> Any:
        batch = self.collate(samples)
        mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
        if not isinstance(mask, torch.Tensor) or mask.dim() != 2:
            return batch
        width = self._width(batch, mask)
        if width == mask.shape[1]:
            return batch
        wide = {
            name for name, value in batch.items()
            if isinstance(value, torch.Tensor) and value.dim() > 1 and value.shape[1] == mask.shape[1]
            and (len(value) == len(mask) or (len(value) == 1 and name in _PER_TOKEN))  # 1: the same for all rows
        }  # fmt: skip
        if "labels" in wide and batch["labels"].is_floating_point() and batch["labels"].dim() == 2:
            wide -= {"labels"}  # several classes a sample, by chance as many as there are columns
        if unknown := wide - _PER_TOKEN:
            if not self._warned:
                log.warning("padding is not trimmed: %s may be per token, or not", ", ".join(sorted(unknown)))
            self._warned = True
            return batch
        for name in wide:
            batch[name] = batch[name][:, :width].contiguous()
        return batch

    def _width(self, batch: Mapping[str, Any], mask: torch.Tensor) -> int:
        used = mask.ne(0).any(0)
        labels = batch.get("labels")
        if isinstance(labels, torch.Tensor) and labels.shape[:2] == mask.shape:
            if labels.dim() == 3:
                used = used | (labels.ne(0) & labels.ne(IGNORED)).any(-1).any(0)
            elif not labels.is_floating_point():
                used = used | labels.ne(IGNORED).any(0)
        places = used.nonzero()
        longest = int(places[-1]) + 1 if len(places) else 1
        return min(mask.shape[1], -(-longest // self.multiple_of) * self.multiple_of)


def sharing(loader: DataLoader) -> tuple[int, int]:
    """Rank and number of ranks that `loader` is for: as its own sampler says, else this process's group.

    Accelerate's `prepare` deals out the batches of whatever loader it gets, once more if they were dealt out here.
    """
    if isinstance(loader.sampler, DistributedSampler):
        return loader.sampler.rank, loader.sampler.num_replicas
    if _accelerate_shares():
        return 0, 1
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return 0, 1


def _accelerate_shares() -> bool:
    """Whether there is an `Accelerator` for several processes; asked so that none is made by asking."""
    state = getattr(sys.modules.get("accelerate.state"), "PartialState", None)
    return getattr(state, "_shared_state", {}).get("num_processes", 1) > 1


def seed_of(loader: DataLoader, otherwise: int) -> int:
    """The seed of the order of samples: the loader's own if it has one."""
    return loader.sampler.seed if isinstance(loader.sampler, DistributedSampler) else otherwise


def check_loader(loader: Any) -> None:
    """Raise `SpeedUpUnavailable` unless `loader` is of a kind whose order of samples may be changed."""
    fault = None
    if type(loader) is not DataLoader:
        fault = f"it is a {type(loader).__name__}, not a torch DataLoader"
    elif isinstance(loader.dataset, IterableDataset):
        fault = "its dataset is iterable, so that nobody knows the lengths beforehand: use a map-style dataset"
    elif type(loader.batch_sampler) is not BatchSampler or loader.batch_size is None:
        fault = f"it has its own batches ({type(loader.batch_sampler).__name__}): give batch_size instead"
    elif type(loader.sampler) not in (RandomSampler, SequentialSampler, DistributedSampler):
        fault = f"its {type(loader.sampler).__name__} chooses samples in its own way: leave this speed-up out"
    elif isinstance(loader.sampler, RandomSampler) and (
        loader.sampler.replacement or loader.sampler.num_samples != len(loader.dataset)
    ):
        fault = "its RandomSampler does not show every sample once: leave this speed-up out"
    if fault is not None:
        raise SpeedUpUnavailable(f"the train dataloader cannot be regrouped: {fault}")


def rebuild(loader: DataLoader, multiple_of: int, **batches: Any) -> DataLoader:
    """A DataLoader like `loader` with other `batches` (`sampler=` or `batch_sampler=`) and trimmed padding."""
    workers: dict[str, Any] = {}
    if loader.num_workers > 0:
        workers = {"prefetch_factor": loader.prefetch_factor, "persistent_workers": loader.persistent_workers}
    return DataLoader(
        loader.dataset,
        num_workers=loader.num_workers,
        collate_fn=TrimPadding(loader.collate_fn, multiple_of),
        pin_memory=loader.pin_memory,
        pin_memory_device=loader.pin_memory_device,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        generator=loader.generator,
        in_order=loader.in_order,
        **workers,
        **batches,
    )


def padding_share(lengths: np.ndarray, batches: Sequence[np.ndarray], multiple_of: int) -> float:
    """Which part of the columns of these batches, padded to their longest sample, is padding."""
    longest = [-(-int(lengths[batch].max()) // multiple_of) * multiple_of for batch in batches]
    wide = sum(width * len(batch) for width, batch in zip(longest, batches, strict=True))
    return 1 - sum(int(lengths[batch].sum()) for batch in batches) / wide
