"""Where a training step's time goes, by kind of work: matmuls, attention, norms, the optimizer, the loop, ...

A few steps run under PyTorch's profiler, after everything that is measured. Every operator's own time goes to one
kind (`operator_kinds.py`); what no rule knows is `other`, and is listed by name. On a CPU the parts are seconds of the
training thread, and what is left of the step is the loop itself: Python, Composer, waiting. On a GPU they are seconds
of kernels by the operator that launched them, and what is left is the time in which the GPU had nothing to do. Of
several ranks one is looked at, and what it does or waits for to have all ranks' gradients is `exchange`.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from composer.core import Callback, State
from composer.loggers import Logger
from composer.utils import dist
from torch.autograd import DeviceType

from composer_speedups.measurement.exchange_time import alone, is_exchange, waited
from composer_speedups.measurement.operator_kinds import AROUND, HEAD, INSIDE, KINDS, STEPS, kinds, without_node

__all__ = ["StepProfile", "StepProfiler", "profiled"]

_LISTED = 8  # names of operators that no rule knows
_NOTED = 0.05  # seconds in which Gloo's threads note the end of an exchange for which nobody waits any more


@dataclass
class StepProfile:
    """Where the time of one step went.

    Attributes:
        seconds: by kind, in the order of `KINDS`; kinds without any are left out. They sum to the step's seconds.
        other: the largest of those operators that no rule knows, seconds by name.
        step: seconds of the whole step, the profiler's own cost (a microsecond or two an operator) included.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    other: dict[str, float] = field(default_factory=dict)
    step: float = 0.0


class profiled:
    """Profile what runs inside; `profile` then holds where the time of one of `steps` equal steps went.

    >>> with profiled(torch.device("cpu")) as found:
    ...     _ = torch.ones(8, 8) @ torch.ones(8, 8)
    >>> "matmul" in found.profile.seconds
    True
    """

    def __init__(self, device: torch.device, steps: int = 1) -> None:
        self.device, self.steps = device, steps
        self.profile = StepProfile()

    def __enter__(self) -> profiled:
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self.device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        # There is one cycle only; saying so spares a warning about several.
        self._profiler = torch.profiler.profile(activities=activities, acc_events=True)
        self._profiler.__enter__()
        if dist.get_world_size() > 1:
            dist.barrier()  # or the first exchange would hold how much later another rank's profiler was there
        self._wait()
        self._root = torch.profiler.record_function(STEPS)
        self._root.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._wait()
        self._root.__exit__(*error)
        if dist.get_world_size() > 1:
            time.sleep(_NOTED)
        self._profiler.__exit__(*error)
        if error[0] is None:
            self.profile = _summarise(self._profiler.events(), self.device, self.steps)

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


class StepProfiler(Callback):
    """Profiles `steps` steps of a fit, after `skip` others (one at least), and marks the model's head for it.

    Args:
        model: the Hugging Face model whose head is to be told from its encoder; None leaves the head unmarked, as it
            must be where hooks would make a compiler start anew.
        steps: to profile.
        skip: steps before that.
    """

    def __init__(self, model: torch.nn.Module | None, steps: int = 3, skip: int = 1) -> None:
        self.steps, self.skip = steps, skip
        self.profile = StepProfile()
        self._model, self._done = model, 0
        self._running: profiled | None = None
        self._inside: Any = None
        self._hooks: list[Any] = []

    def fit_start(self, state: State, logger: Logger) -> None:
        if self._model is not None:
            self._hooks = _mark_head(self._model)

    def before_forward(self, state: State, logger: Logger) -> None:
        if self._running is not None:
            self._inside = torch.profiler.record_function(INSIDE)
            self._inside.__enter__()

    def after_backward(self, state: State, logger: Logger) -> None:
        self._end_inside()

    def _end_inside(self) -> None:
        if self._inside is not None:
            self._inside.__exit__(None, None, None)
            self._inside = None

    def batch_end(self, state: State, logger: Logger) -> None:
        self._done += 1
        if self._done == self.skip:
            self._running = profiled(state.device._device, self.steps).__enter__()
        elif self._done == self.skip + self.steps and self._running is not None:
            self._running.__exit__(None, None, None)
            self.profile = self._running.profile
            self._running = None

    def close(self, state: State, logger: Logger) -> None:
        self.stop()

    def stop(self) -> None:
        """End what is still running, and take the marks away."""
        self._end_inside()
        if self._running is not None:
            self._running.__exit__(RuntimeError, None, None)
            self._running = None
        while self._hooks:
            self._hooks.pop().remove()


def _mark_head(model: torch.nn.Module) -> list[Any]:
    """Name the calls of what a Hugging Face model has besides its encoder; return the hooks."""
    encoder = getattr(model, "base_model", None)
    open_marks: list[Any] = []

    def before(*_: Any) -> None:
        open_marks.append(torch.profiler.record_function(HEAD))
        open_marks[-1].__enter__()

    def after(*_: Any) -> None:
        if open_marks:
            open_marks.pop().__exit__(None, None, None)

    hooks = []
    for module in model.children():
        outside = encoder is not None and encoder is not model and module is not encoder
        if outside and next(module.parameters(), None) is not None:
            hooks.append(module.register_forward_pre_hook(before))
            hooks.append(module.register_forward_hook(after, always_call=True))
    return hooks


def _summarise(events: Iterable[Any], device: torch.device, steps: int) -> StepProfile:
    """By kind, the times of the profiler's events; microseconds of all steps become seconds of one."""
    everything = list(events)
    root = next(event for event in everything if event.name == STEPS and event.device_type == DeviceType.CPU)
    everything = [event for event in everything if event.time_range.start >= root.time_range.start]  # not the barrier
    events = [event for event in everything if event.device_type == DeviceType.CPU and not event.is_async]
    kind_of = kinds(events)
    seconds: dict[str, float] = defaultdict(float)
    unknown: Counter[str] = Counter()
    whole = root.cpu_time_total
    cuda = device.type == "cuda"
    waiting = {} if cuda else waited(everything, root.thread)
    seconds["exchange"] = alone(everything) if cuda else sum(waiting.values())
    for event in events:
        if cuda:
            spent = sum(kernel.duration for kernel in event.kernels if not is_exchange(kernel.name))
        else:
            # Other threads work beside this one: the step waits for them inside the operator that shares work out.
            spent = event.self_cpu_time_total - waiting.get(id(event), 0.0) if event.thread == root.thread else 0.0
        if spent <= 0 or event.name in AROUND:
            continue
        kind = kind_of[id(event)][0]
        seconds[kind] += spent
        if kind == "other":
            unknown[event.name] += spent
    busy = sum(seconds.values())
    if busy > whole:  # kernels on several streams at once: their shares of the step
        seconds = {kind: value * whole / busy for kind, value in seconds.items()}
    else:
        seconds["idle" if cuda else "loop"] += whole - busy
    scale = 1e-6 / steps
    return StepProfile(
        {kind: seconds[kind] * scale for kind in KINDS if seconds.get(kind)},
        {without_node(name, "backward of "): value * scale for name, value in unknown.most_common(_LISTED)},
        whole * scale,
    )
