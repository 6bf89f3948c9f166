"""A Composer callback that measures a training run without disturbing it.

Seconds per step come from a monotonic clock (CUDA events on a GPU), from the moment in which Composer asks for a batch
to the batch's end: loading is included, evaluation and checkpoints, which come between two batches, are left out.
Lengths stay on the device until the end. Losses are those that Composer has read at each step.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import torch
from composer.core import Callback, State, TimeUnit
from composer.loggers import Logger
from composer.utils import dist

from composer_speedups.algorithms.sync_free_loop import takes_host_tensors
from composer_speedups.measurement.flops import pairs_within
from composer_speedups.measurement.peak_memory import PeakMemory
from composer_speedups.measurement.results import Progress

__all__ = ["Measurement"]

_REPORT_EVERY = 0.25  # seconds between two progress reports
_KEPT = 512  # steps whose events and lengths stay on the device; a training of days must not collect them
_NAN_PATIENCE = 25  # steps in a row without a finite loss, after which a run is given up


class Measurement(Callback):
    """Records losses, seconds, samples (of all ranks) and real tokens (of this one) of each step, and reports progress.

    Args:
        report: called with a `Progress` a few times a second.
        compile_seconds: tells how many seconds this process has spent compiling so far; steps during which that
            grows are not counted in the speeds.
        stop_requested: asked after each batch; True ends the training after that batch, in good order.
        reach: how far the model's local attention layers see to either side; None where it has none.

    Attributes:
        peak: of memory, since the fit began.
        losses: of each step, the mean over the ranks, as Composer has it.
        samples: of each step, of all ranks.
        compiling: of each step, whether something was compiled in it, on any rank.
        gave_up: whether it was ended as the loss stayed without a finite value.
        interrupted: whether it was ended as somebody asked for that.
        evaluating: whether an evaluation goes on.
        padded_tokens: of all batches of this rank, padding included.
        fit_seconds: of all of the fit.
        eval_seconds: of evaluations in it.
    """

    def __init__(
        self,
        report: Callable[[Progress], None] | None = None,
        compile_seconds: Callable[[], float] = lambda: 0.0,
        stop_requested: Callable[[], bool] = lambda: False,
        reach: int | None = None,
    ) -> None:
        self._report = report
        self._compile_seconds = compile_seconds
        self._stop_requested = stop_requested
        self._reach = reach
        self.peak = PeakMemory(torch.device("cpu"))
        self.losses: list[float] = []
        self.samples: list[int] = []
        self.compiling: list[bool] = []
        self.gave_up = False
        self.interrupted = False
        self.evaluating = False
        self.fit_seconds = 0.0
        self.eval_seconds = 0.0
        self._lengths: list[torch.Tensor] = []
        self._tokens: list[tuple[int, int, int]] = []
        self._seconds: list[float] = []
        self._ticks: list[tuple[object, object]] = []
        self.padded_tokens = 0
        self._next_report = 0.0
        self._bad = 0
        self._steps = 0
        # A run that finds nothing left to train has no fit, but evaluates.
        self._cuda = self._fitting = False
        self._mark: object = 0.0
        self._first = True  # batch of an epoch

    # ---- events

    def init(self, state: State, logger: Logger) -> None:
        self.peak = PeakMemory(state.device._device)  # of a run that finds nothing left to train, too

    def fit_start(self, state: State, logger: Logger) -> None:
        self.peak = PeakMemory(state.device._device)
        self.peak.start()
        self._cuda = state.device._device.type == "cuda"
        self._compiled = self._compile_seconds()
        self._steps = _steps(state)
        self._began = time.perf_counter()
        self._mark = self._now()
        self._fitting = self._first = True

    def epoch_start(self, state: State, logger: Logger) -> None:
        self._mark = self._now()
        self._first = True

    def before_dataloader(self, state: State, logger: Logger) -> None:
        # The batch before, its evaluation and its checkpoint are done. The epoch's first batch counts from the epoch's
        # start, as its loader, with all workers, is started before this event.
        if not self._first:
            self._mark = self._now()
        self._first = False

    def eval_start(self, state: State, logger: Logger) -> None:
        self.evaluating = True
        self._eval_began = time.perf_counter()

    def eval_batch_end(self, state: State, logger: Logger) -> None:
        step, total = int(state.eval_timestamp.batch), int(state.dataloader_len or 0)
        if self._due() or step == total:
            self._send(Progress("eval", step=step, steps=total))

    def eval_end(self, state: State, logger: Logger) -> None:
        self.evaluating = False
        if self._fitting:  # Composer's last evaluation may come after the fit's end, outside of its seconds
            self.eval_seconds += time.perf_counter() - self._eval_began

    def batch_start(self, state: State, logger: Logger) -> None:
        batch = state.batch
        mask = batch.get("attention_mask") if isinstance(batch, dict) else None
        if mask is not None:
            lengths = mask.sum(1)
            squares = lengths.square().sum()
            local = squares if self._reach is None else pairs_within(lengths, self._reach)
            self._lengths.append(torch.stack([lengths.sum(), squares, local]))
            self.padded_tokens += mask.numel()
            if len(self._lengths) >= 2 * _KEPT:
                self._read_lengths(_KEPT)

    def batch_end(self, state: State, logger: Logger) -> None:
        now = self._now()
        self._ticks.append((self._mark, now))
        self._mark = now
        self.peak.look()
        self._step = len(self._seconds) + len(self._ticks)
        if len(self._ticks) >= 2 * _KEPT:
            self._read_ticks(_KEPT)
        loss = float(state.total_loss_dict.get("loss/train/total", math.nan))
        self.losses.append(loss)
        # Of all ranks, which may have unequal numbers: Composer has summed them in its own account of time.
        self.samples.append(int(state.timestamp.sample) - int(state.previous_timestamp.sample))
        compiled = self._compile_seconds()
        self._bad = 0 if math.isfinite(loss) else self._bad + 1
        flags = [self._bad >= _NAN_PATIENCE, self._stop_requested(), compiled > self._compiled]
        self.gave_up, self.interrupted, compiling = _on_any_rank(flags, state)
        self.compiling.append(compiling)
        self._compiled = compiled
        if self.gave_up or self.interrupted:
            state.stop_training()
            # Composer would evaluate before it ends: minutes for whoever wants it to stop, and nothing to learn of NaN.
            state.evaluators = []
        if self._due() or self._step == self._steps:
            self._send(self._progress(state, loss))

    def fit_end(self, state: State, logger: Logger) -> None:
        if self._cuda:
            torch.cuda.synchronize()
        self.fit_seconds = time.perf_counter() - self._began
        self._fitting = False

    # ---- results

    def step_seconds(self) -> list[float]:
        """Seconds of each step."""
        if self._ticks and self._cuda:
            torch.cuda.synchronize()
        self._read_ticks(len(self._ticks))
        return self._seconds

    def tokens(self) -> list[tuple[int, int, int]]:
        """Of each step: real tokens, the sum of the squares of the samples' lengths, and the pairs within `reach`."""
        self._read_lengths(len(self._lengths))
        return self._tokens

    # ---- helpers

    def _read_lengths(self, count: int) -> None:
        """Of the first `count` that are kept. The device is waited for, once in hundreds of steps."""
        if count:
            self._tokens += [tuple(sums) for sums in torch.stack(self._lengths[:count]).tolist()]
            del self._lengths[:count]

    def _read_ticks(self, count: int) -> None:
        for begin, end in self._ticks[:count]:
            seconds = begin.elapsed_time(end) / 1000 if self._cuda else end - begin  # type: ignore[attr-defined,operator]
            self._seconds.append(seconds)
        del self._ticks[:count]

    def _now(self) -> object:
        if self._cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            return event
        return time.perf_counter()

    def _due(self) -> bool:
        return self._report is not None and time.perf_counter() >= self._next_report

    def _send(self, progress: Progress) -> None:
        if self._report is not None:
            self._next_report = time.perf_counter() + _REPORT_EVERY
            self._report(progress)

    def _progress(self, state: State, loss: float) -> Progress:
        elapsed = time.perf_counter() - self._began - self.eval_seconds
        pace = elapsed / self._step
        recent = self._ticks[-20:] if len(self._ticks) > 3 else self._ticks
        if self._cuda:
            seconds = pace * len(recent)  # reading the events would make the host wait for the device
        else:
            seconds = sum(end - begin for begin, end in recent)  # type: ignore[operator]
        return Progress(
            "train",
            step=self._step,
            steps=self._steps,
            loss=loss,
            accuracy=None if self._cuda else _accuracy(state),  # reading it would make the host wait, too
            samples_per_second=sum(self.samples[-len(recent) :]) / max(seconds, 1e-9),
            seconds_left=max(0, self._steps - self._step) * pace,
        )


