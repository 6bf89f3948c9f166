"""The ends of post-norm blocks, `norm(dropout(x) + residual)`, in one kernel: what `FusedDropoutAddNorm` mixes in.

Families write them in three places: in a module behind the projection, around the attention, or in the layer. Such
modules are known by what they compute, or are a family's own.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from composer_speedups.compat import distilbert_attention, layer_result
from composer_speedups.families import DISTILBERT, MPNET, layers_of, stack_of
from composer_speedups.joint_linear import only_linear
from composer_speedups.kernels import dropout_add_norm as kernel
from composer_speedups.kernels.tensors import autocast_dtype, plain
from composer_speedups.read_twice import as_residual, given_out_twice, read_twice
from composer_speedups.surgery import hooked, mix_in, same_code, stock_class, stock_forward

__all__ = ["FUSED", "DropoutOfBlock", "FusedEnd", "NormOfBlock", "ends_in"]

_KNOWN = ("torch.nn.modules.", "composer_speedups.")  # classes whose meaning is known


class Ends(NamedTuple):
    """What of a module becomes one kernel each: its norms, with the dropouts before them."""

    module: torch.nn.Module
    mixin: type
    norms: tuple[torch.nn.Module, ...]
    dropouts: tuple[torch.nn.Module, ...]

    def fuse(self) -> None:
        """Change the module, its norms and dropouts, in place."""
        mix_in(self.mixin, self.module)
        for dropout in self.dropouts:
            dropout.__class__ = DropoutOfBlock
        for norm in self.norms:
            norm.__class__ = NormOfBlock


def ends_in(model: torch.nn.Module) -> list[Ends]:
    """All in `model` that are not fused yet."""
    found = {ends.module: ends for module in model.modules() for ends in _ends_of(module)}  # encoders may share layers
    return list(found.values())


def _ends_of(m: torch.nn.Module) -> Iterator[Ends]:
    if _fits(m, _of_bert, ("dropout",), ("LayerNorm",)):
        yield Ends(m, FusedEnd, (m.LayerNorm,), (m.dropout,))
    elif _fits(m, _of_nomic, *_NOMIC):
        yield Ends(m, FusedNomicLayer, *(tuple(getattr(m, name) for name in names) for names in reversed(_NOMIC)))
    for layer in _layers_of_distilbert(m):
        yield Ends(layer, FusedLayer, (layer.sa_layer_norm, layer.output_layer_norm), (layer.ffn.dropout,))
    for attention in _attentions_of_mpnet(m):
        yield Ends(attention, FusedAttention, (attention.LayerNorm,), (attention.dropout,))


def _of_bert(self, hidden_states: torch.Tensor, input_tensor: torch.Tensor) -> torch.Tensor:
    hidden_states = self.dense(hidden_states)
    hidden_states = self.dropout(hidden_states)
    hidden_states = self.LayerNorm(hidden_states + input_tensor)
    return hidden_states


def _of_nomic(self, hidden_states, attention_mask=None, position_embeddings=None, **kwargs):
    residual = hidden_states
    attention_output, _ = self.self_attn(
        hidden_states,
        attention_mask=attention_mask,
        position_embeddings=position_embeddings,
        **kwargs,
    )
    hidden_states = residual + self.post_attention_dropout(attention_output)
    hidden_states = self.post_attention_layernorm(hidden_states)

    residual = hidden_states
    hidden_states = self.mlp(hidden_states)
    hidden_states = residual + self.post_mlp_dropout(hidden_states)
    hidden_states = self.post_mlp_layernorm(hidden_states)
    return hidden_states


_NOMIC = ("post_attention_dropout", "post_mlp_dropout"), ("post_attention_layernorm", "post_mlp_layernorm")


def _fits(module: torch.nn.Module, pattern: Any, dropouts: tuple[str, ...], norms: tuple[str, ...]) -> bool:
    """Whether the forward pass of `module` is `pattern`, with plain dropouts and norms of these names."""
    if "forward" in vars(module) or isinstance(module, FUSED) or not same_code(_code_of(module), pattern):
        return False
    return _known([getattr(module, name, None) for name in dropouts], [getattr(module, name, None) for name in norms])


def _code_of(module: torch.nn.Module) -> Any:
    """The forward pass of `module`, without what LastLayerSubset lays over a layer, and transformers 5.24 around it."""
    forward = stock_class(type(module)).forward
    return inspect.unwrap(forward) if stock_forward(module) else forward


def _layers_of_distilbert(module: torch.nn.Module) -> list[torch.nn.Module]:
    """Of a DistilBERT encoder the layers that are transformers' own, with plain norms and dropouts; else none."""
    stack = stack_of(module)
    if stack is None or module.config.model_type not in DISTILBERT:
        return []
    return [
        layer
        for layer in layers_of(stack)
        if not isinstance(layer, FusedLayer)
        and "forward" not in vars(layer)
        and all(stock_forward(m) for m in (layer, layer.ffn))
        and _known([layer.ffn.dropout], [layer.sa_layer_norm, layer.output_layer_norm])
    ]


