"""A few more steps after a run's measurement: where their time goes, and what memory each kind takes.

They go through Composer's own loop, with the recipe's speed-ups as they are, and disturb no number, as all numbers
have been taken. The model is of no use afterwards: it has been trained a little further, at some learning rate. Of
several ranks each looks at itself; `ablate` shows what the first saw.
"""

from __future__ import annotations

import logging
import statistics
import warnings
from typing import TYPE_CHECKING, Any

import torch
from composer import Trainer
from composer.core import Callback, State
from composer.loggers import Logger
from composer.utils import dist

from composer_speedups.algorithms.unpadding import Unpadding
from composer_speedups.compilation import compile_statistics
from composer_speedups.ddp import bucket_bytes
from composer_speedups.everyone import everyones
from composer_speedups.gradient_buckets import gradients_at_most
from composer_speedups.graphs.replay import kernel_by_kernel
from composer_speedups.kernels.attention_kernels import AttentionWatch
from composer_speedups.measurement.measure import Measurement
from composer_speedups.measurement.memory import predict
from composer_speedups.measurement.memory_meters import SavedForBackward, tensor_bytes
from composer_speedups.measurement.profiling import StepProfiler
from composer_speedups.measurement.results import NO_FUSED_KERNEL, NOT_TOLD, RunResult
from composer_speedups.optim.optimizers import describe

if TYPE_CHECKING:
    from composer_speedups.recipes import Recipe
    from composer_speedups.tasks import Task

__all__ = ["AsItRan", "MemoryProbe", "look_inside"]

log = logging.getLogger("composer_speedups")

_STEPS = 3
_PATIENCE = 5.0  # seconds; where so many steps take longer, one is profiled


class MemoryProbe(Callback):
    """Measures the first step: what autograd keeps, and at its end weights, gradients (those that are dropped before,
    when most are there) and optimizer state, in bytes.

    Attributes:
        kinds: bytes by kind, after the step.
        rows: real tokens of each row of the largest microbatch; empty where the batch has no attention mask.
        length: of its padded rows.
    """

    def __init__(self) -> None:
        self.kinds: dict[str, int] = {}
        self.rows: list[int] = []
        self.length = 0
        self._saved: SavedForBackward | None = None
        self._most = -1

    def before_forward(self, state: State, logger: Logger) -> None:
        self.stop()  # counting still if the last pass ran out of memory and is tried again
        if not self.kinds:
            self._saved = SavedForBackward(state.model).__enter__()

    def after_loss(self, state: State, logger: Logger) -> None:
        saved = self._saved
        self.stop()
        if saved is not None and saved.bytes > self._most:
            self._most = saved.bytes
            mask = state.batch.get("attention_mask") if isinstance(state.batch, dict) else None
            if mask is not None:
                self.rows, self.length = mask.sum(1).tolist(), mask.shape[1]

    def close(self, state: State, logger: Logger) -> None:
        self.stop()

    def stop(self) -> None:
        """End counting, which an error in the forward pass or in the loss leaves on."""
        if self._saved is not None:
            self._saved.__exit__(None, None, None)
            self._saved = None

    def batch_end(self, state: State, logger: Logger) -> None:
        if self.kinds:
            return
        parameters = list(state.model.parameters())
        states = [v for o in state.optimizers for entry in o.state.values() for v in entry.values()]
        self.kinds = {
            "weights": tensor_bytes([*parameters, *state.model.buffers()]),
            "gradients": max(tensor_bytes(p.grad for p in parameters), gradients_at_most(state.optimizers)),
            **({"buckets": buckets} if (buckets := bucket_bytes(state.model)) else {}),
            "optimizer": tensor_bytes(states),
            "activations": max(0, self._most),
        }


