"""A last layer that computes each row's first token only: what `LastLayerSubset` mixes into it, for each family."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F

from composer_speedups.compat import MPNET_AFTER_MASK, attention_dropout, layer_result
from composer_speedups.families import BERT_LIKE, DEBERTA, DISTILBERT, ESM, MODERNBERT, MPNET
from composer_speedups.first_request import with_request
from composer_speedups.joint_linear import joint_linear, only_linear, part_of_linear
from composer_speedups.kernels.sdpa import padded_attention
from composer_speedups.kernels.varlen_attention import varlen_attention
from composer_speedups.packed.deberta import of_distances, scale_of
from composer_speedups.packed.esm import esm_rotations, esm_turned
from composer_speedups.packed.modernbert import rotations_of, turned
from composer_speedups.packed.packing import Packing
from composer_speedups.surgery import hooked, known_code

__all__ = ["FIRST_OF", "FirstOnly"]

# What a layer may be given besides, and then is computed whole.
_EXTRAS = ("head_mask", "encoder_hidden_states", "past_key_value", "query_states", "output_attentions")
_FILLED = 16  # numbers more in each head, of which one is needed: a multiple of what kernels want


class FirstOnly:
    """Mixed into a layer: [rows, length, width] -> [rows, 1, width], or packed, [total, width] -> [rows, width]."""

    masks_are_rows = False  # whether a mask of [rows, length] says which tokens are real

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(*args, **with_request(self, kwargs))

    def forward(
        self, hidden_states: torch.Tensor, attention_mask=None, *args: Any, first_only: bool = False, **kwargs: Any
    ):
        extras = (*args, *map(kwargs.get, _EXTRAS))
        mask = attention_mask
        if first_only and self.masks_are_rows and isinstance(mask, torch.Tensor) and mask.dim() == 2:
            least = torch.finfo(hidden_states.dtype).min
            mask = hidden_states.new_zeros(mask.shape).masked_fill(mask == 0, least)[:, None, None]
        known = mask is None or isinstance(mask, Packing) or (isinstance(mask, torch.Tensor) and mask.dim() == 4)
        if not first_only or not known or any(extra is not None and extra is not False for extra in extras):
            return super().forward(hidden_states, attention_mask, *args, **kwargs)
        first = mask.first(hidden_states) if isinstance(mask, Packing) else hidden_states[:, :1]
        return self.result(self.compute_first(first, hidden_states, mask, kwargs))

    @staticmethod
    def result(hidden_states: torch.Tensor) -> Any:
        """What such a layer returns."""
        return layer_result(hidden_states)

    def must_be_whole(self) -> bool:
        """Whether a module that is not called here, but is in the whole layer, is listened to, or somebody's own."""
        return any(hooked(part) or not known_code(type(part)) for part in self.worked_around())

    def worked_around(self) -> tuple[torch.nn.Module, ...]:
        """Those modules."""
        raise NotImplementedError

    def compute_first(
        self, first: torch.Tensor, hidden_states: torch.Tensor, mask: Any, given: dict[str, Any]
    ) -> torch.Tensor:
        """The layer's output for the tokens `first` of `hidden_states`; `given` are its further arguments by name."""
        raise NotImplementedError


class _FirstOfBert(FirstOnly):
    def worked_around(self) -> tuple[torch.nn.Module, ...]:
        return self.attention, self.attention.self, self.attention.self.dropout

    def compute_first(
        self, first: torch.Tensor, hidden_states: torch.Tensor, mask: Any, given: dict[str, Any]
    ) -> torch.Tensor:
        attention = self.attention.self
        keys_and_values = joint_linear((attention.key, attention.value), hidden_states)
        context = _context(attention, attention.query(first), keys_and_values, mask)
        attended = self.attention.output(context, first)
        return self.output(self.intermediate(attended), attended)


