"""What a search is asked for: its goal, its budget, and its limits."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from composer_speedups.errors import UserError

__all__ = ["GOALS", "SAMPLES", "Settings"]

GOALS = ("largest", "fastest")
SAMPLES = 16_000  # in short runs


@dataclass(frozen=True)
class Settings:
    """What is searched, and with how much effort.

    Attributes:
        batch: search the batch.
        rate: search the learning rate; without it, the scaling rule gives it.
        constant: keep the effective batch, and search the microbatch instead (gradient accumulation).
        samples: that may be trained in all, to find the fastest batch and the learning rate; None is `SAMPLES` in short
            runs, and whole trainings besides, where a training is longer than those.
        trials: learning rates in short runs, at most.
        memory_limit: bytes, of each rank; None is most of what the machine has.
        goal: `largest` batch that fits or `fastest`; None is the largest on a GPU, the fastest without.
        timeout: seconds that one try may take.
        ranks: processes that train a try together (DDP): batches are of all of them, microbatches of one.
    """

    batch: bool = True
    rate: bool = True
    constant: bool = False
    samples: int | None = None
    trials: int = 8
    memory_limit: int | None = None
    goal: str | None = None
    timeout: float = 1800.0
    ranks: int = 1

    @property
    def short(self) -> int:
        """Samples of short runs, where whole trainings come on top; else of all."""
        return self.samples or SAMPLES

    def asked(self) -> dict[str, Any]:
        """What is searched, by name: what says nothing of that is left out, and one rank, as no settings had any once.

        A longer limit of time asks for nothing else.
        """
        return {k: v for k, v in asdict(self).items() if k != "timeout" and (k, v) != ("ranks", 1)}

    def __post_init__(self) -> None:
        if not self.batch and not self.rate:
            raise UserError("nothing to tune: use --batch, --lr, or both")
        minutes = self.timeout / 60  # as the command takes it
        for name, value in (("--samples", self.samples), ("--trials", self.trials), ("--timeout", minutes)):
            if value is not None and not value > 0:
                raise UserError(f"{name} must be positive, got {value:g}")
        if self.memory_limit is not None and self.memory_limit <= 0:
            raise UserError(f"--memory-limit must be positive, got {self.memory_limit}. Write e.g. --memory-limit 8GB")
        if self.goal is not None and self.goal not in GOALS:
            raise UserError(f"--goal must be largest or fastest, got {self.goal!r}")
