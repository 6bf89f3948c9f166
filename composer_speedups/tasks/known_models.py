"""Encoders that are known by name: what their configurations say, without the hub and without transformers."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

__all__ = ["KNOWN", "OWNERS", "described", "known"]

_LARGE = dict(hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096)
# Its configuration's own defaults are those of DeBERTa-v2-xlarge.
_DEBERTA_V3 = dict(
    hidden_size=768,
    num_hidden_layers=12,
    num_attention_heads=12,
    intermediate_size=3072,
    relative_attention=True,
    pos_att_type=["p2c", "c2p"],
    position_buckets=256,
    norm_rel_ebd="layer_norm",
    share_att_key=True,
    position_biased_input=False,
)
_ROBERTA = dict(vocab_size=50265, max_position_embeddings=514, type_vocab_size=1, layer_norm_eps=1e-5)


def _bert(layers: int, width: int) -> tuple[str, dict[str, Any]]:
    """The family of Turc et al., 2019: heads of width 64, four times the width inside."""
    return "bert", dict(
        hidden_size=width, num_hidden_layers=layers, num_attention_heads=width // 64, intermediate_size=4 * width
    )


def _esm2(layers: int, width: int) -> tuple[str, dict[str, Any]]:
    """ESM-2 of Lin et al., 2022: of proteins, heads of 16 to 64, no dropout."""
    special = dict(vocab_size=33, pad_token_id=1, mask_token_id=32, max_position_embeddings=1026, token_dropout=True)
    numerics = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, layer_norm_eps=1e-5)
    return "esm", special | numerics | dict(
        position_embedding_type="rotary", emb_layer_norm_before=False,
        hidden_size=width, num_hidden_layers=layers, num_attention_heads=20, intermediate_size=4 * width,
    )  # fmt: skip


# Architectures by hub name (model type, changes to its defaults), to build without asking the hub.
# BertConfig() is bert-base-uncased, DistilBertConfig() distilbert-base-uncased, ModernBertConfig() ModernBERT-base.
KNOWN: dict[str, tuple[str, dict[str, Any]]] = {
    "google-bert/bert-base-uncased": ("bert", {}),
    "google-bert/bert-base-cased": ("bert", {"vocab_size": 28996}),
    "google-bert/bert-large-uncased": ("bert", _LARGE),
    "google-bert/bert-large-cased": ("bert", {**_LARGE, "vocab_size": 28996}),
    "google/bert_uncased_L-2_H-128_A-2": _bert(2, 128),
    "google/bert_uncased_L-4_H-256_A-4": _bert(4, 256),
    "google/bert_uncased_L-4_H-512_A-8": _bert(4, 512),
    "google/bert_uncased_L-8_H-512_A-8": _bert(8, 512),
    "prajjwal1/bert-tiny": _bert(2, 128),
    "prajjwal1/bert-mini": _bert(4, 256),
    "prajjwal1/bert-small": _bert(4, 512),
    "prajjwal1/bert-medium": _bert(8, 512),
    "distilbert/distilbert-base-uncased": ("distilbert", {}),
    "distilbert/distilroberta-base": ("roberta", {**_ROBERTA, "num_hidden_layers": 6}),
    "answerdotai/ModernBERT-base": ("modernbert", {}),
    "answerdotai/ModernBERT-large": (
        "modernbert",
        dict(hidden_size=1024, num_hidden_layers=28, num_attention_heads=16, intermediate_size=2624),
    ),
    "microsoft/deberta-v3-xsmall": (
        "deberta-v2",
        {**_DEBERTA_V3, "hidden_size": 384, "num_attention_heads": 6, "intermediate_size": 1536},
    ),
    "microsoft/deberta-v3-small": ("deberta-v2", {**_DEBERTA_V3, "num_hidden_layers": 6}),
    "microsoft/deberta-v3-base": ("deberta-v2", _DEBERTA_V3),
    "microsoft/deberta-v3-large": ("deberta-v2", {**_DEBERTA_V3, **_LARGE}),
    "microsoft/mpnet-base": ("mpnet", {"max_position_embeddings": 514, "layer_norm_eps": 1e-5}),
    "facebook/esm2_t6_8M_UR50D": _esm2(6, 320),
    "facebook/esm2_t12_35M_UR50D": _esm2(12, 480),
    "facebook/esm2_t30_150M_UR50D": _esm2(30, 640),
    "facebook/esm2_t33_650M_UR50D": _esm2(33, 1280),
    "FacebookAI/roberta-base": ("roberta", _ROBERTA),
    "FacebookAI/roberta-large": ("roberta", {**_ROBERTA, **_LARGE}),
}
OWNERS = ("google-bert", "distilbert", "FacebookAI")  # the hub serves these without owner, too


def known(name: str) -> tuple[str, dict[str, Any]] | None:
    """The model type and the changes to its defaults of a model that the table has, with or without its owner."""
    return next((KNOWN[n] for n in (name, *(f"{o}/{name}" for o in OWNERS)) if n in KNOWN), None)


def described(name: str) -> dict[str, Any]:
    """What can be said of a model's configuration at once, without transformers, weights or the hub.

    Of a folder what its config.json says, of a known name what differs from its family's defaults, else nothing.
    """
    folder = Path(os.path.expanduser(name))
    if not os.path.isdir(folder):
        return (known(name) or ("", {}))[1]
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}  # `resolve` will say what is wrong
    return config if isinstance(config, dict) else {}