class AsItRan(Callback):
    """Notes what no speed-up may have reported: optimizer, attention kernel, and the dtype inside of the model.

    Args:
        encoder: whose output's dtype is wanted; None where a hook would make a compiler start anew.

    Attributes:
        facts: the evidence.
    """

    def __init__(self, encoder: torch.nn.Module | None) -> None:
        self.facts: dict[str, str | bool] = {}
        self._encoder, self._watch, self._compiled = encoder, AttentionWatch(), 0.0
        self._hook: Any = None

    def before_forward(self, state: State, logger: Logger) -> None:
        if "attention" in self.facts:
            return
        if not self.facts:
            optimizer = state.optimizers[0]
            self.facts["optimizer"] = describe(optimizer)
            flags = {flag: optimizer.param_groups[0].get(flag) for flag in ("foreach", "fused")}
            self.facts |= {flag: value for flag, value in flags.items() if value is not None}
        if self._encoder is not None and self._hook is None:
            self._hook = self._encoder.register_forward_hook(self._see)
        self._compiled = compile_statistics()["compile_seconds"]
        self._watch.start()

    def _see(self, module: torch.nn.Module, inputs: Any, output: Any) -> None:
        self.facts["encoder_output"] = str(output[0].dtype).removeprefix("torch.")

    def after_forward(self, state: State, logger: Logger) -> None:
        watched, kernels = self._watch.running, self._watch.stop()
        if watched and compile_statistics()["compile_seconds"] == self._compiled:  # else the compiler ran some, too
            own = [str(a.evidence["kernel"]) for a in state.algorithms if isinstance(a, Unpadding)]
            self.facts["attention"] = ", ".join(kernels or own) or NO_FUSED_KERNEL
        self.stop()

    def stop(self) -> None:
        """End what is still running, and take the hook away."""
        self._watch.stop()
        if self._hook is not None:
            self._hook.remove()
            self._hook = None


def look_inside(trainer: Trainer, recipe: Recipe, task: Task, result: RunResult) -> None:
    """Train some steps more, and put what they show into `result`. A failure is told, and costs the run nothing.

    Raises:
        Exception: where several ranks train together, whatever one of them has met.
    """
    model = trainer._original_model.model
    # Of the slowest rank: all take as many steps, or one would wait for the others' gradients for good.
    typical = max(everyones(statistics.median(result.step_seconds) if result.step_seconds else 0.0))
    steps = _STEPS if (_STEPS + 2) * typical < _PATIENCE else 1
    compiled = "torch_compile" in recipe.speedups
    probe = MemoryProbe()
    profiler = StepProfiler(None if compiled else model, steps, skip=2 if steps > 1 else 1)
    ran = AsItRan(None if compiled else getattr(model, "base_model", None))
    try:
        before = compile_statistics()["compile_seconds"]
        with kernel_by_kernel():  # in a CUDA graph none of them would see a thing
            _more_steps(trainer, [probe, profiler, ran], profiler.skip + steps)
        # A rank's compiler would be in its own seconds, and in the others' that wait for it.
        if not any(everyones(compile_statistics()["compile_seconds"] - before)):
            result.step_profile, result.step_profile_other = profiler.profile.seconds, profiler.profile.other
        result.memory = probe.kinds
        if probe.rows:
            ranks = dist.get_world_size()
            found = predict(recipe, lengths=probe.rows, length=probe.length, task=task, ranks=ranks)
            result.memory_predicted = found.kinds() | {"peak": found.peak}
    except Exception as error:
        if dist.get_world_size() > 1:  # the other ranks wait for this one
            raise
        log.warning("where the time and memory of %s go cannot be told: %r", recipe.name, error, exc_info=True)
        result.warnings.append(f"{NOT_TOLD}: {type(error).__name__}: {error}")
    finally:
        probe.stop()
        profiler.stop()
        ran.stop()
        result.as_it_ran = ran.facts


def _more_steps(trainer: Trainer, callbacks: list[Callback], steps: int) -> None:
    state: Any = trainer.state
    state.callbacks = [c for c in state.callbacks if not isinstance(c, Measurement)] + callbacks
    state.evaluators = []
    trainer.logger.destinations = ()
    # From the start of an epoch: in mid-epoch Composer would first load all batches again that have been seen.
    if state.timestamp.batch_in_epoch.value:
        state.timestamp = state.timestamp.to_next_epoch()
    with warnings.catch_warnings():  # the run has said already what there is to say
        warnings.simplefilter("ignore")
        trainer.fit(duration=f"{steps}ba")