class _FirstOfDeberta(_FirstOfBert):
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
            pos_key, pos_query = of_distances(attention, self.distances(mask, given))
            more = torch.zeros_like(k[..., :1])
            if pos_query is not None:
                more = (k * _of_keys(pos_query, mask, len(k))).sum(-1, keepdim=True)
            k = k if pos_key is None else k + _of_keys(pos_key, mask, len(k))
            q, k, v = _with_one_more(q, k, v, more)
        dropout, scale = attention_dropout(attention), scale_of(attention)
        # float16 has no room for three products before they are scaled; by a power of two nothing is rounded.
        first_part = 2.0 ** math.floor(math.log2(scale))
        q, scale = q * first_part, scale / first_part
        if isinstance(mask, Packing):
            context = _attend(q, k, v, mask, dropout, scale)
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


class _FirstOfDistilBert(FirstOnly):
    masks_are_rows = True  # in eager attention of transformers 4.53

    def must_be_whole(self) -> bool:
        return super().must_be_whole() or bool(self.ffn.chunk_size_feed_forward)  # it would cut one token

    def worked_around(self) -> tuple[torch.nn.Module, ...]:
        return self.attention, self.attention.dropout

    def compute_first(
        self, first: torch.Tensor, hidden_states: torch.Tensor, mask: Any, given: dict[str, Any]
    ) -> torch.Tensor:
        attention = self.attention
        keys_and_values = joint_linear((attention.k_lin, attention.v_lin), hidden_states)
        context = _context(attention, attention.q_lin(first), keys_and_values, mask)
        attended = self.sa_layer_norm(attention.out_lin(context) + first)
        return self.output_layer_norm(self.ffn(attended) + attended)


class _FirstOfEsm(FirstOnly):
    def worked_around(self) -> tuple[torch.nn.Module, ...]:
        inside = (getattr(self.attention.self, name, None) for name in ("dropout", "rotary_embeddings"))
        return self.attention, self.attention.self, *(m for m in inside if isinstance(m, torch.nn.Module))

    def compute_first(
        self, first: torch.Tensor, hidden_states: torch.Tensor, mask: Any, given: dict[str, Any]
    ) -> torch.Tensor:
        attention, packed = self.attention.self, isinstance(mask, Packing)
        normed = self.attention.LayerNorm(hidden_states)
        normed_first = mask.first(normed) if packed else normed[:, :1]
        projected = attention.query(normed_first), *joint_linear((attention.key, attention.value), normed)
        q, k, v = (x.unflatten(-1, (-1, attention.attention_head_size)) for x in projected)
        if attention.position_embedding_type == "rotary":
            rotations = mask.rotations if packed else given.get("position_embeddings")
            if rotations is None:  # transformers 4.53
                rotations = esm_rotations(attention, k, k.shape[1])
            rotations_first = [mask.first(x) if packed else x[:, :1] for x in rotations]
            (q,), (k,) = esm_turned(attention, rotations_first, q), esm_turned(attention, rotations, k)
        context = _attend(q, k, v, mask, attention_dropout(attention))
        return self.feed_forward_chunk(self.attention.output(context, first))


class _FirstOfModernBert(FirstOnly):
    def must_be_whole(self) -> bool:
        return super().must_be_whole() or not only_linear(self.attn.Wqkv)

    def worked_around(self) -> tuple[torch.nn.Module, ...]:
        return (self.attn,)

    def compute_first(
        self, first: torch.Tensor, hidden_states: torch.Tensor, mask: Any, given: dict[str, Any]
    ) -> torch.Tensor:
        attention, width = self.attn, hidden_states.shape[-1]
        normed, packed = self.attn_norm(hidden_states), isinstance(mask, Packing)
        normed_first = mask.first(normed) if packed else normed[:, :1]
        query = part_of_linear(attention.Wqkv, normed_first, slice(width))
        projected = query, *part_of_linear(attention.Wqkv, normed, slice(width, None)).chunk(2, -1)
        if "position_embeddings" in given or packed:
            rotations = rotations_of(given)
        else:  # transformers 4.53
            rotations = attention.rotary_emb(normed, position_ids=given["position_ids"])
        rotations_first = [mask.first(x) if packed else x[:, :1] for x in rotations]
        q, k, v = (x.unflatten(-1, (-1, attention.head_dim)) for x in projected)
        (q,), (k,) = turned(attention, rotations_first, q), turned(attention, rotations, k)
        context = _attend(q, k, v, mask, attention.attention_dropout if attention.training else 0.0)
        attended = first + attention.out_drop(attention.Wo(context))
        return attended + self.mlp(self.mlp_norm(attended))


