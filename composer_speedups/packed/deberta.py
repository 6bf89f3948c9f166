"""DeBERTa-v2 and -v3: what `Unpadding` and `LastLayerSubset` mix into their modules.

Their encoder makes its masks and its relative positions from the shape of a padded batch, so packed, its layers are run
from here, with what they need of both. All else is called as it is.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import _disable_current_modes
from transformers.modeling_outputs import BaseModelOutput
from transformers.models.deberta_v2.modeling_deberta_v2 import build_relative_position

from composer_speedups.compat import attention_dropout
from composer_speedups.joint_linear import joint_linear
from composer_speedups.kernels.disentangled import Places, disentangled_attention, in_c
from composer_speedups.kernels.varlen_attention import varlen_attention
from composer_speedups.packed.bert import FirstOfBert, PackedBertAttention, pack_parts
from composer_speedups.packed.encoder import PackedEncoder, for_compiled
from composer_speedups.packed.first import attend, of_keys, with_one_more
from composer_speedups.packed.packing import Packing
from composer_speedups.surgery import mix_in

__all__ = ["FirstOfDeberta", "pack_deberta"]

_KINDS = ("c2p", "p2c")  # content to position: queries meet distances; position to content: keys do
_REACH = 64  # distances are known up to a multiple of it: what is multiplied with them seldom changes its shape


def pack_deberta(encoder: torch.nn.Module, owner: torch.nn.Module | None) -> int:
    """Let `encoder`, and the head of `owner` where one works on packed tokens, do so; return its attention layers."""
    mix_in(_Stack, encoder.encoder)
    return pack_parts(encoder, owner, _Encoder, _Attention)


class _Encoder(PackedEncoder):
    packed_whole_rows = True  # distances count the padding between two tokens

    def forward(
        self, input_ids=None, attention_mask=None, token_type_ids=None, position_ids=None, *args: Any, **kwargs: Any
    ):
        packing = self.packing_of(input_ids, attention_mask, args, kwargs)
        if packing is None or self.z_steps > 1:
            return super().forward(input_ids, attention_mask, token_type_ids, position_ids, *args, **kwargs)
        ids = packing.pack(input_ids)[None]
        types = torch.zeros_like(ids) if token_type_ids is None else packing.pack(token_type_ids)[None]
        positions = None  # rows may be longer than there are any
        if self.embeddings.position_embeddings is not None:
            known = self.embeddings.position_ids[:, : packing.length] if position_ids is None else position_ids
            positions = packing.pack(known)[None]
        hidden = self.embeddings(input_ids=ids, token_type_ids=types, position_ids=positions).squeeze(0)
        hidden = self.encoder(for_compiled(hidden, self.encoder.layer), packing).last_hidden_state
        return self.output(hidden, self.encoder.layer, packing, kwargs)


class _Stack:
    """Mixed into the module that runs the layers: given a `Packing` as mask, hidden states are [total, width]."""

    def forward(self, hidden_states: torch.Tensor, attention_mask, *args: Any, **kwargs: Any):
        if not isinstance(attention_mask, Packing):
            return super().forward(hidden_states, attention_mask, *args, **kwargs)
        hidden, packing, distances = hidden_states, attention_mask, self.get_rel_embedding()
        places = None if distances is None else places_of(self, packing.lengths.longest, hidden.device)
        for layer in self.layer:
            # By their order: reentrant checkpointing gives no gradient to what comes by name.
            hidden = layer(hidden, packing, None, places, distances)[0]
        return BaseModelOutput(last_hidden_state=hidden)


class _Attention(PackedBertAttention):
    def packed(self, hidden_states: torch.Tensor, packing: Packing, *args: Any, **kwargs: Any) -> tuple:
        q, k, v = self.project(hidden_states)
        dropout, scale = attention_dropout(self), _scale_of(self)
        if not _kinds(self):
            out = varlen_attention(q, k, v, packing.lengths, packing.lengths, dropout, scale)
            return out.flatten(1), None
        places = kwargs["relative_pos"]
        distances = self.pos_dropout(kwargs["rel_embeddings"])[slice(*places.used)]
        positions = _of_distances(self, distances)
        return disentangled_attention(q, k, v, *positions, places, packing.lengths, dropout, scale).flatten(1), None

    def kernel(self, queries: torch.Tensor) -> str:
        kinds = len(_kinds(self))
        ours = kinds == 0 or (kinds == 2 and in_c(queries, queries, queries))
        return super().kernel(queries) if ours else "padded sdpa"

    def projections(self) -> tuple[torch.nn.Module, torch.nn.Module, torch.nn.Module]:
        return self.query_proj, self.key_proj, self.value_proj


class FirstOfDeberta(FirstOfBert):
    """The same, with products with the distances of a row's first token."""

    def forward(
        self, hidden_states: torch.Tensor, attention_mask, query_states=None, relative_pos=None, rel_embeddings=None,
        output_attentions: bool = False, first_only: bool = False,
    ):  # fmt: skip
        return super().forward(
            hidden_states,
            attention_mask,
            query_states=query_states,
            relative_pos=relative_pos,
            rel_embeddings=rel_embeddings,
            output_attentions=output_attentions,
            first_only=first_only,
        )

    @staticmethod
    def result(hidden_states: torch.Tensor) -> tuple[torch.Tensor, None]:
        return hidden_states, None  # in every version of transformers

    def compute_first(
        self, first: torch.Tensor, hidden_states: torch.Tensor, mask: Any, given: dict[str, Any]
    ) -> torch.Tensor:
        """Of one query a row, products with positions are part of the keys, and of one number more that each has."""
        attention = self.attention.self
        keys_and_values = joint_linear((attention.key_proj, attention.value_proj), hidden_states)
        projected = attention.query_proj(first), *keys_and_values
        q, k, v = (x.unflatten(-1, (-1, attention.attention_head_size)) for x in projected)
        width = q.shape[-1]
        if attention.relative_attention:
            pos_key, pos_query = _of_distances(attention, self.distances(mask, given))
            more = torch.zeros_like(k[..., :1])
            if pos_query is not None:
                more = (k * of_keys(pos_query, mask, len(k))).sum(-1, keepdim=True)
            k = k if pos_key is None else k + of_keys(pos_key, mask, len(k))
            q, k, v = with_one_more(q, k, v, more)
        dropout, scale = attention_dropout(attention), _scale_of(attention)
        # float16 has no room for three products before they are scaled; by a power of two nothing is rounded.
        first_part = 2.0 ** math.floor(math.log2(scale))
        q, scale = q * first_part, scale / first_part
        if isinstance(mask, Packing):
            context = attend(q, k, v, mask, dropout, scale)
        else:  # of pairs, 0 where one is padding; a row that begins with padding takes a mean, and has no gradient
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            scores = q @ k.mT * scale
            if mask is not None:
                scores = scores.masked_fill(mask[:, :, :1] == 0, torch.finfo(q.dtype).min)
            context = (F.dropout(F.softmax(scores, -1), dropout) @ v).transpose(1, 2).flatten(-2)
        context = context.unflatten(-1, (-1, v.shape[-1]))[..., :width].flatten(-2)
        attended = self.attention.output(context, first)
        return self.output(self.intermediate(attended), attended)

    def distances(self, mask: Any, given: dict[str, Any]) -> torch.Tensor:
        """[length, width]: the embeddings of the distances of a row's first token to all."""
        attention, embeddings, places = self.attention.self, given["rel_embeddings"], given["relative_pos"]
        if isinstance(mask, Packing):
            back = torch.arange(mask.lengths.longest, device=embeddings.device)
            rows = places.rows[places.reach - back] + places.used[0]
        else:
            span = attention.pos_ebd_size
            rows = (places[..., 0, :].flatten() + span).clamp(0, 2 * span - 1)
        return attention.pos_dropout(embeddings)[rows]