def _on_any_rank(flags: list[bool], state: State) -> list[bool]:
    """Each flag, on all ranks if on any. A rank that stopped alone would leave the others waiting for its gradients."""
    if dist.get_world_size() == 1:
        return flags
    # On the host where that can be, as with `SyncFreeLoop`: a vote on the device is read when all kernels are done.
    votes = torch.tensor(flags, dtype=torch.int32, device="cpu" if takes_host_tensors() else state.device._device)
    dist.all_reduce(votes, reduce_operation="MAX")
    return [bool(vote) for vote in votes.tolist()]


def _steps(state: State) -> int:
    """How many steps this fit will do, as far as can be told."""
    duration, done = state.max_duration, state.timestamp
    per_epoch = int(state.dataloader_len) if state.dataloader_len is not None else 0
    if duration is None:
        return 0
    if duration.unit == TimeUnit.BATCH:
        return duration.value - done.batch.value
    if duration.unit == TimeUnit.EPOCH:
        return duration.value * per_epoch - done.batch.value
    if duration.unit == TimeUnit.SAMPLE and state.train_dataloader is not None:
        samples = len(state.train_dataloader.dataset)  # of all ranks
        return math.ceil((duration.value - done.sample.value) * per_epoch / samples)
    return 0


def _accuracy(state: State) -> float | None:
    """Share of right answers in the last batch of a classification; a vocabulary's logits take long to look through."""
    logits = getattr(state.outputs, "logits", None)
    try:
        labels = state.batch_get_item("labels")
    except (KeyError, TypeError):
        return None
    if logits is None or labels.ndim > 1 or labels.is_floating_point() or logits.shape[:-1] != labels.shape:
        return None  # several microbatches: the outputs are the last one's only
    with torch.no_grad():
        return (logits.argmax(-1) == labels).float().mean().item()
