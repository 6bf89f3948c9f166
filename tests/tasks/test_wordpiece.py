from __future__ import annotations

from pathlib import Path

import pytest

from composer_speedups.tasks import wordpiece

TEXTS = [
    "Return the eigenvalues of a symmetric matrix, and the eigenvectors if asked for.",
    "Compute the gradient of the loss; raise ValueError if the matrix isn't symmetric.",
    "Ünïcödé ∑∫ 漢字 text, returned as-is — with emoji 🎉.",
] * 5


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    wordpiece.train(TEXTS, 300, tmp_path)
    return tmp_path


def test_same_texts_same_vocabulary(folder: Path, tmp_path: Path):
    # Rust's hash maps are seeded anew for each map, so two trainings in one process differ if order matters at all.
    for i in range(3):
        again = tmp_path / str(i)
        again.mkdir()
        wordpiece.train(TEXTS, 300, again)
        assert (again / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()


def test_reads_what_it_was_trained_on(folder: Path):
    tokenizer = wordpiece.load(folder / "tokenizer.json", 64)
    assert tokenizer.is_fast and len(tokenizer) <= 300
    for text in TEXTS[:3]:
        ids = tokenizer(text)["input_ids"]
        assert ids[0] == tokenizer.cls_token_id and ids[-1] == tokenizer.sep_token_id
        assert tokenizer.unk_token_id not in ids
    assert "eigenvalues of a symmetric matrix" in tokenizer.decode(tokenizer(TEXTS[0])["input_ids"])
    assert tokenizer("ж" * 3)["input_ids"][1:-1] == [tokenizer.unk_token_id]
    # Letters are given to the trainer as "special": they must not be special in the result.
    assert len(set(tokenizer.all_special_ids)) == 5 and len(tokenizer.get_added_vocab()) == 5


def test_ids_are_dense_and_merges_are_there(folder: Path):
    vocabulary = wordpiece.load(folder / "tokenizer.json", 64).get_vocab()
    assert sorted(vocabulary.values()) == list(range(len(vocabulary)))
    assert "the" in vocabulary and "matrix" in vocabulary


def test_stock_transformers_loads_what_was_saved(folder: Path, tmp_path: Path):
    from transformers import AutoTokenizer

    tokenizer = wordpiece.load(folder / "tokenizer.json", 64)
    tokenizer.save_pretrained(tmp_path / "saved")
    stock = AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert stock(TEXTS)["input_ids"] == tokenizer(TEXTS)["input_ids"]
    assert set(stock(TEXTS[0])) == {"input_ids", "attention_mask"}
    assert stock.model_max_length == 64 and stock.mask_token_id == tokenizer.mask_token_id


CHINESE = [chr(0x4E00 + i) for i in range(2000)]


def trained(texts: list[str], vocabulary: int, folder: Path) -> dict[str, int]:
    folder.mkdir()
    wordpiece.train(texts, vocabulary, folder)
    found = wordpiece.load(folder / "tokenizer.json", 64).get_vocab()
    assert len(found) <= vocabulary
    return found


def test_thousands_of_letters_are_known_where_there_is_room(tmp_path: Path):
    """Of 2,000 characters, each as frequent as any other, no text may lose more than a few."""
    texts = ["".join(CHINESE[(7 * i + j) % 2000] for j in range(50)) for i in range(400)]
    found = trained(texts, 8192, tmp_path / "large")
    assert 1990 <= sum(c in found for c in CHINESE) < 2000 and sum(f"##{c}" in found for c in CHINESE) == 512
    found = trained(texts, 2000, tmp_path / "small")
    assert sum(c in found for c in CHINESE) == 512


def test_letters_leave_room_for_words(tmp_path: Path):
    """Beside words of another script thousands of characters must not take what those words need."""
    syllables = ["ka", "lo", "mi", "tu", "re", "sen"]
    words = ["".join(syllables[i // 6**k % 6] for k in range(4)) for i in range(1000)]
    texts = [
        " ".join(words[(7 * i + j) % 1000] for j in range(40))
        + "".join(CHINESE[(11 * i + j) % 2000] for j in range(40))
        for i in range(600)
    ]
    found = trained(texts, 3000, tmp_path / "v")
    assert sum(word in found for word in words) > 900
    assert 512 < sum(c in found for c in CHINESE) <= 1000
    kana = ["".join(chr(0x3042 + (i * k) % 80) for k in range(1, 6)) for i in range(50)]
    assert "##" + kana[0][1] in trained(kana * 3, 400, tmp_path / "kana"), "these continue words"
