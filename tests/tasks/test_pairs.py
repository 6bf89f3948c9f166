"""Tasks of two texts: how they are read, split, joined, and given to models that know types of tokens or not."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

from composer_speedups import apply_unpadding
from composer_speedups.errors import TaskError
from composer_speedups.recipes import make_recipe
from composer_speedups.tasks import ModelSpec, TaskSpec, build_model, build_task, files
from composer_speedups.training.run import run

SMALL = {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32}
DISTILLED = {"n_layers": 1, "dim": 16, "n_heads": 2, "hidden_dim": 32}
WORDS = ["cat", "dog", "bird", "fish", "tree", "house", "river"]


def words(first: int, count: int) -> str:
    return " ".join(WORDS[(first * 5 + i * i) % len(WORDS)] for i in range(count))


@pytest.fixture
def table(tmp_path: Path) -> Path:
    rows = ["question\tanswer\tgood"]
    rows += [f"{words(i, 2 + i % 5)} {i}\t{words(i + i % 2, 3 + i % 9)} {i}\t{['no', 'yes'][i % 2]}" for i in range(60)]
    path = tmp_path / "pairs.tsv"
    path.write_text("\n".join(rows))
    return path


def spec(table: Path, **changes) -> TaskSpec:
    usual = {"text_column": "question", "text_pair_column": "answer", "label_column": "good"}
    return TaskSpec(**({"name": "text", "path": str(table), "max_length": 32, "vocabulary": 300} | usual | changes))


@pytest.mark.parametrize(
    ("name", "config", "types"),
    [
        ("bert-base-uncased", SMALL, 2),
        ("bert-base-uncased", SMALL | {"type_vocab_size": 1}, 0),
        ("roberta-base", SMALL, 0),  # has one
        ("distilbert-base-uncased", DISTILLED, 0),
    ],
)
@pytest.mark.parametrize("objective", ["classification", "mlm"])
def test_both_texts_are_given_as_the_model_takes_them(
    table: Path, tmp_path: Path, name: str, config: dict, types: int, objective: str
) -> None:
    from transformers import AutoTokenizer

    model = ModelSpec(name=name, pretrained=False, config=config)
    made = build_task(spec(table, objective=objective), model, seed=0)
    batch = made.collate_train([made.train[i] for i in range(4)])
    assert ("token_type_ids" in batch) == (types > 0)
    assert torch.isfinite(build_model(model, made)(**batch).loss)
    made.tokenizer.save_pretrained(tmp_path / "saved")
    saved = AutoTokenizer.from_pretrained(tmp_path / "saved")
    texts = dict(line.split("\t")[:2] for line in table.read_text().splitlines()[1:])
    sep = made.tokenizer.sep_token_id
    for sample in made.train:
        parts = sample["input_ids"].tolist()
        assert parts.count(sep) == 2 and parts[-1] == sep
        first, second = (
            made.tokenizer.decode(part) for part in (parts[1 : parts.index(sep)], parts[parts.index(sep) + 1 : -1])
        )
        assert texts[first] == second
        again = saved(first, second, return_tensors="pt")
        assert again["input_ids"][0].tolist() == parts
        assert ("token_type_ids" in again) == (types > 0)
        if types:
            expected = [0] * (parts.index(sep) + 1) + [1] * (len(parts) - parts.index(sep) - 1)
            assert sample["token_type_ids"].tolist() == again["token_type_ids"][0].tolist() == expected


def test_types_are_padded_with_zeros_and_reach_workers(table: Path) -> None:
    made = build_task(spec(table), ModelSpec(pretrained=False, config=SMALL), seed=0)
    batch = made.collate_train([made.train[i] for i in range(8)])
    lengths = batch["attention_mask"].sum(1)
    for row, length in zip(batch["token_type_ids"], lengths, strict=True):
        assert row[:length].max() == 1 and row[length:].eq(0).all()
    there = pickle.loads(pickle.dumps(made.train))  # what a data loader's worker is given
    assert torch.equal(there[3]["token_type_ids"], made.train[3]["token_type_ids"])


def test_the_longer_text_is_cut_first(tmp_path: Path) -> None:
    path = tmp_path / "a.tsv"
    rows = [f"{words(i, 2)}\t{words(i, 40)}\t{i % 2}" for i in range(20)]
    path.write_text("question\tanswer\tgood\n" + "\n".join(rows))
    made = build_task(spec(path, max_length=16), ModelSpec(pretrained=False, config=SMALL), seed=0)
    for sample in made.train:
        text = made.tokenizer.decode(sample["input_ids"])
        first = text.split("[SEP]")[0].split()[1:]
        assert len(sample["input_ids"]) == 16 and len(first) == 2 and text.endswith("[SEP]")


def test_pairs_with_one_first_text_stay_on_one_side(tmp_path: Path) -> None:
    path = tmp_path / "a.tsv"
    rows = [f"question {i % 7}\tanswer {i}\t{i % 2}" for i in range(70)]
    path.write_text("question\tanswer\tgood\n" + "\n".join(rows))
    for seed in range(5):
        texts = files.read(str(path), text_column="question", text_pair_column="answer", label_column="good", seed=seed)
        assert texts.train and texts.evaluation and not set(texts.train) & set(texts.evaluation)
        assert texts.train_pairs is not None and texts.evaluation_pairs is not None
        found = [*zip(texts.train, texts.train_pairs, texts.train_labels, strict=True)]
        found += zip(texts.evaluation, texts.evaluation_pairs, texts.evaluation_labels, strict=True)
        assert sorted(f"{a}\t{b}\t{texts.label_names[n]}" for a, b, n in found) == sorted(rows)


def test_rows_without_a_second_text_are_dropped_and_counted(table: Path) -> None:
    table.write_text(table.read_text() + "\nalone\t\tyes\n\tnothing asked\tno")
    texts = files.read(str(table), text_column="question", text_pair_column="answer", label_column="good")
    assert len(texts.train) + len(texts.evaluation) == 60
    assert texts.notes == [f"2 of 62 rows of {table} dropped: no text, or no second one"]


def test_what_cannot_be_is_one_clear_error(table: Path, tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="text_pair_column belongs to task text or hub, not to imdb"):
        TaskSpec(name="imdb", text_pair_column="b")
    with pytest.raises(ValidationError, match="text_column and text_pair_column are both 'a': one column cannot be"):
        TaskSpec(name="text", path="x", text_column="a", text_pair_column="a")
    with pytest.raises(ValidationError, match="text_pair_column and label_column are both 'label'"):
        TaskSpec(name="text", path="x", text_pair_column="label")
    assert TaskSpec(name="text", path="x", text_pair_column="label", objective="mlm").text_pair_column == "label"
    with pytest.raises(
        TaskError, match=r"no column 'reply': it has 'question', 'answer', 'good'\. Set task\.text_column, "
    ):
        build_task(spec(table, text_pair_column="reply"), ModelSpec(pretrained=False, config=SMALL), seed=0)
    (tmp_path / "folder" / "yes").mkdir(parents=True)
    (tmp_path / "folder" / "yes" / "1.txt").write_text("text")
    with pytest.raises(TaskError, match=r"holds \.txt files, each of one text: pairs .* are read from \.csv"):
        files.read(str(tmp_path / "folder"), text_pair_column="answer")


def test_what_is_stored_of_other_tasks_says_nothing_of_pairs() -> None:
    """Studies and checkpoints of before have no such key, and are to be gone on with."""
    assert not {"text_pair_column", "subset", "train_split"} & TaskSpec().model_dump().keys()
    one = TaskSpec(name="text", path="x", text_pair_column="b")
    assert one.model_dump()["text_pair_column"] == "b" and TaskSpec.model_validate_json(one.model_dump_json()) == one


def test_padding_is_removed_of_pairs_too(table: Path) -> None:
    """Types go with their tokens: in float64 the packed model computes what the padded one does, which reads them."""
    model_spec = ModelSpec(pretrained=False, config=SMALL)
    made = build_task(spec(table), model_spec, seed=0)
    batch = made.collate_train([made.train[i] for i in range(8)])
    model = build_model(model_spec, made, seed=0).double().eval()
    for parameter in model.parameters():  # BERT's own are so small that all texts are alike to it
        torch.nn.init.normal_(parameter, std=0.5, generator=torch.Generator().manual_seed(parameter.numel()))
    expected = model(**batch).logits
    alike = model(**batch | {"token_type_ids": torch.zeros_like(batch["token_type_ids"])}).logits
    assert (alike - expected).abs().max() > 1e-4
    assert apply_unpadding(model) == 1
    torch.testing.assert_close(model(**batch).logits, expected)


@pytest.mark.parametrize("name", ["bert-base-uncased", "roberta-base"])
def test_a_training_with_what_moves_tokens(table: Path, name: str) -> None:
    config = SMALL | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    values = {
        "task": spec(table, padding="longest").model_dump(),
        "model": {"name": name, "pretrained": False, "config": config},
        "batch_size": 8,
        "duration": "2ep",
        "schedule": {"warmup": "0ba"},
    }
    used = {"unpadding": {}, "last_layer_subset": {}, "fused_dropout_add_norm": {}, "fused_bias_gelu": {}}
    plain, packed = (run(make_recipe(values | {"speedups": speedups})) for speedups in ({}, used))
    assert plain.status == packed.status == "ok" and len(packed.losses) == len(plain.losses) == 12
    assert packed.losses == pytest.approx(plain.losses, rel=1e-4)
