"""`SpeedUp`: what every algorithm of this package has in common.

A speed-up is a Composer `Algorithm` that changes model and optimizer once, at `Event.INIT`, before Composer builds
schedulers, GradScaler and DDP around them; what is about batches waits for `Event.FIT_START`, when they are there. The
base class gives it: the right place in the order, refusal of contradictions, a `repr` that evaluates back, and evidence
of what it changed.
"""

from __future__ import annotations

import ast
import inspect
import logging
import re
import textwrap
import warnings
import weakref
from abc import abstractmethod
from collections.abc import Callable, Sequence
from enum import IntEnum
from functools import cache, partial
from typing import Any, ClassVar

import torch
from composer.algorithms.warnings import NoEffectWarning
from composer.core import Algorithm, Callback, Event, State
from composer.loggers import Logger

from composer_speedups.after_others import AfterOthers
from composer_speedups.errors import ConflictError, SpeedUpUnavailable
from composer_speedups.gradient_buckets import GradientBuckets
from composer_speedups.holds import WORK, Hold, IgnoredWarning

__all__ = ["SpeedUp", "Stage", "algorithm_passes", "check_combination", "conflict", "contradicted", "warn"]

log = logging.getLogger("composer_speedups")

_OF_THE_LOOP = {"composer", "composer_speedups"}

# Attributes that no copy has.
_OF_A_TRAINER = ("_installed_in", "_hold", "_loading", "_logged")

Evidence = dict[str, "int | float | str | bool"]


class Stage(IntEnum):
    """When a speed-up acts, relative to the others. Lower first.

    Surgery must see plain modules, optimizers must see the final modules, and compile must see everything
    that came before, or it compiles code that is then thrown away.
    """

    DATA = 0  # the dataloader; the model is left alone
    PRECISION = 1  # what matmuls and autocast compute in
    ATTENTION = 2  # queries, keys and values, and what packs them
    BLOCK = 3  # several modules at once, before single norms and dropouts
    NORM = 4  # modules one by one: norms, dropouts, losses
    HEAD = 5  # what of the last layers is computed
    RECOMPUTE = 6  # whole blocks, as all of the above left them
    OPTIMIZER = 7  # sees the model as it will train
    COMPILE = 8  # compiles all of that
    RECORD = 9  # what all of that launches
    LOOP = 10  # the Trainer's loop and the process


