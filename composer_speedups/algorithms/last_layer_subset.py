"""LastLayerSubset: the last layer computes only the token that the head reads.

**Why it is faster.** A classifier reads the first token's hidden state. The last layer's other outputs are computed
and thrown away. Keys and values are still needed for all tokens; queries, attention output, both norms and the
whole feed-forward block are needed for one token a row. Per token a layer of BERT spends 2 of its 12 squares of the
width on keys and values: about ten twelfths of the last layer go.

**Numerics.** The same values and gradients, to rounding; nothing that is left out had a gradient.

**When it pays.** With few layers, much (of 4 layers a fifth), with 12 about 7 %. Dropout draws fewer numbers.

**Needs.** A sequence classifier or multiple choice model of BERT, RoBERTa, XLM-RoBERTa, CamemBERT, data2vec-text,
ERNIE, ELECTRA, MPNet, DistilBERT, ESM or DeBERTa-v2 and -v3, or a sequence classifier of Nomic BERT, Jina embeddings
v3, GTE, or of ModernBERT or EuroBERT that takes the first token and no mean (EuroBERT's `classifier_pooling` is a mean
unless it is `bos`), with transformers' own `forward`: one of your own may read other tokens, and so may a module of
your own in the last layer, unless its class has `per_token = True`. Heads that read every token (MLM, token
classification, question answering) and bare encoders have nothing to leave out: the report says so.
`output_hidden_states` and `output_attentions` compute the whole layer, and so does calling the encoder itself; while
the classifier runs, its `last_hidden_state` is [rows, 1, width]. With a hook on the last layer's attention (Composer
sets some to look for a microbatch size under FSDP) it is computed whole, too; hooks on what follows it see one token a
row. Goes together with `Unpadding`.

Source: computing the last layer for [CLS] alone, as in several BERT inference servers.
"""

from __future__ import annotations

from typing import Any

import torch
from composer.core import State
from composer.loggers import Logger

from composer_speedups.families import (
    MODERNBERT,
    adds_to_scores,
    attention_of,
    layers_of,
    reads_first,
    stack_of,
)
from composer_speedups.first_request import ask
from composer_speedups.packed.by_family import BY_FAMILY
from composer_speedups.packed.first import FirstOnly
from composer_speedups.packed.modernbert import window_of
from composer_speedups.packed.unpaddable import foreign_in
from composer_speedups.speedup import SpeedUp, Stage
from composer_speedups.surgery import having, mix_in, stock_forward

__all__ = ["LastLayerSubset", "apply_last_layer_subset"]

_FIRST_OF = {name: family.first for name, family in BY_FAMILY.items() if family.first}  # the last layer


def apply_last_layer_subset(model: torch.nn.Module) -> int:
    """Let the last layer of every classifier in `model` compute its first token only; return how many classifiers.

    >>> from transformers import BertConfig, BertForSequenceClassification
    >>> config = BertConfig(hidden_size=8, num_attention_heads=2, num_hidden_layers=3, vocab_size=9)
    >>> bert = BertForSequenceClassification(config)
    >>> apply_last_layer_subset(bert), apply_last_layer_subset(bert)
    (1, 0)
    """
    owners = [(m, encoder) for m in model.modules() if (encoder := _encoder(m)) is not None]
    for owner, encoder in owners:
        mix_in(_Owner, owner)
        mix_in(_FIRST_OF[owner.config.model_type], layers_of(encoder)[-1])
    return len(owners)


class LastLayerSubset(SpeedUp):
    """Apply `apply_last_layer_subset` at `Event.INIT`.

    >>> LastLayerSubset()
    LastLayerSubset()
    """

    stage = Stage.HEAD

    def install(self, state: State, logger: Logger) -> None:
        count = apply_last_layer_subset(state.model)
        self.report(
            logger,
            count,
            f"no sequence classifier of {', '.join(_FIRST_OF)} with transformers' own forward in the model; other "
            "heads read every token",
            already=having(state.model, _Owner),
        )


def _encoder(owner: torch.nn.Module) -> torch.nn.Module | None:
    """The stack of layers of the classifier `owner`, if its last layer may be cut."""
    config = getattr(owner, "config", None)
    if not (reads_first(owner) and stock_forward(owner) and config.model_type in _FIRST_OF):
        return None
    encoder = stack_of(getattr(owner, getattr(owner, "base_model_prefix", ""), None))
    if isinstance(owner, _Owner) or getattr(config, "is_decoder", False) or adds_to_scores(config) or encoder is None:
        return None
    last = layers_of(encoder)[-1]
    if not all(map(stock_forward, (encoder, last, attention_of(last)))) or foreign_in(last) is not None:
        return None
    return None if config.model_type in MODERNBERT and window_of(last.attn) >= 0 else encoder


_IDS = ("input_ids", "attention_mask", "token_type_ids", "position_ids")  # a classifier's first arguments


class _Owner:
    """Mixed into a classifier: asks its last layer for the first tokens, unless all are asked of itself."""

    def forward(self, *args: Any, **kwargs: Any):
        asked = (kwargs.get(name) for name in ("output_hidden_states", "output_attentions"))
        default = (self.config.output_hidden_states, self.config.output_attentions)
        whole = any(d if a is None else a for a, d in zip(asked, default, strict=True))
        layers = layers_of(stack_of(self.base_model))
        last = layers[-1]  # another one if somebody has cut the model, or built a new one
        whole |= not isinstance(last, FirstOnly) or last.must_be_whole() or not reads_first(self)
        whole |= sum(layer is last for layer in layers) > 1  # one that shares its weights reads all that it computes
        whole |= len(args) > len(_IDS)  # any further one could be either of them
        before = ask(None if whole else last)
        try:
            return super().forward(*args, **kwargs)
        finally:
            ask(before)
