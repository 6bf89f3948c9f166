"""Which encoders `Unpadding` can let work on packed tokens, and why it leaves others alone."""

from __future__ import annotations

import torch

from composer_speedups.families import (
    ALBERT,
    DEBERTA,
    ESM,
    MODERNBERT,
    adds_to_scores,
    attention_of,
    embeddings_of,
    has_head,
    layers_of,
    position_kind,
    stack_of,
    unwrapped,
)
from composer_speedups.packed.encoder import PackedEncoder
from composer_speedups.packed.esm import turns_alike
from composer_speedups.packed.modernbert import unpads_itself
from composer_speedups.surgery import known_code, stock_forward

__all__ = ["foreign_in", "owners_in", "why_not"]

# Whose modules, in an encoder of these families, compute each token by itself: adapters, quantised layers, others.
_KNOWN = (
    *("torch.", "transformers.", "composer_speedups.", "composer.", "peft.", "adapters."),
    *("bitsandbytes.", "torchao.", "apex.", "liger_kernel.", "transformer_engine."),
)
# So do those of a user that are one of these, as adapters made by hand are.
_OF_A_TOKEN = (torch.nn.Linear, torch.nn.Embedding, torch.nn.LayerNorm, torch.nn.Dropout)


def owners_in(model: torch.nn.Module) -> dict[int, list[torch.nn.Module]]:
    """By `id`: what each module in `model` is a child of, as heads may share an encoder; nothing of `model` itself."""
    owners: dict[int, list[torch.nn.Module]] = {id(model): []}
    for module in model.modules():
        for child in module.children():
            owners.setdefault(id(child), []).append(module)
    return owners


def why_not(module: torch.nn.Module, *owners: torch.nn.Module) -> str | None:
    """None if `module` is an encoder that can be unpadded; "" if it is nothing of the kind; or the reason.

    Each of its `owners` may read from it what the others do not.
    """
    config = getattr(module, "config", None)
    if stack_of(module) is None or (embeddings := embeddings_of(module)) is None:
        return ""
    if isinstance(module, PackedEncoder):
        return "its encoder is unpadded already"
    if getattr(config, "is_decoder", False) or getattr(config, "add_cross_attention", False):
        return "config.is_decoder is True: attention only to earlier tokens is not for unpadding"
    if adds_to_scores(config):
        return f"position_embedding_type={position_kind(config)!r} adds to the scores, which fused kernels do not allow"
    if getattr(config, "chunk_size_feed_forward", 0):
        return "config.chunk_size_feed_forward cuts padded rows: set it to 0"
    choosing = any(has_head(owner, ("ForMultipleChoice",)) for owner in owners)
    if choosing and getattr(config, "summary_type", "first") != "first":
        return f"summary_type={config.summary_type!r} reads padding, too"
    # Of Sentence Transformers' ColBERT models.
    expansions = [getattr(owner, "query_expansion", None) for owner in owners]
    if any(expansion and not expansion.get("attend", False) for expansion in expansions):
        return "query_expansion without attend scores tokens that the mask leaves out: unpadding has none of them"
    layers = [getattr(layer, "_orig_mod", layer) for layer in layers_of(stack_of(module))]  # as torch.compile wraps it
    if config.model_type in ALBERT and config.inner_group_num > 1:
        return "ALBERT with inner_group_num > 1 has groups of several layers"
    # Of ALBERT's groups the layers inside, too.
    parts = [module, embeddings, stack_of(module), *layers, *map(unwrapped, layers), *map(attention_of, layers)]
    own = [type(part).__name__ for part in parts if part is None or not (stock_forward(part) or _looks_up(part))]
    if own:
        return f"{own[0]} has a forward of its own, not transformers', and may want rows and padding"
    if (foreign := foreign_in(embeddings, *layers)) is not None:
        return (
            f"{foreign} in its layers is somebody's own, and may look from one token at others, which unpadded are "
            "those of all rows: give its class per_token = True if it does not"
        )
    if config.model_type in MODERNBERT and unpads_itself(module):
        return "ModernBERT with flash_attention_2 unpads itself in this version of transformers"
    if config.model_type in DEBERTA and (module.encoder.conv is not None or module.z_steps > 1):
        return "DeBERTa with a convolution between its layers (conv_kernel_size), or z_steps, works on padded rows"
    if config.model_type in ESM and not turns_alike(module):
        return "its layers turn queries and keys by angles of their own"
    return None


def _looks_up(part: torch.nn.Module) -> bool:
    """Whether `part` is PyTorch's table of embeddings, which is all the embeddings that EuroBERT has."""
    return isinstance(part, torch.nn.Embedding) and known_code(type(part)) and "forward" not in vars(part)


def foreign_in(*parts: torch.nn.Module | None) -> str | None:
    """The class of a module in `parts`, layers or embeddings, that may mix tokens; None if there is none.

    >>> from transformers import BertConfig, BertModel
    >>> bert = BertModel(BertConfig(hidden_size=8, num_attention_heads=2, num_hidden_layers=1, vocab_size=9))
    >>> foreign_in(bert.embeddings, *bert.encoder.layer) is None
    True
    """
    inside = [m for part in parts if part is not None for m in part.modules()]
    return next((type(m).__name__ for m in inside if not _of_a_token(m)), None)


def _of_a_token(module: torch.nn.Module) -> bool:
    """Whether `module` computes each token by itself, or else is known to this package."""
    written = next(cls for cls in type(module).__mro__ if "forward" in vars(cls))
    known = written.__module__.startswith(_KNOWN) or isinstance(module, _OF_A_TOKEN)
    return known or getattr(module, "per_token", False) is True
