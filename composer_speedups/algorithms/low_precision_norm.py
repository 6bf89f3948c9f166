"""LowPrecisionNorm: LayerNorm in the autocast dtype instead of float32.

**Why it is faster.** Autocast lists `layer_norm` among the operations that it runs in float32, so each norm
reads a float32 copy of its input, writes float32, and the next matmul casts back. Staying in bf16 or fp16
halves that traffic and saves the casts.

**Numerics.** The output is rounded once to the autocast dtype. Mean and variance are still accumulated in
float32 inside PyTorch's kernel. Without autocast nothing changes, bit for bit. On the CPU PyTorch's kernel sums the
gradients of weight and bias in the low precision, over all tokens, which loses most of their digits; here they are
summed in float32, and mean and deviation are kept in float32 for backward. Under `torch.compile` Inductor does so;
under `torch.func` and for tensor subclasses PyTorch's kernel is as it is. On the CPU there are no second derivatives
(gradient penalties). What autocast leaves alone, float64, is left in it.

**When it pays.** With `MixedPrecision` on a GPU in eager mode: norms are bound by memory traffic. Under
`TorchCompile` the casts are fused away already and little is left to win. The residual stream becomes low
precision too, as autocast no longer re-widens it at each norm: raise the learning rate with care.

**Needs.** Autocast (`MixedPrecision`, or the Trainer's `precision`); any device.

Source: Composer's LowPrecisionLayerNorm, which looks at CUDA autocast only, and copies parameters.
"""

from __future__ import annotations

import logging
from itertools import islice

import torch
import torch.nn.functional as F
from composer.core import State
from composer.loggers import Logger
from torch.autograd.function import once_differentiable

from composer_speedups.algorithms.mixed_precision import low_precision_of
from composer_speedups.kernels.tensors import autocast_dtype, plain, shape_only, to_save
from composer_speedups.speedup import SpeedUp, Stage
from composer_speedups.surgery import having, swap_classes

__all__ = ["LowPrecisionNorm", "apply_low_precision_norm"]

log = logging.getLogger("composer_speedups")


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

    def install(self, state: State, logger: Logger) -> None:
        count = apply_low_precision_norm(state.model)
        autocast = low_precision_of(state) is not None
        self.report(
            logger,
            count,
            "no torch.nn.LayerNorm in the model",
            already=having(state.model, _LowPrecisionLayerNorm),
            norm_class=_LowPrecisionLayerNorm.__name__,
            computes_in="the dtype of autocast" if autocast else "float32: the Trainer uses no autocast",
        )
        if count and not autocast:  # the model may open one itself
            log.warning("%r leaves norms in float32: the Trainer uses no autocast. Add MixedPrecision", self)


class _LowPrecisionLayerNorm(torch.nn.LayerNorm):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        dtype = autocast_dtype(input)
        if dtype is None:
            return super().forward(input)
        with torch.autocast(input.device.type, enabled=False):
            x = input.to(dtype)
            if x.device.type == "cpu" and self.weight is not None and plain(x) and not torch.compiler.is_compiling():
                return _Float32Sums.apply(x, self.weight, self.bias, self.eps)
            weight, bias = (None if p is None else p.to(dtype) for p in (self.weight, self.bias))
            return F.layer_norm(x, self.normalized_shape, weight, bias, self.eps)


class _Float32Sums(torch.autograd.Function):
    """PyTorch's LayerNorm on the CPU, with its sums over tokens in float32.

    Its backward kernel sums in the dtype of what it is given, so it is given a few rows at a time in float32, which
    stay in the cache.
    """

    _ROWS = 512

    @staticmethod
    def forward(ctx, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
        # Weights in float32: mean and deviation are kept in float32 then.
        wide = to_save(weight).float(), None if bias is None else to_save(bias).float()
        y, mean, rstd = torch.native_layer_norm(x, weight.shape, *wide, eps)
        ctx.save_for_backward(x, *wide, mean, rstd)
        ctx.dtypes = weight.dtype, None if bias is None else bias.dtype
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: torch.Tensor):
        x, weight, bias, mean, rstd = ctx.saved_tensors
        backward, shape, gradient = torch.ops.aten.native_layer_norm_backward, weight.shape, gradient.contiguous()
        dx = dw = db = None
        if ctx.needs_input_grad[0]:
            dx = backward(gradient, x, shape, mean, rstd, weight, bias, [True, False, False])[0]
        if any(ctx.needs_input_grad[1:3]):
            dw, db = torch.zeros_like(weight), None if bias is None else torch.zeros_like(bias)
            rows = [t.reshape(-1, *shape).split(_Float32Sums._ROWS) for t in (gradient, x)]
            statistics = [t.reshape(-1, *[1] * len(shape)).split(_Float32Sums._ROWS) for t in (mean, rstd)]
            chunks = zip(*rows, *statistics, strict=True)
            # Without numbers, as when memory is foretold, one chunk tells as much as a thousand.
            for g, some, *of in islice(chunks, 1) if shape_only(x) else chunks:
                _, *sums = backward(g.float(), some.float(), shape, *of, weight, bias, [False, True, bias is not None])
                dw += sums[0]
                if db is not None:
                    db += sums[1]
            dw, db = (s.to(dtype) if need else None for s, dtype, need in zip(
                (dw, db), ctx.dtypes, ctx.needs_input_grad[1:3], strict=True
            ))  # fmt: skip
        return dx, dw, db, None
