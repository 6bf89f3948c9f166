from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import pytest

from composer_speedups.errors import TaskError
from composer_speedups.tasks import ModelSpec, TaskSpec, build_task, files, imdb
from composer_speedups.tasks.labels import ClassOfText

ROWS = [(f"text number {i}, with a comma", ["good", "bad", "ugly"][i % 3]) for i in range(60)]


def write_csv(path: Path, rows=ROWS, columns=("text", "label"), delimiter=",", encoding="utf-8") -> Path:
    with path.open("w", newline="", encoding=encoding) as stream:
        writer = csv.writer(stream, delimiter=delimiter)
        writer.writerow(columns)
        writer.writerows(rows)
    return path


def write_jsonl(path: Path, rows=ROWS, columns=("text", "label")) -> Path:
    path.write_text("".join(json.dumps(dict(zip(columns, row, strict=True))) + "\n" for row in rows))
    return path


def write_parquet(path: Path, rows=ROWS, columns=("text", "label")) -> Path:
    import pyarrow
    import pyarrow.parquet

    data = {name: [row[i] for row in rows] for i, name in enumerate(columns)}
    pyarrow.parquet.write_table(pyarrow.table(data), path)
    return path


def write_folders(path: Path, rows=ROWS) -> Path:
    for i, (text, label) in enumerate(rows):
        (path / label).mkdir(parents=True, exist_ok=True)
        (path / label / f"{i}.txt").write_text(text)
    return path


def pairs(texts) -> set[tuple[str, str]]:
    texts_and_labels = [*zip(texts.train, texts.train_labels, strict=True)]
    texts_and_labels += zip(texts.evaluation, texts.evaluation_labels, strict=True)
    return {(text, texts.label_names[label]) for text, label in texts_and_labels}


@pytest.mark.parametrize(
    "write",
    [
        lambda p: write_csv(p / "a.csv"),
        lambda p: write_csv(p / "a.CSV", encoding="utf-8-sig"),
        lambda p: write_csv(p / "a.tsv", delimiter="\t"),
        lambda p: write_jsonl(p / "a.jsonl"),
        lambda p: write_parquet(p / "a.parquet"),
        lambda p: write_folders(p / "f"),
        lambda p: (write_csv(p / "1.csv", ROWS[:30]), write_csv(p / "2.csv", ROWS[30:]), p)[-1],
    ],
    ids=["csv", "csv with BOM", "tsv", "jsonl", "parquet", "class folders", "folder of tables"],
)
def test_every_format_gives_the_same_texts(write, tmp_path: Path):
    texts = files.read(str(write(tmp_path)))
    assert pairs(texts) == set(ROWS)
    assert texts.label_names == ["bad", "good", "ugly"]
    assert (len(texts.train), len(texts.evaluation)) == (54, 6)
    assert not set(texts.train) & set(texts.evaluation)
    assert texts.notes == []


def test_equal_texts_stay_on_one_side(tmp_path: Path):
    rows = [(f"text {i % 7}", "a" if i % 2 else "b") for i in range(70)]
    for seed in range(5):
        texts = files.read(str(write_csv(tmp_path / "a.csv", rows)), seed=seed)
        assert not set(texts.train) & set(texts.evaluation)


@pytest.mark.parametrize("heavy", [0.3, 0.8], ids=["few texts", "one of most rows"])
def test_texts_that_recur_often_do_not_take_the_tenth(tmp_path: Path, heavy: float):
    """As of pairs, whose first texts are few: equal texts on one side would else be any share of the rows."""
    rows = [(f"text {0 if i < 200 * heavy else i % 20}", "ab"[i % 2]) for i in range(200)]
    path = str(write_csv(tmp_path / "a.csv", rows))
    for seed in range(20):
        texts = files.read(path, seed=seed)
        assert 10 <= len(texts.evaluation) <= 40 and not set(texts.train) & set(texts.evaluation)
        assert len(texts.train) + len(texts.evaluation) == 200 and not texts.notes


