"""What a checkpoint brings to an optimizer: moments that may be another's, and groups that may be split otherwise.

Composer and PyTorch find each parameter's moments by its name. Of the groups they take the file's last one that has a
parameter of ours, and leave a group of which the file's is taken already with no settings at all.
"""

from __future__ import annotations

import logging
import re
import weakref
from collections.abc import Iterable
from typing import Any

from composer.core import State
from composer.utils import dist

from composer_speedups.ddp import without_ddp
from composer_speedups.errors import ConflictError

__all__ = ["Loading", "another_way", "is_resumed_by_train", "source"]

log = logging.getLogger("composer_speedups")

# What wrappers of modules put into the names of parameters; PyTorch leaves it out in checkpoints.
_WRAPPERS = re.compile(r"(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
_MISSING = object()


class Loading:
    """Stands for `state.load_optim_state`, and looks at what it gets, until it is ended: when a checkpoint is loaded,
    and, as a callback may load one later, again until the first batch."""

    def __init__(self, state: State) -> None:
        self._state = weakref.ref(state)  # not to keep that of a Trainer which could not be made
        # That which is loaded: by `Event.AFTER_LOAD` an algorithm, such as Composer's SAM, may have wrapped it.
        self.optimizer = state.optimizers[0]
        groups = self.optimizer.param_groups
        # Each group's settings as they were made.
        self.before = [{key: value for key, value in group.items() if key != "params"} for group in groups]
        # By the optimizer's name: whether there are moments, and the groups. Nothing where no optimizer was offered, as
        # with `load_ignore_keys`, of which Composer tells nobody.
        self._offered: dict[str, tuple[bool, list[dict[str, Any]]]] = {}
        self.asked = False  # whether something was loaded at all
        state.load_optim_state = self  # type: ignore[method-assign,assignment]

    @staticmethod
    def end(state: State) -> Loading | None:
        """Let `state` load as before; None if nothing listened."""
        found = state.__dict__.get("load_optim_state")
        if not isinstance(found, Loading):
            return None
        del state.__dict__["load_optim_state"]
        return found

    def __call__(self, state_dict: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        state = self._state()
        assert state is not None
        self.asked = True
        found = [
            {
                name: (bool(entry.get("state")), [dict(group) for group in entry.get("param_groups", ())])
                for name, entry in (state_dict["optimizers"] or {}).items()
            }
        ]
        if state.load_monolith_rank0_only and dist.get_world_size() > 1:  # the others were given None
            dist.broadcast_object_list(found)
        self._offered = found[0]
        type(state).load_optim_state(state, state_dict, *args, **kwargs)

    def lost(self, state: State) -> bool:
        """Where there are no moments of ours: whether the file has another optimizer's.

        Else they were left out of the file, or the user had them ignored, and nothing is lost that was asked for.
        """
        name = type(self.optimizer).__qualname__
        if list(self._offered) == ["SAMOptimizer"]:
            log.warning(
                "%s was saved under Composer's SAM, which leaves out the moments of %s: they begin anew, as they do in "
                "Composer without speed-ups",
                source(state),
                name,
            )
            return False
        if self._offered and self._offered.get(name, (True, []))[0]:
            return True
        log.warning(
            "no state of %s was loaded from %s: it was ignored or is not there. Its moments begin anew",
            name,
            source(state),
        )
        return False

    def restore_groups(self, state: State) -> None:
        """Give the optimizer's groups their settings back, if the file has the parameters in other groups.

        Weight decay is then as it was here before: it is what the groups are about. Everything else is the file's, as
        it would be with the same groups.

        Raises:
            ConflictError: other settings differ between groups that would be joined or split.
        """
        optimizer = self.optimizer
        _, groups = self._offered.get(type(optimizer).__qualname__, (False, []))
        # A callback loads when Composer has put DDP around the model, whose names no file has.
        names = {p: _WRAPPERS.sub("", name) for name, p in without_ddp(state.model).named_parameters()}
        ours = [frozenset(names.get(p) for p in group["params"]) for group in optimizer.param_groups]
        known = frozenset().union(*ours)
        theirs = [frozenset(group["params"]) & known for group in groups]
        if None in known or not any(theirs) or set(ours) == {t for t in theirs if t}:
            return
        # Other entries are the user's own; foreach and fused say how, not what.
        shared = {*optimizer.defaults, "initial_lr", "step"} - {"weight_decay", "foreach", "fused"}
        known_settings = {key for settings in (*self.before, *groups) for key in settings}  # others are of wrappers
        for held in theirs:
            _agreed(state, shared, [s for s, own in zip(self.before, ours, strict=True) if own & held])
        for group, own, before in zip(optimizer.param_groups, ours, self.before, strict=True):
            sources = [g for g, held in zip(groups, theirs, strict=True) if own & held]
            new = {**before, **_agreed(state, shared, sources), "params": group["params"]}
            new |= {key: value for key, value in group.items() if key not in known_settings}
            group.clear()
            group.update(new)
        for scheduler in state.schedulers:  # the file's has a rate for each of the file's groups
            if len(getattr(scheduler, "base_lrs", optimizer.param_groups)) != len(optimizer.param_groups):
                scheduler.base_lrs = [group["initial_lr"] for group in optimizer.param_groups]
                scheduler._last_lr = [group["lr"] for group in optimizer.param_groups]
        log.warning(
            "%s has the parameters in other groups (%d, and %d here), as with another no_decay_on_bias_and_norm: the "
            "weight decay is what this optimizer was made with, %s; all else is the checkpoint's",
            source(state),
            len(groups),
            len(ours),
            ", ".join(str(group["weight_decay"]) for group in optimizer.param_groups),
        )


def source(state: State) -> str:
    """The checkpoint: of one that a callback loads nobody else is told the name."""
    return f"the checkpoint {state.load_path}" if state.load_path else "the checkpoint"


def is_resumed_by_train(state: State) -> bool:
    """Whether the checkpoint was found by `train --resume`, by its name, and not given by the Trainer's user."""
    return any(getattr(callback, "resumes_by_name", False) for callback in state.callbacks)


def another_way(state: State) -> str:
    """What else can be done where a checkpoint's optimizer does not fit: an end of an error."""
    if is_resumed_by_train(state):
        return "begin anew with another folder for --save"
    return "load the weights alone with load_weights_only=True"


def _agreed(state: State, keys: Iterable[str], settings: list[dict[str, Any]]) -> dict[str, Any]:
    """Those of `keys` that `settings` have; they must have them alike."""
    found = {}
    for key in sorted(keys):
        values = [s.get(key, _MISSING) for s in settings]
        if any(value is not values[0] and value != values[0] for value in values):
            raise ConflictError(
                f"{source(state)} has the parameters in other groups, and {key} differs between "
                "groups that would be joined or split: which is meant cannot be told. Resume with the groups, and the "
                f"no_decay_on_bias_and_norm, that it was saved with, or {another_way(state)}."
            )
        if values and values[0] is not _MISSING:
            found[key] = values[0]
    return found