def _of_distances(
    attention: torch.nn.Module, distances: torch.Tensor
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """What queries and what keys meet of the embeddings `distances` [n, width]: [n, heads, width of a head] or None."""
    names = ("key_proj", "query_proj") if attention.share_att_key else ("pos_key_proj", "pos_query_proj")
    return tuple(
        getattr(attention, name)(distances).unflatten(-1, (-1, attention.attention_head_size))
        if kind in attention.pos_att_type
        else None
        for name, kind in zip(names, _KINDS, strict=True)
    )


def _scale_of(attention: torch.nn.Module) -> float:
    """Of its scores. The model takes the root in float32, whatever its type, and counts kinds that it may not use."""
    kinds = 1 + sum(kind in attention.pos_att_type for kind in _KINDS)
    return 1 / float(np.sqrt(np.float32(attention.attention_head_size * kinds)))


def _kinds(attention: torch.nn.Module) -> list[str]:
    """Of the products with distances that there may be, those that `attention` has."""
    return [kind for kind in _KINDS if kind in attention.pos_att_type] if attention.relative_attention else []


@torch.compiler.disable  # which would not see that they are cached
def places_of(stack: torch.nn.Module, longest: int, device: torch.device) -> Places:
    """Which embeddings of `stack`, the layers' owner, stand for the distances in sequences of up to `longest`."""
    buckets = max(stack.position_buckets, 0)
    return _places(buckets, stack.max_relative_positions, -(-longest // _REACH) * _REACH, device)


@cache
def _places(buckets: int, most: int, length: int, device: torch.device) -> Places:
    with _disable_current_modes():  # a dry run's, where tensors have no numbers
        tokens = torch.empty(length, 0, device="cpu")
        far = build_relative_position(tokens, tokens, buckets, most)[0]  # of query and key, as the model itself counts
        distances = torch.cat((far[0].flip(0), far[1:, 0]))  # from 1 - length to length - 1
        span = buckets or most
        rows = (distances + span).clamp(0, 2 * span - 1)
        low, high = int(rows.min()), int(rows.max()) + 1
        return Places((rows - low).int().to(device), length - 1, (low, high))
