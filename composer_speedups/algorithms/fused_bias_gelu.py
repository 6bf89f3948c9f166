"""FusedBiasGELU: the intermediate layer's bias and its GELU in one kernel.

**Why it is faster.** GELU stands on the widest activations of a BERT block, four times its width. PyTorch's backward
pass goes over them twice: once for GELU's gradient, which it writes, and once more to read that and sum it up for the
bias. Here one kernel does both, and adds the bias in forward as well, in float32 as it is, without a copy in the
autocast dtype. What is kept for backward is one tensor, the matrix product before its bias: as much as PyTorch keeps.

**Numerics.** Exact GELU, with the error function, not its approximation by tanh. Bias and activation are computed in
float32 and rounded once to the product's dtype; PyTorch rounds the bias to the autocast dtype first, and the sum before
GELU. Phi is off by at most 7.5e-8 and what float32 rounds. The bias's gradient is the sum of unrounded terms in a fixed
order: a run repeats bit for bit. There are no second derivatives (gradient penalties).

**When it pays.** On CPUs a little, as PyTorch's error function and exponential cost more than these: in bf16 4.6 ms
where PyTorch takes 7.0, if its matrix product adds the bias for nothing, for 6,144 x 1,024, forward and backward
(`benchmarks/results/2026-11-24_cpu_limits_3`). On an H200 2.04 ms where PyTorch takes 2.80, if its product adds the
bias, for 262,144 x 3,072 (`2026-11-27_h200_limits`): 93 % of the bandwidth, with 5 passes over the widest activations
instead of 6; under `TorchCompile`, too, as Inductor sums up for the bias by itself.

**Needs.** Intermediate layers that compute what BertIntermediate does, with the activation `gelu`: BERT, RoBERTa,
XLM-R, CamemBERT, ELECTRA, MPNet, DeBERTa-v2, ESM, ViT and others, known by their code; DistilBERT's feed-forward
blocks; and those that compute what CLIP's do, as Jina embeddings v3's.
On CUDA the package triton; on the CPU float32 or bfloat16 and a C compiler: elsewhere PyTorch's GELU stays (the
evidence says which kernel there is). Other activations (`gelu_new`, `relu`, ...) are left alone and counted. Layers
that are no plain `nn.Linear`, as with an adapter, and hooks on the linear layer or on its activation, take the model's
own code.

Source: the fused bias + GELU of Megatron-LM and of NVIDIA's MLPerf BERT, there with the approximation by tanh.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F
from composer.core import State
from composer.loggers import Logger
from transformers.activations import GELUActivation

from composer_speedups.compilation import missing_kernel
from composer_speedups.errors import SpeedUpUnavailable
from composer_speedups.joint_linear import only_linear
from composer_speedups.kernels import bias_gelu as kernel
from composer_speedups.kernels.native import without_modes
from composer_speedups.kernels.tensors import compute_dtype, plain
from composer_speedups.speedup import SpeedUp, Stage
from composer_speedups.surgery import having, hooked, mix_in, same_code, stock_class, stock_forward

__all__ = ["FusedBiasGELU", "apply_fused_bias_gelu"]


def apply_fused_bias_gelu(model: torch.nn.Module) -> int:
    """Let every intermediate layer with an exact GELU in `model` run bias and GELU as one kernel; return how many.

    Parameters stay the same objects.

    Raises:
        SpeedUpUnavailable: the parameters are on a device that has no kernel.

    >>> from transformers import BertConfig, BertModel
    >>> bert = BertModel(BertConfig(hidden_size=8, num_attention_heads=2, num_hidden_layers=3, vocab_size=9))
    >>> apply_fused_bias_gelu(bert), apply_fused_bias_gelu(bert)
    (3, 0)
    """
    layers = [layer for layer, activation in _intermediates(model) if _exact(activation)]
    for device in {next(layer.parameters()).device for layer in layers}:
        if (reason := missing_kernel(device)) is not None:
            raise SpeedUpUnavailable(f"apply_fused_bias_gelu cannot be used here: {reason}")
    for layer in layers:
        mix_in(_fused(layer), layer)
    return len(layers)


class FusedBiasGELU(SpeedUp):
    """Apply `apply_fused_bias_gelu` at `Event.INIT`, before DDP wraps the model.

    >>> FusedBiasGELU()
    FusedBiasGELU()
    """

    stage = Stage.BLOCK

    def unavailable(self, device: torch.device) -> str | None:
        return missing_kernel(device)

    def install(self, state: State, logger: Logger) -> None:
        others = [_name(activation) for _, activation in _intermediates(state.model) if not _exact(activation)]
        count = apply_fused_bias_gelu(state.model)
        by = "Triton" if state.device._device.type == "cuda" else "C" if kernel.native() is not None else "PyTorch"
        nothing = "no layer in the model is dense and activation as BERT's intermediate layer is"
        if others:
            nothing = f"the activation is {', '.join(sorted(set(others)))}, and the kernel's is the exact gelu"
        self.report(
            logger,
            count,
            nothing,
            already=having(state.model, _FusedIntermediate, _FusedFeedForward, _FusedMLP),
            left_alone=len(others),
            kernel=by,
        )


def _of_bert(self, hidden_states: torch.Tensor) -> torch.Tensor:
    hidden_states = self.dense(hidden_states)
    hidden_states = self.intermediate_act_fn(hidden_states)
    return hidden_states


def _of_distilbert(self, input: torch.Tensor) -> torch.Tensor:
    x = self.lin1(input)
    x = self.activation(x)
    x = self.lin2(x)
    x = self.dropout(x)
    return x


def _of_clip(self, hidden_states: torch.Tensor) -> torch.Tensor:
    hidden_states = self.fc1(hidden_states)
    hidden_states = self.activation_fn(hidden_states)
    hidden_states = self.fc2(hidden_states)
    return hidden_states


def _of_esm(self, hidden_states: torch.Tensor) -> torch.Tensor:
    hidden_states = self.dense(hidden_states)
    hidden_states = gelu(hidden_states)  # noqa: F821  # of the file that this stands in
    return hidden_states


def _intermediates(model: torch.nn.Module) -> list[tuple[torch.nn.Module, object]]:
    """What computes an intermediate layer, and is not changed yet, with its activation."""
    found = []
    for m in model.modules():
        if "forward" in vars(m) or "ff_chunk" in vars(m):
            continue
        if same_code(type(m).forward, _of_bert) and _biased(getattr(m, "dense", None)):
            found.append((m, m.intermediate_act_fn))
        elif same_code(type(m).forward, _of_esm) and _biased(getattr(m, "dense", None)):
            if stock_forward(m):  # others may have a `gelu` of whatever kind
                own = _own_gelu(type(m))
                found.append((m, F.gelu if _computes_gelu(own) else own))
        elif same_code(getattr(type(m), "ff_chunk", None), _of_distilbert) and _biased(getattr(m, "lin1", None)):
            found.append((m, m.activation))
        elif same_code(type(m).forward, _of_clip) and _biased(getattr(m, "fc1", None)):
            found.append((m, m.activation_fn))
    return found


def _biased(dense: torch.nn.Module | None) -> bool:
    return type(dense) is torch.nn.Linear and dense.bias is not None


def _own_gelu(cls: type[torch.nn.Module]) -> Callable[[torch.Tensor], torch.Tensor]:
    """What `gelu` is in the file of a class like ESM's intermediate layer: there a function of several passes."""
    return inspect.unwrap(stock_class(cls).forward).__globals__["gelu"]


