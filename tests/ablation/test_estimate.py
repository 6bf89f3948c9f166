"""What a study announces before anything has been measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from composer_speedups.ablation.estimate import expected_seconds

PEAKS = {"fp32": 1e12}
START = 4.0
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 64, "vocab_size": 123}
DISTILBERT = {"dim": 32, "n_layers": 2, "hidden_dim": 64, "vocab_size": 123}


def seconds(model: dict, task: dict | None = None, **recipe) -> float:
    asked = {"model": model, "task": {"max_length": 64} | (task or {}), "duration": "1ep", "batch_size": 8} | recipe
    found = expected_seconds(asked, PEAKS, "cpu")
    assert found is not None
    return found - START


@pytest.mark.parametrize("config", [SMALL, DISTILBERT], ids=["bert", "distilbert"])
def test_a_folder_is_as_large_as_its_config_says(tmp_path: Path, config: dict):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "of a family", "hidden_act": "gelu"} | config))
    model = {"name": str(tmp_path)}
    base = {"name": "bert-base-uncased"}
    assert seconds(model) == pytest.approx(seconds(base | {"config": SMALL}))
    assert seconds(model) < seconds(base) / 1000
    deeper = seconds(model | {"config": {"num_hidden_layers": 8}})
    assert deeper == pytest.approx(4 * seconds(model)), "what the recipe changes lies over it"
    assert seconds(model | {"config": {"n_layers": 8}}) == pytest.approx(deeper)


@pytest.mark.parametrize("content", [None, "{", "[1]", '{"hidden_size": "wide"}'])
def test_a_folder_that_does_not_say_is_taken_for_bert_base(tmp_path: Path, content: str | None):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    assert seconds({"name": str(tmp_path)}) == seconds({"name": "bert-base-uncased"})


def test_of_the_users_own_files_as_much_as_there_is(tmp_path: Path):
    (tmp_path / "mine.csv").write_text("text,label\n" + "one of them,a\nand the other,b\n" * 500)
    (tmp_path / "more.csv").write_text("text,label\n" + "one of them,a\nand the other,b\n" * 100)
    (tmp_path / "mine.parquet").write_bytes(b"not looked into")
    model, mine = {"name": "bert-base-uncased"}, {"path": str(tmp_path / "mine.csv")}

    def asked(train: int, evaluated: int) -> float:
        return seconds(model, {"train_samples": train, "eval_samples": evaluated}, evaluate=True)

    assert seconds(model, mine | {"train_samples": 8000}, evaluate=True) == pytest.approx(asked(901, 100))
    assert seconds(model, mine | {"train_samples": 50, "eval_samples": 20}, evaluate=True) == pytest.approx(
        asked(50, 20)
    )
    apart = mine | {"eval_path": str(tmp_path / "more.csv")}
    assert seconds(model, apart | {"train_samples": None}, evaluate=True) == pytest.approx(asked(1001, 201))
    for unknown in (tmp_path / "mine.parquet", tmp_path / "nothing.csv", "~nobody/mine.csv"):
        assert seconds(model, {"path": str(unknown)}, evaluate=True) == pytest.approx(asked(8000, 800))
    assert seconds(model, mine, duration="4ba") == pytest.approx(asked(32, 1), rel=0.02)
