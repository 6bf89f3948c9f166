"""Gradients in buckets: whatever uses a bucket's gradients does so as soon as they are there, and then they go."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence

import torch
from torch.optim import Optimizer

from composer_speedups.errors import ConflictError

__all__ = ["GradientBuckets", "gradients_at_most"]

# Of each optimizer those that it updates. They do not keep it.
_OF: weakref.WeakKeyDictionary[Optimizer, GradientBuckets] = weakref.WeakKeyDictionary()


class GradientBuckets:
    """Calls `update` with the parameters of a bucket when the backward pass has all their gradients, and drops these.

    A backward pass comes to the last layer first, so buckets are filled from the end. A parameter that gets no gradient
    in one step is not waited for any more, and its gradient, should it come again, stays until the step's end.

    Args:
        parameters: in the model's order; those that are not trained are left out.
        bucket_bytes: of gradients, with which a bucket is full.
        update: called in the backward pass, where gradients of other buckets may be there, too.

    Attributes:
        parameters: of all buckets.
        active: whether it acts on backward passes, or lets all gradients stay.
        most: bytes of gradients that were there at once, at most.
    """

    def __init__(
        self,
        parameters: Iterable[torch.nn.Parameter],
        bucket_bytes: int,
        update: Callable[[Sequence[torch.nn.Parameter]], None],
    ) -> None:
        self.parameters = [p for p in parameters if p.requires_grad]
        self.active, self.most, self._now = True, 0, 0
        self._update = update
        self._waits_for = _cut(self.parameters[::-1], bucket_bytes)
        self._bucket = {p: number for number, bucket in enumerate(self._waits_for) for p in bucket}
        self._there: list[list[torch.nn.Parameter]] = [[] for _ in self._waits_for]
        self._came: set[torch.nn.Parameter] = set()
        self._handles = [p.register_post_accumulate_grad_hook(self._arrived) for p in self.parameters]

    @staticmethod
    def of(optimizer: Optimizer) -> GradientBuckets | None:
        return _OF.get(optimizer)

    @staticmethod
    def all() -> list[GradientBuckets]:
        return list(_OF.values())

    def belong_to(self, optimizer: Optimizer) -> None:
        _OF[optimizer] = self

    def __len__(self) -> int:
        return len(self._waits_for)

    def begin_step(self) -> None:
        """The next backward pass is a new step's, whatever became of the last one."""
        for there in self._there:
            there.clear()
        self._came.clear()
        self._now = 0

    def end_step(self) -> None:
        """The optimizer has updated what was left."""
        for number, there in enumerate(self._there):
            if there:
                for missing in set(self._waits_for[number]).difference(there):
                    del self._bucket[missing]
                self._waits_for[number] = there[:]
        self.begin_step()

    def remove(self) -> None:
        """Let the parameters be as they were before."""
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
                "are accumulated (by device_train_microbatch_size, say), or a step was broken off. Take the batch at "
                "once, with gradient_checkpointing if it is too large for that, or remove the speed-up"
            )
        self._came.add(parameter)
        self._now += parameter.grad.nbytes  # type: ignore[union-attr]
        self.most = max(self.most, self._now)
        number = self._bucket.get(parameter)
        if number is None:
            return
        there = self._there[number]
        there.append(parameter)
        if len(there) == len(self._waits_for[number]):
            self._update(there)
            for p in there:
                self._now -= p.grad.nbytes  # type: ignore[union-attr]
                p.grad = None
            there.clear()


def gradients_at_most(optimizers: Iterable[Optimizer]) -> int:
    """Bytes of gradients that were there at once, of optimizers that update in the backward pass; 0 where none does."""
    return sum(buckets.most for optimizer in optimizers if (buckets := GradientBuckets.of(optimizer)) is not None)


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
