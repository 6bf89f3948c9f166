"""A recipe whose whole training takes a second."""

from __future__ import annotations

from composer_speedups.recipes import load_recipe

TINY = [
    "task={name: dummy, max_length: 32, mean_length: 16, length_std: 6, vocabulary: 256, train_samples: 64, "
    "eval_samples: 16}",
    "model.config={num_hidden_layers: 2, hidden_size: 32, num_attention_heads: 2, intermediate_size: 64, "
    "hidden_dropout_prob: 0.0, attention_probs_dropout_prob: 0.0}",
    "batch_size=8",
    "duration=1ep",
    "schedule.warmup=2ba",
]


def tiny(*overrides: str, name: str = "demo/fp32"):
    return load_recipe(name, [*TINY, *overrides])
