"""LastLayerSubset: the last layer computes only the token that the head reads.

**Why it is faster.** A classifier reads the first token's hidden state. The last layer's other outputs are computed
and thrown away. Keys and values are still needed for all tokens; queries, attention output, both norms and the
whole feed-forward block are needed for one token a row. Per token a layer of BERT spends 2 of its 12 squares of the
width on keys and values: about ten twelfths of the last layer go.

**Numerics.** The same values and gradients, to rounding; nothing that is left out had a gradient.

**When it pays.** With few layers, much (of 4 layers a fifth), with 12 about 7 %. Dropout draws fewer numbers.

**Needs.** A sequence classifier or multiple choice model of BERT, RoBERTa, XLM-RoBERTa, CamemBERT, ELECTRA or
DistilBERT with transformers' own `forward`: one of your own may read other tokens. Heads that read every token (MLM,
token classification, question answering) and bare encoders have nothing to leave out: the report says so.
`output_hidden_states` and `output_attentions` compute the whole layer, and so does calling the encoder itself (but not
with gradient checkpointing and gradients); while the classifier runs, its `last_hidden_state` is [rows, 1, width]. With
a hook on the last layer's attention (Composer sets some to look for a microbatch size under FSDP) it is computed whole,
too; hooks on what follows it see one token a row. Goes together with `Unpadding`.

Source: computing the last layer for [CLS] alone, as in several BERT inference servers.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from composer.core import State
from composer.loggers import Logger

from composer_speedups.compat import layer_result
from composer_speedups.families import DISTILBERT, READ_FIRST, UNPADDABLE, has_head, layers_of, positions
from composer_speedups.joint_linear import joint_linear
from composer_speedups.kernels.varlen_attention import varlen_attention
from composer_speedups.packing import Packing
from composer_speedups.speedup import SpeedUp, Stage
from composer_speedups.surgery import hooked, mix_in, stock_forward

__all__ = ["LastLayerSubset", "apply_last_layer_subset"]


def apply_last_layer_subset(model: torch.nn.Module) -> int:
    """Let the last layer of every classifier in `model` compute its first token only; return how many classifiers.

    >>> from transformers import BertConfig, BertForSequenceClassification
    >>> config = BertConfig(hidden_size=8, num_attention_heads=2, num_hidden_layers=3, vocab_size=9)
    >>> bert = BertForSequenceClassification(config)
    >>> apply_last_layer_subset(bert), apply_last_layer_subset(bert)
    (1, 0)
    """
    owners = [(m, encoder) for m in model.modules() if (encoder := _encoder(m)) is not None]
    for owner, encoder in owners:
        mix_in(_Owner, owner)
        mix_in(_Stack, encoder)
        mix_in(_FirstOfDistilBert if owner.config.model_type in DISTILBERT else _FirstOfBert, encoder.layer[-1])
    return len(owners)


class LastLayerSubset(SpeedUp):
    """Apply `apply_last_layer_subset` at `Event.INIT`.

    >>> LastLayerSubset()
    LastLayerSubset()
    """

    stage = Stage.HEAD

    def __init__(self) -> None:
        pass

    def install(self, state: State, logger: Logger) -> None:
        count = apply_last_layer_subset(state.model)
        self.report(
            logger,
            count,
            f"no sequence classifier of {', '.join(UNPADDABLE)} with transformers' own forward in the model; other "
            "heads read every token",
        )


def _encoder(owner: torch.nn.Module) -> torch.nn.Module | None:
    """The stack of layers of the classifier `owner`, if its last layer may be cut."""
    config = getattr(owner, "config", None)
    if not (has_head(owner, READ_FIRST) and stock_forward(owner)):
        return None
    if getattr(config, "summary_type", "first") != "first":  # ELECTRA's multiple choice may take a mean
        return None
    encoder = layers_of(getattr(owner, getattr(owner, "base_model_prefix", ""), None))
    if (
        isinstance(owner, _Owner)
        or getattr(config, "is_decoder", False)
        or positions(config) != "absolute"
        or encoder is None
        or not encoder.layer
    ):
        return None
    return encoder


_IDS = ("input_ids", "attention_mask", "token_type_ids", "position_ids")  # a classifier's first arguments


class _Owner:
    """Mixed into a classifier: tells its encoder that the first tokens are enough, unless all were asked for."""

    def forward(self, *args: Any, **kwargs: Any):
        asked = (kwargs.get(name) for name in ("output_hidden_states", "output_attentions"))
        default = (self.config.output_hidden_states, self.config.output_attentions)
        whole = any(d if a is None else a for a, d in zip(asked, default, strict=True))
        stack = layers_of(self.base_model)
        last = stack.layer[-1]  # another one if somebody has cut the model, or built a new one of its class
        whole |= not isinstance(last, _FirstOnly) or any(map(hooked, last.worked_around()))
        stack.asked_for_first = not whole and len(args) <= len(_IDS)  # any further one could be either of them
        try:
            return super().forward(*args, **kwargs)
        finally:
            stack.asked_for_first = None


class _Stack:
    """Mixed into the stack of layers: called on anybody's behalf but the classifier's, it computes all tokens."""

    asked_for_first: bool | None = None  # by the classifier, while it runs

    def forward(self, *args: Any, **kwargs: Any):
        layer, asked = self.layer[-1], self.asked_for_first
        if not isinstance(layer, _FirstOnly):
            return super().forward(*args, **kwargs)
        before, layer.first_only = layer.first_only, bool(asked)
        try:
            return super().forward(*args, **kwargs)
        finally:  # what the classifier asked for holds when its call is over: checkpointing runs the layer again
            if asked is None:
                layer.first_only = before


class _FirstOnly:
    """Mixed into a layer: [rows, length, width] -> [rows, 1, width], or packed, [total, width] -> [rows, width]."""

    first_only = False
    masks_are_rows = False  # whether a mask of [rows, length] says which tokens are real

    def forward(self, hidden_states: torch.Tensor, attention_mask=None, *args: Any, **kwargs: Any):
        extras = (*args, *(kwargs.get(name) for name in ("head_mask", "encoder_hidden_states", "past_key_value")))
        mask = attention_mask
        if self.first_only and self.masks_are_rows and isinstance(mask, torch.Tensor) and mask.dim() == 2:
            least = torch.finfo(hidden_states.dtype).min
            mask = hidden_states.new_zeros(mask.shape).masked_fill(mask == 0, least)[:, None, None]
        unknown_mask = isinstance(mask, torch.Tensor) and mask.dim() != 4
        if not self.first_only or unknown_mask or any(extra is not None and extra is not False for extra in extras):
            return super().forward(hidden_states, attention_mask, *args, **kwargs)
        first = mask.first(hidden_states) if isinstance(mask, Packing) else hidden_states[:, :1]
        return layer_result(self.compute_first(first, hidden_states, mask))

    def worked_around(self) -> tuple[torch.nn.Module, ...]:
        """Modules that are not called here, but are in the whole layer."""
        raise NotImplementedError

    def compute_first(self, first: torch.Tensor, hidden_states: torch.Tensor, mask: Any) -> torch.Tensor:
        """The layer's output for the tokens `first` of `hidden_states`."""
        raise NotImplementedError


