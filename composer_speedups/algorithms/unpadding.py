"""Unpadding: padding leaves before the embeddings, and every layer sees real tokens only.

**Why it is faster.** A padded batch of lengths between 10 and 256 is about half padding, and all of it goes through
every matmul, GELU, norm and dropout. Here the ids of real tokens are packed into one row [total]; all layers work on
those, attention is variable-length (and skips what is outside of ModernBERT's windows, which padded attention hides by
a mask), with queries, keys and values from one matmul. Padding comes back where somebody looks: the pooler is given the
first tokens only, hidden states and masked language model logits are padded with zeros (DistilBERT's and ModernBERT's
heads compute logits from those, too: `MaskedTokenHead` spares them that).
Totals are filled up to a multiple of 64 with padding that nobody reads: oneDNN keeps kernels for every new one, and
`CUDAGraphs` a graph.

**Numerics.** Attention over a sequence without its padding is the same sum in another order: outputs and all
gradients equal the padded model's to rounding. Padding gets zeros for hidden states and logits, and no gradient.
Attention dropout drops with a multiple of 1/65536 on the CPU; masks differ from the padded model's, as with any kernel.
Losses that read padding are others, as there are no numbers for it here: question answering takes its softmax over
padding, too, in transformers (answers are the same where padding is masked, as in pipelines); labels at padding are to
be -100, as collators make them, and not 0 or the ids; and ColBERT's scores read tokens that the mask leaves out (a
model that says so is left alone). There are no second derivatives (gradient penalties). Hooks on the attention's
dropout hear nothing, as under SDPA.

**When it pays.** The more padding, the more: about in proportion to it. On the CPU it pays without padding, too:
PyTorch's attention with dropout takes a slow path there. `LengthGroupedBatches` takes the same padding away less
completely and needs no knowledge of the model; with both the results are right, and grouping saves nothing. Under
`TorchCompile` use `scope="block"`: the number of tokens is dynamic, so only the first few batches compile.

**Needs.** BERT, RoBERTa, XLM-RoBERTa, CamemBERT, data2vec-text, ERNIE, ELECTRA or DistilBERT as encoders with absolute
positions; ModernBERT, which transformers 4.53 unpads itself where flash-attn is installed; MPNet; DeBERTa-v2 and -v3
without a convolution; ALBERT with one layer in each of its groups; ESM-2 and ESM-1b, whose embeddings, which count the
masked tokens of each row, stay padded; or, as transformers has them from 5 on, Nomic BERT, Jina embeddings v3, GTE and
EuroBERT (the code that their hub pages bring for older versions is left alone). It *is* the attention: it replaces
`SDPAttention`. On CUDA in fp16 or bf16 from compute capability 8.0 it runs flash attention, of flash-attn if installed,
or else PyTorch's own; in float32 attention alone is padded again. With `timed_attention` a Triton kernel of our own
(`kernels/packed_attention.py`; not for ModernBERT, MPNet and DeBERTa; heads of 32 or 64, not compiled) is compared with
it on the first tensors of about each size, and has its place where it computes the same and takes at most 0.97 of the
time (0.7 of it on an H200: `benchmarks/results/2026-11-27_h200_peers`); the evidence has both times. Other work on the
GPU decides it by chance. Two runs of one seed may then differ in masks. On CPUs it is C, by AMX, AVX512-BF16, AVX-512
or AVX2 as there are, and else PyTorch's products; a run's table tells which. What MPNet and DeBERTa add to scores for
distances is C there, too (`kernels/distance_bias.py`, `kernels/disentangled.py`); on CUDA, and where they are compiled,
their attention alone is padded again. Masks may have holes (not ModernBERT's, MPNet's and DeBERTa's, which count what
lies between two tokens) or be on the left; only where a head reads the first position, and that is padding, the whole
batch takes the stock forward pass. So do batches with `output_attentions`, `output_hidden_states`, head masks,
`inputs_embeds`, masks that are not [rows, length] or hold other numbers than 0 and 1, with a warning once for each
reason. Embeddings and layers must be transformers' own, and so must what is in them, as others may want rows: but for
adapters, and your own kinds of `Linear`, `Embedding`, `LayerNorm` and `Dropout`. Whose own module looks at one token at
a time says so by `per_token = True` in its class. Hooks on them see packed tokens, [tokens, width]: what scales each
token works, what mixes rows does not; under the Hugging Face Trainer's `neftune_noise_alpha` the stock forward pass is
taken. Your own pooler is given rows again, with zeros at padding. In a Trainer's `fit` and `eval` tokens are counted
before the batch leaves the host; elsewhere, on CUDA, counting waits.

Source: unpadding in MosaicBERT, https://arxiv.org/abs/2312.17482, and ModernBERT, https://arxiv.org/abs/2412.13663.
"""

