"""ForeachAdamW: torch's AdamW over lists of tensors instead of one tensor at a time.

**Why it is faster.** The for-loop launches about a dozen small kernels for each of BERT's 200 parameters. The
multi-tensor ("foreach") implementation does each arithmetic step for all parameters in a few launches.

**Numerics.** The same operations in the same order on each element; results are equal to the for-loop's to a
rounding or two. Temporary lists take about one more copy of the parameters in memory during the step.

**When it pays.** On a GPU with a for-loop AdamW or Composer's DecoupledAdamW, which reads one number back from the
GPU per parameter and step. On CUDA it is torch's own default when neither flag is set. On a CPU the lists bring
little; `FusedAdamW` is better nearly everywhere.

**Needs.** `torch.optim.AdamW` or Composer's `DecoupledAdamW` as the optimizer; any device. Of moments, parameters and
updates Composer's `OptimizerMonitor` tells what `DecoupledAdamW` reports, and here gradients only.

Source: PyTorch, `torch.optim.AdamW(foreach=True)`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.optim import Optimizer

from composer_speedups.optim.optimizers import become_torch
from composer_speedups.optim.speedup import OptimizerSpeedUp, sizes

__all__ = ["ForeachAdamW", "apply_foreach_adamw"]

_FLAGS = {"foreach": True, "fused": False}


def apply_foreach_adamw(optimizer: Optimizer) -> int:
    """Make `optimizer`, an AdamW of any kind, torch's multi-tensor AdamW, in place.

    Groups, rates, moments, hooks and schedulers stay. Returns for how many parameters the update changed;
    0 if it was this already.

    Raises:
        SpeedUpUnavailable: the optimizer is no AdamW, or was made with `differentiable=True`, which only the for-loop
            computes.

    >>> import torch
    >>> optimizer = torch.optim.AdamW([torch.zeros(3, requires_grad=True)], lr=1e-3)
    >>> apply_foreach_adamw(optimizer), optimizer.param_groups[0]["foreach"]
    (1, True)
    """
    return become_torch(optimizer, **_FLAGS)


class ForeachAdamW(OptimizerSpeedUp):
    """Apply `apply_foreach_adamw` at `Event.INIT`, and hold it after a checkpoint is loaded.

    Args:
        no_decay_on_bias_and_norm: take the weight decay off parameters of fewer than two dimensions.

    >>> ForeachAdamW()
    ForeachAdamW(no_decay_on_bias_and_norm=False)
    """

    flags = _FLAGS

    def step_bytes(self, trained: Sequence[torch.Tensor]) -> int:
        return sum(sizes(trained))  # the denominators of all parameters at once

    def convert(self, optimizer: Optimizer, model: torch.nn.Module) -> int:
        return apply_foreach_adamw(optimizer)
