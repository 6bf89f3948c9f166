"""FusedBiasGELU: the intermediate layer's bias and its GELU in one kernel, on CUDA.

**Why it is faster.** GELU stands on the widest activations of a BERT block, four times its width. PyTorch's backward
pass goes over them twice: once for GELU's gradient, which it writes, and once more to read that and sum it up for the
bias. Here one kernel does both, and adds the bias in forward as well, in float32 as it is, without a copy in the
autocast dtype. What is kept for backward is one tensor, the matrix product before its bias: as much as PyTorch keeps.

**Numerics.** Exact GELU, with the error function, not its approximation by tanh. Bias and activation are computed in
float32 and rounded once to the product's dtype; PyTorch rounds the bias to the autocast dtype first. Phi is off by at
most 7.5e-8. The bias's gradient is the sum of unrounded terms in a fixed order: a run repeats bit for bit.

**When it pays.** On CUDA in eager mode by arithmetic: 5 passes over the widest activations instead of 6; not measured
yet. Under `TorchCompile` the compiler fuses the same, and little is left. There is none for CPUs: PyTorch's GELU is
vectorised there, its linear layer adds the bias for nothing, and the error function costs more than the traffic.

**Needs.** A CUDA device, the package triton, and intermediate layers that compute what BertIntermediate does, with the
activation `gelu`: BERT, RoBERTa, XLM-R, CamemBERT, ELECTRA, MPNet, DeBERTa-v2, ViT and others, known by their code.
Other activations (`gelu_new`, `relu`, ...) are left alone and counted. Layers that are no plain `nn.Linear`, and hooks
on the linear layer or on its activation, take the model's own code.

Source: the fused bias + GELU of Megatron-LM and of NVIDIA's MLPerf BERT, there with the approximation by tanh.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from composer.core import State
from composer.loggers import Logger
from transformers.activations import GELUActivation

from composer_speedups.compilation import TRITON_INTERPRETED, missing_for_triton, why_no_cuda
from composer_speedups.errors import SpeedUpUnavailable
from composer_speedups.kernels.tensors import plain
from composer_speedups.speedup import SpeedUp, Stage
from composer_speedups.surgery import hooked, mix_in, same_code

__all__ = ["FusedBiasGELU", "apply_fused_bias_gelu"]


def apply_fused_bias_gelu(model: torch.nn.Module) -> int:
    """Let every intermediate layer with an exact GELU in `model` run bias and GELU as one kernel; return how many.

    Parameters stay the same objects. An input that is not on a CUDA device, or not in float32, float16 or
    bfloat16, is computed by PyTorch as before.

    Raises:
        SpeedUpUnavailable: there is no CUDA device, or no triton.
    """
    reason = _unavailable()
    if reason is not None:
        raise SpeedUpUnavailable(f"apply_fused_bias_gelu cannot be used here: {reason}")
    layers = [m for m in model.modules() if _is_intermediate(m) and _exact(m.intermediate_act_fn)]
    for layer in layers:
        mix_in(_FusedIntermediate, layer)
    return len(layers)


class FusedBiasGELU(SpeedUp):
    """Apply `apply_fused_bias_gelu` at `Event.INIT`, before DDP wraps the model.

    >>> FusedBiasGELU()
    FusedBiasGELU()
    """

    stage = Stage.BLOCK

    def __init__(self) -> None:
        pass

    def unavailable(self, device: torch.device) -> str | None:
        return _unavailable(device)

    def install(self, state: State, logger: Logger) -> None:
        found = [m for m in state.model.modules() if _is_intermediate(m)]
        others = [_name(m.intermediate_act_fn) for m in found if not _exact(m.intermediate_act_fn)]
        count = apply_fused_bias_gelu(state.model)
        nothing = "no layer in the model is dense and activation as BERT's intermediate layer is"
        if others:
            nothing = f"the activation is {', '.join(sorted(set(others)))}, and the kernel's is the exact gelu"
        self.report(logger, count, nothing, left_alone=len(others))


def _unavailable(device: torch.device | None = None) -> str | None:
    cuda = None if TRITON_INTERPRETED else why_no_cuda(device, "PyTorch's GELU is as fast on a CPU: remove it")
    return cuda or missing_for_triton()


def _pattern(self, hidden_states: torch.Tensor) -> torch.Tensor:
    hidden_states = self.dense(hidden_states)
    hidden_states = self.intermediate_act_fn(hidden_states)
    return hidden_states


def _is_intermediate(module: torch.nn.Module) -> bool:
    dense = getattr(module, "dense", None)
    own = type(dense) is torch.nn.Linear and dense.bias is not None and "forward" not in vars(module)
    return own and same_code(type(module).forward, _pattern)


def _exact(activation: object) -> bool:
    """Whether `activation` is GELU with the error function."""
    if isinstance(activation, torch.nn.GELU):
        return type(activation) is torch.nn.GELU and activation.approximate == "none"
    return type(activation) is GELUActivation or activation is F.gelu


def _name(activation: object) -> str:
    return getattr(activation, "__name__", type(activation).__name__)


class _FusedIntermediate:
    """Mixed into `BertIntermediate` and what computes the same."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        dense, activation = self.dense, self.intermediate_act_fn
        heard = hooked(dense) or (isinstance(activation, torch.nn.Module) and hooked(activation))
        ours = plain(hidden_states) and (hidden_states.is_cuda or TRITON_INTERPRETED)
        if type(dense) is not torch.nn.Linear or heard or not ours:
            return super().forward(hidden_states)
        from composer_speedups.kernels.bias_gelu import bias_gelu, why_not

        x = F.linear(hidden_states, dense.weight)
        if why_not(x, dense.bias) is not None:
            return activation(x + dense.bias)
        return bias_gelu(x, dense.bias)
