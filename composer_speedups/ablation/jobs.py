"""What runs inside the fresh processes of a study: a look at the machine first, then the trainings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from composer_speedups import hardware
from composer_speedups.errors import ConflictError, TaskError, UserError, first_line
from composer_speedups.isolation.ranks import look_for, share_cores
from composer_speedups.measurement.results import INSIDE, Progress
from composer_speedups.recipes import Recipe, check_speedups
from composer_speedups.tasks.inputs import changed
from composer_speedups.verification.findings import samples_for

__all__ = ["PRELOAD", "look_inside", "survey", "train", "verify"]

# Imported once and shared by all runs. None of them may start a thread or touch CUDA.
PRELOAD = (
    "torch",
    "transformers",
    "transformers.models.bert.modeling_bert",
    "composer",
    "composer_speedups.training.run",
    "composer_speedups.measurement.inspection",
    "composer_speedups.ablation.jobs",
)

_STEPS_BEFORE = 3  # of a training, before some of its steps are looked at


def survey(payload: dict[str, Any], report: Callable[[Any], None]) -> dict[str, Any]:
    """Look before anything runs: the environment, the attainable speed, and which recipes cannot run here.

    Args:
        payload: `recipes`: the recipes; `peaks`: by recipe, the precision whose attainable speed is to be measured;
            `planned`: the recipes were put together by a plan: two speed-ups that contradict each other are a row
            to skip, not the user's mistake; `ranks`: processes of each run.
        report: not used.

    Returns:
        `environment`, `skip` (recipe's name -> why it cannot run here, or should not), `peaks` (precision -> FLOP/s),
        `unmeasured` (precision -> why it has no peak) and `error`: what is wrong with a recipe, or an empty string.
    """
    import torch

    ranks = payload.get("ranks", 1)
    look_for(ranks)
    device = torch.device(hardware.hardware())
    answer: dict[str, Any] = {
        "environment": hardware.environment() | {"ranks": ranks},
        "skip": {},
        "peaks": {},
        "unmeasured": {},
        "error": "",
    }
    for recipe in payload["recipes"]:
        try:
            speedups = check_speedups(recipe)
        except ConflictError as error:
            if not payload.get("planned"):
                return answer | {"error": str(error)}
            answer["skip"][recipe.name] = str(error)
            continue
        except UserError as error:
            return answer | {"error": str(error)}
        if why := recipe.unshared_by(ranks):
            answer["skip"][recipe.name] = why
            continue
        reasons = {s.key(): why for s in speedups if (why := s.unavailable(device) or s.too_slow(device))}
        if reasons:
            # Inherited speed-ups stand first: the last one is the row's own, and its reason the telling one.
            *others, (key, why) = reasons.items()
            also = f" (nor can {', '.join(other for other, _ in others)} be used here)" if others else ""
            answer["skip"][recipe.name] = f"{key}: {why}{also}"
    for precision in sorted({p for name, p in payload["peaks"].items() if name not in answer["skip"]}):
        try:
            answer["peaks"][precision] = hardware.matmul_peak(device.type, precision)
        except RuntimeError as error:  # no such matmul on this device, or no memory for it
            answer["unmeasured"][precision] = first_line(error)
    return answer


def train(payload: dict[str, Any], report: Callable[[Any], None]) -> dict[str, Any]:
    """Train `payload["recipe"]` with `payload["seed"]`; return `RunResult` as plain data.

    `payload["inspect"]`: also look where the time of a step and the memory go, when all is measured.
    `payload["inputs"]`: marks of what the run reads, which must be there still.
    """
    from composer_speedups.training.run import run

    share_cores()
    return run(
        _recipe(payload),
        seed=payload["seed"],
        report=lambda progress: report(asdict(progress)),
        inspect=bool(payload.get("inspect")),
    ).as_dict()


def verify(payload: dict[str, Any], report: Callable[[Any], None]) -> dict[str, Any]:
    """What `verify` finds of `payload["recipe"]` with `payload["seed"]`, as `RunResult` has it.

    `payload["train_samples"]`: that there are. `payload["inputs"]`: as `train` has them.
    """
    from composer.utils import dist

    from composer_speedups.verification.recipe import verify_recipe

    share_cores()
    say = lambda line: report(asdict(Progress("verify", message=line)))  # noqa: E731
    ranks = dist.get_world_size()
    usual = samples_for(ranks)
    samples = min(usual, (payload["train_samples"] or usual) // ranks * ranks)
    return {"numerics": verify_recipe(_recipe(payload), samples=samples, seed=payload["seed"], say=say).summary()}


def look_inside(payload: dict[str, Any], report: Callable[[Any], None]) -> dict[str, Any]:
    """Where the time of a step of `payload["recipe"]` and the memory go, as `RunResult` has it: of a training of some
    steps, for nothing else. `payload`: as `train` has it.
    """
    recipe = _recipe(payload).short(_STEPS_BEFORE).to_dict()
    result = train(payload | {"recipe": recipe, "inspect": True}, report)
    if not result["memory"]:
        raise TaskError(result["reason"] or "a training of some steps did not come to its end")
    return {name: result[name] for name in INSIDE}


def _recipe(payload: dict[str, Any]) -> Recipe:
    if path := changed(payload.get("inputs") or {}):
        raise TaskError(f"{path} has changed since the study began: put back what it held, or choose another --out")
    return Recipe.model_validate(payload["recipe"])