def _fused(layer: torch.nn.Module) -> type:
    if not hasattr(layer, "dense"):
        return _FusedMLP if hasattr(layer, "fc1") else _FusedFeedForward
    return _FusedIntermediate if hasattr(layer, "intermediate_act_fn") else _FusedEsm


@cache
def _computes_gelu(function: Callable[[torch.Tensor], torch.Tensor]) -> bool:
    with without_modes():  # of a dry run, where tensors have no numbers
        x = torch.linspace(-6, 6, 97, dtype=torch.float64, device="cpu")
        return torch.allclose(function(x), F.gelu(x), rtol=0, atol=1e-12)


def _exact(activation: object) -> bool:
    """Whether `activation` is GELU with the error function."""
    if isinstance(activation, torch.nn.GELU):
        return type(activation) is torch.nn.GELU and activation.approximate == "none"
    return type(activation) is GELUActivation or activation is F.gelu


def _name(activation: object) -> str:
    return getattr(activation, "__name__", type(activation).__name__)


def _by_kernel(dense: torch.nn.Module, activation: Callable, x: torch.Tensor) -> torch.Tensor | None:
    """`activation(dense(x))` by the kernel, if there is one and nobody listens; else None."""
    heard = isinstance(activation, torch.nn.Module) and hooked(activation)
    ours = only_linear(dense) and dense.bias is not None and _exact(activation) and plain(x)
    if heard or not ours or not (torch.compiler.is_compiling() or _has_kernel(x)):
        return None
    product = F.linear(x, dense.weight)
    if kernel.why_not(product, dense.bias) is not None:
        return activation(product + dense.bias.to(product.dtype))
    return kernel.bias_gelu(product, dense.bias)


def _has_kernel(x: torch.Tensor) -> bool:
    """Whether the product of `x` has one. What the kernel means, in PyTorch's operations, is slower than GELU is."""
    return kernel.has_kernel(x.device.type, compute_dtype(x))


class _FusedIntermediate:
    """Mixed into `BertIntermediate` and what computes the same."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        out = _by_kernel(self.dense, self.intermediate_act_fn, hidden_states)
        return super().forward(hidden_states) if out is None else out


class _FusedEsm(_FusedIntermediate):
    """Mixed into `EsmIntermediate`, whose activation is a function."""

    intermediate_act_fn = staticmethod(F.gelu)


class _FusedFeedForward:
    """Mixed into DistilBERT's `FFN`."""

    def ff_chunk(self, input: torch.Tensor) -> torch.Tensor:
        return self.dropout(self.lin2(self.activated(input)))

    def activated(self, x: torch.Tensor) -> torch.Tensor:
        out = _by_kernel(self.lin1, self.activation, x)
        return self.activation(self.lin1(x)) if out is None else out


class _FusedMLP:
    """Mixed into `JinaEmbeddingsV3MLP` and what computes the same, as CLIP's."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        out = _by_kernel(self.fc1, self.activation_fn, hidden_states)
        return super().forward(hidden_states) if out is None else self.fc2(out)
