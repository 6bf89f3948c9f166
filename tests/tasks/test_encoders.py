"""Model folders that cannot be trained, or not as they are: said in one line before training."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from composer_speedups.errors import TaskError
from composer_speedups.tasks import ModelSpec, TaskSpec, build_model, build_task

BERT = {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32}
T5 = transformers.T5Config(d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, vocab_size=264)
VIT = transformers.ViTConfig(**BERT, image_size=16, patch_size=8)
GPT2 = transformers.GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=264, n_positions=64)
MODELS = {"t5": transformers.T5ForConditionalGeneration, "vit": transformers.ViTModel}
MODELS["gpt2"] = transformers.GPT2LMHeadModel
SPEC = TaskSpec(name="dummy", max_length=16, train_samples=8, eval_samples=4, vocabulary=260, lowest_token=5)


def built(model: ModelSpec, **changes: Any):
    task = build_task(SPEC.model_copy(update=changes), model, seed=0)
    return build_model(model, task, seed=0), task


def refused(model: ModelSpec, **changes: Any) -> str:
    with pytest.raises(TaskError) as error:
        built(model, **changes)
    assert "\n" not in str(error.value)
    return str(error.value)


def tokenizer() -> transformers.PreTrainedTokenizerFast:
    return build_task(SPEC, ModelSpec(pretrained=False, config=BERT), seed=0).tokenizer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small BERT with weights and a tokenizer."""
    model, task = built(ModelSpec(pretrained=False, config=BERT))
    model.save_pretrained(tmp_path / "bert")
    task.tokenizer.save_pretrained(tmp_path / "bert")
    return tmp_path / "bert"


def without_weights(folder: Path) -> None:
    for file in folder.iterdir():
        if file.name != "config.json":
            file.unlink()


def change(folder: Path, **values: Any) -> None:
    file = folder / "config.json"
    config = json.loads(file.read_text()) | values
    file.write_text(json.dumps({key: value for key, value in config.items() if value != "none"}))


# ---- no encoders


@pytest.mark.parametrize("weights", [True, False], ids=["weights", "config.json only"])
@pytest.mark.parametrize("objective", ["classification", "mlm"])
@pytest.mark.parametrize(
    ("config", "why"), [(T5, "it has a decoder, too"), (VIT, "it has no vocabulary")], ids=["T5", "ViT"]
)
def test_what_is_no_encoder_of_texts(tmp_path: Path, config: Any, why: str, objective: str, weights: bool) -> None:
    MODELS[config.model_type](config).save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    if not weights:
        without_weights(tmp_path)
    expected = f"is of type {config.model_type}, which is no encoder of texts ({why}): choose a BERT-like encoder"
    for vocabulary in (260, None):
        assert expected in refused(ModelSpec(name=str(tmp_path)), objective=objective, vocabulary=vocabulary)


@pytest.mark.parametrize("pretrained", [True, False])
def test_gpt2_pads_with_the_tokenizers_token(tmp_path: Path, pretrained: bool) -> None:
    MODELS["gpt2"](GPT2).save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    spec = ModelSpec(name=str(tmp_path), pretrained=pretrained)
    model, task = built(spec, mean_length=8.0, length_std=2.0)
    batch = task.collate_train([task.train[i] for i in range(4)])
    assert (batch["attention_mask"] == 0).any()
    model.eval()
    logits = model(**batch).logits
    assert model.config.pad_token_id == task.tokenizer.pad_token_id
    alone = task.collate_train([task.train[2]])
    assert torch.allclose(logits[2:3], model(**alone).logits, atol=1e-5), "the last token that is no padding is read"
    assert "(there is no AutoModelForMaskedLM of it): choose a BERT-like encoder" in refused(spec, objective="mlm")


# ---- what the first batch would find


@pytest.mark.parametrize("name", ["bert-base-uncased", "roberta-base"])
def test_no_types_of_tokens(name: str) -> None:
    said = refused(ModelSpec(name=name, pretrained=False, config=BERT | {"type_vocab_size": 0}))
    assert "model.config.type_vocab_size is 0" in said and said.endswith("set it to at least 1")


def test_a_family_that_needs_no_types() -> None:
    config = BERT | {"type_vocab_size": 0}
    model, task = built(ModelSpec(name="microsoft/deberta-v3-base", pretrained=False, config=config))
    assert torch.isfinite(model(**task.collate_train([task.train[i] for i in range(2)])).loss)


