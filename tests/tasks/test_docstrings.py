from __future__ import annotations

import sys
from pathlib import Path

import pytest

from composer_speedups.errors import TaskError
from composer_speedups.tasks import docstrings, harvest


def words(stem: str, count: int = 25) -> str:
    """A text of `count` words; digits are no part of the key by which near-copies are found, so spell it out."""
    letters = "abcdefghij"
    return " ".join(stem + "".join(letters[int(d)] for d in str(i)) for i in range(count))


@pytest.fixture
def packages(tmp_path: Path, monkeypatch):
    """Three packages on sys.path: 40 functions, 10 functions, and 5, one text common to the first two."""
    monkeypatch.syspath_prepend(tmp_path)
    sizes = {"pkg_many": 40, "pkg_some": 10, "pkg_few": 5}
    for name, size in sizes.items():
        folder = tmp_path / name
        (folder / "tests").mkdir(parents=True)
        (folder / "__init__.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'w')  # must never run\n")
        (folder / "tests" / "test_it.py").write_text(f'"""{words("test")}"""')
        (folder / "broken.py").write_text("def f(:\n")
        (folder / "bytes.py").write_bytes(b'\x00\xff"""')
        for i in range(size):
            text = words("common") if i == 0 and size > 5 else words(f"{name}x{'y' * i}z")
            (folder / f"m{i}.py").write_text(f'def f{i}():\n    """{text}"""\ndef g():\n    """Too short."""\n')
    monkeypatch.setattr(docstrings, "PACKAGES", tuple(sizes))
    return tmp_path


def test_reads_every_kind_of_docstring_in_order():
    source = f'''"""{words("module")}"""
class A:
    """{words("klass")}"""
    async def f(self):
        r"""{words("method")}"""
x = """{words("assigned")}"""
'''
    found = harvest.docstrings(source.encode())
    assert [text.split()[0] for text in found] == ["modulea", "klassa", "methoda"]


def test_a_docstring_needs_twenty_words():
    assert harvest.docstrings(f'"""{words("w", 19)}"""'.encode()) == []
    assert len(harvest.docstrings(f'"""{words("w", 20)}"""'.encode())) == 1


@pytest.mark.parametrize(
    "source", [b"def f(:", b"\x00", b"\xff\xfe", b"(" * 5000, b"# -*- coding: nonsense -*-\nx = 1"]
)
def test_a_file_that_python_cannot_parse_has_none(source: bytes):
    assert harvest.docstrings(source) == []


def test_a_lone_surrogate_is_made_encodable():
    (text,) = harvest.docstrings(f'"""\\ud800 {words("w")}"""'.encode())
    assert text.encode() and text.startswith("?")


def test_nothing_is_imported_and_tests_are_left_out(packages: Path):
    texts = docstrings.collect(None, None)
    assert not (packages / "imported").exists()
    assert not {"pkg_many", "pkg_some", "pkg_few"} & set(sys.modules)
    everything = texts.train + texts.evaluation
    assert not any(text.startswith("test") for text in everything)
    # 55 files; the text that two packages share is kept once.
    assert len(everything) == len(set(everything)) == 54


@pytest.mark.parametrize("workers", [1, 4])
def test_classes_are_equal_until_one_runs_dry(packages: Path, workers: int):
    texts = docstrings.collect(20, 10, workers=workers)
    assert (len(texts.train), len(texts.evaluation)) == (20, 10)
    assert texts.label_names == ["pkg_many", "pkg_some", "pkg_few"]
    labels = texts.train_labels + texts.evaluation_labels
    # Ten each, but the last has five only; the five that it lacks come from those that have more (9 or 10 of them
    # in pkg_some, which may lose the shared text).
    assert labels.count(2) == 5 and labels.count(1) in (9, 10) and len(labels) == 30
    for text, label in zip(texts.train + texts.evaluation, labels, strict=True):
        assert text.startswith((texts.label_names[label], "common"))


def test_order_of_reading_does_not_matter(packages: Path):
    assert docstrings.collect(20, 10, workers=1) == docstrings.collect(20, 10, workers=5)


def test_a_seed_draws_others_and_train_and_evaluation_share_nothing(packages: Path):
    one, other = docstrings.collect(20, 10, seed=1), docstrings.collect(20, 10, seed=2)
    assert set(one.train) != set(other.train)
    assert not set(one.train) & set(one.evaluation)


def test_says_so_when_there_are_fewer_than_asked_for(packages: Path):
    texts = docstrings.collect(300, 100)
    assert len(texts.train) + len(texts.evaluation) == 54
    assert texts.notes == ["400 docstrings asked for, 54 found: 41 to train, 13 to evaluate"]


def test_near_copies_are_dropped(packages: Path):
    same = words("twin")
    for i in range(3):
        (packages / "pkg_few" / f"copy{i}.py").write_text(f'"""{same.upper() if i else same} Ending {"q" * i}."""')
    texts = docstrings.collect(None, None)
    assert sum(text.lower().startswith("twin") for text in texts.train + texts.evaluation) == 1


def test_too_few_packages_is_one_clear_error(monkeypatch):
    monkeypatch.setattr(docstrings, "PACKAGES", ("no_such_package", "python"))
    with pytest.raises(TaskError, match="use task text"):
        docstrings.collect(10, 10)


def test_the_real_corpus_has_ten_classes_of_real_text():
    lines: list[str] = []
    texts = docstrings.collect(60, 40, progress=lines.append)
    assert texts.label_names == sorted(docstrings.PACKAGES) and len(texts.label_names) == 10
    assert {texts.train_labels.count(i) for i in range(10)} == {6}
    assert {texts.evaluation_labels.count(i) for i in range(10)} == {4}
    assert all(len(text.split()) >= harvest.MIN_WORDS for text in texts.train + texts.evaluation)
    assert lines and "100 of 100 texts" in lines[-1]
