"""FusedDropoutAddNorm: the end of each half of a post-norm block, bias + dropout + residual + LayerNorm, in one kernel.

**Why it is faster.** Behind each of its two last matrix products a BERT block computes `LayerNorm(dropout(x + bias) +
residual)`: kernels that wait for memory, under autocast with casts to float32 between them, and as many backward, with
one more pass for the bias. Here one kernel reads `x` and `residual` and writes the output; backward reads both again
with the gradient, and writes both gradients, while it sums up those of weight and biases. The mask is never stored: its
bits are hashed again.

**Numerics.** Under autocast both inputs are taken in the autocast dtype and the output is rounded once to it, as
`LowPrecisionNorm` does, but the sum before the norm stays in float32, as do weight, biases, mean and variance. Without
autocast the result differs from PyTorch's by float32 rounding. Masks are those of `FastDropout`: a multiple of 1/65536
is dropped, the scale is exact for it; keys come from PyTorch's generator of the device, so that seeds and gradient
checkpointing repeat bit for bit. A dropped NaN or infinity becomes 0. Gradients are summed in a fixed order; there
are no second derivatives (gradient penalties).

**When it pays.** On the CPU in bf16: 2.6 ms where PyTorch takes 15.9, and `FastDropout` with `LowPrecisionNorm` 3.5,
for 6,144 x 256, forward and backward, without the bias (`benchmarks/results/2026-11-24_cpu_limits_3`); less in float32.
On an H200, in eager mode, 0.81 ms where PyTorch takes 3.36 and with `LowPrecisionNorm` 2.06, for 262,144 x 768
(`2026-11-27_h200_limits`): 94 % of the bandwidth, with 8 passes over the activations instead of 16, and 4 launches
instead of 6 or more. Under `TorchCompile` Inductor fuses the forward pass as well, and launches these kernels itself on
CUDA; what is saved there are the stored mask and the second pass for the gradients of weight and biases.

**Needs.** Blocks that compute what BertSelfOutput and BertOutput do: BERT, RoBERTa, XLM-R, CamemBERT, ELECTRA,
DeBERTa-v2 and others, known by their code and not by their names; MPNet's, and DistilBERT's, which drop nothing behind
the attention (in both the projection behind it adds its bias itself). On CUDA the package triton and a width up to
8192; on the CPU a C compiler for speed: without one PyTorch's operations compute the same masks. Other devices are
refused; tensor subclasses, `torch.func`, and a norm or dropout of a block that somebody hooks or has replaced take the
block's own code; a linear layer that somebody hooks or has replaced adds its bias itself. It takes the norms and
dropouts of the blocks; `LowPrecisionNorm`, `FusedLayerNorm` and `FastDropout` take the others.

Source: dropout + add + LayerNorm of MosaicML's and NVIDIA's MLPerf BERT; the masks are counter-based, see FastDropout.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from composer.core import State
from composer.loggers import Logger

from composer_speedups.compat import distilbert_attention, layer_result
from composer_speedups.compilation import missing_kernel
from composer_speedups.errors import SpeedUpUnavailable
from composer_speedups.families import DISTILBERT, MPNET, layers_of, stack_of
from composer_speedups.joint_linear import only_linear
from composer_speedups.kernels import dropout_add_norm as kernel
from composer_speedups.kernels.tensors import autocast_dtype, plain
from composer_speedups.read_twice import as_residual, given_out_twice, read_twice
from composer_speedups.speedup import SpeedUp, Stage
from composer_speedups.surgery import having, hooked, mix_in, same_code, stock_forward

__all__ = ["FusedDropoutAddNorm", "apply_fused_dropout_add_norm"]

_OURS = ("torch.nn.modules.", "composer_speedups.algorithms.")  # classes whose meaning is known


def apply_fused_dropout_add_norm(model: torch.nn.Module) -> int:
    """Let every post-norm block end in `model` run as one kernel, in place; return how many: two for each layer.

    Parameters stay the same objects. Apply it before `apply_low_precision_norm`, `apply_fused_layer_norm` and
    `apply_fast_dropout`, which then count what they really change.

    Raises:
        SpeedUpUnavailable: the parameters are on a device that has no kernel.

    >>> from transformers import BertConfig, BertModel
    >>> bert = BertModel(BertConfig(hidden_size=8, num_attention_heads=2, num_hidden_layers=3, vocab_size=9))
    >>> apply_fused_dropout_add_norm(bert), apply_fused_dropout_add_norm(bert)
    (6, 0)
    """
    ends = {m: (_FusedEnd, (m.LayerNorm,), m.dropout) for m in model.modules() if _fits(m)}
    for layer in (layer for m in model.modules() for layer in _layers_of_distilbert(m)):
        ends[layer] = (_FusedLayer, (layer.sa_layer_norm, layer.output_layer_norm), layer.ffn.dropout)
    for attention in (attention for m in model.modules() for attention in _attentions_of_mpnet(m)):
        ends[attention] = (_FusedAttention, (attention.LayerNorm,), attention.dropout)
    for device in {norm.weight.device for _, norms, _ in ends.values() for norm in norms}:
        if (reason := missing_kernel(device)) is not None:
            raise SpeedUpUnavailable(f"apply_fused_dropout_add_norm cannot be used here: {reason}")
    for block, (mixin, norms, dropout) in ends.items():
        mix_in(mixin, block)
        dropout.__class__ = DropoutOfBlock
        for norm in norms:
            norm.__class__ = _NormOfBlock
    return sum(len(norms) for _, norms, _ in ends.values())


class FusedDropoutAddNorm(SpeedUp):
    """Apply `apply_fused_dropout_add_norm` at `Event.INIT`, before other norms and dropouts are changed.

    >>> FusedDropoutAddNorm()
    FusedDropoutAddNorm()
    """

    stage = Stage.BLOCK

    def unavailable(self, device: torch.device) -> str | None:
        return missing_kernel(device)

    def install(self, state: State, logger: Logger) -> None:
        count = apply_fused_dropout_add_norm(state.model)
        by = "Triton" if state.device._device.type == "cuda" else "C" if kernel.native() is not None else "PyTorch"
        nothing = "no block in the model ends in dropout, LayerNorm(x + residual) as BERT's, DistilBERT's or MPNet's do"
        self.report(
            logger, count, nothing, already=having(state.model, _FusedEnd, _FusedLayer, _FusedAttention), kernel=by
        )


def _pattern(self, hidden_states: torch.Tensor, input_tensor: torch.Tensor) -> torch.Tensor:
    hidden_states = self.dense(hidden_states)
    hidden_states = self.dropout(hidden_states)
    hidden_states = self.LayerNorm(hidden_states + input_tensor)
    return hidden_states


def _fits(module: torch.nn.Module) -> bool:
    """Whether the forward pass of `module` is `_pattern`, with a plain norm and dropout."""
    if "forward" in vars(module) or not same_code(type(module).forward, _pattern):
        return False
    return _known(getattr(module, "dropout", None), getattr(module, "LayerNorm", None))


def _layers_of_distilbert(module: torch.nn.Module) -> list[torch.nn.Module]:
    """Of a DistilBERT encoder the layers that are transformers' own, with plain norms and dropouts; else none."""
    stack = stack_of(module)
    if stack is None or module.config.model_type not in DISTILBERT:
        return []
    return [
        layer
        for layer in layers_of(stack)
        if not isinstance(layer, _FusedLayer)
        and "forward" not in vars(layer)
        and all(stock_forward(m) for m in (layer, layer.ffn))
        and _known(layer.ffn.dropout, layer.sa_layer_norm, layer.output_layer_norm)
    ]


