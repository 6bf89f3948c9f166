"""MPNet: what `Unpadding` and `LastLayerSubset` mix into its modules.

BERT's modules but for its attention, which adds a number for the distance of two tokens to their score. Its encoder
makes those for a padded batch, so packed, its layers are run from here, with the table that the numbers are from.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes
from transformers.modeling_outputs import BaseModelOutput, BaseModelOutputWithPooling
from transformers.models.mpnet.modeling_mpnet import MPNetEncoder

from composer_speedups.compat import MPNET_AFTER_MASK, attention_dropout
from composer_speedups.first_request import asked_for_first
from composer_speedups.joint_linear import joint_linear
from composer_speedups.kernels.disentangled import Places, in_c
from composer_speedups.kernels.distance_bias import distance_biased_attention, padded_bias
from composer_speedups.kernels.tensors import compute_dtype
from composer_speedups.packed.bert import PackedBert, PackedBertAttention, pack_parts
from composer_speedups.packed.encoder import compiled
from composer_speedups.packed.first import FirstOnly, attend, of_keys, with_one_more
from composer_speedups.packed.packing import Packing
from composer_speedups.surgery import mix_in

__all__ = ["FirstOfMPNet", "pack_mpnet"]

_AT = MPNET_AFTER_MASK.index("position_bias")
_BUCKETS = 32  # of distances: the model has as many whatever its configuration says
_REACH = 64  # distances are known up to a multiple of it: so there are few lists of them


def pack_mpnet(encoder: torch.nn.Module, owner: torch.nn.Module | None) -> int:
    """Let `encoder`, and the head of `owner` where one works on packed tokens, do so; return its attention layers."""
    mix_in(_Stack, encoder.encoder)
    return pack_parts(encoder, owner, _Encoder, _Attention)


class _Encoder(PackedBert):
    packed_whole_rows = True  # distances count the padding between two tokens
    packed_output = BaseModelOutputWithPooling

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, *args: Any, **kwargs: Any):
        packing = self.packing_of(input_ids, attention_mask, args, kwargs)
        if packing is None:
            return super().forward(input_ids, attention_mask, position_ids, *args, **kwargs)
        return self.packed(packing, input_ids, None, position_ids, kwargs)

    @torch.compiler.disable
    def packing_of(self, input_ids, *rest: Any) -> Packing | None:
        packing = super().packing_of(input_ids, *rest)
        if packing is None:
            return None
        reach = -(-packing.lengths.longest // _REACH) * _REACH
        return packing._replace(places=_places(reach, packing.lengths.cumulative.device))


class _Stack:
    """Mixed into the module that runs the layers: given a `Packing` as mask, hidden states are [total, width]."""

    def forward(self, hidden_states: torch.Tensor, attention_mask=None, *args: Any, **kwargs: Any):
        if not isinstance(attention_mask, Packing):
            return super().forward(hidden_states, attention_mask, *args, **kwargs)
        buckets = torch.arange(_BUCKETS, device=hidden_states.device)
        hidden, table = hidden_states, self.relative_attention_bias(buckets).t()
        bias = self.bias_for_all(hidden, table, attention_mask)
        for layer in self.layer:
            position_bias = table if asked_for_first(layer) else bias
            # By their order: reentrant checkpointing gives no gradient to what comes by name.
            hidden = layer(hidden, attention_mask, *[None] * _AT, position_bias)[0]
        return BaseModelOutput(last_hidden_state=hidden)

    def bias_for_all(self, hidden: torch.Tensor, table: torch.Tensor, packing: Packing) -> torch.Tensor:
        """`table`, or what it is for padded sequences, of which else each layer would make and keep its own."""
        attention, dtype = self.layer[0].attention.attn, compute_dtype(hidden)
        queries = hidden.new_empty(1, attention.num_attention_heads, attention.attention_head_size, dtype=dtype)
        if not compiled(self.layer) and in_c(queries, queries, queries):
            return table
        return padded_bias(table, packing.places, packing.lengths, dtype)


class _Attention(PackedBertAttention):
    def packed(self, hidden_states: torch.Tensor, packing: Packing, *args: Any, **kwargs: Any) -> tuple:
        table = kwargs["position_bias"] if "position_bias" in kwargs else args[_AT]
        q, k, v = self.project(hidden_states)
        dropout, scale = attention_dropout(self), q.shape[-1] ** -0.5
        out = distance_biased_attention(q, k, v, table, packing.places, packing.lengths, dropout, scale)
        return (self.o(out.flatten(1)),)

    def kernel(self, queries: torch.Tensor) -> str:
        return super().kernel(queries) if in_c(queries, queries, queries) else "padded sdpa"

    def projections(self) -> tuple[torch.nn.Module, torch.nn.Module, torch.nn.Module]:
        return self.q, self.k, self.v


class FirstOfMPNet(FirstOnly):
    """Mixed into the last layer, which is given what distances add to scores."""

    def forward(self, hidden_states: torch.Tensor, attention_mask=None, *args: Any, **kwargs: Any):
        for i, value in enumerate(args):
            kwargs[MPNET_AFTER_MASK[i]] = value
        return super().forward(hidden_states, attention_mask, **kwargs)

    @staticmethod
    def result(hidden_states: torch.Tensor) -> tuple[torch.Tensor]:
        return (hidden_states,)  # in every version of transformers

    def worked_around(self) -> tuple[torch.nn.Module, ...]:
        return self.attention, self.attention.attn, self.attention.attn.dropout

    def compute_first(
        self, first: torch.Tensor, hidden_states: torch.Tensor, mask: Any, given: dict[str, Any]
    ) -> torch.Tensor:
        """Packed, what is added to the scores of one query a row is a number more that each key has."""
        attention, bias = self.attention.attn, given["position_bias"]
        projected = attention.q(first), *joint_linear((attention.k, attention.v), hidden_states)
        q, k, v = (x.unflatten(-1, (-1, attention.attention_head_size)) for x in projected)
        width, dropout = q.shape[-1], attention_dropout(attention)
        scale = width**-0.5
        if isinstance(mask, Packing):
            back = torch.arange(mask.lengths.longest, device=hidden_states.device)
            more = bias[:, mask.places.rows[mask.places.reach - back]].t() / scale
            q, k, v = with_one_more(q, k, v, of_keys(more, mask, len(k))[..., None])
            context = attend(q, k, v, mask, dropout, scale).unflatten(-1, (-1, v.shape[-1]))[..., :width].flatten(-2)
        else:
            added = bias[:, :, :1].to(q.dtype)
            if mask is not None:
                mask = mask[:, :, :1]
                least = torch.finfo(q.dtype).min
                added = added.masked_fill(~mask, least) if mask.dtype == torch.bool else added + mask
            context = attend(q, k, v, added, dropout, scale)
        attended = self.attention.LayerNorm(self.attention.dropout(attention.o(context)) + first)
        return self.output(self.intermediate(attended), attended)


@cache
def _places(reach: int, device: torch.device) -> Places:
    """Which column of the table stands for which distance."""
    with _disable_current_modes():  # a dry run's, where tensors have no numbers
        distances = torch.arange(-reach, reach + 1, device="cpu")  # of query and key; the model counts key less query
        rows = MPNetEncoder.relative_position_bucket(-distances, num_buckets=_BUCKETS)
        return Places(rows.int().to(device), reach, (0, _BUCKETS))
