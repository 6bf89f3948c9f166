"""At `Event.INIT` after all other algorithms, wherever they are listed.

Composer runs algorithms in the order listed, and some of its own at the end. Its surgery (gated linear units, factored
layers, low-precision norms) replaces modules and parameters: what a speed-up had changed of them would be gone without
a word, and an optimizer whose groups had been split by then is refused. After `Event.INIT` it is too late: schedulers,
gradient scaler and DDP are built around what is there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from composer.core import Algorithm, Event, State

__all__ = ["AfterOthers"]


class AfterOthers:
    """Calls `work` when all `others` of a Trainer, which hear `Event.INIT`, too, have done what they do then."""

    def __init__(self, state: State, others: list[Algorithm]) -> None:
        self._pending = {id(other) for other in others}
        self._work: Callable[[], None] | None = None
        vars(state)[__name__] = self  # not in a table of ours: what waits holds the state
        for other in others:
            self._follow(other)

    @staticmethod
    def of(state: State) -> AfterOthers | None:
        return vars(state).get(__name__)

    def do(self, work: Callable[[], None]) -> None:
        """Now, if nothing is waited for; else later, and the first `work` only."""
        if not self._pending:
            work()
        elif self._work is None:
            self._work = work

    def give_up(self) -> None:
        """Do now what still waits: an algorithm was not run after all, as somebody's pass may have taken it out."""
        self._pending.clear()
        self._go()

    def _follow(self, other: Algorithm) -> None:
        own, run = vars(other).get("apply"), other.apply

        def apply(event: Event, state: State, *args: Any, **kwargs: Any) -> int | None:
            if event is Event.INIT:
                vars(other).pop("apply", None)
                if own is not None:
                    other.apply = own  # type: ignore[method-assign]
            code = run(event, state, *args, **kwargs)
            if event is Event.INIT and self.of(state) is self:
                self._pending.discard(id(other))
                if not self._pending:
                    self._go()
            return code

        other.apply = apply  # type: ignore[method-assign]

    def _go(self) -> None:
        work, self._work = self._work, None
        if work is not None:
            work()
