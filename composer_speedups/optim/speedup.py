"""The base of the speed-ups that change which AdamW runs: when it is changed, and what a checkpoint then brings."""

from __future__ import annotations

import shlex
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from composer.core import Event, State
from composer.loggers import Logger
from torch.optim import Optimizer

from composer_speedups.arguments import check_flag
from composer_speedups.errors import ConflictError, SpeedUpUnavailable
from composer_speedups.optim.loading import Loading, another_way, is_resumed_by_train, source
from composer_speedups.optim.optimizers import (
    describe,
    family_of,
    groups_kept_on_error,
    is_adamw,
    reassert,
    split_off_no_decay,
)
from composer_speedups.speedup import SpeedUp, Stage

__all__ = ["OptimizerSpeedUp", "adamw_state_bytes", "sizes"]


class OptimizerSpeedUp(SpeedUp):
    """Base of the speed-ups that change which AdamW runs.

    A subclass names its plain function in `convert`, and what a group of torch's AdamW must hold in `flags`: loading a
    checkpoint brings the groups of the file back, so they are set again after it. One that computes another update than
    AdamW says by `knows` which optimizers it makes, by `check_moments` what a file must hold, and by `settle` what of
    the optimizer stays as it was (`adafactor.py`).

    Args:
        no_decay_on_bias_and_norm: take the weight decay off parameters of fewer than two dimensions. A checkpoint
            saved with another value loads, with this one's weight decay. Only a Trainer without this package, which
            has one group again, would take the one without decay for all: give it `load_ignore_keys` or two groups.
            Sharded files of FSDP2 (`state_dict_type="sharded"`) load with the value that they were saved with.
    """

    stage = Stage.OPTIMIZER
    slot = "optimizer"
    events = frozenset({Event.BEFORE_LOAD, Event.AFTER_LOAD, Event.BEFORE_DATALOADER})
    flags: ClassVar[dict[str, Any]] = {}

    def __init__(self, no_decay_on_bias_and_norm: bool = False) -> None:
        self.no_decay_on_bias_and_norm = check_flag("no_decay_on_bias_and_norm", no_decay_on_bias_and_norm)

    def state_bytes(self, model: torch.nn.Module, trained: Sequence[torch.Tensor]) -> int:
        """Bytes of the state that the optimizer keeps for the parameters `trained` of `model`."""
        return adamw_state_bytes(trained)

    def step_bytes(self, trained: Sequence[torch.Tensor]) -> int:
        """Bytes that a step takes for itself for a while, beyond parameters, gradients and state."""
        return 0

    @abstractmethod
    def convert(self, optimizer: Optimizer, model: torch.nn.Module) -> int:
        """Change `optimizer` in place; return for how many parameters the update is now another one's."""

    def install(self, state: State, logger: Logger) -> None:
        if not state.optimizers:
            raise SpeedUpUnavailable(f"{self!r} found no optimizer. Pass one to the Trainer: optimizers=AdamW(...).")
        optimizer = state.optimizers[0]
        before = describe(optimizer)
        if not is_adamw(optimizer):
            hint = (
                " (Composer's default, used because the Trainer got no optimizers=)"
                if type(optimizer).__name__ == "DecoupledSGDW"
                else ""
            )
            self.report(
                logger,
                0,
                f"the optimizer is {before}{hint}, not torch.optim.AdamW or Composer's DecoupledAdamW",
                optimizer=before,
            )
            return
        with groups_kept_on_error(optimizer):
            moved = split_off_no_decay(optimizer) if self.no_decay_on_bias_and_norm else 0
            changed = self.convert(optimizer, state.model)
        self.report(
            logger,
            changed + moved,
            f"the optimizer is {before} already",
            optimizer=describe(optimizer),
            optimizer_before=before,
            moved_to_no_decay=moved,
        )

    def on_event(self, event: Event, state: State, logger: Logger) -> None:
        if event is Event.BEFORE_LOAD:
            self._check_schedulers(state.schedulers, state.optimizers)
        elif (checkpoint := Loading.end(state)) is not None and (event is Event.AFTER_LOAD or checkpoint.asked):
            self.check_moments(state, checkpoint)
            checkpoint.restore_groups(state)
            self.settle(state, checkpoint)
        if event in (Event.BEFORE_LOAD, Event.AFTER_LOAD) and self.knows(state.optimizers[0]):
            Loading(state)

    def knows(self, optimizer: Optimizer) -> bool:
        """Whether `optimizer` is one that this makes, or would have made had it not been one before."""
        return is_adamw(optimizer)

    def check_moments(self, state: State, checkpoint: Loading) -> None:
        """Raise if a checkpoint in mid-training was loaded, and its moments were another optimizer's."""
        _refuse_lost_moments(state, checkpoint)

    def settle(self, state: State, checkpoint: Loading) -> None:
        """Give the groups what is this speed-up's to say, whatever was loaded."""
        reassert(checkpoint.optimizer, self.flags)

    def _check_schedulers(self, schedulers: Sequence[Any], optimizers: Sequence[Optimizer]) -> None:
        # A PyTorch scheduler made before the split would set the rates of the first groups only, silently.
        for scheduler in schedulers:
            rates = len(getattr(scheduler, "base_lrs", optimizers[0].param_groups))
            if self.no_decay_on_bias_and_norm and rates != len(optimizers[0].param_groups):
                raise ConflictError(
                    f"no_decay_on_bias_and_norm=True splits the parameter groups, and {type(scheduler).__name__} was "
                    f"made for {rates}. Use a Composer scheduler, or give the groups to AdamW yourself."
                )


def adamw_state_bytes(trained: Sequence[torch.Tensor], step: int = 4) -> int:
    """Bytes of AdamW's two moments in float32, and of a count of steps for each parameter: torch has a tensor for it.

    >>> adamw_state_bytes([torch.zeros(10), torch.zeros(2)])
    104
    """
    return sum(8 * parameter.numel() + step for parameter in trained)


def sizes(trained: Sequence[torch.Tensor]) -> list[int]:
    """Bytes of each parameter."""
    return [parameter.numel() * parameter.element_size() for parameter in trained]


def _refuse_lost_moments(state: State, checkpoint: Loading) -> None:
    """Raise if a checkpoint in mid-training was loaded, and its moments were not, as they were another optimizer's.

    Composer stores an optimizer's state under the name of its class, and goes on with empty moments if it finds
    another name there: the loss then jumps, and nobody knows why. torch and bitsandbytes share the name AdamW: then
    the wrong entries are loaded, and the first step fails.
    """
    optimizer = checkpoint.optimizer
    family = family_of(optimizer)
    if family is None or not state.timestamp.batch.value:
        return
    entry = "state1" if family == "bnb" else "exp_avg"
    if optimizer.state and all(entry in moments for moments in optimizer.state.values()):
        return
    if not checkpoint.lost(state):
        return
    to = {"torch": "adamw", "decoupled": "decoupled_adamw", "apex": "apex_fused_adamw"}.get(family) or (
        "adamw_8bit" if type(optimizer).__name__ == "AdamW8bit" else "bnb_adamw"
    )
    path = str(state.load_path or "FILE.pt")
    target, options = f"{path.removesuffix('.pt')}-{to}.pt", ""
    if is_resumed_by_train(state):
        target, options = path, " --overwrite"  # it would never look at another name
    raise ConflictError(
        f"{source(state)} holds no state of {describe(optimizer)}: it was saved with another optimizer. Convert "
        f"it: `composer-speedups convert-checkpoint {shlex.quote(path)} {shlex.quote(target)} --to {to}{options}`; or "
        f"use that optimizer's speed-up; or {another_way(state)}."
    )
