"""TokenBudgetBatches: each batch has about the same number of real tokens instead of the same number of samples.

**Why it is faster.** Once padding is not computed on (`Unpadding`), a batch costs what its tokens cost. With a
fixed number of samples the tokens vary, and memory must fit the worst batch. With a fixed number of tokens all
steps and all ranks are equally full: the device is used evenly, and the mean batch can fill the memory.

**Numerics.** Each sample comes exactly once an epoch, in random order, and weighs the same: the gradient of a step with
n samples is scaled by n over the mean n, so that short samples, of which a batch holds more, do not lose weight to long
ones (the logged loss stays the batch's mean). With one label a token, as in MLM, the loss is a mean over tokens, and
tokens weigh the same: a rank's batch is scaled by its real tokens, as the dataset tells them, over their mean number,
and Composer's weighting of ranks and microbatches by samples is undone: microbatches make exactly the batch's mean. It
is exact where labels are in proportion to tokens, and with [CLS] and [SEP], which have none, a few percent less so
where samples are short. Such labels are recognised as integers under the batch's `labels`, in the shape of its
`input_ids` or `attention_mask`, or in two dimensions where it has neither; where your model's have another name or a
place in a tuple, or its loss is of samples, too (`BertForPreTraining`), ask for `weighting="batch"`, as Composer does.

**When it pays.** Together with `Unpadding`, on one rank to even out memory, on several to even out time. On
padded models use `LengthGroupedBatches`.

**Needs.** A `DataLoader` with `batch_size` over a map-style dataset of dicts with `attention_mask` or `input_ids`, or
with `dataset.lengths`. A step's tokens deviate from the budget by less than one sample's. The number of steps per
epoch is the same in all epochs. `drop_last` is not needed and not kept. Composer's `time/sample` counts the samples
that there were, `time/token` padding, too, which is less. The Trainer's `accumulate_train_batch_on_tokens`, another
weighting of ranks, is refused unless `weighting="batch"`. *Microbatches*: all ranks split a step into as many, each
into equal numbers of samples. Where no number that all can do is enough, mostly as one rank has few samples, long
ones, another's exceed the size asked for: with short samples, and at worst they are its whole part of the step, the
budget and one sample at most. Where memory would not hold that, lower `tokens_per_batch`. `"auto"` is for one rank.
*Resuming in mid-epoch* needs as many steps an epoch: the default budget has them on any number of ranks that share one
batch size; `tokens_per_batch` is each rank's, and is to be scaled when their number changes.

Source: token-budget batches as fairseq's `max_tokens`; sequence packing in ModernBERT.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from composer.algorithms import SeqLengthWarmup
from composer.core import Event, State
from composer.loggers import Logger
from torch.utils.data import DataLoader

from composer_speedups.arguments import check_choice, check_count
from composer_speedups.batches.loaders import check_loader, rebuild, sample_lengths, seed_of, sharing
from composer_speedups.batches.plans import TokenBudgetSampler
from composer_speedups.batches.resumed import KeepsPlan, check_resumed
from composer_speedups.batches.weighting import labelled, of_tokens, trainer_weighs_tokens, weigh
from composer_speedups.errors import ConflictError, SpeedUpUnavailable
from composer_speedups.speedup import SpeedUp, Stage

__all__ = ["TokenBudgetBatches", "apply_token_budget_batches"]

WEIGHTINGS = ("sample", "batch")


def apply_token_budget_batches(
    dataloader: DataLoader, tokens_per_batch: int | None = None, multiple_of: int = 8, seed: int = 0
) -> DataLoader:
    """A DataLoader like `dataloader` whose batches hold about `tokens_per_batch` real tokens each.

    `loader.batch_sampler.set_epoch(epoch)` chooses the epoch's order. To weigh samples alike in a loop of your own,
    scale a step's loss by its number of samples over their mean number; with a label a token by that of real tokens.

    Args:
        dataloader: with `batch_size`; its dataset, collator and workers are kept.
        tokens_per_batch: real tokens on each rank; None takes `batch_size` times the mean length.
        multiple_of: padding is cut to a width that is a multiple of this.
        seed: of the order, if the loader has no `DistributedSampler` with a seed of its own.

    >>> samples = [{"input_ids": [1] * n} for n in (1, 2, 3, 4) * 8]
    >>> loader = apply_token_budget_batches(DataLoader(samples, batch_size=8, collate_fn=list), 20)
    >>> [sum(len(sample["input_ids"]) for sample in batch) for batch in loader]
    [18, 22, 19, 21]
    """
    if tokens_per_batch is not None:
        check_count("tokens_per_batch", tokens_per_batch)
    check_count("multiple_of", multiple_of)
    if isinstance(getattr(dataloader, "batch_sampler", None), TokenBudgetSampler):
        return dataloader
    check_loader(dataloader)
    rank, ranks = sharing(dataloader)
    lengths = sample_lengths(dataloader.dataset)
    together = None
    if tokens_per_batch is None:
        # Of the ranks' batch size together: a run that goes on with more ranks, each of a smaller batch, has the same
        # steps.
        together = max(1, round(dataloader.batch_size * ranks * float(lengths.mean())))
        tokens_per_batch = max(1, round(together / ranks))
    sampler = TokenBudgetSampler(
        dataloader.dataset,
        lengths,
        tokens=tokens_per_batch,
        seed=seed_of(dataloader, seed),
        num_replicas=ranks,
        rank=rank,
        together=together,
    )
    return rebuild(dataloader, multiple_of, batch_sampler=sampler)


class TokenBudgetBatches(KeepsPlan, SpeedUp):
    """Replace the Trainer's train dataloader as `apply_token_budget_batches` does, at `Event.FIT_START`, and weigh.

    Args:
        tokens_per_batch: real tokens on each rank; None takes the loader's `batch_size` times the mean length.
        weighting: `"sample"`: every sample weighs the same, or with a label a token each token; `"batch"`: every batch.
        multiple_of: padding is cut to a width that is a multiple of this.

    >>> TokenBudgetBatches(4096)
    TokenBudgetBatches(tokens_per_batch=4096, weighting='sample', multiple_of=8)
    """

    stage = Stage.DATA
    slot = "batches"
    regroups = True
    events = frozenset({
        Event.FIT_START, Event.BEFORE_DATALOADER, Event.BATCH_START, Event.BEFORE_BACKWARD,
        Event.EPOCH_END, Event.FIT_END,
    })  # fmt: skip

    def __init__(self, tokens_per_batch: int | None = None, weighting: str = "sample", multiple_of: int = 8) -> None:
        if tokens_per_batch is not None:
            check_count("tokens_per_batch", tokens_per_batch)
        self.tokens_per_batch = tokens_per_batch
        self.weighting = check_choice("weighting", weighting, WEIGHTINGS)
        self.multiple_of = check_count("multiple_of", multiple_of)
        self._epoch = -1
        self._drawn = 0  # batches of this epoch's order: with spin_dataloaders=False not those that were trained on
        self._labelled: torch.Tensor | None = None  # tokens of the rank's batch that its loss is a mean over
        self._rows = 0  # of that batch; 0 where nobody knows
        self._samples: list[list[int]] = []  # of each step, on each rank
        self._tokens: list[float] = []  # of each step, on this rank, over their mean
        self._whole = math.inf  # samples of a batch of the loader that was replaced
        self._asked: int | float | None = None  # the Trainer's microbatch before this fit
        self._set: int | float | None = None  # and what it has of us

    def install(self, state: State, logger: Logger) -> None:
        super().install(state, logger)
        self._asked = self._set = None

    def on_event(self, event: Event, state: State, logger: Logger) -> None:
        if event in (Event.FIT_START, Event.EPOCH_END):
            self._drawn = 0
        if event is Event.FIT_START:
            if self.weighting == "sample" and trainer_weighs_tokens():
                raise ConflictError(
                    "token_budget_batches weighs all samples alike, or all tokens, and the Trainer's "
                    "accumulate_train_batch_on_tokens=True weighs again. Leave that out, or set weighting='batch'"
                )
            if any(isinstance(a, SeqLengthWarmup) for a in state.algorithms):
                raise ConflictError(
                    "token_budget_batches makes batches of unequal numbers of samples, of which Composer's "
                    "SeqLengthWarmup takes none. Keep one of them, or use length_grouped_batches"
                )
            # Else it is of a fit that was broken off.
            if self._set is None or state.device_train_microbatch_size != self._set:
                self._asked = state.device_train_microbatch_size
            self._replace_loader(state, logger)
            self._check_resumed(state)
        elif event is Event.BEFORE_DATALOADER:  # also of those that were done when a checkpoint was saved
            self._drawn += 1
        elif event is Event.BATCH_START:  # when other algorithms have changed the batch, at AFTER_DATALOADER
            labels = state.batch.get("labels") if isinstance(state.batch, Mapping) else None
            self._rows = len(labels) if isinstance(labels, torch.Tensor) and labels.dim() else 0
            self._fit_microbatch(state)
            whole = self.weighting == "sample" and of_tokens(state.batch)
            self._labelled = labelled(state.batch).clamp(min=1) if whole else None
        elif event is Event.BEFORE_BACKWARD and self.weighting == "sample":
            self._weigh(state)
        elif event is Event.FIT_END and self._set is not None:
            state.device_train_microbatch_size, self._set = self._asked, None

    def _replace_loader(self, state: State, logger: Logger) -> None:
        self._epoch = -1
        if self._sampler(state) is not None:
            return
        before = state.dataloader
        loader = apply_token_budget_batches(before, self.tokens_per_batch, self.multiple_of, state.rank_zero_seed)
        limit = state.dataloader_len  # less than the loader's where train_subset_num_batches is given
        limited = limit is not None and int(limit) < len(before)
        state.set_dataloader(loader, state.dataloader_label, min(int(limit), len(loader)) if limited else -1)
        state.train_dataloader = state.dataloader
        self._whole = before.batch_size
        lengths = loader.batch_sampler.lengths
        self.report(
            logger,
            len(loader) if lengths.min() < lengths.max() else 0,
            f"all {len(lengths)} samples have {lengths.max()} tokens: batches are equal already",
            tokens_per_batch=loader.batch_sampler.tokens,
            steps_before=len(before),
            samples_per_batch=round(len(lengths) / len(loader) / loader.batch_sampler.num_replicas, 2),
        )

    def _check_resumed(self, state: State) -> None:
        """In mid-epoch, see that the batches done are those that this epoch begins with."""
        sampler, done, first = self._sampler(state), int(state.timestamp.batch_in_epoch), self._first
        self._first = False
        if sampler is None:
            return
        if state.auto_microbatching and sampler.num_replicas > 1:
            raise SpeedUpUnavailable(
                'device_train_microbatch_size="auto" would split ranks into unequal numbers of microbatches, and they '
                "would wait for each other forever: give a number"
            )
        self._plan = {"steps": sampler.steps, "ranks": sampler.num_replicas}
        if first and done:
            check_resumed(sampler, state.timestamp, self._saved)

    def _fit_microbatch(self, state: State) -> None:
        """Give a size that splits each rank's batch into as many microbatches, none larger than asked for if possible.

        A batch of fewer samples than a microbatch would make Composer warn at each step.
        """
        if (samples := self._samples_of_step(state)) and not state.auto_microbatching:
            own = self._rows or samples[state.dataloader.batch_sampler.rank]
            # Composer took the loader's batch size if the user gave none; batches are to stay whole then.
            whole = self._asked is None or self._asked >= self._whole
            number = 1 if whole else TokenBudgetSampler.microbatches(samples, self._asked)
            self._set = state.device_train_microbatch_size = math.ceil(own / number)

    @staticmethod
    def _sampler(state: State) -> TokenBudgetSampler | None:
        sampler = getattr(state.dataloader, "batch_sampler", None)
        return sampler if isinstance(sampler, TokenBudgetSampler) else None

    def _samples_of_step(self, state: State) -> list[int]:
        """How many samples the step has on each rank; none where the batches are not ours."""
        if (sampler := self._sampler(state)) is None:
            return []
        if self._epoch != sampler.epoch:
            self._epoch = sampler.epoch
            self._samples, self._tokens = sampler.sizes()
        return self._samples[self._drawn - 1]

    def _weigh(self, state: State) -> None:
        sampler = self._sampler(state)
        if sampler is None:
            return
        samples = self._samples_of_step(state)
        if of_tokens(state.batch):
            # A mean over tokens. Composer weighs it by samples, of which there are more where they are short.
            own, part = samples[sampler.rank], len(state.batch["labels"])
            factor = sum(samples) / len(samples) / own * self._tokens[self._drawn - 1]
            if self._labelled is not None and part < self._rows:
                factor = labelled(state.batch) / self._labelled * (factor * self._rows / part)
        else:
            factor = sum(samples) * sampler.steps / len(sampler.lengths)
        weigh(state.loss, factor)
