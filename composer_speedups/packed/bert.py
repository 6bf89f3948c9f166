"""BERT, and what is built as it is: what `Unpadding` and `LastLayerSubset` mix into their modules."""

from __future__ import annotations

from typing import Any

import torch
from transformers.modeling_outputs import (
    BaseModelOutputWithPastAndCrossAttentions,
    BaseModelOutputWithPoolingAndCrossAttentions,
)
from transformers.utils import ModelOutput

from composer_speedups.compat import places_without_pooler
from composer_speedups.families import attention_of, layers_of, takes_first
from composer_speedups.first_request import asked_for_first
from composer_speedups.joint_linear import joint_linear
from composer_speedups.packed.encoder import PackedAttention, PackedEncoder, for_compiled, packed_as
from composer_speedups.packed.first import FirstOnly, attend_as_bert
from composer_speedups.packed.packing import Packing
from composer_speedups.surgery import mix_in

__all__ = [
    "FirstOfBert",
    "PackedBert",
    "PackedBertAttention",
    "PackedBertEncoder",
    "pack_bert",
    "pack_masked_head",
    "pack_parts",
]


def pack_bert(encoder: torch.nn.Module, owner: torch.nn.Module | None) -> int:
    """Let `encoder`, and the head of `owner` where one works on packed tokens, do so; return its attention layers."""
    return pack_parts(encoder, owner, PackedBertEncoder, PackedBertAttention)


def pack_parts(encoder: torch.nn.Module, owner: torch.nn.Module | None, whole: type, attention: type) -> int:
    """The same with what is mixed into the encoder and into the attention of its layers, BERT's or like them."""
    mix_in(whole, encoder)
    layers = layers_of(encoder.encoder)
    for layer in layers:
        mix_in(attention, attention_of(layer))
    pack_masked_head(encoder, owner)
    return len(layers)


def pack_masked_head(encoder: torch.nn.Module, owner: torch.nn.Module | None) -> None:
    """Let the head of `owner`, if it is a masked language model with one of its own, compute real tokens' logits."""
    for head in (getattr(owner, name, None) for name in ("cls", "lm_head", "lm_predictions", "predictions")):
        if encoder.reads_anywhere and type(head).__name__.endswith(("MLMHead", "LMHead")):
            mix_in(_MaskedHead, head)
            encoder.packed_for_head = True


class PackedBert(PackedEncoder):
    """What an encoder of BERT's modules does with a batch that can be packed."""

    packed_takes = ("token_type_ids", "position_ids")
    packed_output: type[ModelOutput] = BaseModelOutputWithPoolingAndCrossAttentions  # of one that may have a pooler

    def packed(
        self,
        packing: Packing,
        input_ids: torch.Tensor,
        token_type_ids: torch.Tensor | None,
        position_ids: torch.Tensor | None,
        kwargs: dict[str, Any],
    ):
        ids = packing.pack(input_ids)[None]
        types = torch.zeros_like(ids) if token_type_ids is None else packing.pack(token_type_ids)[None]
        positions = self.positions_of(input_ids) if position_ids is None else position_ids
        hidden = self.embeddings(
            input_ids=ids, token_type_ids=types, position_ids=packing.pack(positions)[None]
        ).squeeze(0)
        if hasattr(self, "embeddings_project"):
            hidden = self.embeddings_project(hidden)
        return self.encoded(hidden, packing, kwargs)

    def encoded(self, hidden: torch.Tensor, packing: Packing, kwargs: dict[str, Any]):
        """The model's output, of packed embeddings."""
        layers = layers_of(self.encoder)
        hidden = self.encoder(for_compiled(hidden, layers), attention_mask=packing)[0]
        return self.finished(hidden, layers, packing, kwargs)

    def finished(self, hidden: torch.Tensor, layers: torch.nn.ModuleList, packing: Packing, kwargs: dict[str, Any]):
        """The same, of what `layers` have made of them."""
        pools = getattr(self, "pooler", None) is not None
        if asked_for_first(layers[-1]):
            read = padded = hidden[:, None]
        else:
            padded = self.padded(hidden, packing)
            read = packing.first(hidden)[:, None] if pools and self.pools_first() else padded
        pooled = self.pooled(read) if pools else None
        if hasattr(self, "pooler"):
            out = self.packed_output(last_hidden_state=padded, pooler_output=pooled)
        else:  # ELECTRA, whose class has no such place
            out = BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=padded)
        return self.returned(out, kwargs.get("return_dict"))

    def pools_first(self) -> bool:
        """Whether `pooled` reads each row's first token, and no other."""
        return takes_first(self.pooler)

    def pooled(self, tokens: torch.Tensor) -> torch.Tensor:
        """What the pooler makes of all tokens, or of the first ones, [rows, length or 1, width]."""
        return self.pooler(tokens)

    def returned(self, out: ModelOutput, return_dict: bool | None) -> ModelOutput | tuple[torch.Tensor | None, ...]:
        """As the model: whether None stands for a pooler that it does not have differs."""
        asked = self.config.return_dict if return_dict is None else return_dict
        if asked or not places_without_pooler(self.config.model_type):
            return super().returned(out, return_dict)
        return out.last_hidden_state, out.pooler_output

    def positions_of(self, input_ids: torch.Tensor) -> torch.Tensor:
        """What the padded embeddings would use: RoBERTa and its kind count tokens that are not padding ids."""
        padding = getattr(self.embeddings, "padding_idx", None)
        if padding is None:
            return self.embeddings.position_ids[:, : input_ids.shape[1]]
        real = (input_ids != padding).long()
        return real.cumsum(1) * real + padding


