"""ESM's folders: its tokenizer is one in Python, as its family has no fast one, and ends a text without a separator."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from composer_speedups.errors import TaskError
from composer_speedups.tasks import ModelSpec, TaskSpec, build_model, build_task
from composer_speedups.tasks.task import _meaning

WORDS = ["<cls>", "<pad>", "<eos>", "<unk>", *"LAGVSERTIDPKQNFYMHWCXBUZO.-", "<null_1>", "<mask>"]
SIZES = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64)
SEQUENCES = ["MKTAYIAKQR", "GGWHLLSVE", "MKV", "LAGVSERTIDPKQNFYMHWC", "KTLLGGAAVV", "WWCCHH", "MAMA", "QQNNPPDD"]


def esm(folder: Path, words: list[str] = WORDS) -> Path:
    folder.mkdir()
    (folder / "vocab.txt").write_text("\n".join(words))
    transformers.EsmTokenizer(str(folder / "vocab.txt")).save_pretrained(folder)
    ids = {"pad_token_id": 1, "mask_token_id": words.index("<mask>"), "vocab_size": len(words)}
    config = transformers.EsmConfig(**SIZES, **ids, position_embedding_type="rotary", token_dropout=True)
    transformers.EsmForMaskedLM(config).save_pretrained(folder)
    return folder


@pytest.fixture
def table(tmp_path: Path) -> Path:
    rows = [f"{sequence},{i % 2}" for i, sequence in enumerate(SEQUENCES * 3)]
    (tmp_path / "proteins.csv").write_text("\n".join(["text,label", *rows]))
    return tmp_path / "proteins.csv"


def task_of(table: Path, folder: Path, **changes: object):
    model = ModelSpec(name=str(folder), pretrained=True)
    return model, build_task(TaskSpec(name="text", path=str(table), max_length=16, **changes), model, seed=0)


@pytest.mark.parametrize("objective", ["classification", "mlm"])
def test_proteins_are_cut_into_amino_acids_and_learnt_from(table: Path, tmp_path: Path, objective: str) -> None:
    spec, task = task_of(table, esm(tmp_path / "esm"), objective=objective, mlm_probability=0.5)
    expected = {tuple([0, *(WORDS.index(letter) for letter in s[:14]), 2]) for s in SEQUENCES}
    assert {tuple(sample["input_ids"].tolist()) for sample in task.train} <= expected
    batch = task.collate_train([task.train[i] for i in range(6)])
    assert batch["input_ids"].shape == (6, 16) and set(batch["input_ids"][batch["attention_mask"] == 0].tolist()) == {1}
    loss = build_model(spec, task, seed=0)(**batch).loss
    loss.backward()
    assert torch.isfinite(loss)


def test_random_tokens_end_as_texts_do(tmp_path: Path) -> None:
    model = ModelSpec(name=str(esm(tmp_path / "esm")), pretrained=True)
    spec = TaskSpec(name="dummy", max_length=16, train_samples=8, eval_samples=4, lowest_token=4)
    sample = build_task(spec, model, seed=0).train[0]["input_ids"]
    assert (sample[0], sample[-1]) == (WORDS.index("<cls>"), WORDS.index("<eos>"))


def test_tokens_of_another_vocabulary_are_not_taken_from_the_cache(table: Path, tmp_path: Path) -> None:
    swapped = [*WORDS[:4], *reversed(WORDS[4:24]), *WORDS[24:]]
    ids = [
        task_of(table, esm(tmp_path / name, words))[1].train[0]["input_ids"].tolist()
        for name, words in (("one", WORDS), ("other", swapped), ("again", WORDS))
    ]
    assert ids[0] == ids[2] != ids[1]


def test_nor_are_those_of_other_options(table: Path, tmp_path: Path) -> None:
    """The same class and vocabulary, but one makes small letters of large ones."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "M", "K", "m", "##k", "##K", "##t"]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    keys = []
    for small in (True, False, True):
        made = transformers.BertJapaneseTokenizer(
            str(tmp_path / "vocab.txt"), word_tokenizer_type="basic", do_lower_case=small
        )
        keys.append(_meaning(made))
    assert keys[0] == keys[2] != keys[1]


def test_a_published_size_is_built_without_the_hub() -> None:
    model = ModelSpec(name="facebook/esm2_t6_8M_UR50D", pretrained=False)
    spec = TaskSpec(name="dummy", max_length=2000, train_samples=4, eval_samples=4, lowest_token=5)
    task = build_task(spec, model, seed=0)
    built = build_model(model, task, seed=0)
    sizes = (built.config.num_hidden_layers, built.config.hidden_size, built.config.num_attention_heads)
    assert sizes == (6, 320, 20) and built.config.mask_token_id == task.tokenizer.mask_token_id
    assert built.esm.embeddings.position_embedding_type == "rotary", "which have no end: 2,000 tokens are no error"


def test_positions_that_are_embeddings_have_an_end(tmp_path: Path) -> None:
    config = {"position_embedding_type": "absolute", "max_position_embeddings": 34}
    model = ModelSpec(name=str(esm(tmp_path / "esm")), pretrained=False, config=config)
    spec = TaskSpec(name="dummy", max_length=33, train_samples=4, eval_samples=4, lowest_token=4)
    with pytest.raises(TaskError, match="max_length 33 exceeds the 32 positions"):
        build_model(model, build_task(spec, model, seed=0), seed=0)


@pytest.mark.timeout(300)
def test_training_goes_on_from_a_checkpoint(table: Path, tmp_path: Path) -> None:
    """Its head for contacts never has a gradient, so that no moments of it are saved."""
    from composer_speedups.recipes import load_recipe
    from composer_speedups.training.run import run

    folder, steps = esm(tmp_path / "esm"), {}
    words = ["model.config={}", f"model.name={folder}", "batch_size=4", "schedule={name: constant, warmup: 0ba}"]
    words += [f"task={{name: text, path: {table}, max_length: 16}}", "evaluate=false"]
    for duration in ("1ep", "2ep"):
        recipe = load_recipe("cpu/fp32", [*words, f"duration={duration}"])
        steps[duration] = run(recipe, save=tmp_path / "saved", resume=True).steps
    assert steps == {"1ep": 5, "2ep": 5}, "the second run is the second epoch"
