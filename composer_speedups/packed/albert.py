"""ALBERT on packed tokens: mixed into its modules by `Unpadding`.

BERT's layer, run as often as there are layers, with all of attention in one module, and with a pooler that is a linear
layer of the encoder's own. Embeddings become as wide as layers in the module that runs these.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.modeling_outputs import BaseModelOutputWithPooling

from composer_speedups.packed.bert import PackedBertAttention, PackedBertEncoder, pack_parts
from composer_speedups.packed.packing import Packing

__all__ = ["pack_albert"]


def pack_albert(encoder: torch.nn.Module, owner: torch.nn.Module | None) -> int:
    """Let `encoder`, and the head of `owner` where one works on packed tokens, do so; return its attention layers."""
    return pack_parts(encoder, owner, _Encoder, _Attention)


class _Encoder(PackedBertEncoder):
    packed_output = BaseModelOutputWithPooling

    def pools_first(self) -> bool:
        return True

    def pooled(self, rows: torch.Tensor) -> torch.Tensor:
        return self.pooler_activation(self.pooler(rows[:, 0]))


class _Attention(PackedBertAttention):
    @property
    def dropout(self) -> torch.nn.Module:
        return self.attention_dropout

    def packed(self, hidden_states: torch.Tensor, packing: Packing, *args: Any, **kwargs: Any) -> tuple:
        attended = self.output_dropout(self.dense(self.attend(self.project(hidden_states), packing)))
        return self.LayerNorm(hidden_states + attended), None
