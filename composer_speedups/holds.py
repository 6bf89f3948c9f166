"""`Hold`: a setting of the whole process that is in force for a while, and is then as it was before.

Trainers overlap: two are built, then both are fitted, then both are closed; one fails before it can say goodbye. So a
hold may end in any order with others, ends once however often it is told to, and ends by itself with the Trainer's
state.
"""

from __future__ import annotations

import re
import warnings
import weakref
from abc import ABC, abstractmethod
from collections.abc import Hashable
from typing import Any, ClassVar

from composer.core import Event, State

__all__ = ["WORK", "Hold", "IgnoredWarning"]

_STARTS = frozenset({Event.FIT_START, Event.EVAL_STANDALONE_START, Event.PREDICT_START})
_ENDS = frozenset({Event.FIT_END, Event.EVAL_STANDALONE_END, Event.PREDICT_END})
WORK = _STARTS | _ENDS  # the events that `Hold.follow` looks at


class Hold(ABC):
    """A setting that is in force until `restore`; several may overlap and end in any order.

    A subclass says how the setting is read, made and written back.

    Attributes:
        about: which setting it is, where holds of one class are about several.
    """

    _in_force: ClassVar[list[Any]]  # of the process, as the setting is; the last one decides
    about: Hashable = None
    _fits = False

    def __init_subclass__(cls) -> None:
        cls._in_force = []

    @abstractmethod
    def read(self) -> Any:
        """What is in force now, as `write` takes it."""

    @abstractmethod
    def make(self) -> None:
        """Put in force what this hold is for."""

    @abstractmethod
    def write(self, before: Any) -> None:
        """Put in force what `read` found."""

    def hold(self) -> None:
        """Put the setting in force, or in force again; what was there before is kept from the first time."""
        if self not in self._in_force:
            self._before = self.read()
            self._in_force.append(self)
        self.make()

    def restore(self) -> None:
        """Undo it. A hold that began later stays in force, and will put back what this one found."""
        if self not in self._in_force:
            return
        later = [h for h in self._in_force[self._in_force.index(self) + 1 :] if h.about == self.about]
        self._in_force.remove(self)
        if later:
            later[0]._before = self._before
            later[-1].hold()
        else:
            self.write(self._before)

    def hold_for(self, state: State) -> None:
        """Hold; restore when `state` is gone at the latest: its Trainer was dropped unclosed, or could not be made."""
        self.hold()
        weakref.finalize(state, self.restore).atexit = False

    def follow(self, event: Event) -> None:
        """Hold while a Trainer works: from each of `_STARTS` to its end. A callback may evaluate within a fit."""
        if event in (Event.FIT_START, Event.FIT_END):
            self._fits = event is Event.FIT_START
        if event in _STARTS:
            self.hold()
        elif event in _ENDS and not self._fits:
            self.restore()

    def __enter__(self) -> Hold:
        self.hold()
        return self

    def __exit__(self, *exception: object) -> None:
        self.restore()


class IgnoredWarning(Hold):
    """A `UserWarning` that is not shown.

    Args:
        message: what it begins with, a regular expression.
        module: whose code warns, a regular expression; any by default.
        line: of that module, at which it warns; 0 for any.
    """

    def __init__(self, message: str, module: str = "", line: int = 0) -> None:
        self.about = (message, module, line)

    def read(self) -> bool:
        return self._filter() in warnings.filters

    def make(self) -> None:
        message, module, line = self.about
        warnings.filterwarnings("ignore", message, UserWarning, module, line)

    def write(self, before: bool) -> None:
        # Somebody's `catch_warnings` may have put all filters back before.
        if not before and self._filter() in warnings.filters:
            warnings.filters.remove(self._filter())

    def _filter(self) -> tuple[Any, ...]:
        """As `filterwarnings` keeps it."""
        message, module, line = self.about
        where = re.compile(module) if module else None
        return ("ignore", re.compile(message, re.IGNORECASE), UserWarning, where, line)
