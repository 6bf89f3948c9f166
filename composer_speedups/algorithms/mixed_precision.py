"""MixedPrecision: autocast to fp16 or bf16 for forward, loss and evaluation.

**Why it is faster.** Matrix products run on tensor cores (CUDA) or in AMX / AVX512-BF16 units (CPU) at a
multiple of the float32 rate, and activations take half the memory and traffic. Weights, gradients and
optimizer stay in float32.

**Numerics.** Autocast rounds the inputs of matrix products to 10 bits of mantissa (fp16) or 7 (bf16); sums
are float32, and so is the loss. fp16 overflows beyond 65504 and loses gradients below 6e-8: Composer's
GradScaler scales the loss, and skips the steps whose gradients are inf or NaN. bf16 has the range of float32
and needs no scaler.

**When it pays.** On GPUs nearly always: fp16 from Volta on, bf16 from Ampere on. On CPUs only with AMX, AVX512-BF16 or
Arm's BF16 in hardware. With other AVX-512 (Intel's servers from Skylake to Ice Lake) products in bf16 take more than
twice as long as in float32; without AVX-512 (most consumers' CPUs) PyTorch multiplies in a plain loop, many times
slower. A study skips such a row and says why.

**Needs.** fp16: a CUDA GPU. bf16: a CUDA GPU of compute capability 8.0 (Ampere), or any CPU. Composer itself
refuses mixed precision on the CPU: there `state.precision` stays fp32, and autocast is put around `forward`,
`loss`, `eval_forward` and `update_metric` of the model itself.

On a GPU it replaces the Trainer's `precision`, whose default is fp16 already; `fit(precision=...)` may not
contradict it.

Source: https://pytorch.org/docs/stable/amp.html
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from composer.core import Event, Precision, State
from composer.loggers import Logger

from composer_speedups.arguments import check_choice
from composer_speedups.ddp import without_ddp
from composer_speedups.errors import ConflictError, SpeedUpUnavailable
from composer_speedups.hardware import multiplies_bf16
from composer_speedups.holds import IgnoredWarning
from composer_speedups.speedup import SpeedUp, Stage
from composer_speedups.surgery import override_methods, overrides

__all__ = ["MixedPrecision", "apply_mixed_precision", "low_precision_of"]

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
METHODS = ("forward", "loss", "eval_forward", "update_metric")


def apply_mixed_precision(model: torch.nn.Module, dtype: str) -> int:
    """Run `model` under autocast, on whichever device it is when called; return how many methods now do.

    `forward`, and of a `ComposerModel` also `loss`, `eval_forward` and `update_metric`. In a bare loop, fp16
    needs a `torch.amp.GradScaler` beside it, and a loss computed outside the model takes its outputs in the
    low precision. The arguments are those of `MixedPrecision`.

    >>> import torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 2))
    >>> apply_mixed_precision(model, "bf16")
    1
    >>> model(torch.ones(1, 4)).dtype
    torch.bfloat16
    """
    wrap = _Autocast(check_choice("dtype", dtype, DTYPES))
    for other in overrides(model):
        if isinstance(other, _Autocast) and other != wrap:
            raise ConflictError(f"the model runs in {other.dtype} already, not {dtype}. Keep one of them")
    replaced = [name for name in METHODS if name in vars(model)]
    if replaced:
        raise SpeedUpUnavailable(
            f"{type(model).__name__}.{replaced[0]} was replaced on the object itself, as torch.compile and "
            "hooks of Accelerate do. Apply mixed precision before that"
        )
    reason = _unavailable(dtype, _device(model))
    # A model may still move to the GPU; a machine without one cannot run fp16 at all.
    if reason is not None and not (dtype == "fp16" and torch.cuda.is_available()):
        raise SpeedUpUnavailable(f"mixed precision in {dtype} cannot be used here: {reason}")
    return override_methods(model, METHODS, wrap)


def low_precision_of(state: State) -> torch.dtype | None:
    """The dtype in which the model is called under autocast: by the Trainer, or, on the CPU, by its own methods."""
    own = next((other.dtype for other in overrides(without_ddp(state.model)) if isinstance(other, _Autocast)), None)
    by_trainer = {Precision.AMP_BF16: "bf16", Precision.AMP_FP16: "fp16"}.get(state.precision)
    name = own or by_trainer
    return None if name is None else DTYPES[name]


class MixedPrecision(SpeedUp):
    """Set the Trainer's precision to `dtype` at `Event.INIT`; on CPU, put autocast into the model.

    Args:
        dtype: `fp16` (CUDA only, with loss scaling) or `bf16`.

    >>> MixedPrecision("bf16")
    MixedPrecision(dtype='bf16')
    """

    stage = Stage.PRECISION
    slot = "precision"
    choices = ({"dtype": "bf16"}, {"dtype": "fp16"})
    events = frozenset({Event.FIT_START, Event.AFTER_FORWARD, Event.EVAL_AFTER_FORWARD})

    def __init__(self, dtype: str) -> None:
        self.dtype = check_choice("dtype", dtype, DTYPES)

    def unavailable(self, device: torch.device) -> str | None:
        return _unavailable(self.dtype, device)

    def too_slow(self, device: torch.device) -> str | None:
        if self.dtype != "bf16" or device.type != "cpu" or multiplies_bf16():
            return None
        return (
            "this CPU has no bf16 products (AVX512-BF16, AMX or Arm's BF16), and without them they take two to many "
            "times as long as float32's. Leave it out, as cpu/fastest_fp32 does"
        )

    def install(self, state: State, logger: Logger) -> None:
        before = state.precision.value
        if self.dtype == "fp16":
            # Where the first step overflows, the scaler skips it. PyTorch then warns that the schedule lost its first
            # value, which Composer's does not: it follows the batches.
            self.keep(state, IgnoredWarning("Detected call of `lr_scheduler.step"))
        if state.device.name == "cpu":
            count = apply_mixed_precision(state.model, self.dtype)
            after = f"{before} outside the model, {self.dtype} autocast inside"
        else:
            # Only now: Composer chooses the GradScaler, and whether to use closures, right after INIT.
            state.precision = self._precision
            count, after = 1, state.precision.value
        nothing = f"the model runs in {self.dtype} already"
        self.report(logger, count, nothing, precision_before=before, precision_after=after)

    @property
    def _precision(self) -> Precision:
        return Precision.AMP_FP16 if self.dtype == "fp16" else Precision.AMP_BF16

    def on_event(self, event: Event, state: State, logger: Logger) -> None:
        if event is Event.FIT_START:
            if state.device.name != "cpu" and state.precision is not self._precision:
                raise ConflictError(
                    f"fit(precision={state.precision.value!r}) contradicts {self!r}. Remove one of them"
                )
            scaler = state.scaler
            enabled = self.dtype == "fp16" and scaler is not None and scaler.is_enabled()
            self.tell(logger, grad_scaler=type(scaler).__name__ if enabled else "none")
        elif "output_dtype" not in self.evidence:
            # What really came out of the first forward, training or evaluation.
            found = _floating_dtype(state.outputs)
            self.tell(logger, output_dtype=str(found).removeprefix("torch."))


@dataclass(frozen=True)
class _Autocast:
    """Puts autocast around a method, on the device where the model is at that moment."""

    dtype: str

    def __call__(self, method: Callable[..., Any]) -> Callable[..., Any]:
        dtype, name = DTYPES[self.dtype], self.dtype

        def under_autocast(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            device = _device(self).type
            if device == "cpu" and name == "fp16":
                raise SpeedUpUnavailable("fp16 on CPU: move the model to a CUDA GPU, or use bf16")
            with torch.autocast(device, dtype=dtype):
                return method(self, *args, **kwargs)

        return under_autocast


def _unavailable(dtype: str, device: torch.device) -> str | None:
    if device.type == "cpu":
        if dtype == "fp16":
            return f"fp16 needs a CUDA GPU, and this is a CPU. {'Use bf16' if multiplies_bf16() else 'Leave it out'}"
        return None
    if device.type != "cuda" or not torch.cuda.is_available():
        return f"there is no CUDA GPU for device {str(device)!r}. Use bf16 on the CPU"
    if dtype == "bf16" and torch.cuda.get_device_capability(device) < (8, 0):
        name = torch.cuda.get_device_name(device)
        return f"{name} has no bf16 (Ampere and newer have). Use fp16"
    return None


def _device(model: torch.nn.Module) -> torch.device:
    for tensor in model.parameters():
        return tensor.device
    return torch.device("cpu")


def _floating_dtype(outputs: Any) -> torch.dtype | None:
    """The dtype of the largest floating tensor in a model's outputs: the logits, not the loss."""
    found: list[torch.Tensor] = []

    def look(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            if value.is_floating_point():
                found.append(value)
        elif isinstance(value, Mapping):
            for item in value.values():
                look(item)
        elif isinstance(value, Sequence) and not isinstance(value, str):
            for item in value:
                look(item)

    look(outputs)
    return max(found, key=torch.Tensor.numel).dtype if found else None
