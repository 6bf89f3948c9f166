"""Cells that are no text, and paths that are no file or that nobody may look into."""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from composer_speedups.errors import TaskError
from composer_speedups.tasks import ModelSpec, TaskSpec, build_task, files, model_sources

TEXTS = [f"text number {i}" for i in range(30)]
LABELS = ["good", "bad"] * 15


def parquet(path: Path, texts: list[Any] = TEXTS, labels: list[Any] = LABELS, **columns: list[Any]) -> str:
    pyarrow.parquet.write_table(pyarrow.table({"text": texts, "label": labels} | columns), path / "a.parquet")
    return str(path / "a.parquet")


def jsonl(path: Path, texts: list[Any] = TEXTS, labels: list[Any] = LABELS) -> str:
    rows = [json.dumps({"text": text, "label": label}) for text, label in zip(texts, labels, strict=True)]
    (path / "a.jsonl").write_text("\n".join(rows))
    return str(path / "a.jsonl")


def encoded(cells: list[str]) -> list[bytes]:
    return [cell.encode() for cell in cells]


def refused(path: str, **how: Any) -> str:
    with pytest.raises(TaskError) as error:
        files.read(path, **how)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_bytes_are_text(tmp_path: Path) -> None:
    part = ["train", "train", "test"] * 10
    expected = files.read(parquet(tmp_path, part=part), split_column="part")
    path = parquet(tmp_path, encoded(TEXTS), encoded(LABELS), part=encoded(part))
    assert files.read(path, split_column="part") == expected
    assert expected.label_names == ["bad", "good"] and "text number 0" in expected.train + expected.evaluation


@pytest.mark.parametrize("column", ["text", "label"])
def test_bytes_that_are_no_utf8_name_their_row(tmp_path: Path, column: str) -> None:
    cells = encoded({"text": TEXTS, "label": LABELS}[column])
    path = parquet(tmp_path, **{f"{column}s": [*cells[:7], b"caf\xe9!", *cells[8:]]})
    said = refused(path)
    assert f"'{path}' row 8: column '{column}' is no UTF-8 (invalid continuation byte at byte 3)" in said
    assert said.endswith(f"or name another task.{column}_column")


def test_strings_that_another_writer_did_not_check(tmp_path: Path) -> None:
    raw = pyarrow.array([*encoded(TEXTS[:-1]), b"caf\xe9!"])
    unchecked = pyarrow.Array.from_buffers(pyarrow.string(), len(raw), raw.buffers())
    assert "is no UTF-8" in refused(parquet(tmp_path, unchecked))


@pytest.mark.parametrize("write", [jsonl, parquet])
@pytest.mark.parametrize(
    ("cell", "kind"), [(["20", "good"], "list"), ({"en": "hello"}, "dict"), ([], "list")], ids=["list", "dict", "none"]
)
def test_several_things_in_a_cell_are_refused(tmp_path: Path, write: Any, cell: Any, kind: str) -> None:
    if write is parquet and cell == []:
        texts = labels = [["some"], *[cell] * 29]
    else:
        texts = labels = [cell] * 30
    first = f"{'row' if write is parquet else 'line'} 1"
    path = write(tmp_path, texts)
    assert f"'{path}' {first}: column 'text' holds a {kind}, not one text: write one text there" in refused(path)
    path = write(tmp_path, labels=labels)
    said = refused(path)
    assert f"'{path}' {first}: column 'label' holds a {kind}, not one word or number" in said
    hint = ", or task.objective=multi_label or token_classification, for which it may" if kind == "list" else ""
    assert said.endswith(f"or name another task.label_column{hint}")
    assert files.read(path, labels=None).train, "masked tokens need no labels"


def test_a_line_is_told_as_an_editor_counts_it(tmp_path: Path) -> None:
    path = Path(jsonl(tmp_path, [*TEXTS[:-1], ["last"]]))
    path.write_text("\n\n" + path.read_text())
    assert "line 32: column 'text' holds a list" in refused(str(path))


@pytest.mark.parametrize("write", [jsonl, parquet])
def test_nan_is_missing(tmp_path: Path, write: Any) -> None:
    texts = files.read(write(tmp_path, labels=[float("nan") if i < 3 else float(i % 2) for i in range(30)]))
    assert texts.label_names == ["0", "1"]
    assert [re.sub(" of .*: ", ": ", note) for note in texts.notes] == ["3: no label"]
    every = write(tmp_path, [float("nan")] * 30)
    assert "holds no row with both text and label (30 rows read)" in refused(every)