class SpeedUp(Algorithm):
    """Base class of all speed-ups.

    A subclass sets `stage`, keeps its constructor's arguments under their own names (scalars only, checked
    in `__init__`), implements `install`, and calls `report` with what it changed. Nothing is listed by hand:
    the file's name is its key.

    Attributes:
        stage: when it acts, relative to other speed-ups.
        slot: what it occupies (`"optimizer"`, `"norm"`, ...). Two speed-ups with one slot contradict.
        for_memory: whether it is there for larger batches or models, and by itself costs time or changes the update.
            `recommend`, which keeps the batch, does not try it.
        choices: arguments worth trying, a dict for each try: the doctor lists them, `recommend` measures them. A class
            with required arguments sets it.
        redundant_with: keys of others that leave it nothing to save, though each alone may gain, with the reason.
            `recommend` keeps the faster one.
        regroups: whether it makes batches by length. Over less than an epoch samples/s then says which lengths came up,
            so speed is compared by real tokens/s.
        at_once: whether it uses gradients as they come: it is for one process and one forward pass of the whole batch,
            and a recipe that accumulates gradients is refused with it.
        in_buckets: whether gradients lie in DDP's buckets, and nowhere else.
        no_fsdp: why this cannot be used under FSDP, naming the remedy; empty where it can.
        events: events beyond `Event.INIT` on which `on_event` is called.
        evidence: what was changed, filled by `report`; the ablation study shows it beside the speed.
    """

    stage: ClassVar[Stage]
    slot: ClassVar[str | None] = None
    for_memory: ClassVar[bool] = False
    choices: ClassVar[tuple[dict[str, Any], ...]] = ({},)
    redundant_with: ClassVar[dict[str, str]] = {}
    regroups: ClassVar[bool] = False  # `registry.regrouping` finds a class by the line `regroups = True` in its file
    at_once: ClassVar[bool] = False
    in_buckets: ClassVar[bool] = False
    no_fsdp: ClassVar[str] = ""
    events: ClassVar[frozenset[Event]] = frozenset()

    _installed_in: weakref.ref[State] | None = None
    _hold: Hold | None = None
    _loading: Hold | None = None

    def __init__(self) -> None:
        """Without arguments, unless a speed-up has its own: Composer's `Algorithm` would take any, and forget them."""

    @classmethod
    def key(cls) -> str:
        """The name in recipes and in the registry: the name of the file that holds the class."""
        return cls.__module__.rpartition(".")[2]

    @classmethod
    @cache  # Composer prints every algorithm at every event
    def parameters(cls) -> dict[str, inspect.Parameter]:
        """The constructor's arguments by name: they are the configuration in YAML, too."""
        parameters = dict(inspect.signature(cls.__init__).parameters)
        parameters.pop("self")
        return {name: p for name, p in parameters.items() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}

    @property
    def evidence(self) -> Evidence:
        return self.__dict__.setdefault("_evidence", {})

    def __repr__(self) -> str:
        arguments = ", ".join(f"{name}={getattr(self, name)!r}" for name in self.parameters())
        return f"{type(self).__name__}({arguments})"

    def __getstate__(self) -> dict[str, object]:
        """For copies and pickles, which belong to no Trainer and hold no setting of the process."""
        return {name: value for name, value in vars(self).items() if name not in _OF_A_TRAINER}

    def unavailable(self, device: torch.device) -> str | None:
        """Why this cannot work on `device`, naming the remedy; None where it can.

        Asked before training starts, and by the ablation study to skip a row with its reason.
        """
        return None

    def contradicts(self, other: SpeedUp) -> str | None:
        """Why this cannot be used beside `other`, naming the remedy; None where it can. What fills the same slot needs
        no word of this."""
        return None

    def too_slow(self, device: torch.device) -> str | None:
        """Why this works on `device` but makes training there many times slower, naming the remedy; None where not.

        A Trainer says so and goes on. Studies, tuning and `recommend` leave it out with this reason: a row of hours
        would tell nothing else.
        """
        return None

    def held_bytes(self, activations: int) -> int:
        """Bytes that this holds between steps beside what training does, where a pass keeps `activations` bytes."""
        return 0

    def released(
        self, parameters: Sequence[torch.nn.Parameter], update: Callable[[Sequence[torch.nn.Parameter]], None]
    ) -> GradientBuckets | None:
        """Has `update` called in backward passes with parameters whose gradients go then; None where all of them stay
        until the optimizer's step."""
        return None

    @abstractmethod
    def install(self, state: State, logger: Logger) -> None:
        """Change model, optimizer or state. Called once per Trainer, in the order of `stage`."""

    def on_event(self, event: Event, state: State, logger: Logger) -> None:
        """Called on the events that the class names in `events`."""

    def at_close(self, state: State, undo: Callable[[], None]) -> None:
        """Have `undo` called when the Trainer closes, as it does after a failed fit: algorithms are not told, callbacks
        are. To be asked for at `Event.AFTER_LOAD`: before, Composer warns of callbacks that a checkpoint lacks."""
        state.callbacks.append(_AtClose(undo))

    def keep(self, state: State, hold: Hold) -> None:
        """Have `hold`, of a setting of the process, in force now and whenever this Trainer fits or evaluates.

        It is undone after each, while a checkpoint is loaded, when the Trainer closes, and when it is dropped or cannot
        be made.
        """
        self._hold = hold
        hold.hold_for(state)

    def match(self, event: Event, state: State) -> bool:
        if event is Event.INIT and AfterOthers.of(state) is None:
            AfterOthers(state, [a for a in state.algorithms if not isinstance(a, SpeedUp) and a.match(event, state)])
        held = self._hold is not None and event in WORK
        return event in (Event.INIT, Event.BEFORE_LOAD, Event.AFTER_LOAD) or held or event in self.events

    def apply(self, event: Event, state: State, logger: Logger) -> int | None:
        if event is Event.INIT:
            turn = AfterOthers.of(state) or AfterOthers(state, [])
            turn.do(partial(_install_all, self, state, logger))
            return None
        if event is Event.BEFORE_LOAD and (turn := AfterOthers.of(state)) is not None:
            turn.give_up()
        if event is Event.BEFORE_LOAD and self._hold is not None:
            self._hold.restore()  # a checkpoint that cannot be loaded leaves a Trainer that nobody can close
        if event is Event.AFTER_LOAD and self._loading is not None:
            self._loading.restore()
        if self._hold is not None:
            if event is Event.AFTER_LOAD:
                self._hold.hold()
                self.at_close(state, self._hold.restore)
            self._hold.follow(event)
        if event in self.events:
            self.on_event(event, state, logger)
        return None

    def report(
        self, logger: Logger, count: int, nothing: str, already: bool = False, **evidence: int | float | str | bool
    ) -> None:
        """Say what was changed: to the log, the loggers, and `evidence`. A `count` of 0 warns.

        Args:
            logger: Composer's logger.
            count: how many things were changed.
            nothing: the warning's text if `count` is 0: what was looked for and not found.
            already: whether the model has had it before, as in an earlier Trainer: then a `count` of 0 says so instead.
            evidence: further facts worth a column in a table, such as an optimizer's class or a kernel's name.
        """
        self.tell(logger, changed=count, **evidence)
        if count == 0:
            nothing = "the model has it already" if already else nothing
            warn(NoEffectWarning(f"{self!r} changed nothing: {nothing}"))
        log.info("%r: %s", self, ", ".join(f"{k}={v}" for k, v in self.evidence.items()))

    def tell(self, logger: Logger, **evidence: int | float | str | bool) -> None:
        """Put facts into `evidence`, and into the loggers those of which they have none yet.

        They are logged as hyperparameters, of which some services, such as MLflow, refuse another value later.
        """
        self.evidence.update(evidence)
        logged = self.__dict__.setdefault("_logged", set())
        logger.log_hyperparameters({f"{self.key()}/{k}": v for k, v in evidence.items() if k not in logged})
        logged.update(evidence)


