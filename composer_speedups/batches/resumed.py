"""A checkpoint of mid-epoch, and batches of our own: whether those done are those that the epoch has here.

Composer skips as many batches as were done. With another number of ranks, or another budget, an epoch is cut otherwise.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from composer.core import State, Timestamp
from composer.loggers import Logger

from composer_speedups.batches.plans import TokenBudgetSampler
from composer_speedups.errors import ConflictError

__all__ = ["KeepsPlan", "check_resumed", "warn_of_other_batches"]

log = logging.getLogger("composer_speedups")


class KeepsPlan:
    """Mixed into a speed-up that decides which samples make a batch: its checkpoints keep by what it did.

    Attributes:
        _plan: that, from the first fit on.
        _saved: that of the checkpoint that was loaded; None if the speed-up was not in it, empty if an older version
            wrote it.
        _first: whether no fit of this Trainer has begun.
    """

    _plan: Mapping[str, int] = MappingProxyType({})
    _saved: Mapping[str, int] | None = None
    _first = True

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), **self._plan}  # type: ignore[misc]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing is restored: only what is compared when the fit starts."""
        self._saved = {name: value for name, value in state.items() if name != "repr"}

    def install(self, state: State, logger: Logger) -> None:
        """Nothing yet but for another Trainer: the dataloader is not there before `Event.FIT_START`."""
        self._plan, self._saved, self._first = {}, None, True


def check_resumed(sampler: TokenBudgetSampler, timestamp: Timestamp, saved: Mapping[str, int] | None) -> None:
    """Raise where the checkpoint's epoch is known to have been cut otherwise, warn where its samples say so.

    Args:
        sampler: of the epochs to come.
        timestamp: that was loaded, in mid-epoch.
        saved: `steps` of an epoch and `ranks`, of the checkpoint; None where it was made without a budget, empty where
            an older version made it.
    """
    steps, ranks = sampler.steps, sampler.num_replicas
    if saved and saved["steps"] != steps:
        then = f"{saved['ranks']} rank{'s' * (saved['ranks'] > 1)}"
        raise ConflictError(
            f"the checkpoint was saved in the middle of an epoch of {saved['steps']} batches on {then}, and here "
            f"an epoch has {steps} on {ranks}: samples would come twice, or not at all. Resume on {then} with the "
            f"batches of then, or with tokens_per_batch={round(sampler.lengths.sum() / saved['steps'] / ranks)}"
        )
    epoch, done = int(timestamp.epoch), int(timestamp.batch_in_epoch)
    if saved is None or (not saved and sampler.samples_before(epoch, done) != timestamp.sample_in_epoch):
        warn_of_other_batches(epoch, "token_budget_batches")


def warn_of_other_batches(epoch: int, name: str) -> None:
    log.warning(
        "the checkpoint was saved in the middle of epoch %d with other batches than %s has here: in what is left of it "
        "samples may come twice, or not at all",
        epoch,
        name,
    )
