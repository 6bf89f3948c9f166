"""A last layer that computes each row's first token only: what `LastLayerSubset` mixes into it.

What differs by family is in the file of each.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from composer_speedups.compat import attention_dropout, layer_result
from composer_speedups.first_request import with_request
from composer_speedups.kernels.sdpa import padded_attention
from composer_speedups.kernels.varlen_attention import varlen_attention
from composer_speedups.packed.packing import Packing
from composer_speedups.surgery import hooked, known_code

__all__ = ["FirstOnly", "attend", "attend_as_bert", "of_keys", "with_one_more"]

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


def of_keys(positions: torch.Tensor, mask: Any, tokens: int) -> torch.Tensor:
    """[length, ...], of places in a row -> for each key its own: as it is, or packed, [tokens, ...]."""
    if not isinstance(mask, Packing):
        return positions
    token, ends = torch.arange(tokens, device=positions.device), mask.lengths.cumulative
    return positions[token - ends[torch.bucketize(token, ends[1:], right=True)]]


def with_one_more(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, more: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Each head wider, so that `more` [..., 1] is added to the product of any query with the key that it is of."""
    k, v = F.pad(torch.cat((k, more.to(k.dtype)), -1), (0, _FILLED - 1)), F.pad(v, (0, _FILLED))
    return F.pad(torch.cat((q, torch.ones_like(q[..., :1])), -1), (0, _FILLED - 1)), k, v


def attend_as_bert(
    attention: torch.nn.Module, query: torch.Tensor, keys_and_values: tuple[torch.Tensor, ...], mask: Any
) -> torch.Tensor:
    """What attention as BERT has it, with nothing between its projections and the scores, makes of them."""
    q, k, v = (x.unflatten(-1, (-1, attention.attention_head_size)) for x in (query, *keys_and_values))
    return attend(q, k, v, mask, attention_dropout(attention))


def attend(
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
