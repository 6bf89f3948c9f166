"""FusedAdamW: torch's AdamW as one kernel over all parameters.

**Why it is faster.** The whole update - decay, both moments, bias correction, step - is one pass: each parameter,
gradient and moment is read once and written once, in a handful of launches. The for-loop reads and writes them a
dozen times. On the CPU it is one vectorised, multi-threaded loop per parameter.

**Numerics.** The same formula, evaluated in float32 without storing intermediate results: equal to the for-loop's
to a rounding or two per step. With fp16 the gradient scaler's check is done inside the kernel.

**When it pays.** On a GPU nearly always; on a CPU where the optimizer weighs. The gain is the optimizer's share of
the step: large for small batches and big embeddings, small for long sequences.

**Needs.** `torch.optim.AdamW` or Composer's `DecoupledAdamW` as the optimizer; a CPU or CUDA device. Embeddings are
resized (`resize_token_embeddings`) before the first step: the moments keep their shape, and where the for-loop says so,
PyTorch's fused kernel on CPUs reads beyond them. Of moments, parameters and updates Composer's `OptimizerMonitor` tells
what `DecoupledAdamW` reports, and here gradients only.

Source: PyTorch, `torch.optim.AdamW(fused=True)`.
"""

from __future__ import annotations

import torch
from torch.optim import Optimizer

from composer_speedups.optim.optimizers import become_torch
from composer_speedups.optim.speedup import OptimizerSpeedUp

__all__ = ["FusedAdamW", "apply_fused_adamw"]

_FLAGS = {"foreach": False, "fused": True}


def apply_fused_adamw(optimizer: Optimizer) -> int:
    """Make `optimizer`, an AdamW of any kind, torch's fused AdamW, in place.

    Groups, rates, moments, hooks and schedulers stay. Returns for how many parameters the update changed;
    0 if it was this already.

    Raises:
        SpeedUpUnavailable: the optimizer is no AdamW, or was made with `differentiable=True`, which only the for-loop
            computes.

    >>> import torch
    >>> optimizer = torch.optim.AdamW([torch.zeros(3, requires_grad=True)], lr=1e-3)
    >>> apply_fused_adamw(optimizer), optimizer.param_groups[0]["fused"]
    (1, True)
    """
    return become_torch(optimizer, **_FLAGS)


class FusedAdamW(OptimizerSpeedUp):
    """Apply `apply_fused_adamw` at `Event.INIT`, and hold it after a checkpoint is loaded.

    Args:
        no_decay_on_bias_and_norm: take the weight decay off parameters of fewer than two dimensions.

    >>> FusedAdamW(no_decay_on_bias_and_norm=True)
    FusedAdamW(no_decay_on_bias_and_norm=True)
    """

    flags = _FLAGS

    def convert(self, optimizer: Optimizer, model: torch.nn.Module) -> int:
        return apply_fused_adamw(optimizer)
