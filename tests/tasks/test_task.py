from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from composer_speedups.errors import TaskError
from composer_speedups.tasks import ModelSpec, TaskSpec, build_model, build_task, files
from composer_speedups.tasks.cache import _seal, digest

SCRATCH = ModelSpec(
    pretrained=False,
    config={"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32},
)


@pytest.fixture
def table(tmp_path: Path) -> Path:
    rows = ["text,label"]
    for i in range(50):
        rows.append(f"the {'cat' if i % 2 else 'dog'} sat on mat number {i} {'and slept ' * (i % 5)},{'ab'[i % 2]}")
    path = tmp_path / "a.csv"
    path.write_text("\n".join(rows))
    return path


def text_spec(path: Path, **changes) -> TaskSpec:
    return TaskSpec(**({"name": "text", "path": str(path), "max_length": 32, "vocabulary": 300} | changes))


def batch_of(made, part: str = "train", rows: int = 4) -> dict[str, torch.Tensor]:
    data = getattr(made, part)
    collate = made.collate_train if part == "train" else made.collate_eval
    return collate([data[i] for i in range(rows)])


@pytest.mark.parametrize("objective", ["classification", "mlm"])
@pytest.mark.parametrize("padding", ["max_length", "longest"])
def test_a_text_task_from_file_to_loss(table: Path, objective: str, padding: str):
    spec = text_spec(table, objective=objective, padding=padding)
    made = build_task(spec, SCRATCH, seed=0)
    batch = batch_of(made)
    assert set(batch) == {"input_ids", "attention_mask", "labels"}
    longest = max(len(made.train[i]["input_ids"]) for i in range(4))
    assert batch["input_ids"].shape == (4, 32 if padding == "max_length" else longest)
    assert batch["input_ids"].max() < made.vocabulary == len(made.tokenizer)
    loss = build_model(SCRATCH, made)(**batch).loss
    assert torch.isfinite(loss)
    if objective == "classification":
        assert (made.num_labels, made.label_names) == (2, ["a", "b"])
        text = made.tokenizer.decode(made.train[0]["input_ids"])
        assert ("cat" in text) == (made.train[0]["label"] == 1)
    else:
        assert batch["labels"].shape == batch["input_ids"].shape and (batch["labels"] != -100).any(1).all()


def test_docstrings_from_packages_to_loss():
    spec = TaskSpec(train_samples=60, eval_samples=40, max_length=64, vocabulary=1000)
    lines: list[str] = []
    made = build_task(spec, SCRATCH, seed=0, progress=lines.append)
    assert (len(made.train), len(made.evaluation), made.num_labels) == (60, 40, 10)
    assert len(made.tokenizer) == made.vocabulary == 1000
    assert made.lengths.longest == 64 and 0 < made.lengths.padding < 1
    assert torch.isfinite(build_model(SCRATCH, made)(**batch_of(made)).loss)
    assert any("WordPiece" in line for line in lines)
    lines.clear()
    again = build_task(spec, SCRATCH, seed=5, progress=lines.append)
    assert lines == [], "the second time everything comes from the cache, whatever the run's seed"
    assert all(torch.equal(made.train[i]["input_ids"], again.train[i]["input_ids"]) for i in range(60))


def test_second_time_nothing_is_read(table: Path, monkeypatch):
    first = build_task(text_spec(table), SCRATCH, seed=0)

    def never(*args, **kwargs):
        raise AssertionError("read again")

    monkeypatch.setattr(files, "read", never)
    again = build_task(text_spec(table), SCRATCH, seed=1)
    assert [s["input_ids"].tolist() for s in again.train] == [s["input_ids"].tolist() for s in first.train]
    assert again.label_names == first.label_names
    monkeypatch.undo()


@pytest.mark.parametrize(
    "change",
    [{"max_length": 16}, {"train_samples": 20}, {"data_seed": 3}, {"vocabulary": 280}, {"objective": "mlm"}],
    ids=str,
)
def test_what_matters_is_in_the_key(table: Path, change: dict, monkeypatch):
    build_task(text_spec(table), SCRATCH, seed=0)
    reads = []
    real = files.read
    monkeypatch.setattr(files, "read", lambda *a, **k: reads.append(1) or real(*a, **k))
    build_task(text_spec(table, **change), SCRATCH, seed=0)
    assert reads == [1]


def test_the_tokenizer_does_not_tell_whether_its_tokens_came_from_the_cache(table: Path):
    cold, warm = (build_task(text_spec(table), SCRATCH, seed=0).tokenizer for _ in range(2))
    assert cold.backend_tokenizer.to_str() == warm.backend_tokenizer.to_str()


def test_a_changed_file_is_read_again(table: Path):
    before = build_task(text_spec(table), SCRATCH, seed=0)
    table.write_text(table.read_text() + "\na new line about a bird,b")
    after = build_task(text_spec(table), SCRATCH, seed=0)
    assert len(after.train) + len(after.evaluation) == len(before.train) + len(before.evaluation) + 1


def test_a_damaged_cache_is_rebuilt(table: Path, cache: Path):
    before = build_task(text_spec(table), SCRATCH, seed=0)
    expected = [s["input_ids"].tolist() for s in before.train]
    (ids,) = cache.glob("tokens/*/train/ids.npy")
    ids.write_bytes(ids.read_bytes()[:-8])
    (vocabulary,) = cache.glob("tokenizer/*/tokenizer.json")
    vocabulary.write_text(vocabulary.read_text()[:-5])
    after = build_task(text_spec(table), SCRATCH, seed=0)
    assert [s["input_ids"].tolist() for s in after.train] == expected


def test_a_cache_made_before_labels_were_looked_at_is_made_again(table: Path, tmp_path: Path, cache: Path):
    """What is kept are the notes of then: another file's labels that training never sees would stay untold."""
    other = tmp_path / "other.csv"
    other.write_text("text,label\nheld out one,a\nheld out two,never seen\n")
    spec = text_spec(table, eval_path=str(other))
    told = build_task(spec, SCRATCH, seed=0).notes
    assert any("labels that no text to train on has: 'never seen'" in note for note in told)
    (made,) = (cache / "tokens").glob("*[0-9a-f]")
    key = json.loads((made / "manifest.json").read_text())["key"]
    key.pop("checks", None)  # the older versions' key had none
    made = made.rename(made.with_name(digest(key)))
    about = json.loads((made / "about.json").read_text())
    (made / "about.json").write_text(json.dumps(about | {"notes": []}))
    (made / "manifest.json").unlink()
    _seal(made, key)
    assert build_task(spec, SCRATCH, seed=0).notes == told


@pytest.mark.slow
def test_two_runs_that_start_at_once(table: Path):
    code = (
        "import sys, hashlib; from composer_speedups.tasks import *\n"
        "t = build_task(TaskSpec(name='text', path=sys.argv[1], vocabulary=300, max_length=32),"
        " ModelSpec(pretrained=False), seed=0)\n"
        "print(len(t.train), hashlib.sha256(t.train.ids.tobytes()).hexdigest())"
    )
    running = [
        subprocess.Popen([sys.executable, "-c", code, str(table)], stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    outputs = {p.communicate()[0].strip() for p in running}
    assert [p.returncode for p in running] == [0, 0]
    assert len(outputs) == 1 and outputs.pop().startswith("45 ")


def test_seeds_share_data_and_evaluation_but_not_masks(table: Path):
    one, other = (build_task(text_spec(table, objective="mlm"), SCRATCH, seed=s) for s in (1, 2))
    assert not torch.equal(batch_of(one, rows=32)["labels"], batch_of(other, rows=32)["labels"])
    assert torch.equal(batch_of(one, "evaluation")["labels"], batch_of(other, "evaluation")["labels"])
    first, held_out = batch_of(one, rows=32), batch_of(one, "evaluation")
    one.set_epoch(1)
    assert not torch.equal(batch_of(one, rows=32)["labels"], first["labels"])
    assert torch.equal(batch_of(one, "evaluation")["labels"], held_out["labels"])
    one.set_epoch(0)
    assert torch.equal(batch_of(one, rows=32)["input_ids"], first["input_ids"])


def test_texts_without_a_token_are_dropped_and_counted(table: Path):
    with table.open("a") as stream:
        stream.write("\n\x01\x02,a\n\x03\x02,b\n")
    made = build_task(text_spec(table, objective="mlm"), SCRATCH, seed=0)
    assert sum("no token in them" in note for note in made.notes) >= 1
    assert len(made.train) + len(made.evaluation) == 50
    again = build_task(text_spec(table, objective="mlm"), SCRATCH, seed=0)
    assert again.notes == made.notes, "a warm start says the same"


def test_what_the_tokenizer_does_not_know_is_told(table: Path, tmp_path: Path):
    """Many letters and a small vocabulary; and a pretrained model's, which cannot be made larger."""
    made = build_task(text_spec(table), SCRATCH, seed=0)
    assert not any("[UNK]" in note for note in made.notes)
    build_model(SCRATCH, made).save_pretrained(tmp_path / "m")
    made.tokenizer.save_pretrained(tmp_path / "m")
    with table.open("a", encoding="utf-8") as stream:
        stream.write(
            "\n" + "".join(f"{''.join(chr(0x4E00 + 9 * i + j) for j in range(9))},{'ab'[i % 2]}\n" for i in range(100))
        )
    pretrained = ModelSpec(name=str(tmp_path / "m"))
    for model, vocabulary, remedy in (
        (SCRATCH, 300, "raise task.vocabulary above"),
        (pretrained, None, "choose a model"),
    ):
        notes = build_task(text_spec(table, vocabulary=vocabulary), model, seed=0).notes
        assert any("of the train tokens are [UNK]" in note and remedy in note for note in notes), notes


def test_a_pretrained_models_own_tokenizer_is_used(table: Path, tmp_path: Path):
    made = build_task(text_spec(table), SCRATCH, seed=0)
    build_model(SCRATCH, made).save_pretrained(tmp_path / "m")
    made.tokenizer.save_pretrained(tmp_path / "m")
    other = build_task(text_spec(table, vocabulary=None), ModelSpec(name=str(tmp_path / "m")), seed=0)
    assert other.pretrained and other.tokenizer.get_vocab() == made.tokenizer.get_vocab()
    assert [s["input_ids"].tolist() for s in other.train] == [s["input_ids"].tolist() for s in made.train]


def test_a_task_error_names_the_columns(table: Path):
    with pytest.raises(TaskError, match="no column 'review': it has 'text', 'label'"):
        build_task(text_spec(table, text_column="review"), SCRATCH, seed=0)


@pytest.mark.parametrize("objective", ["classification", "mlm"])
def test_dummy_has_the_lengths_asked_for(objective: str):
    spec = TaskSpec(
        name="dummy", max_length=128, mean_length=60.0, length_std=10.0, vocabulary=5000, num_labels=4,
        train_samples=4000, eval_samples=10, objective=objective,
    )  # fmt: skip
    made = build_task(spec, SCRATCH, seed=0)
    assert len(made.train) == 4000 and len(made.evaluation) == 10
    # Standard error of the mean: 10 / sqrt(4000) = 0.16; of the deviation: 10 / sqrt(8000) = 0.11. Five of them.
    assert made.lengths.mean == pytest.approx(60, abs=0.8)
    assert made.train.lengths.std() == pytest.approx(10, abs=0.6)
    ids = np.concatenate([made.train[i]["input_ids"].numpy()[1:-1] for i in range(500)])
    assert ids.min() >= 100 and ids.max() < 5000
    assert made.train[0]["input_ids"][0] == made.tokenizer.cls_token_id
    assert made.train[0]["input_ids"][-1] == made.tokenizer.sep_token_id
    assert set(made.train.labels.tolist()) == {0, 1, 2, 3}
    assert made.num_labels == (4 if objective == "classification" else 1)
    assert torch.isfinite(build_model(SCRATCH, made)(**batch_of(made)).loss)


def test_dummy_is_full_length_unless_told_otherwise_and_the_same_every_time():
    spec = TaskSpec(name="dummy", max_length=16, train_samples=20, eval_samples=5)
    one, again = (build_task(spec, SCRATCH, seed=s) for s in (1, 2))
    assert set(one.train.lengths) == {16} and one.lengths.padding == 0
    assert np.array_equal(one.train.ids, again.train.ids)
    assert one.vocabulary == 30522, "the model's own vocabulary, where none is named"


def test_dummy_shorter_than_its_bounds_is_cut_to_them():
    spec = TaskSpec(name="dummy", max_length=16, mean_length=4.0, length_std=20.0, train_samples=500, eval_samples=5)
    lengths = build_task(spec, SCRATCH, seed=0).train.lengths
    assert lengths.min() == 3 and lengths.max() == 16


def test_dummy_without_ids_left_is_one_clear_error():
    spec = TaskSpec(name="dummy", vocabulary=256, lowest_token=300, train_samples=5, eval_samples=5)
    with pytest.raises(TaskError, match="lowest_token 300 leaves no ids below 256"):
        build_task(spec, SCRATCH, seed=0)
