"""`verify --ranks N`: a recipe's numbers, as N processes of this machine compute them together."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from composer_speedups import hardware
from composer_speedups.errors import OutOfMemory, SpeedUpUnavailable, UserError
from composer_speedups.isolation.isolate import Isolation, Outcome
from composer_speedups.isolation.look import look
from composer_speedups.isolation.ranks import share_cores
from composer_speedups.verification.findings import Verification, with_fewer

if TYPE_CHECKING:
    from composer_speedups.recipes import Recipe

__all__ = ["as_rank", "survey", "verify_in_ranks"]

_PRELOAD = ("transformers.models.bert.modeling_bert", "composer_speedups.verification.recipe")
# How a reason begins that is no user's mistake: with the error's class.
_PROGRAMS = re.compile(r"(rank \d+: )?[A-Z]\w*(Error|Exception|Exit): ")
_ERRORS = {"skipped": SpeedUpUnavailable, "out_of_memory": OutOfMemory}


def verify_in_ranks(
    recipe: Recipe, ranks: int, *, samples: int, seed: int | None, say: Callable[[str], None]
) -> tuple[Verification, str]:
    """What `verify_recipe` finds of `recipe` on `ranks` processes, which this one starts; and the machine in words.

    Args:
        recipe: a resolved recipe.
        ranks: one for each GPU, or for some of the cores.
        samples: texts in the batch, of all ranks together.
        seed: of weights and masks; None takes the recipe's.
        say: is told what is being done.

    Raises:
        UserError: the recipe asks for what this machine or its data cannot give, or a rank failed.
        OutOfMemory: with fewer texts to try.
    """
    payload = {"recipe": recipe, "ranks": ranks, "samples": samples, "seed": seed}
    with Isolation(f"{__name__}:as_rank", _PRELOAD) as isolation:
        # Before there are too many processes.
        facts = look(isolation, payload, f"{__name__}:survey", 600)["environment"]
        outcome = isolation.run(payload, report=say, ranks=ranks)
    return Verification.read(_value(outcome, with_fewer(samples, ranks))), hardware.summary(facts)


def survey(payload: dict[str, Any], report: Callable[[Any], None]) -> dict[str, Any]:
    """The machine alone: what is wrong with the recipe, each rank finds."""
    return {"environment": hardware.environment(), "error": ""}


def as_rank(payload: dict[str, Any], report: Callable[[Any], None]) -> dict[str, Any]:
    """What one of the processes does, and finds as all do."""
    from composer_speedups.recipes import check_speedups
    from composer_speedups.verification.recipe import verify_recipe

    check_speedups(payload["recipe"])
    share_cores()
    return asdict(verify_recipe(payload["recipe"], samples=payload["samples"], seed=payload["seed"], say=report))


def _value(outcome: Outcome, remedy: str) -> Any:
    if outcome.status == "ok":
        return outcome.value
    if _PROGRAMS.match(outcome.reason):
        print(outcome.log, file=sys.stderr)
    reason = f"{outcome.reason}; {remedy}" if outcome.killed else outcome.reason
    raise _ERRORS.get(outcome.status, UserError)(reason)
