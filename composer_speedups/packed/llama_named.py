"""Nomic BERT, Jina embeddings v3, GTE and EuroBERT: what `Unpadding` and `LastLayerSubset` mix into their modules.

Encoders whose modules have Llama's names (`layers`, `self_attn`, `q_proj`, ...), which transformers has from 5 on.
Positions are rotations of queries and keys, which the encoder computes and gives to its layers. The first three have
BERT's norms, behind what they follow; EuroBERT has Llama's, before it, and several heads may share keys and values.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.modeling_outputs import BaseModelOutputWithPooling

from composer_speedups.compat import attention_dropout
from composer_speedups.families import EUROBERT
from composer_speedups.joint_linear import joint_linear
from composer_speedups.packed.bert import PackedBert, pack_masked_head
from composer_speedups.packed.encoder import PackedAttention, PackedEncoder, for_compiled
from composer_speedups.packed.first import FirstOnly, attend
from composer_speedups.packed.modernbert import Rotations, turned
from composer_speedups.packed.packing import Packing
from composer_speedups.surgery import mix_in

__all__ = ["FirstOfEuroBert", "FirstOfNomicBert", "pack_llama_named"]


def pack_llama_named(encoder: torch.nn.Module, owner: torch.nn.Module | None) -> int:
    """Let `encoder`, and the head of `owner` where one works on packed tokens, do so; return its attention layers."""
    mix_in(_EuroBert if encoder.config.model_type in EUROBERT else _NomicBert, encoder)
    for layer in encoder.layers:
        mix_in(_Attention, layer.self_attn)
    pack_masked_head(encoder, owner)
    return len(encoder.layers)


class _RunsLayers:
    """What both encoders do between embeddings and output."""

    def through_layers(self, hidden: torch.Tensor, positions: torch.Tensor | None, packing: Packing) -> torch.Tensor:
        """What the layers make of `hidden`, [total, width]; `positions` are those of the padded batch, if given."""
        if positions is None:
            positions = torch.arange(packing.length, device=hidden.device)[None]
        like = hidden.new_empty(0, dtype=torch.promote_types(hidden.dtype, torch.float32))  # whose type they will have
        rotations = tuple(packing.pack(x) for x in self.rotary_emb(like, positions))
        hidden = for_compiled(hidden, self.layers)
        for layer in self.layers[: self.config.num_hidden_layers]:
            hidden = layer(hidden, attention_mask=packing, position_embeddings=rotations)
        return hidden


class _NomicBert(_RunsLayers, PackedBert):
    packed_output = BaseModelOutputWithPooling

    def forward(
        self, input_ids=None, attention_mask=None, token_type_ids=None, position_ids=None, *args: Any, **kwargs: Any
    ):
        packing = self.packing_of(input_ids, attention_mask, args, kwargs)
        if packing is None:
            return super().forward(input_ids, attention_mask, token_type_ids, position_ids, *args, **kwargs)
        types = None if token_type_ids is None else packing.pack(token_type_ids)
        hidden = self.embeddings(input_ids=packing.pack(input_ids), token_type_ids=types)
        return self.finished(self.through_layers(hidden, position_ids, packing), self.layers, packing, kwargs)


class _EuroBert(_RunsLayers, PackedEncoder):
    packed_takes = ("position_ids",)

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, *args: Any, **kwargs: Any):
        packing = self.packing_of(input_ids, attention_mask, args, kwargs)
        if packing is None:
            return super().forward(input_ids, attention_mask, position_ids, *args, **kwargs)
        hidden = self.through_layers(self.embed_tokens(packing.pack(input_ids)), position_ids, packing)
        return self.output(self.norm(hidden), self.layers, packing, kwargs)


class _Attention(PackedAttention):
    @property
    def attention_head_size(self) -> int:
        return self.head_dim

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any):
        packing = kwargs.get("attention_mask")
        if not isinstance(packing, Packing):
            return super().forward(hidden_states, *args, **kwargs)
        q, k, v = self.project(hidden_states)
        q, k = turned(self, kwargs["position_embeddings"], q, k)
        return self.o_proj(self.attend((q, *_for_every_head(self, k, v)), packing)), None

    def projections(self) -> tuple[torch.nn.Module, ...]:
        return self.q_proj, self.k_proj, self.v_proj


class _First(FirstOnly):
    def worked_around(self) -> tuple[torch.nn.Module, ...]:
        return (self.self_attn,)


class FirstOfNomicBert(_First):
    """Mixed into the last layer of those with norms behind what they follow."""

    def compute_first(
        self, first: torch.Tensor, hidden_states: torch.Tensor, mask: Any, given: dict[str, Any]
    ) -> torch.Tensor:
        attended = _attended(self.self_attn, first, hidden_states, mask, given["position_embeddings"])
        attended = self.post_attention_layernorm(first + self.post_attention_dropout(attended))
        return self.post_mlp_layernorm(attended + self.post_mlp_dropout(self.mlp(attended)))


class FirstOfEuroBert(_First):
    """Mixed into the last layer, whose norms come before what they feed: all tokens need the first of them."""

    def compute_first(
        self, first: torch.Tensor, hidden_states: torch.Tensor, mask: Any, given: dict[str, Any]
    ) -> torch.Tensor:
        normed = self.input_layernorm(hidden_states)
        attended = first + _attended(self.self_attn, _first(normed, mask), normed, mask, given["position_embeddings"])
        return attended + self.mlp(self.post_attention_layernorm(attended))


def _attended(
    attention: torch.nn.Module, first: torch.Tensor, hidden: torch.Tensor, mask: Any, rotations: Rotations
) -> torch.Tensor:
    """What `attention` makes of the tokens `first`, which look at all of `hidden`."""
    projected = attention.q_proj(first), *joint_linear((attention.k_proj, attention.v_proj), hidden)
    q, k, v = (x.unflatten(-1, (-1, attention.head_dim)) for x in projected)
    (q,), (k,) = turned(attention, tuple(_first(x, mask) for x in rotations), q), turned(attention, rotations, k)
    context = attend(q, *_for_every_head(attention, k, v), mask, attention_dropout(attention))
    return attention.o_proj(context)


def _first(x: torch.Tensor, mask: Any) -> torch.Tensor:
    """Of each row's tokens in `x`, padded or packed, the first."""
    return mask.first(x) if isinstance(mask, Packing) else x[:, :1]


def _for_every_head(attention: torch.nn.Module, *tensors: torch.Tensor) -> list[torch.Tensor]:
    """Keys and values [..., heads, width of a head], those that several heads share once for each of them."""
    sharing = getattr(attention, "num_key_value_groups", 1)
    return [x if sharing == 1 else x.repeat_interleave(sharing, -2) for x in tensors]
