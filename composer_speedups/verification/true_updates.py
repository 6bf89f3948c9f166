"""What an optimizer made of its gradients, against AdamW in float64 from the same ones."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence

import torch
from composer.core import Algorithm
from composer.models import ComposerModel
from torch.optim import Optimizer

from composer_speedups.optim.optimizers import split_off_no_decay, torch_adamw
from composer_speedups.speedup import SpeedUp
from composer_speedups.verification.findings import Updates
from composer_speedups.verification.trained_steps import Watch, part_of

__all__ = ["another_optimizer", "compare_updates"]

_IN_8_BITS = 0.5


def compare_updates(
    plain: ComposerModel,
    optimizer: Callable[[torch.nn.Module], Optimizer],
    algorithms: Sequence[Algorithm],
    watch: Watch,
) -> Updates | None:
    """AdamW in float64 from the same weights and gradients, on a part of each parameter: it looks at nothing else."""
    if not (watch.was_adamw and watch.is_adamw and watch.parts):
        return None
    model = copy.deepcopy(plain)
    names = {parameter: name for name, parameter in model.named_parameters()}
    reference = optimizer(model)
    if any(getattr(algorithm, "no_decay_on_bias_and_norm", False) for algorithm in algorithms):
        split_off_no_decay(reference)
    before = {name: part_of(weight).double() for name, weight in watch.kept[0].weights.items()}
    weights = {name: torch.nn.Parameter(value.clone()) for name, value in before.items()}
    groups = [
        {**group, "params": [weights[names[p]] for p in group["params"] if names.get(p) in weights]}
        for group in torch_adamw(reference, foreach=False, fused=False).param_groups
    ]
    exact = torch.optim.AdamW([group for group in groups if group["params"]])
    for part in watch.parts:
        for name, weight in weights.items():
            weight.grad = None if (gradient := part.get(name)) is None else gradient.double()
        exact.step()
    update, size, error = (
        math.hypot(*(float(difference.norm()) for difference in differences))
        for differences in (
            [weights[name].detach() - before[name] for name in weights],
            list(before.values()),
            [watch.after[name].double() - weights[name].detach() for name in weights],
        )
    )
    epsilon = torch.finfo(torch.float32).eps
    # Each step rounds each weight once, to half of `epsilon` of it at most, and computes its update in some twenty
    # roundings. Twice that.
    if not update:  # at a rate of 0, as it should be
        return Updates(watch.optimizer, error and math.inf, 0.0)
    allowed = len(watch.parts) * epsilon * size / update + 40 * epsilon
    judged = max(allowed, _IN_8_BITS) if watch.in_8_bits else allowed
    return Updates(watch.optimizer, error / update, judged if allowed < 0.5 else None)


def another_optimizer(algorithms: Sequence[Algorithm], watch: Watch) -> list[str]:
    """What is to be said of an AdamW that became something else, though nobody asked for another optimizer."""
    chosen = any(isinstance(algorithm, SpeedUp) and algorithm.slot == "optimizer" for algorithm in algorithms)
    if chosen or watch.is_adamw or not watch.parts or not watch.was_adamw:
        return []
    return [f"the optimizer is {watch.optimizer} now, and no speed-up of optimizers was given"]