class PackedBertEncoder(PackedBert):
    """The same, with the arguments of BERT's."""

    def forward(
        self, input_ids=None, attention_mask=None, token_type_ids=None, position_ids=None, *args: Any, **kwargs: Any
    ):
        packing = self.packing_of(input_ids, attention_mask, args, kwargs)
        if packing is None:
            return super().forward(input_ids, attention_mask, token_type_ids, position_ids, *args, **kwargs)
        return self.packed(packing, input_ids, token_type_ids, position_ids, kwargs)


class PackedBertAttention(PackedAttention):
    """The attention of such an encoder, which takes hidden states and the mask as BERT's does."""

    def forward(self, hidden_states: torch.Tensor, attention_mask=None, *args: Any, **kwargs: Any):
        if not isinstance(attention_mask, Packing):
            return super().forward(hidden_states, attention_mask, *args, **kwargs)
        return self.packed(hidden_states, attention_mask, *args, **kwargs)

    def packed(self, hidden_states: torch.Tensor, packing: Packing, *args: Any, **kwargs: Any) -> tuple:
        """What the layer returns for packed tokens."""
        return self.attend(self.project(hidden_states), packing), None

    def projections(self) -> tuple[torch.nn.Module, torch.nn.Module, torch.nn.Module]:
        return self.query, self.key, self.value


class FirstOfBert(FirstOnly):
    """Mixed into the last layer: keys and values of all tokens, everything else of the first ones."""

    def worked_around(self) -> tuple[torch.nn.Module, ...]:
        return self.attention, self.attention.self, self.attention.self.dropout

    def compute_first(
        self, first: torch.Tensor, hidden_states: torch.Tensor, mask: Any, given: dict[str, Any]
    ) -> torch.Tensor:
        attention = self.attention.self
        keys_and_values = joint_linear((attention.key, attention.value), hidden_states)
        context = attend_as_bert(attention, attention.query(first), keys_and_values, mask)
        attended = self.attention.output(context, first)
        return self.output(self.intermediate(attended), attended)


class _MaskedHead:
    """Mixed into a masked language model's head: the logits of real tokens only, padded with zeros."""

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        packing = packed_as(hidden_states)
        if packing is None:
            return super().forward(hidden_states, *args, **kwargs)
        # Packed anew, for next to nothing beside a vocabulary: a hook may have changed the padded ones in place.
        return packing.pad(super().forward(packing.pack(hidden_states), *args, **kwargs))
