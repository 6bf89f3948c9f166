"""ModernBERT: what `Unpadding` and `LastLayerSubset` mix into its modules.

Positions are rotations of queries and keys, and most layers see a window of tokens only. In transformers 4.53 each
layer's attention has its own rotations; in 5.x the encoder has them, and the layers are given what it computes.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from composer_speedups.compat import attention_dropout
from composer_speedups.joint_linear import only_linear, part_of_linear
from composer_speedups.kernels.rotary import rotary, serves
from composer_speedups.kernels.varlen_attention import varlen_attention
from composer_speedups.packed.encoder import PackedAttention, PackedEncoder, for_compiled
from composer_speedups.packed.first import FirstOnly, attend
from composer_speedups.packed.packing import Packing
from composer_speedups.surgery import mix_in

__all__ = ["FirstOfModernBert", "pack_modernbert", "turned", "unpads_itself", "window_of"]

Rotations = tuple[torch.Tensor, torch.Tensor]  # cosine and sine, [..., tokens, width of a head]


def pack_modernbert(encoder: torch.nn.Module, _owner: torch.nn.Module | None) -> int:
    """Let `encoder` work on packed tokens; return its attention layers. Its owner's head stays as it is."""
    encoder.packed_whole_rows = any(window_of(layer.attn) >= 0 for layer in encoder.layers)
    mix_in(_Encoder, encoder)
    for layer in encoder.layers:
        mix_in(_Attention, layer.attn)
    return len(encoder.layers)


def unpads_itself(encoder: torch.nn.Module) -> bool:
    """Whether transformers unpads, as 4.53 does with flash-attn, by rotations that know of nothing else."""
    return any(type(m).__name__ == "ModernBertUnpaddedRotaryEmbedding" for m in encoder.modules())


def window_of(attention: torch.nn.Module) -> int:
    """How many tokens to each side `attention` sees; -1 is all."""
    if hasattr(attention, "local_attention"):  # 4.53
        return attention.local_attention[0]
    return -1 if attention.sliding_window is None else attention.sliding_window - 1


def _rotations_of(given: dict[str, Any]) -> Rotations:
    """What `_Encoder` gives a layer, among its arguments by name."""
    return given["position_embeddings" if "position_embeddings" in given else "position_ids"]


def turned(attention: torch.nn.Module, rotations: Rotations, *tensors: torch.Tensor) -> list[torch.Tensor]:
    """Each of `tensors`, one or two, [..., tokens, heads, width of a head], turned to its positions.

    Where the kernel for CPUs does not serve, by transformers' own function for it. Rotations are float32 at least, and
    so is the product: it is rounded once.
    """
    if all(serves(x, *rotations) for x in tensors):
        return [rotary(x, *rotations) for x in tensors]
    homes = (sys.modules.get(cls.__module__) for cls in type(attention).__mro__)  # a subclass may be anybody's
    rotate = next(home.apply_rotary_pos_emb for home in homes if hasattr(home, "apply_rotary_pos_emb"))
    both = rotate(tensors[0], tensors[-1], *rotations, unsqueeze_dim=-2)  # it always wants two
    return [x.to(tensors[0].dtype) for x in both[: len(tensors)]]


class _Encoder(PackedEncoder):
    packed_takes = ("position_ids",)

    def forward(self, input_ids=None, attention_mask=None, *args: Any, position_ids=None, **kwargs: Any):
        packing = self.packing_of(input_ids, attention_mask, args, kwargs)
        if packing is None:
            named = kwargs if position_ids is None else kwargs | {"position_ids": position_ids}
            return super().forward(input_ids, attention_mask, *args, **named)
        if hasattr(self, "_maybe_set_compile"):  # 4.53: whether parts compile themselves, which CPUs' do not
            self._maybe_set_compile()
        hidden = for_compiled(self.embeddings(input_ids=packing.pack(input_ids)), self.layers)
        positions = torch.arange(packing.length, device=hidden.device)[None] if position_ids is None else position_ids
        rotations = self.rotations(hidden, positions, packing)
        hidden = self.final_norm(self.run_layers(hidden, packing, rotations))
        return self.output(hidden, self.layers, packing, kwargs)

    def run_layers(self, hidden: torch.Tensor, packing: Packing, rotations: list[dict[str, Rotations]]) -> torch.Tensor:
        """What `CUDAGraphs` records: the layers, with all that they are given."""
        for layer, given in zip(self.layers, rotations, strict=True):
            hidden = layer(hidden, attention_mask=packing, **given)
            hidden = hidden[0] if isinstance(hidden, tuple) else hidden
        return hidden

    def rotations(self, like: torch.Tensor, positions: torch.Tensor, packing: Packing) -> list[dict[str, Rotations]]:
        """For each layer its rotations, by the name of the argument that brings them to its attention."""
        known: dict[Any, dict[str, Rotations]] = {}  # two kinds, of layers that see a window and of those that see all
        like = like.new_empty(0, dtype=torch.promote_types(like.dtype, torch.float32))  # whose type they will have
        out = []
        for layer in self.layers:
            kind = getattr(layer, "attention_type", window_of(layer.attn) >= 0)
            if kind not in known:
                own = getattr(layer.attn, "rotary_emb", None)
                both = self.rotary_emb(like, positions, kind) if own is None else own(like, position_ids=positions)
                name = "position_embeddings" if own is None else "position_ids"
                known[kind] = {name: tuple(packing.pack(x) for x in both)}
            out.append(known[kind])
        return out


class _Attention(PackedAttention):
    @property
    def attention_head_size(self) -> int:
        return self.head_dim

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any):
        packing = kwargs.get("attention_mask")
        if not isinstance(packing, Packing):
            return super().forward(hidden_states, *args, **kwargs)
        q, k, v = self.Wqkv(hidden_states).unflatten(-1, (3, -1, self.head_dim)).unbind(-3)
        q, k = turned(self, _rotations_of(kwargs), q, k)
        dropout = attention_dropout(self)
        out = varlen_attention(q, k, v, packing.lengths, packing.lengths, dropout, window=window_of(self))
        return self.out_drop(self.Wo(out.flatten(1))), None

    def projections(self) -> tuple[torch.nn.Module, ...]:
        return (self.Wqkv,)


class FirstOfModernBert(FirstOnly):
    """Mixed into the last layer: of the linear layer of queries, keys and values first tokens need one part."""

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
            rotations = _rotations_of(given)
        else:  # transformers 4.53
            rotations = attention.rotary_emb(normed, position_ids=given["position_ids"])
        rotations_first = [mask.first(x) if packed else x[:, :1] for x in rotations]
        q, k, v = (x.unflatten(-1, (-1, attention.head_dim)) for x in projected)
        (q,), (k,) = turned(attention, rotations_first, q), turned(attention, rotations, k)
        context = attend(q, k, v, mask, attention_dropout(attention))
        attended = first + attention.out_drop(attention.Wo(context))
        return attended + self.mlp(self.mlp_norm(attended))
