"""What runs inside the fresh processes of a search: a look at the machine first, then the tries."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from composer_speedups import hardware
from composer_speedups.ablation import jobs
from composer_speedups.errors import OutOfMemory, UserError

__all__ = ["survey", "trial"]

_PREDICTED = (8, 32)  # two sizes give the line on which memory grows


def survey(payload: dict[str, Any], report: Callable[[Any], None]) -> dict[str, Any]:
    """What the search must know: the machine, the number of samples, and the memory to expect.

    Makes the task's data, too, so that no try has to.

    Args:
        payload: `recipe`, and `peaks`: the precision whose attainable speed is to be measured, by the recipe's name.
        report: told of progress.

    Returns:
        As the survey of a study, and `samples`: in the training set; `memory`: predicted peak by batch size (empty
        where it cannot be predicted).
    """
    from composer_speedups.memory import predict
    from composer_speedups.tasks import build_task

    recipe = payload["recipe"]
    answer = jobs.survey({"recipes": [recipe], "peaks": payload["peaks"]}, report) | {"samples": 0, "memory": {}}
    if answer["error"] or answer["skip"]:
        return answer
    try:
        say = lambda text: report({"phase": "data", "message": text})  # noqa: E731
        task = build_task(recipe.task, recipe.model, seed=recipe.seed, progress=say)
    except UserError as error:
        return answer | {"error": str(error)}
    answer["samples"] = len(task.train)
    typical = round(task.lengths.mean)
    try:
        for size in _PREDICTED:
            known = predict(recipe, length=task.max_length, lengths=[typical] * size, task=task)
            answer["memory"][str(size)] = known.peak
    except Exception as error:  # a model of the user's own may not run on fake tensors; then the search just begins low
        print(f"memory cannot be predicted: {error}")
        answer["memory"] = {}
    return answer


def trial(payload: dict[str, Any], report: Callable[[Any], None]) -> dict[str, Any]:
    """Train as a study's run does; on a CPU, end as soon as more memory is taken than `payload["memory_limit"]`.

    A GPU refuses by itself what does not fit; a machine without one would begin to swap, or kill what else runs on it.
    """
    limit = payload["memory_limit"] if hardware.hardware() == "cpu" else None

    def watch(event: Any) -> None:
        size = _resident() if limit is not None else 0
        if limit is not None and size > limit:
            raise OutOfMemory(f"{size / 1e9:.2f} GB of memory in use, over the limit of {limit / 1e9:.2f} GB")
        report(event)

    return jobs.train(payload, watch)


def _resident() -> int:
    """Bytes of memory that this process holds."""
    try:
        with open("/proc/self/status") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmRSS:"))
    except (OSError, StopIteration):
        return 0
