"""Gradients in buckets: whatever uses a bucket's gradients does so as soon as they are there, and then they go."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from composer_speedups.errors import ConflictError

__all__ = ["GradientBuckets", "gradients_at_most", "update_alone"]

# Of each optimizer those that it updates. They do not keep it.
_OF: weakref.WeakKeyDictionary[Optimizer, GradientBuckets] = weakref.WeakKeyDictionary()


class GradientBuckets:
    """Calls `update` with the parameters of a bucket when the backward pass has all their gradients, and drops these.

    A backward pass comes to the last layer first, so buckets are filled from the end. A parameter that gets no gradient
    in one step is not waited for any more, and its gradient, should it come again, stays until the step's end.

    Args:
        groups: of parameters, each in the model's order; no bucket is of two, as groups may be of many layers each.
            Parameters that are not trained are left out.
        bucket_bytes: of gradients, with which a bucket is full.
        update: called in the backward pass, where gradients of other buckets may be there, too.

    Attributes:
        parameters: of all buckets.
        active: whether it acts on backward passes, or lets all gradients stay.
        most: bytes of gradients that were there at once, at most.
    """

    def __init__(
        self,
        groups: Iterable[Iterable[torch.nn.Parameter]],
        bucket_bytes: int,
        update: Callable[[Sequence[torch.nn.Parameter]], None],
    ) -> None:
        trained = [[p for p in group if p.requires_grad] for group in groups]
        self.parameters = [p for group in trained for p in group]
        self.active, self.most, self._now = True, 0, 0
        self._update = update
        self._waits_for = [bucket for group in trained for bucket in _cut(group[::-1], bucket_bytes)]
        self._bucket = {p: number for number, bucket in enumerate(self._waits_for) for p in bucket}
        self._there: list[list[torch.nn.Parameter]] = [[] for _ in self._waits_for]
        self._came: set[torch.nn.Parameter] = set()
        self._gone: list[torch.nn.Parameter] = []
        self._handles: list[Any] = [p.register_post_accumulate_grad_hook(self._arrived) for p in self.parameters]

    @staticmethod
    def of(optimizer: Optimizer) -> GradientBuckets | None:
        return _OF.get(optimizer)

    @staticmethod
    def all() -> list[GradientBuckets]:
        return list(_OF.values())

    def belong_to(self, optimizer: Optimizer) -> None:
        """Until it is gone, or they are removed. Its `step` ends a step here, too."""
        _OF[optimizer] = self
        self._handles.append(optimizer.register_step_pre_hook(self._look_again))
        self._handles.append(optimizer.register_step_post_hook(self._end_step))
        weakref.finalize(optimizer, self.remove).atexit = False  # another one may come for these parameters

    def __len__(self) -> int:
        return len(self._waits_for)

    def begin_step(self) -> None:
        """The next backward pass is a new step's, whatever became of the last one."""
        for there in self._there:
            there.clear()
        self._gone.clear()
        self._came.clear()
        self._now = 0

    def remove(self) -> None:
        """Let parameters and optimizer be as they were before."""
        self.active = False
        for handle in self._handles:
            handle.remove()
        for optimizer in [optimizer for optimizer, buckets in _OF.items() if buckets is self]:
            del _OF[optimizer]

    def _arrived(self, parameter: torch.nn.Parameter) -> None:
        if not self.active:
            return
        if parameter in self._came:
            raise ConflictError(
                "gradient_release updates in the backward pass, and there are two to one optimizer.step(): gradients "
                "are accumulated (by device_train_microbatch_size, say). Take the batch at once, with "
                "gradient_checkpointing if it is too large for that, or remove the speed-up. After a step that was "
                "broken off call optimizer.step() first"
            )
        self._came.add(parameter)
        self._now += _bytes(parameter.grad)
        self.most = max(self.most, self._now)
        number = self._bucket.get(parameter)
        if number is None:
            return
        there = self._there[number]
        there.append(parameter)
        if len(there) == len(self._waits_for[number]):
            self._update(there)
            for p in there:
                self._now -= _bytes(p.grad)
                p.grad = None
            self._gone += there
            there.clear()

    def _look_again(self, *_: Any) -> None:
        """Before the optimizer's step: what was updated has no gradient, or it would be updated twice."""
        if any(p.grad is not None for p in self._gone):
            self.begin_step()
            raise ConflictError(
                "gradient_release: gradients of parameters that were updated are there again. DistributedDataParallel "
                "writes them back, also for one process. Train without it, or remove the speed-up"
            )

    def _end_step(self, *_: Any) -> None:
        """After it: what was left has been updated."""
        for number, there in enumerate(self._there):
            if any(p.grad is not None for p in there):  # else the step was broken off, and gradients cleared
                for missing in set(self._waits_for[number]).difference(there):
                    del self._bucket[missing]
                self._waits_for[number] = there[:]
        self.begin_step()


def update_alone(optimizer: Optimizer, parameters: Iterable[torch.nn.Parameter]) -> None:
    """A step of `optimizer` for some of its parameters, whatever gradients the others have.

    Without the profiler's name and the users' hooks around it, for which a step is a whole one.
    """
    now = set(parameters)
    everything = [p for group in optimizer.param_groups for p in group["params"]]
    others = [(p, p.grad) for p in everything if p.grad is not None and p not in now]
    # Groups and their order stay as they are: bitsandbytes finds what it was told of a parameter by its place.
    for p, _ in others:
        p.grad = None
    step = type(optimizer).step
    step = step.__wrapped__ if getattr(step, "hooked", False) else step
    try:
        step(optimizer)
    finally:
        for p, gradient in others:
            p.grad = gradient


def gradients_at_most(optimizers: Iterable[Optimizer]) -> int:
    """Bytes of gradients that were there at once, of optimizers that update in the backward pass; 0 where none does."""
    return sum(buckets.most for optimizer in optimizers if (buckets := GradientBuckets.of(optimizer)) is not None)


def _bytes(gradient: torch.Tensor | None) -> int:
    if gradient is None:  # the update has dropped it
        return 0
    if gradient.is_sparse:
        return gradient._values().nbytes + gradient._indices().nbytes
    return gradient.nbytes


def _cut(parameters: Sequence[torch.nn.Parameter], size: int) -> list[list[torch.nn.Parameter]]:
    """Consecutive ones together, until they have `size` bytes."""
    buckets: list[list[torch.nn.Parameter]] = []
    room = 0
    for parameter in parameters:
        if room <= 0:
            buckets.append([])
            room = size
        buckets[-1].append(parameter)
        room -= parameter.nbytes
    return buckets