def warn(warning: Warning) -> None:
    """Warn at the line of whoever made the Trainer, or called it: there something can be changed, and here nothing."""
    frame, level = inspect.currentframe(), 1
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _OF_THE_LOOP:
        frame, level = frame.f_back, level + 1
    warnings.warn(warning, stacklevel=level - 1 if frame is None else level)


class _AtClose(Callback):
    def __init__(self, undo: Callable[[], None]) -> None:
        self._undo = undo

    def close(self, state: State, logger: Logger) -> None:
        self._undo()


def algorithm_passes(algorithms: Sequence[Algorithm], event: Event) -> Sequence[Algorithm]:
    """Order speed-ups by stage whatever order the user listed; leave all other algorithms where they are.

    It has the form of a Composer algorithm pass, but needs not be passed on: at `Event.INIT` speed-ups put the
    Trainer's list into this order themselves.
    """
    ordered = iter(sorted((a for a in algorithms if isinstance(a, SpeedUp)), key=lambda a: a.stage))
    return [next(ordered) if isinstance(a, SpeedUp) else a for a in algorithms]


def check_combination(algorithms: Sequence[Algorithm]) -> None:
    """Raise `ConflictError` if a speed-up is listed twice, two fill the same slot, or one contradicts another."""
    speedups = [algorithm for algorithm in algorithms if isinstance(algorithm, SpeedUp)]
    clash = conflict(speedups)
    if clash is None:
        if (contradiction := contradicted(speedups)) is not None:
            raise ConflictError(contradiction[1])
        return
    one, other, place = clash
    if one.key() == other.key():
        raise ConflictError(f"{one.key()} is listed twice: {one!r} and {other!r}. Keep one.")
    raise ConflictError(f"{one.key()} and {other.key()} contradict each other: both set the {place}. Keep one of them.")


