"""LengthGroupedBatches: samples of similar length share a batch, and batches are padded no further than needed.

**Why it is faster.** A batch costs as much as if all its samples were as long as its longest, or as the model's
maximum where the collator pads to that. Grouped, a batch has little padding to compute on. It needs no kernel
and works for every model. The report says which part of the columns is padding: `padding_random` with batches
of random samples, each padded to its longest, `padding_grouped` with these.

**Numerics.** Forward and gradients of a sample are what they were, as padding is masked; that other samples
share its batch is the change. The randomness is kept as far as can be: each epoch is shuffled, grouped only
within pools of `pool` batches (fewer if there were not four pools), and batches come in random order, so that
length does not follow the step. Every sample comes exactly once an epoch, or, with `drop_last`, as many as
before, others each time. Sums in attention may run over fewer zeros, so results agree to rounding.

**When it pays.** Wherever lengths differ and the model computes on padding: always with padding to `max_length`.
`Unpadding` computes on none, so there it brings little. Under `TorchCompile`, and with cuDNN's attention (see
`SDPAttention`), choose `multiple_of` large (64), as every width is a shape; where the label goes with the length
(e.g. long texts of one class) gradients of a batch become correlated. **Look at the quality**: over two epochs of
`docstrings`, in five seeds, accuracy was 3.1 points lower than with random lengths at one learning rate, 0.6 at a
higher one (medians; `2026-11-21_cpu_length_grouped_five_seeds` and `2026-11-28_cpu_grouping` among the benchmarks'
results). In the Hugging Face Trainer's order, where length does follow the step, it was 26 points lower.

**Needs.** A `DataLoader` with `batch_size` over a map-style dataset of dicts with `attention_mask` or
`input_ids`, or with `dataset.lengths`; without that all samples are read once before training. The order
becomes a random one, from the loader's `DistributedSampler.seed` or the Trainer's seed, even where it was not.
Ranks share each batch so that their longest samples are neighbours in length; the widths may still differ by a
step of `multiple_of`. Resuming in mid-epoch needs the same `pool`, batch size and number of ranks: others are warned
of. A duration in tokens (`1000tok`), of which Composer counts padding, too, has more steps than without.

Source: `group_by_length` of the Hugging Face Trainer, whose batches are as alike, and come with the longest first.
"""

from __future__ import annotations

import numpy as np
from composer.core import Event, State
from composer.loggers import Logger
from torch.utils.data import DataLoader

from composer_speedups.arguments import check_count
from composer_speedups.batches.loaders import check_loader, rebuild, sample_lengths, seed_of, sharing
from composer_speedups.batches.plans import LengthGroupedSampler, padding_share
from composer_speedups.batches.resumed import KeepsPlan, warn_of_other_batches
from composer_speedups.speedup import SpeedUp, Stage

__all__ = ["LengthGroupedBatches", "apply_length_grouped_batches"]


def apply_length_grouped_batches(
    dataloader: DataLoader, pool: int = 50, multiple_of: int = 8, seed: int = 0
) -> DataLoader:
    """A DataLoader like `dataloader`, with batches of samples of similar length and trimmed padding.

    Call `loader.sampler.set_epoch(epoch)` before each epoch, as for a `DistributedSampler` (which it is). One that
    is grouped already is returned as it is.

    Args:
        dataloader: with `batch_size`; its dataset, collator and workers are kept.
        pool: batches that are sorted together; more group better and shuffle less.
        multiple_of: the width left is a multiple of this.
        seed: of the order, if the loader has no `DistributedSampler` with a seed of its own.

    >>> samples = [{"input_ids": [1] * n} for n in (3, 9, 4, 8)]
    >>> loader = apply_length_grouped_batches(DataLoader(samples, batch_size=2, collate_fn=list))
    >>> len(loader), type(loader.sampler).__name__
    (2, 'LengthGroupedSampler')
    """
    check_count("pool", pool)
    check_count("multiple_of", multiple_of)
    if isinstance(getattr(dataloader, "sampler", None), LengthGroupedSampler):
        return dataloader
    check_loader(dataloader)
    rank, ranks = sharing(dataloader)
    lengths = sample_lengths(dataloader.dataset)
    sampler = LengthGroupedSampler(
        dataloader.dataset,
        lengths,
        batch_size=dataloader.batch_size,
        pool=max(1, min(pool, len(lengths) // (dataloader.batch_size * ranks * 4))),
        seed=seed_of(dataloader, seed),
        drop_last=dataloader.drop_last,
        num_replicas=ranks,
        rank=rank,
    )
    return rebuild(
        dataloader, multiple_of, sampler=sampler, batch_size=dataloader.batch_size, drop_last=dataloader.drop_last
    )


class LengthGroupedBatches(KeepsPlan, SpeedUp):
    """Replace the Trainer's train dataloader as `apply_length_grouped_batches` does, at `Event.FIT_START`.

    Args:
        pool: batches that are sorted together.
        multiple_of: widths are rounded up to a multiple of this.

    >>> LengthGroupedBatches(multiple_of=64)
    LengthGroupedBatches(pool=50, multiple_of=64)
    """

    stage = Stage.DATA
    slot = "batches"
    regroups = True
    redundant_with = {"unpadding": "unpadding computes on no padding, so grouping has none to save"}
    events = frozenset({Event.FIT_START})

    def __init__(self, pool: int = 50, multiple_of: int = 8) -> None:
        self.pool = check_count("pool", pool)
        self.multiple_of = check_count("multiple_of", multiple_of)

    def on_event(self, event: Event, state: State, logger: Logger) -> None:
        self._group(state, logger)
        sampler, first, done = state.dataloader.sampler, self._first, int(state.timestamp.batch_in_epoch)
        self._plan = {"pool": sampler.pool, "samples_per_batch": sampler.batch_size * sampler.num_replicas}
        self._first = False
        if first and done and self._saved != {} and self._saved != self._plan:
            warn_of_other_batches(int(state.timestamp.epoch), self.key())

    def _group(self, state: State, logger: Logger) -> None:
        if isinstance(getattr(state.dataloader, "sampler", None), LengthGroupedSampler):
            return
        loader = apply_length_grouped_batches(state.dataloader, self.pool, self.multiple_of, state.rank_zero_seed)
        batches_before = state.dataloader_len  # less than the loader's where train_subset_num_batches is given
        state.set_dataloader(loader, state.dataloader_label, -1 if batches_before is None else int(batches_before))
        state.train_dataloader = state.dataloader
        sampler = loader.sampler
        lengths, together = sampler.lengths, sampler.batch_size * sampler.num_replicas
        shuffled = np.random.default_rng(0).permutation(len(lengths))
        random = [shuffled[i : i + together] for i in range(0, len(lengths), together)]
        self.report(
            logger,
            len(loader) if lengths.min() < lengths.max() else 0,
            f"all {len(lengths)} samples have {lengths.max()} tokens",
            pool=sampler.pool,
            padding_random=round(padding_share(lengths, random, self.multiple_of), 4),
            padding_grouped=round(padding_share(lengths, sampler.batches(), self.multiple_of), 4),
        )
