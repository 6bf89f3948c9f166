"""What `Unpadding` mixes into encoders of every family: when a batch can be packed, and attention over packed tokens.

Each family's own part is beside this, in a file of its name.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary
from transformers.modeling_outputs import BaseModelOutput
from transformers.utils import ModelOutput

from composer_speedups.compat import attention_dropout
from composer_speedups.families import attention_of, layers_of, stack_of, unwrapped
from composer_speedups.first_request import asked_for_first
from composer_speedups.joint_linear import joint_linear
from composer_speedups.kernels.attention_trial import Trials
from composer_speedups.kernels.packed_attention import packed_attention
from composer_speedups.kernels.per_sequence import served_by
from composer_speedups.kernels.varlen_attention import attention_kernel, varlen_attention
from composer_speedups.packed.fixed_total import fixed_total
from composer_speedups.packed.packing import Holed, Packing, Valued, counts_of
from composer_speedups.surgery import known_code

__all__ = [
    "PackedAttention",
    "PackedEncoder",
    "compiled",
    "for_compiled",
    "packed_as",
    "say_once",
]

log = logging.getLogger("composer_speedups")

_PACKED = WeakTensorKeyDictionary()  # by padded hidden states: how they were packed, for a head
_SAID: set[str] = set()  # in this process
_HARMLESS = {"return_dict", "output_attentions", "output_hidden_states", "use_cache", "num_items_in_batch", "labels"}
# Sentence Transformers writes what it makes of a batch into it; MPNet, which takes any keyword, is given it, unread.
_HARMLESS |= {"token_embeddings", "sentence_embedding", "all_layer_embeddings"}


class PackedEncoder:
    """Mixed into an encoder: packs, runs embeddings and layers, pads what is returned."""

    packed_multiple_of = 64  # packed tokens are filled up to a multiple of this, as far as there is padding
    reads_anywhere = False  # whether the head reads tokens of any place, or each row's first
    packed_for_head = False  # whether the head works on packed tokens
    packed_takes: tuple[str, ...] = ()  # what else than ids and mask it can pack
    packed_embeddings = True  # whether embeddings are made of packed ids
    packed_whole_rows = False  # whether a layer counts the tokens between two others, padding among them

    @torch.compiler.disable
    def packing_of(self, input_ids, mask, args: tuple, kwargs: dict[str, Any]) -> Packing | None:
        """How to pack this batch; None, said once, where only the padded forward pass is right."""
        total = fixed_total()
        if total is not None:  # whoever has fixed it has asked `counted` before
            return Packing.on_device(torch.ones_like(input_ids) if mask is None else mask, total)
        found = self.counted(input_ids, mask, args, kwargs)
        return None if found is None else Packing.of(*found, self.packed_multiple_of)

    def counted(self, input_ids, mask, args: tuple, kwargs: dict[str, Any]) -> tuple[torch.Tensor, list[int]] | None:
        """The mask of a batch that can be packed, and its rows' counts; None, said once, for one that cannot."""
        extras = [name for name, value in kwargs.items() if value is not None and name not in _HARMLESS]
        for name in ("output_attentions", "output_hidden_states"):
            asked = kwargs.get(name)
            extras += [name] if (getattr(self.config, name, False) if asked is None else asked) else []
        if torch.jit.is_tracing():  # this batch's lengths would be those of all that the trace ever sees
            return say_once("a trace is made of the model")
        if torch._C._are_functorch_transforms_active() or torch.autograd.forward_ad._current_level >= 0:
            return say_once("a transform of torch.func, or forward-mode differentiation, is active")
        if self.training and getattr(self.get_input_embeddings(), "neftune_noise_alpha", None):
            return say_once("NEFTune's noise, which it scales by the length of rows")
        if input_ids is None or extras or any(value is not None for value in args):
            return say_once(f"{', '.join(extras) or 'inputs other than ids'} asked for")
        if (change := changed(self)) is not None:
            return say_once(change)
        if mask is None:
            mask, counts = torch.ones_like(input_ids), [input_ids.shape[1]] * len(input_ids)
        elif not isinstance(mask, torch.Tensor) or mask.shape != input_ids.shape:
            found = tuple(mask.shape) if isinstance(mask, torch.Tensor) else f"a {type(mask).__name__}"
            return say_once("the attention mask is not as the ids [rows, length]", f"it is {found}")
        else:
            counts = counts_of(mask)
        if any(isinstance(count, Valued) for count in counts):
            return say_once("an attention mask of other numbers than 0 and 1")
        if self.packed_whole_rows and any(isinstance(count, Holed) for count in counts):
            return say_once("padding between the tokens of a row, of which windows are counted")
        if not any(counts) or (not self.reads_anywhere and min(counts) <= 0):
            return say_once("a row's first position, which a head may read, is padding")
        return mask, counts

    def padded(self, hidden: torch.Tensor, packing: Packing) -> torch.Tensor:
        """[total, width] -> [rows, length, width], with what a head that works on packed tokens looks for."""
        padded = packing.pad(hidden)
        if self.packed_for_head and not torch.compiler.is_compiling():
            _PACKED[padded] = packing
        return padded

    def output(self, hidden: torch.Tensor, layers: torch.nn.ModuleList, packing: Packing, kwargs: dict[str, Any]):
        """The output of a model without a pooler: of all tokens, or of each row's first, if its head asked for it."""
        first = asked_for_first(layers[-1])
        out = BaseModelOutput(last_hidden_state=hidden[:, None] if first else self.padded(hidden, packing))
        return self.returned(out, kwargs.get("return_dict"))

    def returned(self, out: ModelOutput, return_dict: bool | None) -> ModelOutput | tuple[torch.Tensor, ...]:
        """`out` as it was asked for, by argument or in the configuration."""
        return out if (self.config.return_dict if return_dict is None else return_dict) else out.to_tuple()


