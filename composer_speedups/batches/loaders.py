"""A user's DataLoader: whether its order of samples may be changed, how long its samples are, and one made like it."""

from __future__ import annotations

import sys
from collections.abc import Mapping
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

from composer_speedups.batches.trimming import TrimPadding
from composer_speedups.errors import SpeedUpUnavailable

__all__ = ["check_loader", "rebuild", "sample_lengths", "seed_of", "sharing"]


def sample_lengths(dataset: Dataset) -> np.ndarray:
    """Real tokens of every sample, int64: from `dataset.lengths` if it has them, else by reading all samples once.

    A sample is a mapping with `attention_mask` (its ones are counted) or `input_ids` (their number is), of all its
    choices where it has several.
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
            return sum(int(np.asarray(part).sum()) for part in _parts(sample["attention_mask"]))
        if "input_ids" in sample:
            return sum(map(len, _parts(sample["input_ids"])))
    kind = f"dict with the keys {sorted(sample)}" if isinstance(sample, Mapping) else type(sample).__name__
    raise SpeedUpUnavailable(
        f"how long a sample is cannot be told: it is a {kind}, not a dict with attention_mask or input_ids;"
        " give the dataset an attribute `lengths`, tokens per sample"
    )


def _parts(values: Any) -> Any:
    """Of a sample of several choices each, in whatever lengths; else the one that there is."""
    return values if len(values) and np.ndim(values[0]) else [values]


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
