"""What runs in a fresh process before the study of a recommendation: which speed-ups there are, and which work here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from composer_speedups import doctor, hardware, registry
from composer_speedups.errors import UserError
from composer_speedups.isolation.ranks import look_for
from composer_speedups.tasks import build_task

__all__ = ["candidates"]

_FOR_MEMORY = "not tried: for memory and larger batches, and the batch stays as it is here"


def candidates(payload: dict[str, Any], report: Callable[[Any], None]) -> dict[str, Any]:
    """Every registered speed-up with each of its choices, and the data made, so that no run has to.

    Args:
        payload: `recipe`, the plain one; `ranks`: processes of each run.
        report: told of progress.

    Returns:
        `candidates`: those that work on this device, in the order in which to try them: `name`, `key`, `arguments`,
        `slot`, `stage`, `redundant_with`; `unavailable` and `left_out`: name -> why; `first`: what the doctor would
        switch on; `samples`: in the training set; `environment`: what `hardware.environment` says; `error`: what is
        wrong with the task or the model, or an empty string.
    """
    recipe, ranks = payload["recipe"], payload["ranks"]
    look_for(ranks)
    device = torch.device(hardware.hardware())
    found: list[dict[str, Any]] = []
    unavailable: dict[str, str] = {}
    left_out: dict[str, str] = {}
    for key, arguments, reason in doctor.choices(device):
        name = ".".join([key, *map(str, arguments.values())])
        if reason is not None:
            unavailable[name] = reason
            continue
        cls = registry.speedup_class(key)
        if cls.for_memory:
            left_out[name] = _FOR_MEMORY
            continue
        one = {"name": name, "key": key, "arguments": arguments, "slot": cls.slot or key, "stage": cls.stage.name}
        found.append(one | {"redundant_with": cls.redundant_with})
    try:
        first = doctor.examine(recipe.model.name).first
    except UserError:  # building the task will say what is wrong with the model
        first = doctor.examine().first
    # What promises most comes first, as the time may not be enough for all; compiling takes longest, so it is last.
    order = {name: n for n, name in enumerate(first)}
    stages = ("PRECISION", "ATTENTION", "DATA")
    found.sort(
        key=lambda c: (
            c["stage"] == "COMPILE",
            order.get(c["key"], len(order)),
            stages.index(c["stage"]) if c["stage"] in stages else len(stages),
        )
    )
    answer: dict[str, Any] = {"candidates": found, "unavailable": unavailable, "left_out": left_out, "first": first}
    answer |= {"samples": 0, "error": ""}
    answer["environment"] = hardware.environment() | {"ranks": ranks}
    try:
        say = lambda text: report({"phase": "data", "message": text})  # noqa: E731
        answer["samples"] = len(build_task(recipe.task, recipe.model, seed=recipe.seed, progress=say).train)
    except UserError as error:
        answer["error"] = str(error)
    return answer
