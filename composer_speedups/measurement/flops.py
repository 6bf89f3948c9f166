"""Model FLOPs: what the mathematics of a training step needs, whatever the implementation does.

Counted as PaLM's appendix B does: two operations for each multiply-add, the backward pass twice the forward, no
recomputation, padding not counted. Embedding look-ups, norms, softmax and the head on one token per sample are left
out: under one per cent for BERT-base.
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["COUNTED", "local_attention", "model_flops", "pairs_within"]

# By `config.model_type`: families whose count here is PyTorch's own. Others have products that this does not know, as
# convolutions, bottlenecks, or attention to other tokens than all; for them a wrong MFU would be worse than none.
COUNTED = frozenset({
    "albert", "bert", "camembert", "data2vec-text", "deberta-v2", "distilbert", "electra", "ernie", "esm", "eurobert",
    "flaubert", "gpt2", "gte", "jina_embeddings_v3", "layoutlm", "megatron-bert", "modernbert", "mpnet", "nomic_bert",
    "rembert", "roberta", "roberta-prelayernorm", "roformer", "xlm", "xlm-roberta", "xlm-roberta-xl",
})  # fmt: skip


def model_flops(
    model: torch.nn.Module,
    tokens: float,
    squared_lengths: float,
    predicted: float = 0.0,
    local_pairs: float | None = None,
) -> float | None:
    """FLOPs of one training step (forward and backward); None for families that are not `COUNTED`.

    Args:
        model: a Hugging Face encoder with a head.
        tokens: real tokens of the step.
        squared_lengths: the sum over the samples of their length squared.
        predicted: tokens that an MLM head has to predict; 0 for classification.
        local_pairs: the sum over the samples of `pairs_within` the reach of `local_attention`; None counts layers
            with local attention as the others.

    Returns:
        `6 * tokens * weights of the encoder's linear layers`, the attention's `12 * layers * width *
        squared_lengths` (`local_pairs` in layers that see a window), and `6 * predicted * weights of the head`.
        DeBERTa's attention has up to two products more for each pair, with its distance: half as much again each.
    """
    if getattr(model.config, "model_type", None) not in COUNTED:
        return None
    base = getattr(model, "base_model", model)
    layers = getattr(model.config, "num_hidden_layers", 0)
    width = getattr(model.config, "hidden_size", 0)
    # ALBERT runs the same layers several times; their weights count each time, those of its embedding once.
    groups = getattr(model.config, "num_hidden_groups", 0)
    shared = layers / groups if groups else 1
    encoder = sum(
        w.numel() * (shared if "albert_layer_groups" in name else 1)
        for name, w in _weights(base)
        if not any(part in name for part in ("pooler", "pos_key_proj", "pos_query_proj"))  # of few tokens, or none
    )
    inside = {id(w) for _, w in _weights(base)}
    head = sum(w.numel() for _, w in _weights(model) if id(w) not in inside)
    layers *= getattr(model.config, "inner_group_num", 1)  # of ALBERT: layers in each of those that it counts
    local = local_attention(model.config)[0] if local_pairs is not None else 0
    pairs = (layers - local) * squared_lengths + local * (local_pairs or 0.0)
    return 6.0 * tokens * encoder + _of_a_pair(model.config) * width * pairs + 6.0 * predicted * head


def _of_a_pair(config: Any) -> float:
    """Of attention for each pair of tokens and number of its width: two products, and DeBERTa's with distances."""
    kinds = getattr(config, "pos_att_type", None) if getattr(config, "relative_attention", False) else None
    return 12.0 + 6.0 * sum(kind in ("c2p", "p2c") for kind in kinds or ())


def local_attention(config: Any) -> tuple[int, int | None]:
    """How many of a model's layers see a window only, and how far it reaches to either side; (0, None) without any.

    >>> from transformers import BertConfig
    >>> local_attention(BertConfig())
    (0, None)
    """
    window = getattr(config, "local_attention", None)  # of ModernBERT: tokens on both sides together
    if not isinstance(window, int) or window <= 0:
        return 0, None
    layers = range(config.num_hidden_layers)
    kinds = getattr(config, "layer_types", None)  # transformers 5; 4.53 has every how many layers see everything
    if kinds is not None:
        count = sum(kinds[i] == "sliding_attention" for i in layers)
    else:
        count = sum(i % getattr(config, "global_attn_every_n_layers", 1) != 0 for i in layers)
    return (count, window // 2) if count else (0, None)


def pairs_within(lengths: torch.Tensor, reach: int) -> torch.Tensor:
    """The sum over samples of `lengths` of their pairs of tokens that are at most `reach` apart; one scalar tensor.

    >>> pairs_within(torch.tensor([3, 5]), 1).item()  # 3 with themselves, 4 beside each other; 5 and 8
    20
    """
    far = (lengths - 1).clamp(0, reach)
    return (lengths * (2 * far + 1) - far * (far + 1)).sum()


def _weights(model: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Weights of matrix products: linear layers, and GPT-2's Conv1D, which is one by another name."""
    return [
        (name, module.weight)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) or type(module).__name__ == "Conv1D"
    ]
