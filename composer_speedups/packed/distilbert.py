"""DistilBERT: what `Unpadding` and `LastLayerSubset` mix into its modules.

The same mathematics as BERT's under other names, without token types and pooler. In transformers 4.53 its embeddings
take no positions, its layers take head masks, and its attention takes the same tensor three times.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch

from composer_speedups.joint_linear import joint_linear
from composer_speedups.packed.encoder import PackedAttention, PackedEncoder, for_compiled
from composer_speedups.packed.first import FirstOnly, attend_as_bert
from composer_speedups.packed.packing import Packing
from composer_speedups.surgery import mix_in

__all__ = ["FirstOfDistilBert", "pack_distilbert"]


def pack_distilbert(encoder: torch.nn.Module, _owner: torch.nn.Module | None) -> int:
    """Let `encoder` work on packed tokens; return its attention layers. Its owner's head stays as it is."""
    stack = encoder.transformer
    encoder.packed_head_masks = "head_mask" in inspect.signature(stack.forward).parameters
    mix_in(_Encoder, encoder)
    mix_in(_Embeddings, encoder.embeddings)
    for layer in stack.layer:
        mix_in(_Attention, layer.attention)
    return len(stack.layer)


class _Encoder(PackedEncoder):
    packed_head_masks = False  # whether its stack of layers asks for them, as in 4.53

    def forward(self, input_ids=None, attention_mask=None, *args: Any, **kwargs: Any):
        packing = self.packing_of(input_ids, attention_mask, args, kwargs)
        if packing is None:
            return super().forward(input_ids, attention_mask, *args, **kwargs)
        positions = packing.pack(self.positions_of(input_ids))
        hidden = self.embeddings(packing.pack(input_ids), packed_positions=positions)
        hidden = for_compiled(hidden, self.transformer.layer)
        others: dict[str, Any] = {}
        if self.packed_head_masks:  # one for each layer there is now
            others = {"head_mask": [None] * len(self.transformer.layer), "return_dict": True}
        hidden = self.transformer(hidden, packing, **others)[0]
        return self.output(hidden, self.transformer.layer, packing, kwargs)

    def positions_of(self, input_ids: torch.Tensor) -> torch.Tensor:
        """What the padded embeddings would use: columns of the batch, padding on the left included."""
        return self.embeddings.position_ids[:, : input_ids.shape[1]]


class _Embeddings:
    """Mixed into the embeddings: given positions of packed tokens, ids are [total]."""

    def forward(self, input_ids: torch.Tensor, *args: Any, packed_positions: torch.Tensor | None = None, **kwargs: Any):
        if packed_positions is None:
            return super().forward(input_ids, *args, **kwargs)
        embeddings = self.word_embeddings(input_ids) + self.position_embeddings(packed_positions)
        return self.dropout(self.LayerNorm(embeddings))


class _Attention(PackedAttention):
    def forward(self, *args: Any, **kwargs: Any):
        mask = kwargs.get("mask", kwargs.get("attention_mask"))
        if not isinstance(mask, Packing):
            return super().forward(*args, **kwargs)
        hidden_states = kwargs["query"] if "query" in kwargs else args[0]
        return self.out_lin(self.attend(self.project(hidden_states), mask)), None

    def projections(self) -> tuple[torch.nn.Module, torch.nn.Module, torch.nn.Module]:
        return self.q_lin, self.k_lin, self.v_lin


class FirstOfDistilBert(FirstOnly):
    """Mixed into the last layer: BERT's under other names."""

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
        context = attend_as_bert(attention, attention.q_lin(first), keys_and_values, mask)
        attended = self.sa_layer_norm(attention.out_lin(context) + first)
        return self.output_layer_norm(self.ffn(attended) + attended)
