"""ESM, a BERT of proteins: what `Unpadding` and `LastLayerSubset` mix into its modules.

BERT's modules, with norms before what they feed. Its embeddings count the masked tokens of each row, so that they are
made of padded ids and packed afterwards, and those of padding are zeros. Positions are rotations of queries and keys in
ESM-2, and added in ESM-1b. In transformers 4.53 each layer's attention has its own rotations, the same in all; in 5.x
the encoder has them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from composer_speedups.compat import attention_dropout
from composer_speedups.joint_linear import joint_linear
from composer_speedups.kernels.rotary import rotary, serves
from composer_speedups.kernels.tensors import shape_only
from composer_speedups.packed.bert import PackedBert, PackedBertAttention, pack_parts
from composer_speedups.packed.first import FirstOnly, attend
from composer_speedups.packed.modernbert import Rotations, turned
from composer_speedups.packed.packing import Packing

__all__ = ["FirstOfEsm", "pack_esm", "turns_alike"]


def pack_esm(encoder: torch.nn.Module, owner: torch.nn.Module | None) -> int:
    """Let `encoder`, and the head of `owner` where one works on packed tokens, do so; return its attention layers."""
    return pack_parts(encoder, owner, _Encoder, _Attention)


def turns_alike(encoder: torch.nn.Module) -> bool:
    """Whether all layers turn queries and keys by the same angles, as those of every published model do.

    In a dry run and on the meta device, where they have no numbers, they do.
    """
    own = [m.inv_freq for m in encoder.modules() if hasattr(m, "inv_freq")]
    own = [x.cpu() for x in own if not (shape_only(x) or x.is_meta)]
    return all(torch.equal(own[0], other) for other in own[1:])


def _own_rotations(attention: torch.nn.Module, like: torch.Tensor, length: int) -> Rotations:
    """Cosine and sine, [1, length, width of a head], of an attention that has its own (transformers 4.53).

    As its own code makes them: in the dtype of its frequencies, of which a model that is bfloat16 itself has few bits.
    They are float32 at least then, as kernels want them.
    """
    frequencies = attention.rotary_embeddings.inv_freq.to(like.device)
    angles = torch.outer(torch.arange(length, device=like.device).type_as(frequencies), frequencies)
    angles = torch.cat((angles, angles), -1)[None]
    wide = torch.promote_types(frequencies.dtype, torch.float32)
    return angles.cos().to(wide), angles.sin().to(wide)


def _esm_turned(attention: torch.nn.Module, rotations: Rotations, *tensors: torch.Tensor) -> Sequence[torch.Tensor]:
    """Each of `tensors`, one or two, [..., tokens, heads, width of a head], turned to its positions, rounded once."""
    if not hasattr(attention, "rotary_embeddings"):
        return turned(attention, rotations, *tensors)
    return [rotary(x, *rotations) if serves(x, *rotations) else _rotated(x, *rotations) for x in tensors]


def _rotated(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """As transformers 4.53 does it."""
    half = x.shape[-1] // 2
    other = torch.cat((-x[..., half:], x[..., :half]), -1)
    return (x * cosine.unsqueeze(-2) + other * sine.unsqueeze(-2)).to(x.dtype)


class _Encoder(PackedBert):
    packed_takes = ("position_ids",)
    packed_embeddings = False

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, *args: Any, **kwargs: Any):
        packing = self.packing_of(input_ids, attention_mask, args, kwargs)
        if packing is None:
            return super().forward(input_ids, attention_mask, position_ids, *args, **kwargs)
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        hidden = packing.pack(self.embeddings(input_ids=input_ids, attention_mask=mask, position_ids=position_ids))
        rotations = self.rotations(hidden, position_ids, packing.length)
        if rotations is not None:
            packing = packing._replace(rotations=tuple(packing.pack(x) for x in rotations))
        return self.encoded(hidden, packing, kwargs)

    def rotations(self, like: torch.Tensor, positions: torch.Tensor | None, length: int) -> Rotations | None:
        """Cosine and sine, [rows or 1, length, width of a head]; None if positions are in the embeddings."""
        if self.embeddings.position_embedding_type != "rotary":
            return None
        if not hasattr(self, "rotary_embeddings"):  # 4.53, which turns by columns, whatever positions are given
            return _own_rotations(self.encoder.layer[0].attention.self, like, length)
        positions = torch.arange(length, device=like.device)[None] if positions is None else positions
        like = like.new_empty(0, dtype=torch.promote_types(like.dtype, torch.float32))  # whose type they will have
        return self.rotary_embeddings(like, positions)


class _Attention(PackedBertAttention):
    def packed(self, hidden_states: torch.Tensor, packing: Packing, *args: Any, **kwargs: Any) -> tuple:
        q, k, v = self.project(hidden_states)
        if packing.rotations is not None:
            # Queries are scaled with the scores, not before as in the stock code: to a rounding the same.
            q, k = _esm_turned(self, packing.rotations, q, k)
        return self.attend((q, k, v), packing), None


class FirstOfEsm(FirstOnly):
    """Mixed into the last layer, whose norms come before what they feed: all tokens need the first of them."""

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
                rotations = _own_rotations(attention, k, k.shape[1])
            rotations_first = [mask.first(x) if packed else x[:, :1] for x in rotations]
            (q,), (k,) = _esm_turned(attention, rotations_first, q), _esm_turned(attention, rotations, k)
        context = attend(q, k, v, mask, attention_dropout(attention))
        return self.feed_forward_chunk(self.attention.output(context, first))