from __future__ import annotations

import logging

import torch
from composer.core import Event, State
from composer.loggers import Logger

from composer_speedups.algorithms.mixed_precision import low_precision_of
from composer_speedups.arguments import check_count, check_flag
from composer_speedups.errors import ConflictError
from composer_speedups.families import (
    EUROBERT,
    MODERNBERT,
    READ_ANYWHERE,
    READ_FIRST,
    UNPADDABLE,
    attention_of,
    embeddings_of,
    has_head,
    layers_of,
    reads_first,
    stack_of,
    unwrapped,
)
from composer_speedups.kernels.attention_trial import Trials
from composer_speedups.kernels.tensors import compute_dtype
from composer_speedups.packed.by_family import BY_FAMILY
from composer_speedups.packed.encoder import PackedAttention, PackedEncoder
from composer_speedups.packed.packing import count_on_host, hand_over, labels_at_padding
from composer_speedups.packed.unpaddable import foreign_in, owners_in, why_not
from composer_speedups.speedup import SpeedUp, Stage
from composer_speedups.surgery import hooked

__all__ = ["Unpadding", "apply_unpadding"]

log = logging.getLogger("composer_speedups")


def apply_unpadding(model: torch.nn.Module, multiple_of: int = 64, timed_attention: bool = False) -> int:
    """Let every BERT-like encoder in `model` work on packed tokens, in place; return how many attention layers.

    Args:
        model: changed in place; an encoder that does so already stays as it is.
        multiple_of: the packed tokens of a batch are filled up to a multiple of this, as far as there is padding.
        timed_attention: on CUDA, in fp16 and bf16, let a kernel of our own attend where a trial finds it faster.

    Raises:
        ConflictError: `apply_masked_token_head` came first.

    >>> from transformers import BertConfig, BertForSequenceClassification
    >>> config = BertConfig(hidden_size=8, num_attention_heads=2, num_hidden_layers=3, vocab_size=9)
    >>> bert = BertForSequenceClassification(config)
    >>> apply_unpadding(bert), apply_unpadding(bert)
    (3, 0)
    """
    count, trials = 0, Trials() if check_flag("timed_attention", timed_attention) else None
    owners = owners_in(model)
    for encoder in [m for m in model.modules() if why_not(m, *owners[id(m)]) is None]:
        readers, family = owners[id(encoder)], encoder.config.model_type
        if getattr(encoder, "chooses_tokens", False):
            raise ConflictError("apply_unpadding must come before apply_masked_token_head, whose work it would undo")
        encoder.packed_multiple_of = check_count("multiple_of", multiple_of)
        means = family in (*MODERNBERT, *EUROBERT)  # of classifiers, which leave padding out
        heads = (*READ_ANYWHERE, *READ_FIRST) if means else READ_ANYWHERE
        anywhere = bool(readers) and all(has_head(m, heads) and not reads_first(m) for m in readers)
        encoder.reads_anywhere = anywhere and getattr(encoder, "pooler", None) is None
        count += BY_FAMILY[family].pack(encoder, readers[-1] if readers else None)
        for layer in [m for m in encoder.modules() if isinstance(m, PackedAttention)]:
            layer.trials = trials
    return count


