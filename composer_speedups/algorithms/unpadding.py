"""Unpadding: padding leaves before the embeddings, and every layer sees real tokens only.

**Why it is faster.** A padded batch of lengths between 10 and 256 is about half padding, and all of it goes through
every matmul, GELU, norm and dropout. Here the ids of real tokens are packed into one row [total]; all layers work on
those, attention is variable-length, with queries, keys and values from one matmul. Padding comes back where somebody
looks: the pooler is given the first tokens only, hidden states and masked language model logits are padded with zeros.
Totals are filled up to a multiple of 64 with padding that nobody reads: oneDNN keeps kernels for every new one.

**Numerics.** Attention over a sequence without its padding is the same sum in another order: outputs and all
gradients equal the padded model's to rounding. Padding gets zeros for hidden states and logits, and no gradient.
Attention dropout drops with a multiple of 1/65536 on the CPU; masks differ from the padded model's, as with any kernel.

**When it pays.** The more padding, the more: about in proportion to it. On the CPU it pays without padding, too:
PyTorch's attention with dropout takes a slow path there. `LengthGroupedBatches` takes the same padding away less
completely and needs no knowledge of the model; with both the results are right, and grouping saves nothing. Under
`TorchCompile` use `scope="block"`: the number of tokens is dynamic, so only the first few batches compile.

**Needs.** BERT, RoBERTa, XLM-RoBERTa, CamemBERT or ELECTRA as encoders with absolute positions. It *is* the
attention: it replaces `SDPAttention`. On CUDA in fp16 or bf16 from compute capability 8.0 it runs flash
attention, of flash-attn if installed, or else PyTorch's own; in float32 attention alone is padded again. Masks may
have holes or be on the left; only where a head reads the first position, and that is padding, the whole batch takes
the stock forward pass. So do batches with `output_attentions`, `output_hidden_states`, head masks, `inputs_embeds`
or masks that are not [rows, length], with a warning once for each reason. Question answering takes its softmax
over padding, too, in transformers: there the logits are the head's bias.
In a Trainer's `fit` and `eval` tokens are counted before the batch leaves the host; elsewhere, on CUDA, counting waits.

Source: unpadding in MosaicBERT, https://arxiv.org/abs/2312.17482, and ModernBERT, https://arxiv.org/abs/2412.13663.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

import torch
from composer.core import Event, State
from composer.loggers import Logger
from transformers.modeling_outputs import BaseModelOutputWithPoolingAndCrossAttentions

from composer_speedups.arguments import check_count
from composer_speedups.families import BERT_LIKE, READ_ANYWHERE, bert_like, has_head, positions
from composer_speedups.joint_linear import joint_linear
from composer_speedups.kernels.varlen_attention import attention_kernel, varlen_attention
from composer_speedups.packing import Packing, count_on_host, counts_of, hand_over
from composer_speedups.speedup import SpeedUp, Stage
from composer_speedups.surgery import mix_in

__all__ = ["Unpadding", "apply_unpadding"]

log = logging.getLogger("composer_speedups")

_HARMLESS = {"return_dict", "output_attentions", "output_hidden_states", "use_cache", "num_items_in_batch", "labels"}
_PACKED = "_composer_speedups_packed"


def apply_unpadding(model: torch.nn.Module, multiple_of: int = 64) -> int:
    """Let every BERT-like encoder in `model` work on packed tokens, in place; return how many attention layers.

    Args:
        model: changed in place.
        multiple_of: the packed tokens of a batch are filled up to a multiple of this, as far as there is padding.

    >>> from transformers import BertConfig, BertForSequenceClassification
    >>> config = BertConfig(hidden_size=8, num_attention_heads=2, num_hidden_layers=3, vocab_size=9)
    >>> bert = BertForSequenceClassification(config)
    >>> apply_unpadding(bert), apply_unpadding(bert)
    (3, 0)
    """
    count = 0
    owners = {id(child): module for module in model.modules() for child in module.children()}
    for encoder in [m for m in model.modules() if _why_not(m) is None]:
        owner = owners.get(id(encoder))
        anywhere = has_head(owner, READ_ANYWHERE) and getattr(encoder, "pooler", None) is None
        mix_in(_UnpaddedAnywhere if anywhere else _Unpadded, encoder)
        encoder.packed_multiple_of = check_count("multiple_of", multiple_of)
        for layer in encoder.encoder.layer:
            mix_in(_PackedAttention, layer.attention.self)
            count += 1
        for head in (getattr(owner, name, None) for name in ("cls", "lm_head")):
            if anywhere and type(head).__name__.endswith(("OnlyMLMHead", "LMHead")):
                mix_in(_PackedHead, head)
    return count


class Unpadding(SpeedUp):
    """Apply `apply_unpadding` at `Event.INIT`; count each batch's tokens while it is on the host.

    >>> Unpadding()
    Unpadding(multiple_of=64)
    """

    stage = Stage.ATTENTION
    slot = "attention"
    events = frozenset({Event.BATCH_START, Event.EVAL_BATCH_START, Event.BEFORE_FORWARD, Event.EVAL_BEFORE_FORWARD})

    def __init__(self, multiple_of: int = 64) -> None:
        self.multiple_of = check_count("multiple_of", multiple_of)

    def install(self, state: State, logger: Logger) -> None:
        nothing = sorted({reason for m in state.model.modules() if (reason := _why_not(m))})
        count = apply_unpadding(state.model, self.multiple_of)
        nothing = nothing or [f"no encoder of {', '.join(BERT_LIKE)} in the model"]
        self.report(logger, count, "; ".join(nothing), counted_on_host=False)

    def on_event(self, event: Event, state: State, logger: Logger) -> None:
        if event in (Event.BATCH_START, Event.EVAL_BATCH_START):
            count_on_host(state.batch)  # the whole batch, before Composer sends its microbatches to the device
        elif hand_over(state.batch) and event is Event.BEFORE_FORWARD:
            self.evidence["counted_on_host"] = True
        if event is Event.BEFORE_FORWARD and "kernel" not in self.evidence:
            self.evidence["kernel"] = _kernel(state)
            logger.log_hyperparameters({f"{self.key()}/kernel": self.evidence["kernel"]})


def _kernel(state: State) -> str:
    """The attention kernel for the dtype that the queries will have."""
    for module in state.model.modules():
        if isinstance(module, _PackedAttention):
            device, dtype = module.query.weight.device, module.query.weight.dtype
            precision = {"amp_bf16": torch.bfloat16, "amp_fp16": torch.float16}.get(str(state.precision.value))
            if torch.is_autocast_enabled(device.type):
                precision = torch.get_autocast_dtype(device.type)
            return attention_kernel(
                torch.empty(0, 1, module.attention_head_size, device=device, dtype=precision or dtype)
            )
    return "none"


def _why_not(module: torch.nn.Module) -> str | None:
    """None if `module` is an encoder that can be unpadded; "" if it is nothing of the kind; or the reason."""
    config = getattr(module, "config", None)
    layers = getattr(getattr(module, "encoder", None), "layer", None)
    if not bert_like(config) or not hasattr(module, "embeddings") or layers is None:
        return ""
    if isinstance(module, _Unpadded):
        return "its encoder is unpadded already"
    if getattr(config, "is_decoder", False) or getattr(config, "add_cross_attention", False):
        return "config.is_decoder is True: attention only to earlier tokens is not for unpadding"
    if (position := positions(config)) != "absolute":
        return f"position_embedding_type={position!r} adds to the scores, which fused kernels do not allow"
    if getattr(config, "chunk_size_feed_forward", 0):
        return "config.chunk_size_feed_forward cuts padded rows: set it to 0"
    return None


class _Unpadded:
    """Mixed into an encoder (`BertModel`): packs, runs embeddings and layers, pads what is returned."""

    reads_anywhere = False

    def forward(
        self, input_ids=None, attention_mask=None, token_type_ids=None, position_ids=None, *args: Any, **kwargs: Any
    ):
        packing = self._pack(input_ids, attention_mask, args, kwargs)
        if packing is None:
            return super().forward(input_ids, attention_mask, token_type_ids, position_ids, *args, **kwargs)
        ids = packing.pack(input_ids)[None]
        types = torch.zeros_like(ids) if token_type_ids is None else packing.pack(token_type_ids)[None]
        positions = self._positions(input_ids) if position_ids is None else position_ids
        hidden = self.embeddings(input_ids=ids, token_type_ids=types, position_ids=packing.pack(positions)[None])[0]
        if hasattr(self, "embeddings_project"):
            hidden = self.embeddings_project(hidden)
        if any(layer._compiled_call_impl is not None for layer in self.encoder.layer):
            hidden = hidden.clone()  # compiled layers are for views or for none: the first would have its own graph
        hidden = self.encoder(hidden, attention_mask=packing)[0]
        pooler = getattr(self, "pooler", None)
        if getattr(self.encoder, "asked_for_first", False):  # by LastLayerSubset
            first, padded = hidden, hidden[:, None]
        else:
            first, padded = None if pooler is None else packing.first(hidden), packing.pad(hidden)
            if not torch.compiler.is_compiling():
                setattr(padded, _PACKED, (hidden, packing))
        pooled = None if pooler is None else pooler(first[:, None])
        out = BaseModelOutputWithPoolingAndCrossAttentions(last_hidden_state=padded, pooler_output=pooled)
        named = kwargs.get("return_dict")
        return out if (self.config.return_dict if named is None else named) else out.to_tuple()

    @torch.compiler.disable
    def _pack(self, input_ids, mask, args: tuple, kwargs: dict[str, Any]) -> Packing | None:
        """How to pack this batch; None, said once, where only the padded forward pass is right."""
        extras = [name for name, value in kwargs.items() if value is not None and name not in _HARMLESS]
        for name in ("output_attentions", "output_hidden_states"):
            asked = kwargs.get(name)
            extras += [name] if (getattr(self.config, name, False) if asked is None else asked) else []
        if input_ids is None or extras or any(value is not None for value in args):
            return _warn(f"{', '.join(extras) or 'inputs other than ids'} asked for")
        if mask is None:
            mask, counts = torch.ones_like(input_ids), [input_ids.shape[1]] * len(input_ids)
        elif mask.shape != input_ids.shape:
            return _warn(f"the attention mask is {tuple(mask.shape)}, not as the ids [rows, length]")
        else:
            counts = counts_of(mask)
        if not any(counts) or (not self.reads_anywhere and min(counts) <= 0):
            return _warn("a row's first position, which is read by the head, is padding")
        return Packing.of(mask, counts, self.packed_multiple_of)

    def _positions(self, input_ids: torch.Tensor) -> torch.Tensor:
        """What the padded embeddings would use: RoBERTa and its kind count tokens that are not padding ids."""
        padding = getattr(self.embeddings, "padding_idx", None)
        if padding is None:
            return self.embeddings.position_ids[:, : input_ids.shape[1]]
        real = (input_ids != padding).long()
        return real.cumsum(1) * real + padding


class _UnpaddedAnywhere(_Unpadded):
    reads_anywhere = True


class _PackedAttention:
    """Mixed into a self-attention layer: given a `Packing` as mask, hidden states are [total, width]."""

    def forward(self, hidden_states: torch.Tensor, attention_mask=None, *args: Any, **kwargs: Any):
        if not isinstance(attention_mask, Packing):
            return super().forward(hidden_states, attention_mask, *args, **kwargs)
        projected = joint_linear((self.query, self.key, self.value), hidden_states)
        q, k, v = (x.unflatten(-1, (-1, self.attention_head_size)) for x in projected)
        dropout = self.dropout.p if self.training else 0.0
        context = varlen_attention(q, k, v, attention_mask.lengths, attention_mask.lengths, dropout)
        return context.flatten(1), None


class _PackedHead:
    """Mixed into a masked language model's head: the logits of real tokens only, padded with zeros."""

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        hidden, packing = getattr(hidden_states, _PACKED, None) or (None, None)
        if packing is None:
            return super().forward(hidden_states, *args, **kwargs)
        return packing.pad(super().forward(hidden, *args, **kwargs))


@cache
def _warn(reason: str) -> None:
    log.warning("Unpadding: %s: such batches take the padded forward pass", reason)
