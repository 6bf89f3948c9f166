"""A checkpoint of mid-epoch, and batches of our own: whether those done are those that the epoch has here.

Composer skips as many batches as were done. With another number of ranks, or another budget, an epoch is cut otherwise.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from composer.core import Timestamp

from composer_speedups.batching import TokenBudgetSampler
from composer_speedups.errors import ConflictError

__all__ = ["check_resumed", "warn_of_other_batches"]

log = logging.getLogger("composer_speedups")


def check_resumed(sampler: TokenBudgetSampler, timestamp: Timestamp, saved: Mapping[str, int]) -> None:
    """Raise where the checkpoint's epoch is known to have been cut otherwise, warn where its samples say so.

    Args:
        sampler: of the epochs to come.
        timestamp: that was loaded, in mid-epoch.
        saved: `steps` of an epoch and `ranks`, of the checkpoint; empty where it was made without a budget, or by an
            older version.
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
    if not saved and sampler.samples_before(epoch, done) != timestamp.sample_in_epoch:
        warn_of_other_batches(epoch, "token_budget_batches")


def warn_of_other_batches(epoch: int, name: str) -> None:
    log.warning(
        "the checkpoint was saved in the middle of epoch %d with other batches than %s has here: in what is left of it "
        "samples may come twice, or not at all",
        epoch,
        name,
    )