class PackedAttention:
    """Mixed into a self-attention layer: given a `Packing` as mask, hidden states are [total, width]."""

    trials: Trials | None = None  # on CUDA, a kernel of our own serves where they find it right and faster

    def projections(self) -> tuple[torch.nn.Module, ...]:
        """The layers of queries, keys and values, or the one of all three."""
        raise NotImplementedError

    def kernel(self, queries: torch.Tensor) -> str:
        """What computes the attention of such `queries`, in words."""
        kernel = attention_kernel(queries)
        return f"{kernel}: {served_by(queries)}" if kernel == "per sequence" else kernel

    def attend(self, projected: Sequence[torch.Tensor], packing: Packing) -> torch.Tensor:
        """Of queries, keys and values, as `project` gives them, the heads' outputs side by side, [total, width]."""
        dropout, lengths = attention_dropout(self), packing.lengths
        if self.trials is not None and self.trials.prefer_packed(*projected, lengths, dropout):
            return packed_attention(*projected, lengths, lengths, dropout).flatten(1)
        return varlen_attention(*projected, lengths, lengths, dropout).flatten(1)

    def project(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """[total, width] -> queries, keys and values, [total, heads, width of a head] each."""
        projected = joint_linear(self.projections(), hidden_states)
        return tuple(x.unflatten(-1, (-1, self.attention_head_size)) for x in projected)


def changed(encoder: torch.nn.Module) -> str | None:
    """What was done to `encoder` since it was packed that its packed layers know nothing of; None if nothing was."""
    if getattr(encoder.config, "is_decoder", False):
        return "config.is_decoder is True"
    for layer in layers_of(stack_of(encoder)):
        attention, layer = attention_of(layer), unwrapped(layer)
        if not isinstance(attention, PackedAttention):
            return f"{type(layer).__name__} came into the model after Unpadding"
        if any(vars(part).get("chunk_size_feed_forward") for part in (layer, layer._modules.get("ffn", layer))):
            return "chunk_size_feed_forward cuts padded rows"
        modules = attention._modules
        # Not called: of its hooks none hears, as under transformers' SDPA.
        dropout = modules.get("dropout") or modules.get("attention_dropout")
        if dropout is not None and not known_code(type(dropout)):
            return f"{type(dropout).__name__} in attention is somebody's own"
    return None


def packed_as(padded: torch.Tensor) -> Packing | None:
    """How these hidden states were packed, if they are what an encoder has padded for a head."""
    return None if torch.compiler.is_compiling() else _PACKED.get(padded)


def for_compiled(hidden: torch.Tensor, layers: torch.nn.ModuleList) -> torch.Tensor:
    """`hidden` as compiled layers take it: for views or for none. The first would have a graph of its own."""
    return hidden.clone() if compiled(layers) else hidden


def compiled(layers: torch.nn.ModuleList) -> bool:
    """Whether `TorchCompile(scope="block")` has compiled any of them."""
    return any(layer._compiled_call_impl is not None for layer in layers)


def say_once(reason: str, found: str = "") -> None:
    """Say why a batch is not packed, and what was `found` in the first one."""
    if reason not in _SAID:
        _SAID.add(reason)
        log.warning("Unpadding: %s%s: such batches take the padded forward pass", reason, found and f" ({found})")
