"""FusedLayerNorm: LayerNorm in one kernel each way, in the autocast dtype, with float32 weights.

**Why it is faster.** Under autocast PyTorch widens the input of `layer_norm` to float32, normalises, and the
next matmul narrows again: three kernels that wait for memory. Here one kernel reads the activations in the
autocast dtype, computes in registers and writes them in the autocast dtype; weights are read in float32, so no
cast of them is launched either. Backward reads input and gradient once for all three gradients.

**Numerics.** Under autocast the input is taken in the autocast dtype and the output rounded once to it, as
`LowPrecisionNorm` does, but weight and bias enter in float32. Mean, variance and the sums for the gradients of
weight and bias are in float32, in a fixed order: a run repeats bit for bit. Without autocast the result keeps
the input's dtype and differs from PyTorch's by float32 rounding. Apex rounds the weights to the input's dtype.

**When it pays.** On a GPU with autocast, in eager mode: on an H200 0.53 ms where PyTorch takes 2.51, `LowPrecisionNorm`
1.22 and Liger's kernel 2.08, for 262,144 x 768, forward and backward (`benchmarks/results/2026-11-27_h200_limits`).
Under `TorchCompile` the compiler fuses LayerNorm with its neighbours, which an opaque kernel prevents: prefer
`LowPrecisionNorm` there.

**Needs.** A CUDA device. `backend="auto"` takes Apex's kernel if Apex with its CUDA extensions is installed, else
the project's Triton kernel; `"apex"` and `"triton"` insist. Norms that are wider than 8192 or run over several
dimensions are left alone and counted, as are subclasses of `nn.LayerNorm`, and for Apex those without a bias.

Source: Apex's FusedLayerNorm, which Composer once had as an algorithm and which lost pretrained weights there.
"""

from __future__ import annotations

import importlib
from functools import cache

import torch
from composer.core import State
from composer.loggers import Logger

from composer_speedups.arguments import check_choice
from composer_speedups.compilation import TRITON_INTERPRETED, missing_for_triton_on, why_no_cuda
from composer_speedups.errors import SpeedUpUnavailable
from composer_speedups.kernels.tensors import MAX_WIDTH, compute_dtype, shape_only
from composer_speedups.speedup import SpeedUp, Stage
from composer_speedups.surgery import having, swap_classes

__all__ = ["FusedLayerNorm", "apply_fused_layer_norm"]

BACKENDS = ("auto", "apex", "triton")


def apply_fused_layer_norm(model: torch.nn.Module, backend: str = "auto") -> int:
    """Let every plain `nn.LayerNorm` in `model` run as one fused kernel, in place; return how many.

    Parameters stay the same objects. An input that is not on a CUDA device, or not in float32, float16 or
    bfloat16, is computed by PyTorch as before. The arguments are those of `FusedLayerNorm`.

    Raises:
        SpeedUpUnavailable: there is no CUDA device, or not the backend that was asked for.
    """
    reason = _unavailable(backend)
    if reason is not None:
        raise SpeedUpUnavailable(f"apply_fused_layer_norm cannot be used here: {reason}")
    new = _ApexLayerNorm if _choose(backend) == "apex" else _TritonLayerNorm
    return swap_classes(model, {torch.nn.LayerNorm: new}, only=new.fits)


class FusedLayerNorm(SpeedUp):
    """Apply `apply_fused_layer_norm` at `Event.INIT`, before DDP wraps the model.

    Args:
        backend: `"auto"` (Apex if installed, else Triton), `"apex"` or `"triton"`.

    >>> FusedLayerNorm(backend="triton")
    FusedLayerNorm(backend='triton')
    """

    stage = Stage.NORM
    slot = "norm"

    def __init__(self, backend: str = "auto") -> None:
        self.backend = check_choice("backend", backend, BACKENDS)

    def unavailable(self, device: torch.device) -> str | None:
        return _unavailable(self.backend, device)

    def install(self, state: State, logger: Logger) -> None:
        plain = sum(type(module) is torch.nn.LayerNorm for module in state.model.modules())
        count = apply_fused_layer_norm(state.model, self.backend)
        chosen = _choose(self.backend)
        form = f"one dimension of at most {MAX_WIDTH}"
        nothing = (
            f"none of its {plain} nn.LayerNorm has a form that {chosen} takes ({form})"
            if plain
            else "no torch.nn.LayerNorm in the model"
        )
        self.report(
            logger,
            count,
            nothing,
            already=having(state.model, _FusedLayerNorm),
            backend=chosen,
            left_alone=plain - count,
        )


def _unavailable(backend: str, device: torch.device | None = None) -> str | None:
    instead = "use low_precision_norm, which runs everywhere"
    if _choose(check_choice("backend", backend, BACKENDS)) == "triton":
        return missing_for_triton_on(device, instead)
    if missing := why_no_cuda(device, instead):
        return missing
    if backend == "apex" and _apex() is None:
        return (
            "backend 'apex' needs Apex with its CUDA extensions, which are not installed; build them from"
            " https://github.com/NVIDIA/apex, or use backend='triton'"
        )
    return None


def _choose(backend: str) -> str:
    return ("apex" if _apex() is not None else "triton") if backend == "auto" else backend


@cache
def _apex():
    """Apex's module of norms, if its CUDA extension is there too: without it the import works, calls fail."""
    try:
        importlib.import_module("fused_layer_norm_cuda")
        return importlib.import_module("apex.normalization.fused_layer_norm")
    except (ImportError, OSError):  # OSError: built against another torch
        return None


class _FusedLayerNorm(torch.nn.LayerNorm):
    """What both kernels share: which modules and which inputs they take, and the dtype they compute in."""

    @staticmethod
    def fits(layer: torch.nn.Module) -> bool:
        return len(layer.normalized_shape) == 1 and 1 <= layer.normalized_shape[0] <= MAX_WIDTH

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        dtype = compute_dtype(input)
        if not self.takes(input) or dtype not in (torch.float32, torch.float16, torch.bfloat16):
            return super().forward(input)
        with torch.autocast(input.device.type, enabled=False):
            return self.kernel(input.to(dtype))

    def takes(self, input: torch.Tensor) -> bool:
        return input.is_cuda

    def kernel(self, input: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


class _TritonLayerNorm(_FusedLayerNorm):
    def takes(self, input: torch.Tensor) -> bool:
        return input.is_cuda or TRITON_INTERPRETED

    def kernel(self, input: torch.Tensor) -> torch.Tensor:
        from composer_speedups.kernels.layer_norm import layer_norm

        return layer_norm(input, self.weight, self.bias, self.eps)


class _ApexLayerNorm(_FusedLayerNorm):
    @staticmethod
    def fits(layer: torch.nn.Module) -> bool:
        return _FusedLayerNorm.fits(layer) and (layer.weight is None) == (layer.bias is None)

    def takes(self, input: torch.Tensor) -> bool:
        # In a dry run that counts memory there are no numbers, for which Apex's kernel would look.
        return super().takes(input) and not shape_only(input)

    def kernel(self, input: torch.Tensor) -> torch.Tensor:
        apex = _apex()
        if self.weight is None:
            return apex.fused_layer_norm(input, self.normalized_shape, self.eps)
        weight, bias = self.weight.to(input.dtype), self.bias.to(input.dtype)
        return apex.fused_layer_norm_affine(input, weight, bias, self.normalized_shape, self.eps)