@pytest.mark.parametrize(
    ("chunk", "task", "unit"),
    [
        (3, {}, 16),
        (32, {}, 16),
        (2, {"padding": "longest"}, 1),
        (3, {"padding": "longest", "pad_to_multiple_of": 8}, 8),
    ],
    ids=str,
)
def test_chunks_that_do_not_divide_a_batch(chunk: int, task: dict[str, Any], unit: int) -> None:
    said = refused(ModelSpec(pretrained=False, config=BERT | {"chunk_size_feed_forward": chunk}), **task)
    assert f"chunk_size_feed_forward is {chunk}, but the batches' lengths are multiples of {unit}, which" in said


@pytest.mark.parametrize(
    ("chunk", "task"),
    [(4, {}), (1, {"padding": "longest"}), (4, {"padding": "longest", "pad_to_multiple_of": 8}), (0, {})],
    ids=str,
)
def test_chunks_that_do(chunk: int, task: dict[str, Any]) -> None:
    config = BERT | {"chunk_size_feed_forward": chunk}
    model, made = built(ModelSpec(pretrained=False, config=config), mean_length=8.0, length_std=2.0, **task)
    assert torch.isfinite(model(**made.collate_train([made.train[i] for i in range(4)])).loss)


# ---- broken folders


@pytest.mark.parametrize("pretrained", [True, False])
@pytest.mark.parametrize(
    "values",
    [
        {"num_hidden_layers": "two"},
        {"num_attention_heads": 0},
        {"model_type": "none"},
        {"vocab_size": "many"},
        {"max_position_embeddings": "512"},
        {"pad_token_id": "0"},
    ],
    ids=str,
)
@pytest.mark.parametrize("config", [{}, {"hidden_dropout_prob": 0.0}], ids=["", "changed"])
def test_the_file_at_fault_is_named(folder: Path, values: dict, pretrained: bool, config: dict) -> None:
    if not pretrained:
        without_weights(folder)
    change(folder, **values)
    said = refused(ModelSpec(name=str(folder), pretrained=pretrained, config=config), vocabulary=None)
    assert f"{folder}/config.json" in said and "check the name" not in said
    if not config:
        assert "model.config" not in said


def test_a_folders_path_does_not_name_its_family(folder: Path) -> None:
    """transformers 4 would build RoBERTa, as that word occurs in the path."""
    change(folder, model_type="none")
    folder = folder.rename(folder.with_name("my-roberta"))
    said = refused(ModelSpec(name=str(folder)))
    assert "cannot be loaded" in said and "model_type" in said and f"{folder}/config.json" in said


def test_a_recipes_own_change_is_named_too(folder: Path) -> None:
    config = {"num_attention_heads": 7}
    assert refused(ModelSpec(name=str(folder), pretrained=False, config=config)).endswith(
        f"check model.config and {folder}/config.json"
    )
    assert refused(ModelSpec(name=str(folder), config=config)).endswith(
        f"check {folder}/config.json and the weights beside it, and model.config"
    )
    assert refused(ModelSpec(pretrained=False, config=BERT | config)).endswith("check model.config")


def test_a_vocabulary_of_null(folder: Path) -> None:
    assert "config.vocab_size" in refused(ModelSpec(name=str(folder), config={"vocab_size": None}))


# ---- weights that are not used


def test_weights_that_are_not_used_are_told(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    def told(model: ModelSpec) -> list[str]:
        caplog.clear()
        with caplog.at_level(logging.WARNING, "composer_speedups"):
            build_task(SPEC, model, seed=0)
        return [record.getMessage() for record in caplog.records if record.name == "composer_speedups"]

    assert told(ModelSpec(name=str(folder), pretrained=False)) == [
        f"{folder} has weights, and model.pretrained is false: they are not used; set model.pretrained=true"
    ]
    assert told(ModelSpec(name=str(folder))) == told(ModelSpec(name=str(folder), pretrained=True)) == []
    assert told(ModelSpec(pretrained=False, config=BERT)) == [], "a name has none here"
    without_weights(folder)
    assert told(ModelSpec(name=str(folder), pretrained=False)) == []