class _FirstOfMPNet(FirstOnly):
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
            q, k, v = _with_one_more(q, k, v, _of_keys(more, mask, len(k))[..., None])
            context = _attend(q, k, v, mask, dropout, scale).unflatten(-1, (-1, v.shape[-1]))[..., :width].flatten(-2)
        else:
            added = bias[:, :, :1].to(q.dtype)
            if mask is not None:
                mask = mask[:, :, :1]
                least = torch.finfo(q.dtype).min
                added = added.masked_fill(~mask, least) if mask.dtype == torch.bool else added + mask
            context = _attend(q, k, v, added, dropout, scale)
        attended = self.attention.LayerNorm(self.attention.dropout(attention.o(context)) + first)
        return self.output(self.intermediate(attended), attended)


def _of_keys(positions: torch.Tensor, mask: Any, tokens: int) -> torch.Tensor:
    """[length, ...], of places in a row -> for each key its own: as it is, or packed, [tokens, ...]."""
    if not isinstance(mask, Packing):
        return positions
    token, ends = torch.arange(tokens, device=positions.device), mask.lengths.cumulative
    return positions[token - ends[torch.bucketize(token, ends[1:], right=True)]]


def _with_one_more(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, more: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Each head wider, so that `more` [..., 1] is added to the product of any query with the key that it is of."""
    k, v = F.pad(torch.cat((k, more.to(k.dtype)), -1), (0, _FILLED - 1)), F.pad(v, (0, _FILLED))
    return F.pad(torch.cat((q, torch.ones_like(q[..., :1])), -1), (0, _FILLED - 1)), k, v


def _context(
    attention: torch.nn.Module, query: torch.Tensor, keys_and_values: tuple[torch.Tensor, ...], mask: Any
) -> torch.Tensor:
    """What attention as BERT has it, with nothing between its projections and the scores, makes of them."""
    q, k, v = (x.unflatten(-1, (-1, attention.attention_head_size)) for x in (query, *keys_and_values))
    return _attend(q, k, v, mask, attention_dropout(attention))


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any, dropout: float, scale: float | None = None
) -> torch.Tensor:
    """[rows, 1, width] out of [rows, length, heads, width of a head], or packed, [rows, width] out of [total, ...]."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if isinstance(mask, Packing):
        return varlen_attention(q, k, v, mask.ones(), mask.lengths, dropout, scale).flatten(-2)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    if mask is None or mask.dtype == torch.bool:
        mask = None if mask is None else mask[:, :, :1]
        context = padded_attention(q, k, v, mask, dropout, scale)
    else:
        # For a row that is nothing but padding, whose scores are all the least number there is, PyTorch's kernel for
        # CPUs has wrong gradients; and one query a row is little to compute.
        scores = q @ k.transpose(2, 3) * scale + mask[:, :, :1]
        context = F.dropout(F.softmax(scores, -1), dropout) @ v
    return context.transpose(1, 2).flatten(-2)


FIRST_OF: dict[str, type[FirstOnly]] = {  # by family, whose last layer may be cut
    **dict.fromkeys(BERT_LIKE, _FirstOfBert),
    **dict.fromkeys(DEBERTA, _FirstOfDeberta),
    **dict.fromkeys(DISTILBERT, _FirstOfDistilBert),
    **dict.fromkeys(ESM, _FirstOfEsm),
    **dict.fromkeys(MODERNBERT, _FirstOfModernBert),
    **dict.fromkeys(MPNET, _FirstOfMPNet),
}
