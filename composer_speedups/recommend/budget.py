"""How much of what is to be measured fits into the time: learnt from a few steps, and better from each run."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from composer_speedups.errors import UserError
from composer_speedups.isolation.isolate import Isolation
from composer_speedups.measurement.results import SHORT_RUN
from composer_speedups.recipes.schema import count_and_unit

if TYPE_CHECKING:
    from composer_speedups.recipes import Recipe

__all__ = ["LEAST", "Budget"]

LEAST, _MOST = SHORT_RUN
_CALIBRATION = 4  # steps
_BATCHES = (32, 16, 8)


class Budget:
    """The time until `end`, of `time.monotonic`, and what a run of `ranks` processes takes of it.

    Attributes:
        overhead: seconds of a run beside its steps; 0 before any has been measured.
        step: seconds of a step of the plain recipe; 0 before any has been measured.
    """

    def __init__(self, end: float, ranks: int = 1) -> None:
        self.end, self.ranks = end, ranks
        self.overhead = self.step = 0.0

    def left(self) -> float:
        """Seconds."""
        return self.end - time.monotonic()

    def affordable(self) -> float:
        """How many of the shortest runs fit into what is left."""
        return self.left() / (self.overhead + LEAST * self.step) if self.step else 0.0

    def seconds(self, recipe: Recipe) -> float | None:
        """Of one run of `recipe`, whose duration is in batches; None before anything has been measured."""
        return self.overhead + count_and_unit(recipe.duration)[0] * self.step if self.step else None

    def steps(self, seconds: float) -> int:
        """Of a run of the plain recipe that takes so long."""
        return max(LEAST, min(_MOST, int((seconds - self.overhead) / max(self.step, 1e-6))))

    def learn(self, result: dict[str, Any], seconds: float) -> None:
        """From a run of the plain recipe: its result, and how long it took in all."""
        steps = [s for s in result.get("step_seconds") or [] if s]
        if steps:
            self.step = min(steps)
            self.overhead = max(0.5, seconds - sum(steps))

    def calibrate(
        self, isolation: Isolation, base: Recipe, samples: int, own_batch: bool, say: Callable[..., None]
    ) -> int:
        """Train `base`, the plain recipe, for a few steps; return the batch size with which enough runs fit.

        Args:
            isolation: what runs it.
            base: with a batch that is kept if it is the user's.
            samples: of the data.
            own_batch: whether it is.
            say: is told what is done, and what was found.

        Raises:
            UserError: it does not run, or not in the time that is left.
        """
        shared = [b // self.ranks * self.ranks for b in _BATCHES if b >= self.ranks]
        sizes = [b for b in shared if (base.microbatch_size or 1) <= b <= max(samples, _BATCHES[-1])]
        if own_batch or not sizes:
            sizes = [base.batch_size]
        size = sizes[-1]
        recipe = base.model_copy(update={"batch_size": size}).short(_CALIBRATION)
        say(f"Calibrating: {_CALIBRATION} steps of the plain recipe, batch {size} ...", style="dim")
        payload = {"recipe": recipe.to_dict(), "seed": recipe.seed, "inspect": False}
        outcome = isolation.run(payload, timeout=max(10.0, self.left()), ranks=self.ranks)
        value, (status, reason) = outcome.facts, outcome.verdict
        if status == "timeout":
            raise UserError(
                f"{_CALIBRATION} steps of batch {size} take longer than the whole time. Give more --minutes"
            )
        if status != "ok":
            raise UserError(f"the plain recipe does not run: {reason}")
        steps = [seconds for seconds in value.get("step_seconds") or [] if seconds] or [outcome.seconds / _CALIBRATION]
        # The fastest: whatever else the machine was doing meanwhile is no part of the step.
        per_sample = min(steps) / size
        self.overhead = max(0.5, outcome.seconds - sum(steps))
        # The largest batch with which a dozen runs fit; where none does, the smallest.
        left = max(0.0, self.left())
        fitting = [b for b in sizes if 12 * (self.overhead + LEAST * per_sample * b) <= left]
        batch = fitting[0] if fitting else sizes[-1]
        self.step = per_sample * batch
        note = "" if batch == sizes[0] else f", as a step of {sizes[0]} would take {per_sample * sizes[0]:.1f} s"
        say(
            f"A step of batch {batch} takes {self.step:.2f} s, a run's start {self.overhead:.1f} s{note}",
            highlight=False,
        )
        return batch
