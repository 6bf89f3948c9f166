"""What `verify` finds, in plain numbers: whoever only shows it need not wait for torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

__all__ = [
    "NOT_VERIFIED",
    "SAMPLES",
    "Comparison",
    "Errors",
    "Evaluated",
    "Updates",
    "Verification",
    "samples_for",
    "with_fewer",
]

NOT_VERIFIED = "its numbers cannot be verified"  # how a study's warning of that begins
SAMPLES = 8  # of the batch, where nobody says otherwise


def with_fewer(samples: int, ranks: int) -> str:
    """What to try where so many texts have run out of memory."""
    fewer = samples // ranks // 2 * ranks
    return f"try --samples {fewer}" if fewer else "try a shorter task.max_length"


def samples_for(ranks: int) -> int:
    """The same of several ranks, each of which has as many, and not one alone.

    >>> samples_for(1), samples_for(3), samples_for(8)
    (8, 9, 16)
    """
    return max(2, -(-SAMPLES // ranks)) * ranks


@dataclass(frozen=True)
class Errors:
    """How far loss and gradients are from the true ones.

    Attributes:
        loss: relative.
        gradients: relative: the norm of the difference of all gradients over the norm of the true ones.
        tensors: by parameter, the norm of the difference.
        norms: by parameter, the norm of the true gradient.
    """

    loss: float
    gradients: float
    tensors: dict[str, float]
    norms: dict[str, float]


@dataclass(frozen=True)
class Comparison:
    """One step's loss and gradients, with and without speed-ups, against float64.

    Attributes:
        precision: `bf16`, `fp16` or `float32`, in which both were computed; and what ranks exchanged gradients in.
        step: counted from 1.
        plain: errors of the plain model.
        errors: those of the model with its speed-ups.
        worst: what is furthest off for what is allowed: a parameter's gradient, `all gradients`, or the `loss`.
        share: its error, of what is allowed: above 1 it is too large.
    """

    precision: str
    step: int
    plain: Errors
    errors: Errors
    worst: str
    share: float


@dataclass(frozen=True)
class Evaluated:
    """What the model gives when it is evaluated after its last step, against float64.

    Attributes:
        precision: `bf16`, `fp16` or `float32`, in which both were computed.
        plain: the plain model's relative error, of all outputs at real tokens together.
        error: that of the model with its speed-ups; NaN where its outputs have other shapes.
        share: of what is allowed: above 1 it is too large.
    """

    precision: str
    plain: float
    error: float
    share: float


@dataclass(frozen=True)
class Updates:
    """What the optimizer made of its gradients.

    Attributes:
        optimizer: its class.
        error: of all steps' updates together, relative to AdamW's in float64 from the same gradients.
        allowed: what rounding each weight to float32 at each step explains, or a half where the state has 8 bits, which
            rounds much more; None where the updates are so small that rounding is all of them.
    """

    optimizer: str
    error: float
    allowed: float | None


@dataclass(frozen=True)
class Verification:
    """What `verify` found.

    Attributes:
        comparisons: by precision and step.
        updates: the optimizer's; None where it is no AdamW, as Adafactor.
        tokens: real ones of the batch; None where it has no attention mask.
        padding: share of the batch.
        changed: by speed-up, what it says it changed.
        notes: what had no effect, or could not be compared, and why.
        wrong: what is not as it should be, a line each; empty if all is well.
        evaluated: by precision, what the model gives in evaluation; empty where it could not be evaluated.
    """

    comparisons: list[Comparison]
    updates: Updates | None
    tokens: int | None
    padding: float
    changed: dict[str, dict[str, Any]]
    notes: list[str]
    wrong: list[str]
    evaluated: list[Evaluated] = field(default_factory=list)

    @classmethod
    def read(cls, told: dict[str, Any]) -> Verification:
        """From what `asdict` has made of one."""
        comparisons = [
            Comparison(**{**one, "plain": Errors(**one["plain"]), "errors": Errors(**one["errors"])})
            for one in told["comparisons"]
        ]
        updates = told["updates"] and Updates(**told["updates"])
        evaluated = [Evaluated(**one) for one in told["evaluated"]]
        return cls(**{**told, "comparisons": comparisons, "updates": updates, "evaluated": evaluated})

    @property
    def holds(self) -> bool:
        return not self.wrong

    def summary(self) -> dict[str, Any]:
        """For a table: whether it `holds`, what is `wrong`, and of the first step the relative errors of `gradients`
        and of the `plain` model's, in `precision`."""
        first = self.comparisons[0]
        return {
            "holds": self.holds,
            "wrong": self.wrong,
            "precision": first.precision,
            "gradients": first.errors.gradients,
            "plain": first.plain.gradients,
        }
