"""What transformers has switched on in a model that no CUDA graph can record: told before training, and not by CUDA."""

from __future__ import annotations

import torch

from composer_speedups.families import GRAPHED, stack_of
from composer_speedups.packed.encoder import PackedEncoder

__all__ = ["unrecordable"]


def unrecordable(model: torch.nn.Module) -> str | None:
    """What it is, and the remedy; None if there is no such thing.

    >>> from transformers import BertConfig, BertModel
    >>> bert = BertModel(BertConfig(hidden_size=8, num_attention_heads=2, num_hidden_layers=1, vocab_size=9))
    >>> unrecordable(bert)
    >>> bert.encoder.gradient_checkpointing = True  # as transformers' gradient_checkpointing_enable() does it
    >>> unrecordable(bert)[:43]
    'how layers are computed again in backward. '
    """
    for module in model.modules():
        if module.__dict__.get("gradient_checkpointing"):  # restores the state of a generator, in each layer
            return (
                "how layers are computed again in backward. Call the model's gradient_checkpointing_disable() "
                "(activation_checkpointing_disable() in newer transformers), or remove cuda_graphs"
            )
        config = getattr(module, "config", None)
        attention = str(getattr(config, "_attn_implementation", None))
        padded = getattr(config, "model_type", None) in GRAPHED and not isinstance(module, PackedEncoder)
        if "flash" in attention and padded and stack_of(module) is not None:
            return (
                f"how attn_implementation={attention!r} waits for the lengths of padded rows. Add unpadding, which has "
                "such attention of its own, or load the model with 'sdpa'"
            )
    return None