def _attentions_of_mpnet(module: torch.nn.Module) -> list[torch.nn.Module]:
    """Of an MPNet encoder what is around each attention, and ends as BERT's does in code of its own; else none."""
    stack = stack_of(module)
    if stack is None or module.config.model_type not in MPNET:
        return []
    around = (layer.attention for layer in layers_of(stack) if not isinstance(layer.attention, _FusedAttention))
    return [m for m in around if stock_forward(m) and _known(m.dropout, m.LayerNorm)]


def _known(dropout: torch.nn.Module | None, *norms: torch.nn.Module | None) -> bool:
    """Whether it is a dropout and they are norms of a row, of classes whose meaning is known."""
    if not isinstance(dropout, torch.nn.Dropout) or not all(isinstance(norm, torch.nn.LayerNorm) for norm in norms):
        return False
    known = all(type(m).__module__.startswith(_OURS) for m in (dropout, *norms))
    return known and all(len(n.normalized_shape) == 1 and n.weight is not None and n.bias is not None for n in norms)


class _NormOfBlock(torch.nn.LayerNorm):
    """Computed by the block that owns it."""


class DropoutOfBlock(torch.nn.Dropout):
    """Computed by the block that owns it. So named: many look for modules whose class begins with "Dropout"."""


def _still_ours(dropout: torch.nn.Module, *norms: torch.nn.Module) -> bool:
    """Whether they are what was put there, and nobody listens. Another norm, or one in an adapter, is called."""
    parts = [(dropout, DropoutOfBlock), *((norm, _NormOfBlock) for norm in norms)]
    return all(type(part) is cls and not hooked(part) for part, cls in parts)


