"""What was at a path, and that it is seen when something else is there."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path

import pytest

from composer_speedups.tasks import inputs
from composer_speedups.tasks.inputs import Mark, changed, data_of, marks, model_of


def test_what_a_recipe_reads(tmp_path: Path):
    task = {"name": "text", "path": "a.csv", "eval_path": "b.csv"}
    assert data_of({"task": task, "model": {"name": str(tmp_path)}}) == {"a.csv": "data", "b.csv": "data"}
    assert model_of({"model": {"name": str(tmp_path)}}) == {str(tmp_path): "model"}
    assert model_of({"model": {"name": "bert-base-uncased"}}) == {}, "the hub is not asked"
    assert data_of({"task": {"name": "docstrings", "path": None}}) == data_of({}) == model_of({}) == {}
    assert marks({str(tmp_path / "none.csv"): "data", str(tmp_path): "data", "~nobody/a.csv": "data"}) == {}
    assert model_of({"model": {"name": "~nobody/bert"}}) == {}


def test_bytes_count_and_times_do_not(tmp_path: Path):
    file = tmp_path / "a.csv"
    file.write_text("text,label")
    known = marks({str(file): "data"})
    os.utime(file, (1, 1))
    assert changed(known) is None
    assert marks({str(file): "data"})[str(file)].content == known[str(file)].content
    file.write_text("text,LABEL")
    assert changed(known) == str(file)
    file.unlink()
    assert changed(known) is None, "whoever needs it will say that it is not there"
    assert {path: Mark(**json.loads(json.dumps(asdict(mark)))) for path, mark in known.items()} == known


@pytest.mark.parametrize("kind", ["data", "model"])
def test_of_a_folder_what_is_read(tmp_path: Path, kind: str):
    read, other = ("train.csv", "config.json") if kind == "data" else ("config.json", "train.csv")
    (tmp_path / read).write_text("one")
    (tmp_path / "model.safetensors").write_text("weights")
    known = marks({str(tmp_path): kind})
    (tmp_path / other).write_text("not looked at")
    (tmp_path / "notes.md").write_text("not looked at")
    assert changed(known) is None
    (tmp_path / read).rename(tmp_path / f"x{read}")
    assert changed(known) == str(tmp_path)
    (tmp_path / f"x{read}").rename(tmp_path / read)
    assert changed(known) is None
    (tmp_path / read).write_text("two")
    assert changed(known) == str(tmp_path)


def test_of_a_folder_that_datasets_reads_every_file_counts(tmp_path: Path):
    """JSON, arrow, images, what the card says: any of them may be its data."""
    recipe = {"task": {"name": "hub", "path": str(tmp_path)}}
    assert data_of(recipe) == {str(tmp_path): "hub"}
    (tmp_path / "data").mkdir()
    for name in ("data/train.json", "README.md"):
        (tmp_path / name).write_text("one")
    known = marks(data_of(recipe))
    for name in ("data/train.json", "README.md"):
        (tmp_path / name).write_text("two")
        assert changed(known) == str(tmp_path)
        (tmp_path / name).write_text("one")
        assert changed(known) is None
    assert marks(data_of({"task": {"name": "hub", "path": "stanfordnlp/none"}})) == {}, "a name of the hub"


def test_of_a_large_file_places_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Seven of ten pieces: the first, the last, and some between them; and the length counts."""
    monkeypatch.setattr(inputs, "_PIECE", 10)
    monkeypatch.setattr(inputs, "_PIECES", 7)
    content = bytes(range(100))
    file = tmp_path / "a.csv"
    seen = set()
    for changed_at in (None, *range(100)):
        altered = bytearray(content)
        if changed_at is not None:
            altered[changed_at] += 100
        file.write_bytes(altered)
        seen.add(marks({str(file): "data"})[str(file)].content)
    assert len(seen) == 1 + 70
    file.write_bytes(content + b"x")
    assert marks({str(file): "data"})[str(file)].content not in seen
