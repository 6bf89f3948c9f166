"""FLOPs of a step: against counts by hand, and against PyTorch's own counter for every family that is counted."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForSequenceClassification

from composer_speedups.measurement.flops import COUNTED, local_attention, model_flops, pairs_within
from composer_speedups.recipes import load_recipe
from composer_speedups.training.run import run

ROWS, LENGTH = 2, 96
SIZES = {"num_hidden_layers": 2, "hidden_size": 128, "num_attention_heads": 4, "intermediate_size": 256}
ITS_OWN: dict[str, dict[str, Any]] = {
    "distilbert": {"n_layers": 2, "dim": 128, "n_heads": 4, "hidden_dim": 256},
    "deberta-v2": SIZES | {"relative_attention": True, "pos_att_type": ["p2c"], "position_buckets": LENGTH // 2},
    "gpt2": {"n_layer": 2, "n_embd": 128, "n_head": 4, "n_inner": 256, "pad_token_id": 0},
    "esm": SIZES | {"pad_token_id": 1, "mask_token_id": 3},
    "modernbert": SIZES | {"local_attention": 2 * LENGTH, "pad_token_id": 0, "cls_token_id": 1, "sep_token_id": 2},
    "xlm": {"emb_dim": 128, "n_layers": 2, "n_heads": 4, "n_words": 500},
    "nomic_bert": SIZES | {"head_dim": 32},
    "eurobert": SIZES | {"num_key_value_heads": 2, "head_dim": 32, "pad_token_id": 0, "classifier_pooling": "bos"},
    "gte": SIZES | {"pad_token_id": 0},
    "flaubert": {"emb_dim": 128, "n_layers": 2, "n_heads": 4, "n_words": 500},
}


@pytest.mark.parametrize("family", sorted(COUNTED))
def test_every_counted_family_is_counted_as_pytorch_does(family: str) -> None:
    if family not in CONFIG_MAPPING:
        pytest.skip("this version of transformers does not have it")
    config = AutoConfig.for_model(family, vocab_size=500, **ITS_OWN.get(family, SIZES))
    model = AutoModelForSequenceClassification.from_config(config, attn_implementation="eager").train()
    ids = torch.randint(5, 400, (ROWS, LENGTH))
    with FlopCounterMode(display=False) as counter:
        out = model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=torch.zeros(ROWS, dtype=torch.long))
        out.loss.backward()
    # DeBERTa's distances, as many as tokens here, are projected once for all samples of a batch.
    once = 6 * 2 * LENGTH * 128**2 if family == "deberta-v2" else 0
    found = model_flops(model, ROWS * LENGTH, ROWS * LENGTH**2)
    assert found == pytest.approx(counter.get_total_flops() - once, rel=0.02)


@pytest.mark.parametrize("family", ["squeezebert", "ibert", "longformer"])
def test_of_other_families_nothing_is_said(family: str) -> None:
    more = {"attention_window": [32, 32]} if family == "longformer" else {"embedding_size": 128}
    config = AutoConfig.for_model(family, vocab_size=500, **SIZES, **more)
    assert model_flops(AutoModelForSequenceClassification.from_config(config), 100, 10_000) is None


def test_flops_of_bert() -> None:
    """Against the count by hand: 12 width^2 weights a layer at intermediate = 4 width."""
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=100, hidden_size=64, num_hidden_layers=3, num_attention_heads=4, intermediate_size=256
    )
    model = BertForSequenceClassification(config)
    expected = 6 * 1000 * 3 * 12 * 64**2 + 12 * 3 * 64 * 50_000
    assert model_flops(model, 1000, 50_000) == expected


@pytest.mark.parametrize(("groups", "inner"), [(1, 1), (3, 1), (2, 2)])
def test_flops_of_albert(groups: int, inner: int) -> None:
    """Its layers run several times each; what makes its small embeddings wide runs once."""
    from transformers import AlbertConfig, AlbertForSequenceClassification

    config = AlbertConfig(
        vocab_size=100, embedding_size=16, hidden_size=64, num_hidden_layers=6, num_attention_heads=4,
        intermediate_size=256, num_hidden_groups=groups, inner_group_num=inner,
    )  # fmt: skip
    expected = 6 * 1000 * (6 * inner * 12 * 64**2 + 16 * 64) + 12 * 6 * inner * 64 * 50_000
    assert model_flops(AlbertForSequenceClassification(config), 1000, 50_000) == expected


@pytest.mark.parametrize("kinds", [["c2p", "p2c"], ["p2c"]])
def test_flops_of_deberta(kinds: list[str]) -> None:
    """Each kind of product with distances is half of attention's two; what is made of distances once is left out."""
    from transformers import DebertaV2Config, DebertaV2ForSequenceClassification

    config = DebertaV2Config(
        vocab_size=100, hidden_size=64, num_hidden_layers=3, num_attention_heads=4, intermediate_size=256,
        relative_attention=True, pos_att_type=kinds, share_att_key=kinds == ["c2p", "p2c"],
    )  # fmt: skip
    model = DebertaV2ForSequenceClassification(config)
    expected = 6 * 1000 * 3 * 12 * 64**2 + (12 + 6 * len(kinds)) * 3 * 64 * 50_000
    assert model_flops(model, 1000, 50_000) == expected


def modern_bert():
    from transformers import ModernBertConfig

    return ModernBertConfig(
        vocab_size=256, hidden_size=64, num_hidden_layers=5, num_attention_heads=4, intermediate_size=96,
        local_attention=8, pad_token_id=0, cls_token_id=1, sep_token_id=2, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip


def test_flops_of_modern_bert() -> None:
    """Of five layers two see everything, the first and the fourth; the others four tokens to either side."""
    from transformers import ModernBertForSequenceClassification

    config, lengths = modern_bert(), [1, 3, 5, 6, 20]
    assert local_attention(config) == (3, 4)
    near = sum(abs(i - j) <= 4 for length in lengths for i in range(length) for j in range(length))
    assert pairs_within(torch.tensor(lengths), 4) == near
    tokens, squares = sum(lengths), sum(length**2 for length in lengths)
    layer = 4 * 64**2 + 3 * 64 * 96  # query, key, value, out; in, gate, out
    expected = 6 * tokens * 5 * layer + 12 * 64 * (2 * squares + 3 * near)
    model = ModernBertForSequenceClassification(config)
    assert model_flops(model, tokens, squares, local_pairs=near) == expected


def test_flops_of_modern_bert_in_a_run(tmp_path) -> None:
    modern_bert().save_pretrained(tmp_path)
    task = "task={name: dummy, max_length: 32, vocabulary: 256, train_samples: 64, eval_samples: 16}"
    sizes = {"num_hidden_layers": 5, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96}
    overrides = [task, f"model.name={tmp_path}", f"model.config={json.dumps(sizes)}", "batch_size=8", "duration=8ba"]
    result = run(load_recipe("demo/fp32", [*overrides, "schedule.warmup=2ba"]))
    near = sum(abs(i - j) <= 4 for i in range(32) for j in range(32))
    sample = 6 * 32 * 5 * (4 * 64**2 + 3 * 64 * 96) + 12 * 64 * (2 * 32**2 + 3 * near)
    assert result.model_flops_per_second == pytest.approx(result.samples_per_second * sample)
