"""Which Hugging Face models are built as BERT is, and which tokens the head of a model reads.

transformers has no class for either: families share code by copies, and heads differ in the end of their class names.
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = [
    "ALBERT",
    "BERT_LIKE",
    "CAUSAL",
    "DATA2VEC",
    "DEBERTA",
    "DISTILBERT",
    "ERNIE",
    "ESM",
    "EUROBERT",
    "GRAPHED",
    "MASKED",
    "MODERNBERT",
    "MPNET",
    "NOMIC_LIKE",
    "READ_ANYWHERE",
    "READ_FIRST",
    "UNPADDABLE",
    "adds_to_scores",
    "attention_of",
    "embeddings_of",
    "has_head",
    "layers_of",
    "position_kind",
    "reads_first",
    "stack_of",
    "takes_first",
    "unwrapped",
]

# By `config.model_type`: embeddings, then `encoder.layer`, each with `attention.self`, `attention.output`, ...
BERT_LIKE = ("bert", "roberta", "xlm-roberta", "camembert", "electra")
DATA2VEC = ("data2vec-text",)  # RoBERTa by another name
ERNIE = ("ernie",)  # BERT, with one argument more
DISTILBERT = ("distilbert",)  # the same mathematics in modules of other names
MODERNBERT = (
    "modernbert",
)  # its encoder runs the layers itself; rotary positions, windows, norms before what they feed
MPNET = ("mpnet",)  # BERT's modules; scores have a number for the distance, which its encoder brings
DEBERTA = ("deberta-v2",)  # and v3; scores have products with relative positions, which its encoder brings
ESM = ("esm",)  # of proteins; rotary positions in ESM-2, norms before what they feed
ALBERT = ("albert",)  # one layer that is run again and again, or a few of them, in groups
NOMIC_LIKE = ("nomic_bert", "jina_embeddings_v3", "gte")  # BERT's norms, rotary positions, Llama's names of modules
EUROBERT = ("eurobert",)  # the same with Llama's norms; transformers has all four from 5 on
_OLDER = (*BERT_LIKE, *DATA2VEC, *ERNIE, *DISTILBERT, *MODERNBERT, *MPNET, *DEBERTA, *ESM, *ALBERT)
UNPADDABLE = (*_OLDER, *NOMIC_LIKE, *EUROBERT)

GRAPHED = (*BERT_LIKE, *DISTILBERT, *MODERNBERT)  # of which `CUDAGraphs` knows what the host reads

MASKED = ("ForMaskedLM",)
CAUSAL = ("ForCausalLM", "LMHeadModel")
READ_FIRST = ("ForSequenceClassification", "ForMultipleChoice")
READ_ANYWHERE = ("ForTokenClassification", "ForQuestionAnswering", *MASKED)


def stack_of(encoder: torch.nn.Module | None) -> torch.nn.Module | None:
    """The module that runs the layers of `encoder`; None if `encoder` is none of `UNPADDABLE`.

    >>> from transformers import BertConfig, BertModel, DistilBertConfig, DistilBertModel
    >>> type(stack_of(BertModel(BertConfig(hidden_size=8, num_attention_heads=2, num_hidden_layers=1)))).__name__
    'BertEncoder'
    >>> type(stack_of(DistilBertModel(DistilBertConfig(dim=8, n_heads=2, n_layers=1)))).__name__
    'Transformer'
    """
    family = getattr(getattr(encoder, "config", None), "model_type", None)
    if family in (*MODERNBERT, *NOMIC_LIKE, *EUROBERT):
        stack = encoder
    else:
        stack = getattr(encoder, "transformer" if family in DISTILBERT else "encoder", None)
    return stack if family in UNPADDABLE and layers_of(stack) is not None else None


def layers_of(stack: torch.nn.Module | None) -> torch.nn.ModuleList | None:
    """The layers that the module `stack_of` an encoder runs, in order; None if it has none.

    ALBERT's are its groups, each of one layer in every published model, which it may run several times.
    """
    # Compilers trace it, and the one of torch 2.7 knows no `next` of a generator.
    layers = getattr(stack, "layer", None) or getattr(stack, "layers", None)
    layers = layers or getattr(stack, "albert_layer_groups", None)
    return layers if isinstance(layers, torch.nn.ModuleList) else None


def embeddings_of(encoder: torch.nn.Module) -> torch.nn.Module | None:
    """What makes hidden states of ids in such an encoder; None if not found."""
    return getattr(encoder, "embed_tokens" if encoder.config.model_type in EUROBERT else "embeddings", None)


def attention_of(layer: torch.nn.Module) -> torch.nn.Module | None:
    """The self-attention in a layer of such an encoder: with the layers of queries, keys and values; None if not found.

    >>> from transformers import BertConfig, BertModel
    >>> bert = BertModel(BertConfig(hidden_size=8, num_attention_heads=2, num_hidden_layers=1))
    >>> attention_of(bert.encoder.layer[0]).query
    Linear(in_features=8, out_features=8, bias=True)
    """
    # Asked at each forward pass, so it looks into modules' own dictionaries: `getattr` takes ten times as long.
    inside = unwrapped(layer)._modules
    block = inside.get("attention") or inside.get("attn") or inside.get("self_attn")
    if block is None:
        return None
    inside = unwrapped(block)._modules
    return unwrapped(inside.get("self") or inside.get("attn") or block)


def unwrapped(module: torch.nn.Module) -> torch.nn.Module:
    """What `torch.compile`, FSDP, a checkpoint or a group of ALBERT's has wrapped, each with one child; else `module`.

    >>> unwrapped(torch.nn.Sequential(torch.nn.Linear(2, 2)))
    Linear(in_features=2, out_features=2, bias=True)
    """
    while len(module._modules) == 1:
        (module,) = module._modules.values()
    return module


def position_kind(config: Any) -> str:
    """ "absolute" where positions are added to the embeddings, "rotary" where ESM turns queries and keys, or others.

    >>> from transformers import BertConfig
    >>> position_kind(BertConfig())
    'absolute'
    """
    return getattr(config, "position_embedding_type", None) or "absolute"  # transformers 5 has no others any more


def adds_to_scores(config: Any) -> bool:
    """Whether positions add to the attention scores, which fused kernels do not allow."""
    return position_kind(config) not in ("absolute", "rotary")


def has_head(model: torch.nn.Module | None, kinds: tuple[str, ...]) -> bool:
    """Whether `model` is a whole model with such a head, a subclass or a model that a surgery changed included.

    >>> from transformers import BertConfig, BertForMaskedLM
    >>> bert = BertForMaskedLM(BertConfig(hidden_size=8, num_attention_heads=2, num_hidden_layers=1, vocab_size=9))
    >>> has_head(bert, MASKED), has_head(bert.bert, MASKED)
    (True, False)
    """
    return type(model).__name__.endswith(kinds)


def takes_first(reader: torch.nn.Module | None) -> bool:
    """Whether `reader`, a pooler or head that is given the tokens of each row, takes the first and no other.

    All of transformers' do; one of your own may take their mean, under whatever name. None: nobody is given them.

    >>> from transformers.models.bert.modeling_bert import BertConfig, BertPooler
    >>> takes_first(BertPooler(BertConfig(hidden_size=8, num_attention_heads=2))), takes_first(torch.nn.Linear(8, 8))
    (True, False)
    """
    reader = getattr(reader, "original_module", reader)  # PEFT's, which trains a copy of it
    own = reader is not None and "forward" in reader.__dict__  # what the compiler understands, and not `vars`
    return reader is None or (type(reader).__module__.startswith("transformers.") and not own)


def _reader_of(owner: torch.nn.Module) -> torch.nn.Module | None:
    """The module which the classifier `owner` gives the tokens of each row; None if it takes the first itself."""
    for module in (getattr(owner.base_model, "pooler", None), getattr(owner, "pooler", None)):
        if module is not None:
            return module
    if owner.config.model_type in (*DISTILBERT, *MODERNBERT, *EUROBERT):
        return None
    return getattr(owner, "sequence_summary", None) or getattr(owner, "classifier", None)


def reads_first(owner: torch.nn.Module | None) -> bool:
    """Whether `owner` is a whole model whose head reads each row's first token, and no other.

    >>> from transformers import BertConfig, BertForSequenceClassification
    >>> small = dict(hidden_size=8, num_attention_heads=2, num_hidden_layers=1, vocab_size=9)
    >>> reads_first(BertForSequenceClassification(BertConfig(**small)))
    True
    """
    config = getattr(owner, "config", None)
    modern = getattr(config, "model_type", None) in MODERNBERT
    if not has_head(owner, READ_FIRST) or (modern and has_head(owner, ("ForMultipleChoice",))):
        return False  # that one reads the first token that is real
    if not takes_first(_reader_of(owner)):
        return False
    # ELECTRA's multiple choice may take a mean, and so may ModernBERT's classifiers and EuroBERT's.
    first = ("cls", "bos")
    return getattr(config, "summary_type", "first") == "first" and getattr(config, "classifier_pooling", "cls") in first
