"""Which Hugging Face models are built as BERT is, and which tokens the head of a model reads.

transformers has no class for either: families share code by copies, and heads differ in the end of their class names.
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = [
    "BERT_LIKE",
    "CAUSAL",
    "DISTILBERT",
    "MASKED",
    "READ_ANYWHERE",
    "READ_FIRST",
    "UNPADDABLE",
    "has_head",
    "layers_of",
    "positions",
]

# By `config.model_type`: embeddings, then `encoder.layer`, each with `attention.self`, `attention.output`, ...
BERT_LIKE = ("bert", "roberta", "xlm-roberta", "camembert", "electra")
DISTILBERT = ("distilbert",)  # the same mathematics in modules of other names
UNPADDABLE = (*BERT_LIKE, *DISTILBERT)

MASKED = ("ForMaskedLM",)
CAUSAL = ("ForCausalLM", "LMHeadModel")
READ_FIRST = ("ForSequenceClassification", "ForMultipleChoice")
READ_ANYWHERE = ("ForTokenClassification", "ForQuestionAnswering", *MASKED)


def layers_of(encoder: torch.nn.Module | None) -> torch.nn.Module | None:
    """The module that runs the layers of `encoder`, in its `layer`; None if `encoder` is none of `UNPADDABLE`.

    >>> from transformers import BertConfig, BertModel, DistilBertConfig, DistilBertModel
    >>> type(layers_of(BertModel(BertConfig(hidden_size=8, num_attention_heads=2, num_hidden_layers=1)))).__name__
    'BertEncoder'
    >>> type(layers_of(DistilBertModel(DistilBertConfig(dim=8, n_heads=2, n_layers=1)))).__name__
    'Transformer'
    """
    family = getattr(getattr(encoder, "config", None), "model_type", None)
    stack = getattr(encoder, "transformer" if family in DISTILBERT else "encoder", None)
    return stack if family in UNPADDABLE and hasattr(stack, "layer") else None


def positions(config: Any) -> str:
    """ "absolute" where positions are added to the embeddings; other kinds add to the attention scores.

    >>> from transformers import BertConfig
    >>> positions(BertConfig())
    'absolute'
    """
    return getattr(config, "position_embedding_type", None) or "absolute"  # transformers 5 has no other any more


def has_head(model: torch.nn.Module | None, kinds: tuple[str, ...]) -> bool:
    """Whether `model` is a whole model with such a head, a subclass or a model that a surgery changed included.

    >>> from transformers import BertConfig, BertForMaskedLM
    >>> bert = BertForMaskedLM(BertConfig(hidden_size=8, num_attention_heads=2, num_hidden_layers=1, vocab_size=9))
    >>> has_head(bert, MASKED), has_head(bert.bert, MASKED)
    (True, False)
    """
    return type(model).__name__.endswith(kinds)
