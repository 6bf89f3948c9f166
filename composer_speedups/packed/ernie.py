"""ERNIE: BERT, with types of tasks among its arguments, which few give and which then take the padded forward pass."""

from __future__ import annotations

from typing import Any

import torch

from composer_speedups.packed.bert import PackedBert, PackedBertAttention, pack_parts

__all__ = ["pack_ernie"]


def pack_ernie(encoder: torch.nn.Module, owner: torch.nn.Module | None) -> int:
    """Let `encoder`, and the head of `owner` where one works on packed tokens, do so; return its attention layers."""
    return pack_parts(encoder, owner, _Encoder, PackedBertAttention)


class _Encoder(PackedBert):
    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        token_type_ids=None,
        task_type_ids=None,
        position_ids=None,
        *args: Any,
        **kwargs: Any,
    ):
        packing = self.packing_of(input_ids, attention_mask, args, kwargs | {"task_type_ids": task_type_ids})
        if packing is None:
            given = attention_mask, token_type_ids, task_type_ids, position_ids
            return super().forward(input_ids, *given, *args, **kwargs)
        return self.packed(packing, input_ids, token_type_ids, position_ids, kwargs)