class Unpadding(SpeedUp):
    """Apply `apply_unpadding` at `Event.INIT`; count each batch's tokens while it is on the host.

    Args:
        multiple_of: the packed tokens of a batch are filled up to a multiple of this, as far as there is padding.
        timed_attention: on CUDA, in fp16 and bf16, let a kernel of our own attend where a trial finds it faster.

    >>> Unpadding()
    Unpadding(multiple_of=64, timed_attention=False)
    """

    stage = Stage.ATTENTION
    slot = "attention"
    events = frozenset(
        {
            Event.FIT_START,
            Event.BATCH_START,
            Event.BATCH_END,
            Event.EVAL_BATCH_START,
            Event.BEFORE_FORWARD,
            Event.EVAL_BEFORE_FORWARD,
            Event.FIT_END,
        }
    )

    def __init__(self, multiple_of: int = 64, timed_attention: bool = False) -> None:
        self.multiple_of = check_count("multiple_of", multiple_of)
        self.timed_attention = check_flag("timed_attention", timed_attention)
        self._told, self._trials = False, None  # of labels at padding; the trials of attention

    def install(self, state: State, logger: Logger) -> None:
        self._told = False
        owners = owners_in(state.model)
        nothing = sorted({reason for m in state.model.modules() if (reason := why_not(m, *owners[id(m)]))})
        count = apply_unpadding(state.model, self.multiple_of, self.timed_attention)
        self._trials = next((m.trials for m in state.model.modules() if isinstance(m, PackedAttention)), None)
        nothing = nothing or [f"no encoder of {', '.join(UNPADDABLE)} in the model"]
        self.report(logger, count, "; ".join(nothing), counted_on_host=False)
        if heard := sorted({type(m).__name__ for m in _packed_parts(state.model) if hooked(m)}):
            log.warning("hooks on %s see packed tokens, [tokens, width], and no rows", ", ".join(heard))
        if any(has_head(m, ("ForQuestionAnswering",)) for m in state.model.modules()):
            log.warning("losses of question answering are not those of the padded model: see the card's Numerics")

    def on_event(self, event: Event, state: State, logger: Logger) -> None:
        if event is Event.FIT_START:
            _refuse_replaced(state.model)
        elif event in (Event.BATCH_START, Event.EVAL_BATCH_START):
            if state.device._device.type != "cpu":  # there it is never too late
                count_on_host(state.batch)  # the whole batch, before Composer sends its microbatches to the device
            if self.evidence.get("changed") and not self._told and labels_at_padding(state.batch):
                self._told = True
                log.warning("labels at padding are not all -100: their loss is not the padded model's, see the card")
        elif event in (Event.BATCH_END, Event.FIT_END):
            if self._trials and (said := self._trials.said()):
                self.evidence["trials"] = said
                if event is Event.FIT_END:  # loggers are told once
                    self.tell(logger, trials=said)
        elif hand_over(state.batch) and event is Event.BEFORE_FORWARD:
            self.evidence["counted_on_host"] = True
        if event is Event.BEFORE_FORWARD and "kernel" not in self.evidence:
            self.tell(logger, kernel=_kernel(state))


def _kernel(state: State) -> str:
    """The attention kernel for the dtype that the queries will have."""
    for module in state.model.modules():
        if isinstance(module, PackedAttention):
            weight = next(module.projections()[0].parameters())
            dtype = low_precision_of(state) or compute_dtype(weight)
            return module.kernel(torch.empty(1, 1, module.attention_head_size, device=weight.device, dtype=dtype))
    return "none"


def _packed_parts(model: torch.nn.Module) -> list[torch.nn.Module]:
    """What is called with packed tokens: embeddings, layers and their attention."""
    parts = []
    for encoder in [m for m in model.modules() if isinstance(m, PackedEncoder)]:
        layers = list(layers_of(stack_of(encoder)) or ())
        parts += [embeddings_of(encoder)] if encoder.packed_embeddings else []
        parts += [*layers, *map(unwrapped, layers), *filter(None, map(attention_of, layers))]
    return parts


def _refuse_replaced(model: torch.nn.Module) -> None:
    for part in _packed_parts(model):
        if "forward" in vars(part):
            raise ConflictError(
                f"the forward of {type(part).__name__} was replaced after Unpadding had packed the model (Composer's "
                "Alibi does so), by one that knows no packed tokens. Keep one of them"
            )
    for encoder in [m for m in model.modules() if isinstance(m, PackedEncoder)]:
        if (foreign := foreign_in(embeddings_of(encoder), *(layers_of(stack_of(encoder)) or ()))) is not None:
            raise ConflictError(
                f"{foreign} came into a layer after Unpadding had packed the model, and may look from one token at "
                "others, which are those of all rows now: give its class per_token = True if it does not, or remove "
                "one of them"
            )