def test_two_texts_alone_are_shared_and_it_is_told(tmp_path: Path):
    rows = [(f"text {i % 10 == 0:d}", "ab"[i // 10 % 2]) for i in range(100)]
    texts = files.read(str(write_csv(tmp_path / "a.csv", [*rows, *rows[:60]])))
    assert (len(texts.train), len(texts.evaluation), texts.notes) == (144, 16, [])
    half = [(f"text {i % 2}", "ab"[i // 2 % 2]) for i in range(100)]
    texts = files.read(str(write_csv(tmp_path / "b.csv", half)))
    assert (len(texts.train), len(texts.evaluation)) == (50, 50)
    assert texts.notes[0].startswith("50 of 100 texts are kept to evaluate on, not a tenth: equal texts (of pairs")


def test_a_seed_draws_others_and_numbers_are_bounds(tmp_path: Path):
    path = str(write_csv(tmp_path / "a.csv"))
    one, other = (files.read(path, train=10, evaluation=5, seed=s) for s in (1, 2))
    assert (len(one.train), len(one.evaluation)) == (10, 5)
    assert set(one.train) != set(other.train)
    assert {len(files.read(path, train=10**6, evaluation=10**6).train)} == {54}


def test_what_to_evaluate_on_can_be_told(tmp_path: Path):
    rows = [(t, label, "Test" if i % 4 == 0 else "train") for i, (t, label) in enumerate(ROWS)]
    by_column = files.read(str(write_csv(tmp_path / "a.csv", rows, ("text", "label", "part"))), split_column="part")
    assert len(by_column.evaluation) == 15
    train = str(write_csv(tmp_path / "b.csv", ROWS[:40]))
    by_path = files.read(train, eval_path=str(write_jsonl(tmp_path / "c.jsonl", ROWS[40:])))
    assert set(by_path.evaluation) == {t for t, _ in ROWS[40:]} and len(by_path.train) == 40
    (tmp_path / "d").mkdir()
    write_csv(tmp_path / "d" / "train.csv", ROWS[:40])
    write_csv(tmp_path / "d" / "validation-00000-of-00001.csv", ROWS[40:])
    by_name = files.read(str(tmp_path / "d"))
    assert set(by_name.evaluation) == {t for t, _ in ROWS[40:]} and len(by_name.train) == 40


def test_rows_without_text_or_label_are_dropped_and_counted(tmp_path: Path):
    rows = [*ROWS, ("", "good"), ("   ", "bad"), (None, "bad"), ("unlabelled", None), ("unlabelled too", "")]
    texts = files.read(str(write_jsonl(tmp_path / "a.jsonl", rows)))
    assert pairs(texts) == set(ROWS)
    assert [re.sub(" of .*: ", ": ", note) for note in texts.notes] == ["3: no text", "2: no label"]


def test_mlm_needs_no_labels(tmp_path: Path):
    path = write_csv(tmp_path / "a.csv", [(t,) for t, _ in ROWS], ("text",))
    texts = files.read(str(path), labels=None)
    assert len(texts.train) + len(texts.evaluation) == 60 and set(texts.train_labels) == {0}


@pytest.mark.parametrize(
    ("labels", "names"),
    [
        ([10, 9, 2], ["2", "9", "10"]),
        (["10", "9", "x"], ["10", "9", "x"]),
        ([True, False, True], ["False", "True"]),
        ([0, -1, 1], ["-1", "0", "1"]),
        (["1", "001", "01"], ["001", "01", "1"]),
    ],
)
def test_labels_are_numbered_in_order(tmp_path: Path, labels: list, names: list[str]):
    rows = [(t, labels[i % 3]) for i, (t, _) in enumerate(ROWS)]
    texts = files.read(str(write_jsonl(tmp_path / "a.jsonl", rows)))
    assert texts.label_names == names
    assert pairs(texts) == {(t, str(label)) for t, label in rows}


def test_whole_numbers_are_the_same_classes_however_a_csv_writes_them(tmp_path: Path):
    """pandas writes 1.0 into a column where one is missing, and 1 where none is."""
    folder = tmp_path / "both"
    folder.mkdir()
    write_csv(folder / "a.csv", [(t, str(i % 2)) for i, (t, _) in enumerate(ROWS[:30])])
    write_csv(folder / "b.csv", [(t, f"{i % 2}.0" if i else "") for i, (t, _) in enumerate(ROWS[30:])])
    texts = files.read(str(folder))
    assert texts.label_names == ["0", "1"] and any("1 of 60 rows" in note for note in texts.notes)
    rows = [(t, ["1.5", "-2.00", "v1.0"][i % 3]) for i, (t, _) in enumerate(ROWS)]
    write_csv(tmp_path / "c.tsv", rows, delimiter="\t")
    assert files.read(str(tmp_path / "c.tsv")).label_names == ["-2", "1.5", "v1.0"]
    spaced = [(t, [" 1.0", "1", "0 "][i % 3]) for i, (t, _) in enumerate(ROWS)]
    assert files.read(str(write_csv(tmp_path / "e.csv", spaced))).label_names == ["0", "1"]
    write_jsonl(tmp_path / "d.jsonl", [(t, f"{i % 2}.0") for i, (t, _) in enumerate(ROWS)])
    assert files.read(str(tmp_path / "d.jsonl")).label_names == ["0.0", "1.0"], "in quotes it is a name"


def test_hostile_text_is_kept_and_encodable(tmp_path: Path):
    odd = ["\u202eevil", "a\x00b", "long " * 60_000, 'line\nbreak, "quoted"', "\ud83d\ude00 and lone \ud83d"]
    rows = [(t, "ab"[i % 2]) for i, t in enumerate(odd)]
    texts = files.read(str(write_jsonl(tmp_path / "a.jsonl", rows)))
    everything = texts.train + texts.evaluation
    assert len(everything) == 5 and all(t.encode() for t in everything)
    written = write_csv(tmp_path / "a.csv", [r for r in rows if "\ud83d" not in r[0] and "\x00" not in r[0]])
    assert {t for t, _ in pairs(files.read(str(written)))} == {odd[0], odd[2].strip(), odd[3]}


def bad_bytes(path: Path) -> Path:
    path.write_bytes(b"text,label\n\xff\xfe,1\n")
    return path


def content(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda p: p / "none.csv", "is not there"),
        (lambda p: write_csv(p / "a.csv", columns=("review", "label")), "no column 'text': it has 'review', 'label'"),
        (lambda p: write_csv(p / "a.csv", columns=("text", "stars")), "no column 'label': it has 'text', 'stars'"),
        (lambda p: write_jsonl(p / "a.jsonl", columns=("t", "label")), "line 1 has no column 'text'"),
        (lambda p: write_parquet(p / "a.parquet", columns=("t", "label")), "no column 'text': it has 't', 'label'"),
        (lambda p: bad_bytes(p / "a.csv"), "no UTF-8"),
        (lambda p: content(p / "a.csv", ""), "no column 'text': it has none"),
        (lambda p: content(p / "a.csv", 'text,label\n"open'), "no valid csv"),
        (lambda p: content(p / "a.csv", "text,label\nfine,a\nwell, not,b\n"), "line 3 has 3 fields, the header 2: put"),
        (lambda p: content(p / "a.csv", "text,label,label\nx,a,b\n"), "more than one column 'label': rename"),
        (lambda p: content(p / "a.csv", "text;label\nx;a\n"), "separated by commas, of a tsv by tabs: convert it"),
        (lambda p: content(p / "a.jsonl", "{"), "line 1 is no JSON"),
        (lambda p: content(p / "a.jsonl", "[1]"), "no JSON object"),
        (lambda p: content(p / "a.parquet", "PAR1 not"), "cannot be read as parquet"),
        (lambda p: content(p / "a.docx", "x"), "known are .csv"),
        (lambda p: p, "holds neither"),
        (lambda p: write_csv(p / "a.csv", []), "no row with both text and label"),
        (lambda p: write_csv(p / "a.csv", [(t, "one") for t, _ in ROWS]), "one label only, 'one'"),
        (lambda p: write_csv(p / "a.csv", [(t, t) for t, _ in ROWS]), "that is no label"),
        (lambda p: write_csv(p / "a.csv", [("same", "a"), ("same", "b")]), "no text to train on"),
    ],
)
def test_bad_files_are_one_clear_error(write, message: str, tmp_path: Path):
    with pytest.raises(TaskError, match=re.escape(message)) as error:
        files.read(str(write(tmp_path)))
    assert "\n" not in str(error.value)


def test_a_file_to_evaluate_on_is_there_and_another_one(tmp_path: Path):
    path = str(write_csv(tmp_path / "a.csv"))
    with pytest.raises(TaskError, match=r"task\.eval_path 'gone\.csv' is not there"):
        files.read(path, eval_path="gone.csv")
    with pytest.raises(TaskError, match=r"task\.eval_path 'gone\.csv' is not there"):
        build_task(TaskSpec(name="text", path=path, eval_path="gone.csv"), ModelSpec(pretrained=False), seed=0)
    with pytest.raises(TaskError, match=r"task\.eval_path .* is task\.path: leave it out"):
        files.read(path, eval_path=str(tmp_path / "." / "a.csv"))


def test_a_split_column_that_says_something_else_is_an_error(tmp_path: Path):
    path = write_csv(tmp_path / "a.csv", [("t", "a", "fold1")], ("text", "label", "part"))
    with pytest.raises(TaskError, match="says 'fold1'"):
        files.read(str(path), split_column="part")


def test_fingerprint_sees_a_change(tmp_path: Path):
    folder = write_folders(tmp_path / "f")
    before = files.fingerprint(str(folder))
    assert files.fingerprint(str(folder)) == before
    (folder / "good" / "0.txt").write_text("another text, longer than it was")
    assert files.fingerprint(str(folder)) != before


def write_imdb(path: Path) -> Path:
    for part in ("train", "test"):
        for kind in ("pos", "neg"):
            (path / part / kind).mkdir(parents=True)
            for i in range(10):
                (path / part / kind / f"{i}_7.txt").write_text(f"a {kind} film, {part} review {i}")
    (path / "train" / "unsup").mkdir()
    (path / "train" / "unsup" / "0_0.txt").write_text("a film nobody has judged")
    (path / "train" / "urls_pos.txt").write_text("http://...")
    return path


def test_imdb_from_the_folder_of_the_archive(tmp_path: Path):
    texts = imdb.read(str(write_imdb(tmp_path)), 8, None, 0, ClassOfText())
    assert texts.label_names == ["neg", "pos"] and len(texts.train) == 8 and len(texts.evaluation) == 20
    assert all(f"a {label} film" in text for text, label in pairs(texts))
    assert all("train" in t for t in texts.train) and all("test" in t for t in texts.evaluation)
    for_mlm = imdb.read(str(tmp_path), None, None, 0, None)
    assert "a film nobody has judged" in for_mlm.train and not any("http" in t for t in for_mlm.train)


def test_imdb_from_the_hubs_parquet_files(tmp_path: Path):
    write_parquet(tmp_path / "train-00000-of-00001.parquet", [(f"train {i}", i % 2) for i in range(20)])
    write_parquet(tmp_path / "test-00000-of-00001.parquet", [(f"test {i}", i % 2) for i in range(20)])
    write_parquet(tmp_path / "unsupervised-00000-of-00001.parquet", [("unsupervised", -1)])
    texts = imdb.read(str(tmp_path), None, None, 0, ClassOfText())
    assert texts.label_names == ["neg", "pos"] and len(texts.train) == len(texts.evaluation) == 20
    assert ("train 1", "pos") in pairs(texts)


def test_imdb_without_network_names_both_ways_out(monkeypatch, tmp_path: Path):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    with pytest.raises(TaskError, match=r"connect to it, or set task\.path to a local folder or parquet") as error:
        imdb.read(None, 10, 10, 0, ClassOfText())
    assert "\n" not in str(error.value)


def test_about_how_many_rows(tmp_path: Path):
    """A text of several lines counts as several; of a large file the beginning is taken for all of it."""
    assert files.about_rows(str(write_csv(tmp_path / "a.csv"))) == 61, "its header is a line, too"
    assert files.about_rows(str(write_jsonl(tmp_path / "a.jsonl"))) == 60
    assert files.about_rows(str(tmp_path)) == 121
    assert files.about_rows(str(write_folders(tmp_path / "f"))) == 60
    large = write_csv(tmp_path / "large.tsv", ROWS * 1000, delimiter="\t")
    assert large.stat().st_size > files._BEGINNING
    assert files.about_rows(str(large)) == pytest.approx(60_000, rel=0.01)
    assert files.about_rows(str(write_parquet(tmp_path / "a.parquet"))) == 60
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 and no more")
    assert files.about_rows(str(tmp_path / "broken.parquet")) is None
    assert files.about_rows(str(tmp_path / "none.csv")) is None


def test_labels_to_evaluate_on_that_training_never_sees(tmp_path) -> None:
    """Their classes would be trained by nothing, and the accuracy would be 0 without a word."""
    train = str(write_csv(tmp_path / "a.csv", [(f"text {i}", str(i % 2)) for i in range(40)]))
    other = str(write_csv(tmp_path / "b.csv", [(f"held out {i}", ("pos", "neg")[i % 2]) for i in range(10)]))
    message = (
        rf"evaluate on \('neg', 'pos'\), as {re.escape(other)} has them, .* train on \('0', '1'\): write them alike"
    )
    with pytest.raises(TaskError, match=message) as refused:
        files.read(train, eval_path=other)
    assert "\n" not in str(refused.value)
    assert files.read(train, eval_path=other, labels=None).evaluation, "masked tokens need no labels"

    some = str(write_csv(tmp_path / "c.csv", [(f"held out {i}", "012"[i % 3]) for i in range(10)]))
    texts = files.read(train, eval_path=some)
    assert texts.notes == ["3 of 10 texts to evaluate on have labels that no text to train on has: '2'"]
    assert files.read(train).notes == []

    none = str(write_csv(tmp_path / "d.csv", [(f"held out {i}", "") for i in range(10)]))
    with pytest.raises(TaskError, match=r"leaves no text to evaluate on \(40 texts\): give more, or task\.eval_path"):
        files.read(train, eval_path=none)  # and not a tenth of the others, which nobody asked for
