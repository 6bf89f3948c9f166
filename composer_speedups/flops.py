"""Model FLOPs: what the mathematics of a training step needs, whatever the implementation does.

Counted as PaLM's appendix B does: two operations for each multiply-add, the backward pass twice the forward, no
recomputation, padding not counted. Embedding look-ups, norms, softmax and the head on one token per sample are left
out: under one per cent for BERT-base.
"""

from __future__ import annotations

import torch

__all__ = ["model_flops"]


def model_flops(model: torch.nn.Module, tokens: float, squared_lengths: float, predicted: float = 0.0) -> float:
    """FLOPs of one training step (forward and backward).

    Args:
        model: a Hugging Face encoder with a head.
        tokens: real tokens of the step.
        squared_lengths: the sum over the samples of their length squared.
        predicted: tokens that an MLM head has to predict; 0 for classification.

    Returns:
        `6 * tokens * weights of the encoder's linear layers`, the attention's `12 * layers * width *
        squared_lengths`, and `6 * predicted * weights of the head`.
    """
    base = getattr(model, "base_model", model)
    layers = getattr(model.config, "num_hidden_layers", 0)
    width = getattr(model.config, "hidden_size", 0)
    # ALBERT runs the same layer several times; its weights count once for each.
    shared = layers if getattr(model.config, "num_hidden_groups", 0) == 1 else 1
    encoder = sum(w.numel() for name, w in _weights(base) if "pooler" not in name) * shared
    inside = {id(w) for _, w in _weights(base)}
    head = sum(w.numel() for _, w in _weights(model) if id(w) not in inside)
    return 6.0 * tokens * encoder + 12.0 * layers * width * squared_lengths + 6.0 * predicted * head


def _weights(model: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Weights of matrix products: linear layers, and GPT-2's Conv1D, which is one by another name."""
    return [
        (name, module.weight)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) or type(module).__name__ == "Conv1D"
    ]