@pytest.mark.parametrize(
    ("labels", "names"),
    [
        ([1, 1.0, 0, 0.0], ["0", "1"]),
        ([-0.0, 0, 2.5, 2.5], ["0", "2.5"]),
        ([float("inf"), 1.0, 1, float("inf")], ["1", "inf"]),
        ([1.0, "1", "0", 0], ["0", "1"]),
    ],
    ids=str,
)
def test_a_whole_number_is_one_class(tmp_path: Path, labels: list[Any], names: list[str]) -> None:
    assert files.read(jsonl(tmp_path, TEXTS[:4], labels)).label_names == names


def test_a_number_with_a_point_as_text_stays_what_it_is(tmp_path: Path) -> None:
    texts = files.read(parquet(tmp_path, [i / 2 for i in range(30)], [Decimal(f"{i % 2}.00") for i in range(30)]))
    assert {"0.5", "1.0"} < {*texts.train, *texts.evaluation}
    assert texts.label_names == ["0", "1"]


def test_json_of_a_hundred_thousand_brackets(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": ' + "[" * 100_000 + "]" * 100_000 + ', "label": "a"}\n')
    assert "line 1 is no JSON: maximum recursion depth" in refused(str(tmp_path / "a.jsonl"))


def test_a_cache_filled_with_what_is_refused_now_is_made_again(tmp_path: Path, cache: Path) -> None:
    """Tokenizer and tokens of `b'text'` would otherwise go on to be used."""
    spec = TaskSpec(name="text", path=parquet(tmp_path), max_length=16, vocabulary=300)
    build_task(spec, ModelSpec(pretrained=False), seed=0)
    for kind in ("tokenizer", "tokens"):
        (made,) = (cache / kind).glob("*[0-9a-f]")
        assert json.loads((made / "manifest.json").read_text())["key"]["checks"] > 2


# ---- paths


@contextmanager
def nobody() -> Iterator[None]:
    """Root may look into every folder."""
    if os.geteuid():
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def locked() -> Iterator[Path]:
    """A folder that others can reach, and in it what the test makes; nobody may list or enter it, as the test says."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        inside = Path(folder, "locked")
        inside.mkdir()
        yield inside
        inside.chmod(0o755)


LONG = "x" * 300
HOMELESS = "~nosuchuser/x"


@pytest.mark.parametrize("path", [LONG, HOMELESS, "a\0b"], ids=["long", "no such home", "zero byte"])
def test_what_cannot_be_a_path_is_not_there(path: str) -> None:
    assert "is not there" in refused(path)
    assert files.about_rows(path) is None
    with pytest.raises(TaskError, match="is not there"):
        files.fingerprint(path)
    with pytest.raises(TaskError, match="is not there"):
        model_sources.resolve(ModelSpec(name=f"./{path}" if path == LONG else path))


def test_what_lies_in_a_folder_that_nobody_may_enter_is_not_there(locked: Path) -> None:
    jsonl(locked)
    locked.chmod(0)
    with nobody():
        assert "is not there" in refused(str(locked / "a.jsonl"))
        with pytest.raises(TaskError, match="is not there"):
            model_sources.resolve(ModelSpec(name=str(locked / "model")))


@pytest.mark.parametrize("mode", [0o000, 0o711])
def test_a_folder_that_nobody_may_list(locked: Path, mode: int) -> None:
    jsonl(locked)
    locked.chmod(mode)
    with nobody():
        assert refused(str(locked)) == f"{str(locked)!r} cannot be read: Permission denied"
        assert refused(str(locked.parent)) == f"{str(locked)!r} cannot be read: Permission denied"
        with pytest.raises(TaskError, match="cannot be read: Permission denied"):
            files.fingerprint(str(locked))
        assert files.about_rows(str(locked)) is None


def test_a_model_folder_that_nobody_may_enter(locked: Path) -> None:
    (locked / "config.json").write_text("{}")
    locked.chmod(0o744)
    with nobody(), pytest.raises(TaskError, match=r"model folder .* cannot be read: Permission denied"):
        model_sources.resolve(ModelSpec(name=str(locked)))


def test_a_named_pipe_is_called_so(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.csv")
    said = refused(str(tmp_path / "pipe.csv"))
    assert "is a named pipe, no file or folder: write what it gives into a file" in said
    assert "is a device, no file" in refused("/dev/null")
    (tmp_path / "a").mkdir()
    os.mkfifo(tmp_path / "a" / "b.txt")  # reading it would wait for ever
    assert "holds neither" in refused(str(tmp_path))