def _attentions_of_mpnet(module: torch.nn.Module) -> list[torch.nn.Module]:
    """Of an MPNet encoder what is around each attention, and ends as BERT's does in code of its own; else none."""
    stack = stack_of(module)
    if stack is None or module.config.model_type not in MPNET:
        return []
    around = (layer.attention for layer in layers_of(stack) if not isinstance(layer.attention, FusedAttention))
    return [m for m in around if stock_forward(m) and _known([m.dropout], [m.LayerNorm])]


def _known(dropouts: list[torch.nn.Module | None], norms: list[torch.nn.Module | None]) -> bool:
    """Whether they are dropouts and norms of a row, of classes whose meaning is known."""
    kinds = [isinstance(m, torch.nn.Dropout) for m in dropouts] + [isinstance(m, torch.nn.LayerNorm) for m in norms]
    if not all(kinds) or not all(type(m).__module__.startswith(_KNOWN) for m in (*dropouts, *norms)):
        return False
    return all(len(n.normalized_shape) == 1 and n.weight is not None and n.bias is not None for n in norms)


class NormOfBlock(torch.nn.LayerNorm):
    """Computed by the block that owns it."""


class DropoutOfBlock(torch.nn.Dropout):
    """Computed by the block that owns it. So named: many look for modules whose class begins with "Dropout"."""


def _still_ours(dropouts: tuple[torch.nn.Module, ...], norms: tuple[torch.nn.Module, ...]) -> bool:
    """Whether they are what was put there, and nobody listens. Another norm, or one in an adapter, is called."""
    parts = [*((dropout, DropoutOfBlock) for dropout in dropouts), *((norm, NormOfBlock) for norm in norms)]
    return all(type(part) is cls and not hooked(part) for part, cls in parts)


class FusedEnd:
    """Mixed into `BertSelfOutput`, `BertOutput` and what computes the same."""

    def forward(self, hidden_states: torch.Tensor, input_tensor: torch.Tensor) -> torch.Tensor:
        norm, dropout = self.LayerNorm, self.dropout
        if not (_still_ours((dropout,), (norm,)) and plain(hidden_states) and plain(input_tensor)):
            return super().forward(hidden_states, input_tensor)
        return _end(*_product(self.dense, hidden_states), input_tensor, norm, dropout)


class FusedAttention:
    """Mixed into `MPNetAttention`, whose projection is within its attention, and adds its bias there."""

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any):
        norm, dropout = self.LayerNorm, self.dropout
        if not (_still_ours((dropout,), (norm,)) and plain(hidden_states)):
            return super().forward(hidden_states, *args, **kwargs)
        attended, *weights = self.attn(hidden_states, *args, **kwargs)
        return (_end(attended, None, hidden_states, norm, dropout), *weights)


class FusedLayer:
    """Mixed into DistilBERT's `TransformerBlock`, whose own forward pass adds before it calls its norms."""

    def forward(self, *args: Any, **kwargs: Any):
        ffn = self.ffn
        ours = _still_ours((ffn.dropout,), (self.sa_layer_norm, self.output_layer_norm)) and not hooked(ffn)
        weights = kwargs.get("output_attentions") or any(argument is True for argument in args)
        first = "first_only" in kwargs  # asked by LastLayerSubset, which may lie beneath
        if first or not ours or weights or not args or not plain(args[0]) or ffn.chunk_size_feed_forward:
            return super().forward(*args, **kwargs)
        attended = _end(distilbert_attention(self, *args, **kwargs), None, args[0], self.sa_layer_norm)
        by_kernel = getattr(ffn, "activated", None)  # of FusedBiasGELU
        wide = ffn.activation(ffn.lin1(attended)) if by_kernel is None else by_kernel(attended)
        hidden, bias = _product(ffn.lin2, wide)
        return layer_result(_end(hidden, bias, attended, self.output_layer_norm, ffn.dropout))


class FusedNomicLayer:
    """Mixed into `NomicBertLayer` and what computes the same, whose own forward pass adds before it calls its norms."""

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any):
        norms = self.post_attention_layernorm, self.post_mlp_layernorm
        dropouts = self.post_attention_dropout, self.post_mlp_dropout
        first = "first_only" in kwargs  # asked by LastLayerSubset, which may lie beneath
        if first or args or not _still_ours(dropouts, norms) or not plain(hidden_states):
            return super().forward(hidden_states, *args, **kwargs)
        attended = _end(self.self_attn(hidden_states, **kwargs)[0], None, hidden_states, norms[0], dropouts[0])
        return _end(self.mlp(attended), None, attended, norms[1], dropouts[1])


FUSED = (FusedEnd, FusedAttention, FusedLayer, FusedNomicLayer)


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
