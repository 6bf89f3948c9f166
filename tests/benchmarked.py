"""What the tests of the benchmarks share: the folder of results, a training of moments, a row of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks import harness

ROOT = Path(__file__).resolve().parents[1]
TINY = (
    "task={name: dummy, mean_length: 10, length_std: 4, max_length: 16, train_samples: 64}",
    "model.config={num_hidden_layers: 1, hidden_size: 32, num_attention_heads: 2, intermediate_size: 64, "
    "vocab_size: 128, hidden_dropout_prob: 0.0, attention_probs_dropout_prob: 0.0}",
    "model.pretrained=false",
    "batch_size=4",
)


def row(entry: str, repetition: int, tokens: float, **more: Any) -> dict[str, Any]:
    values = {"seconds": [9.0, 1.0, 1.0], "tokens": [9, tokens, tokens], "flops": [9, 5.0, 5.0], "losses": [1.0, 0.5]}
    found = {"entry": entry, "repetition": repetition, "reason": "", "overlapped": False, **values} | more
    return found | harness._speeds(found, 4, 2)