class _FirstOfBert(_FirstOnly):
    def worked_around(self) -> tuple[torch.nn.Module, ...]:
        return self.attention, self.attention.self, self.attention.self.dropout

    def compute_first(self, first: torch.Tensor, hidden_states: torch.Tensor, mask: Any) -> torch.Tensor:
        attention = self.attention.self
        keys_and_values = joint_linear((attention.key, attention.value), hidden_states)
        context = _attend(attention, attention.query(first), *keys_and_values, mask)
        attended = self.attention.output(context, first)
        return self.output(self.intermediate(attended), attended)


class _FirstOfDistilBert(_FirstOnly):
    masks_are_rows = True  # in eager attention of transformers 4.53

    def worked_around(self) -> tuple[torch.nn.Module, ...]:
        return self.attention, self.attention.dropout

    def compute_first(self, first: torch.Tensor, hidden_states: torch.Tensor, mask: Any) -> torch.Tensor:
        attention = self.attention
        keys_and_values = joint_linear((attention.k_lin, attention.v_lin), hidden_states)
        context = _attend(attention, attention.q_lin(first), *keys_and_values, mask)
        attended = self.sa_layer_norm(attention.out_lin(context) + first)
        return self.output_layer_norm(self.ffn(attended) + attended)


def _attend(
    attention: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any
) -> torch.Tensor:
    """[rows, 1, width] out of [rows, length, width], or packed, [rows, width] out of [total, width]."""
    dropout = attention.dropout.p if attention.training else 0.0
    q, k, v = (x.unflatten(-1, (-1, attention.attention_head_size)) for x in (query, key, value))
    if isinstance(mask, Packing):
        return varlen_attention(q, k, v, mask.ones(), mask.lengths, dropout).flatten(-2)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    if mask is None or mask.dtype == torch.bool:
        context = F.scaled_dot_product_attention(q, k, v, None if mask is None else mask[:, :, :1], dropout)
    else:
        # For a row that is nothing but padding, whose scores are all the least number there is, PyTorch's kernel for
        # CPUs has wrong gradients; and one query a row is little to compute.
        scores = q @ k.transpose(2, 3) * q.shape[-1] ** -0.5 + mask[:, :, :1]
        context = F.dropout(F.softmax(scores, -1), dropout) @ v
    return context.transpose(1, 2).flatten(-2)
