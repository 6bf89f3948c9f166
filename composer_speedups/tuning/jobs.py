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
        payload: `recipe`; `peaks`: the precision whose attainable speed is to be measured, by the recipe's name;
            `ranks`: processes of each try.
        report: told of progress.

    Returns:
        As the survey of a study, and `samples`: in the training set; `memory`: predicted peak by batch size (empty
        where it cannot be predicted).
    """
    from composer_speedups.measurement.memory import predict
    from composer_speedups.tasks import build_task

    recipe = payload["recipe"]
    answer = jobs.survey(payload | {"recipes": [recipe]}, report) | {"samples": 0, "memory": {}}
    if answer["error"] or answer["skip"]:
        return answer
    try:
        say = lambda text: report({"phase": "data", "message": text})  # noqa: E731
        task = build_task(recipe.task, recipe.model, seed=recipe.seed, progress=say)
    except UserError as error:
        return answer | {"error": str(error)}
    answer["samples"] = len(task.train)
    typical, ranks = round(task.lengths.mean), payload.get("ranks", 1)
    try:
        for size in _PREDICTED:
            known = predict(recipe, length=task.max_length, lengths=[typical] * size, task=task, ranks=ranks)
            answer["memory"][str(size)] = known.peak
    except Exception as error:  # a model of the user's own may not run on fake tensors; then the search just begins low
        print(f"memory cannot be predicted: {error}")
        answer["memory"] = {}
    return answer


def trial(payload: dict[str, Any], report: Callable[[Any], None]) -> dict[str, Any]:
    """Train as a study's run does, within the memory that the search allows.

    A GPU refuses by itself what does not fit: the whole of it, or what is over `payload["device_limit"]`, where that is
    not None. A machine without one would begin to swap, or kill what else runs on it: there a try ends after the first
    step that is known to have taken more than `payload["memory_limit"]`. That step itself is not cut short.
    """
    cuda = hardware.hardware() == "cuda"
    if cuda and payload["device_limit"] is not None:
        import torch
        from composer.utils import dist

        own = dist.get_local_rank()  # the GPU that will be its
        total = torch.cuda.get_device_properties(own).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, payload["device_limit"] / total), own)
    limit = None if cuda else payload["memory_limit"]

    def watch(event: Any) -> None:
        if limit is not None:
            # Reports come between steps, when the activations are freed again: what a step took, its peak tells. The
            # peak is counted anew when the training begins; before that, it may be that of the preparations.
            size = hardware.resident_memory(peak=event.get("phase") == "train")
            if size is not None and size > limit:
                raise OutOfMemory(f"{size / 1e9:.2f} GB of memory taken, over the limit of {limit / 1e9:.2f} GB")
        report(event)

    return jobs.train(payload, watch)