def contradicted(speedups: Sequence[SpeedUp]) -> tuple[SpeedUp, str] | None:
    """The first that another one contradicts, and why; None if there is none."""
    pairs = ((one, other) for one in speedups for other in speedups if one is not other)
    return next(((other, reason) for one, other in pairs if (reason := one.contradicts(other)) is not None), None)


def conflict(speedups: Sequence[SpeedUp]) -> tuple[SpeedUp, SpeedUp, str] | None:
    """The first two that cannot be used together, and what both would set; None if there are no such two."""
    taken: dict[str, SpeedUp] = {}
    for speedup in speedups:
        for place in sorted({speedup.key(), speedup.slot or speedup.key()}):
            other = taken.setdefault(place, speedup)
            if other is not speedup:
                return other, speedup, place
    return None


def _install_all(first: SpeedUp, state: State, logger: Logger) -> None:
    """Install every speed-up of this Trainer, in order, when the first of them hears `Event.INIT`.

    And when all other algorithms have had it. Composer runs algorithms in the order listed. Doing all the work here
    makes the order right without asking the user for `algorithm_passes`, and refuses what is listed twice, fills one
    slot twice or cannot be used here before anything was changed.
    """
    listed = list(state.algorithms)
    if not any(a is first for a in listed):
        listed.append(first)
    check_combination(listed)
    state.algorithms = algorithm_passes(state.algorithms, Event.INIT)  # for the events to come
    speedups = [a for a in algorithm_passes(listed, Event.INIT) if isinstance(a, SpeedUp)]
    waiting = [s for s in speedups if s._installed_in is None or s._installed_in() is not state]
    for speedup in waiting:
        reason = speedup.unavailable(state.device._device)
        if reason is not None:
            raise SpeedUpUnavailable(f"{speedup!r} cannot be used here: {reason}")
        if speedup.no_fsdp and state.fsdp_config is not None:
            raise SpeedUpUnavailable(f"{speedup!r} cannot be used under FSDP: {speedup.no_fsdp}")
        if (slow := speedup.too_slow(state.device._device)) is not None:
            log.warning("%r makes training slower here: %s", speedup, slow)
    loading = _loads_without(waiting)
    if waiting and loading is not None:
        loading.hold_for(state)
    for place, speedup in enumerate(waiting):
        speedup.evidence.clear()
        speedup.__dict__.pop("_logged", None)
        speedup._hold, speedup._loading = None, loading
        speedup._installed_in = weakref.ref(state)
        try:
            speedup.install(state, logger)
        except Exception as error:
            if changed := [s.key() for s in waiting[:place] if s.evidence.get("changed")]:
                error.add_note(
                    f"Changed before that, and still so: what {', '.join(changed)} changes. For another Trainer make "
                    f"model, optimizer and dataloader anew."
                )
            raise


def _loads_without(speedups: Sequence[SpeedUp]) -> IgnoredWarning | None:
    """Until the checkpoint is loaded: no warning that `speedups`, which it was saved without, will not be restored.

    A speed-up has no state: that such a checkpoint loads is a promise, not a loss. Composer warns of optimizers by the
    same words elsewhere. That is a loss, and an optimizer's class may have a speed-up's name, as Adafactor and
    AdamW8bit do.
    """
    names = "|".join(re.escape(type(speedup).__qualname__) for speedup in speedups)
    line = _line_that_warns_of_algorithms()
    if line is None:
        return None
    return IgnoredWarning(f"({names}) is not in the state_dict", re.escape(State.__module__), line)


@cache
def _line_that_warns_of_algorithms() -> int | None:
    """Of the module of `State`; None where its code says it otherwise, or is not there to be read."""
    try:
        lines, first = inspect.getsourcelines(State.load_state_dict)
    except OSError:
        return None
    calls = (node for node in ast.walk(ast.parse(textwrap.dedent("".join(lines)))) if isinstance(node, ast.Call))
    found = [first + call.lineno - 1 for call in calls if "is not in the state_dict" in ast.unparse(call)]
    return found[0] if found else None