class _FusedEnd:
    """Mixed into `BertSelfOutput`, `BertOutput` and what computes the same."""

    def forward(self, hidden_states: torch.Tensor, input_tensor: torch.Tensor) -> torch.Tensor:
        norm, dropout = self.LayerNorm, self.dropout
        if not (_still_ours(dropout, norm) and plain(hidden_states) and plain(input_tensor)):
            return super().forward(hidden_states, input_tensor)
        return _end(*_product(self.dense, hidden_states), input_tensor, norm, dropout)


class _FusedAttention:
    """Mixed into `MPNetAttention`, whose projection is within its attention, and adds its bias there."""

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any):
        norm, dropout = self.LayerNorm, self.dropout
        if not (_still_ours(dropout, norm) and plain(hidden_states)):
            return super().forward(hidden_states, *args, **kwargs)
        attended, *weights = self.attn(hidden_states, *args, **kwargs)
        return (_end(attended, None, hidden_states, norm, dropout), *weights)


class _FusedLayer:
    """Mixed into DistilBERT's `TransformerBlock`, whose own forward pass adds before it calls its norms."""

    def forward(self, *args: Any, **kwargs: Any):
        ffn = self.ffn
        ours = _still_ours(ffn.dropout, self.sa_layer_norm, self.output_layer_norm) and not hooked(ffn)
        weights = kwargs.get("output_attentions") or any(argument is True for argument in args)
        first = "first_only" in kwargs  # asked by LastLayerSubset, which may lie beneath
        if first or not ours or weights or not args or not plain(args[0]) or ffn.chunk_size_feed_forward:
            return super().forward(*args, **kwargs)
        attended = _end(distilbert_attention(self, *args, **kwargs), None, args[0], self.sa_layer_norm)
        by_kernel = getattr(ffn, "activated", None)  # of FusedBiasGELU
        wide = ffn.activation(ffn.lin1(attended)) if by_kernel is None else by_kernel(attended)
        hidden, bias = _product(ffn.lin2, wide)
        return layer_result(_end(hidden, bias, attended, self.output_layer_norm, ffn.dropout))


def _product(dense: torch.nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What `dense` makes of `x`, but for the bias that is still to be added, if it is a linear layer and no more."""
    if not only_linear(dense) or dense.bias is None:
        return dense(x), None
    return F.linear(x, dense.weight), dense.bias


def _end(
    x: torch.Tensor,
    x_bias: torch.Tensor | None,
    residual: torch.Tensor,
    norm: torch.nn.LayerNorm,
    dropout: torch.nn.Dropout | None = None,
) -> torch.Tensor:
    """`norm(dropout(x + x_bias) + residual)`."""
    residual = as_residual(residual)
    if (dtype := autocast_dtype(x)) is not None:
        x, residual = x.to(dtype), residual.to(dtype)
    p = dropout.p if dropout is not None and dropout.training else 0.0
    if kernel.why_not(x, residual, norm.weight, norm.bias, p, x_bias) is not None:
        x = x if x_bias is None else x + x_bias.to(x.dtype)
        return norm((x if dropout is None else dropout(x)) + residual)
    arguments = x, residual, norm.weight, norm.bias, p, norm.eps, x_bias
    with torch.autocast(x.device.type, enabled=False):
        if read_twice():
            return given_out_twice(*kernel.dropout_add_norm_twice(*arguments))
        return kernel.dropout_add_norm(*arguments)
