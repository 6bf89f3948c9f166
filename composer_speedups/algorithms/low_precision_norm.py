"""LowPrecisionNorm: LayerNorm in the autocast dtype instead of float32.

**Why it is faster.** Autocast lists `layer_norm` among the operations that it runs in float32, so each norm
reads a float32 copy of its input, writes float32, and the next matmul casts back. Staying in bf16 or fp16
halves that traffic and saves the casts.

**Numerics.** The output is rounded once to the autocast dtype. Mean and variance are still accumulated in
float32 inside PyTorch's kernel. Without autocast nothing changes, bit for bit.

**When it pays.** With `MixedPrecision` on a GPU in eager mode: norms are bound by memory traffic. Under
`TorchCompile` the casts are fused away already and little is left to win. The residual stream becomes low
precision too, as autocast no longer re-widens it at each norm: raise the learning rate with care.

**Needs.** Autocast (`MixedPrecision`, or the Trainer's `precision`); any device.

Source: Composer's LowPrecisionLayerNorm, which looks at CUDA autocast only, and copies parameters.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from composer.core import State
from composer.loggers import Logger

from composer_speedups.speedup import SpeedUp, Stage
from composer_speedups.surgery import swap_classes

__all__ = ["LowPrecisionNorm", "apply_low_precision_norm"]


def apply_low_precision_norm(model: torch.nn.Module) -> int:
    """Let every plain `nn.LayerNorm` in `model` compute in the autocast dtype, in place; return how many.

    Parameters stay the same objects in float32; subclasses of LayerNorm are left alone.

    >>> import torch
    >>> apply_low_precision_norm(torch.nn.Sequential(torch.nn.LayerNorm(8)))
    1
    """
    return swap_classes(model, {torch.nn.LayerNorm: _LowPrecisionLayerNorm})


class LowPrecisionNorm(SpeedUp):
    """Apply `apply_low_precision_norm` at `Event.INIT`, before DDP wraps the model.

    >>> LowPrecisionNorm()
    LowPrecisionNorm()
    """

    stage = Stage.NORM
    slot = "norm"

    def __init__(self) -> None:
        pass

    def install(self, state: State, logger: Logger) -> None:
        count = apply_low_precision_norm(state.model)
        self.report(
            logger,
            count,
            "no torch.nn.LayerNorm in the model",
            norm_class=_LowPrecisionLayerNorm.__name__,
        )


class _LowPrecisionLayerNorm(torch.nn.LayerNorm):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        device = input.device.type
        if not torch.is_autocast_enabled(device):
            return super().forward(input)
        dtype = torch.get_autocast_dtype(device)
        weight, bias = (None if p is None else p.to(dtype) for p in (self.weight, self.bias))
        with torch.autocast(device, enabled=False):
            return F.layer_norm(input.to(dtype), self.normalized_shape, weight, bias, self.eps)
