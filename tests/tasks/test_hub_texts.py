"""Data sets as the library `datasets` gives them: here of folders, as there is no hub."""

from __future__ import annotations

from pathlib import Path

import datasets
import pytest
import torch
from pydantic import ValidationError

from composer_speedups.errors import TaskError
from composer_speedups.tasks import ModelSpec, TaskSpec, build_model, build_task, hub, hub_texts

SMALL = {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32}
CLASSES = datasets.ClassLabel(names=["positive", "negative", "mixed"])  # not in the order of the alphabet


def rows(count: int, first: int = 0, secret: bool = False) -> datasets.Dataset:
    numbers = range(first, first + count)
    values = {
        "sentence1": [f"the film number {i} was {['good', 'bad', 'long'][i % 3]}" for i in numbers],
        "sentence2": [f"it was {['good', 'bad', 'long'][i % 3]}" for i in numbers],
        "label": [-1 if secret else i % 3 for i in numbers],
        "score": [i / 7 for i in numbers],
        "tags": [["a", "b"]] * count,
    }
    features = datasets.Features(
        {"sentence1": datasets.Value("string"), "sentence2": datasets.Value("string"), "label": CLASSES,
         "score": datasets.Value("float32"), "tags": datasets.Sequence(datasets.Value("string"))}
    )  # fmt: skip
    return datasets.Dataset.from_dict(values, features=features)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """As many sets of the hub are: parquet files by split, the labels of the test kept secret."""
    path = tmp_path / "set"
    (path / "data").mkdir(parents=True)
    for name, part in {"train": rows(60), "validation": rows(12, 60), "test": rows(9, 72, secret=True)}.items():
        part.to_parquet(path / "data" / f"{name}-00000-of-00001.parquet")
    return path


def spec(folder: Path, **changes) -> TaskSpec:
    usual = {
        "text_column": "sentence1",
        "max_length": 32,
        "vocabulary": 300,
        "train_samples": None,
        "eval_samples": None,
    }
    return TaskSpec(**({"name": "hub", "path": str(folder)} | usual | changes))


def texts(folder: Path, **changes):
    asked = spec(folder, **changes)
    return hub_texts.read(hub_texts.load(asked), asked)


def test_splits_columns_and_names_of_classes_are_the_data_sets_own(folder: Path) -> None:
    found = texts(folder)
    assert found.label_names == ["positive", "negative", "mixed"], "in their order: a checkpoint's head may know it"
    told = {f"the film number {i} was {['good', 'bad', 'long'][i % 3]}": i % 3 for i in range(72)}
    numbers = {t: n for t, n in told.items() if int(t.split()[3]) < 60}
    assert dict(zip(found.train, found.train_labels, strict=True)) == numbers
    assert dict(zip(found.evaluation, found.evaluation_labels, strict=True)) == {
        t: n for t, n in told.items() if t not in numbers
    }
    assert found.notes == [] and found.train_pairs is None


def test_a_training_batch_of_pairs(folder: Path) -> None:
    model = ModelSpec(pretrained=False, config=SMALL)
    made = build_task(spec(folder, text_pair_column="sentence2"), model, seed=0)
    batch = made.collate_train([made.train[i] for i in range(4)])
    assert batch["token_type_ids"].max() == 1 and made.num_labels == 3
    loaded = build_model(model, made)
    assert loaded.config.id2label == {0: "positive", 1: "negative", 2: "mixed"}
    assert torch.isfinite(loaded(**batch).loss)


def test_the_second_time_nothing_is_read_and_other_content_is(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, reads, real = ModelSpec(pretrained=False, config=SMALL), [], hub_texts.read
    monkeypatch.setattr(hub_texts, "read", lambda *given: reads.append(1) or real(*given))
    first = build_task(spec(folder), model, seed=0)
    again = build_task(spec(folder), model, seed=1)
    assert len(reads) == 1 and [s["input_ids"].tolist() for s in again.train] == [
        s["input_ids"].tolist() for s in first.train
    ]
    build_task(spec(folder, text_column="sentence2"), model, seed=0)
    assert len(reads) == 2
    rows(60, 500).to_parquet(folder / "data" / "train-00000-of-00001.parquet")
    other = build_task(spec(folder), model, seed=0)
    assert "number 5" in other.tokenizer.decode(other.train[0]["input_ids"]), "as many rows, and other texts"


def test_lists_of_classes_have_their_names(tmp_path: Path) -> None:
    """Of words, as the sets of named entities have them, and several of a text, as those of emotions."""
    tags = datasets.Sequence(datasets.ClassLabel(names=["O", "B-PER", "B-LOC"]))
    moods = datasets.Sequence(datasets.ClassLabel(names=["joy", "anger"]))
    words = datasets.Sequence(datasets.Value("string"))
    features = datasets.Features({"tokens": words, "tags": tags, "text": datasets.Value("string"), "moods": moods})
    values = {
        "tokens": [["Ada", "saw", "Rome", f"{i}"] for i in range(40)],
        "tags": [[1, 0, 2, -100 if i % 2 else 0] for i in range(40)],
        "text": [f"text {i}" for i in range(40)],
        "moods": [[0, 1][: i % 3] for i in range(40)],
    }
    folder = tmp_path / "lists"
    folder.mkdir()
    datasets.Dataset.from_dict(values, features=features).to_parquet(folder / "train.parquet")
    found = texts(folder, objective="token_classification", text_column="tokens", label_column="tags")
    assert found.label_names == ["O", "B-PER", "B-LOC"]
    for text, labels in zip(found.train, found.train_labels, strict=True):
        assert text.startswith("Ada saw Rome ") and labels == [1, 0, 2, -100 if int(text.split()[-1]) % 2 else 0]
    found = texts(folder, objective="multi_label", text_column="text", label_column="moods")
    assert found.label_names == ["joy", "anger"]
    for text, labels in zip(found.train, found.train_labels, strict=True):
        assert labels == [[0, 0], [1, 0], [1, 1]][int(text.split()[-1]) % 3]
    with pytest.raises(
        TaskError,
        match=r"holds a list, not one word or number: .*task\.objective=multi_label or token_classification, for",
    ):
        texts(folder, text_column="text", label_column="moods")


def test_what_was_saved_to_disk_is_read(tmp_path: Path) -> None:
    parts = datasets.DatasetDict(train=rows(40), validation=rows(10, 40))
    parts.save_to_disk(tmp_path / "parts")
    found = texts(tmp_path / "parts")
    assert (len(found.train), len(found.evaluation), found.label_names) == (40, 10, CLASSES.names)
    first = hub_texts.fingerprint(datasets.load_from_disk(tmp_path / "parts"))
    rows(40).save_to_disk(tmp_path / "one")
    assert len(texts(tmp_path / "one").train) == 36
    other = datasets.DatasetDict(train=rows(40, 7), validation=rows(10, 40))
    other.save_to_disk(tmp_path / "parts")
    assert hub_texts.fingerprint(datasets.load_from_disk(tmp_path / "parts")) != first, "its files have the same names"


def test_a_score_is_a_number(folder: Path) -> None:
    found = texts(folder, objective="regression", label_column="score")
    assert found.label_names == ["score"]
    for text, score in zip(found.train, found.train_labels, strict=True):
        assert score == pytest.approx(int(text.split()[3]) / 7)


def test_without_a_split_for_it_a_tenth_is_kept_to_evaluate_on(folder: Path) -> None:
    for name in ("validation", "test"):
        (folder / "data" / f"{name}-00000-of-00001.parquet").unlink()
    found = texts(folder)
    assert (len(found.train), len(found.evaluation)) == (54, 6) and not set(found.train) & set(found.evaluation)


def test_splits_can_be_named(folder: Path) -> None:
    found = texts(folder, train_split="validation", eval_split="train", eval_samples=20)
    assert (len(found.train), len(found.evaluation)) == (12, 20)
    with pytest.raises(TaskError, match=r"has no split 'dev': set task\.eval_split to one of train, validation, test"):
        texts(folder, eval_split="dev")
    with pytest.raises(TaskError, match=r"has no split 'all': set task\.train_split to one of train, "):
        texts(folder, train_split="all")
    with pytest.raises(TaskError, match=r"\(60 texts\): name others by task\.train_split or eval_split"):
        texts(folder, eval_split="test", eval_samples=5)


def test_a_test_whose_classes_are_secret_is_none(folder: Path) -> None:
    """As GLUE's; their number is -1."""
    (folder / "data" / "validation-00000-of-00001.parquet").unlink()
    found = texts(folder)
    assert (len(found.train), len(found.evaluation), found.notes) == (54, 6, [])
    assert len(texts(folder, objective="mlm").evaluation) == 9, "which needs no classes"


def test_of_many_rows_some_are_drawn_by_the_seed(folder: Path) -> None:
    rows(3000, 100).to_parquet(folder / "data" / "train-00000-of-00001.parquet")
    one, same, other = (texts(folder, train_samples=40, data_seed=seed) for seed in (1, 1, 2))
    assert one.train == same.train and one.train != other.train and len(one.train) == 40
    numbers = [int(text.split()[3]) for text in one.train + other.train]
    assert min(numbers) < 1100 and max(numbers) > 2100, "from all of it"
    assert one.notes[-1].startswith("40 of about 3,000 texts to train on are used")


def test_what_is_evaluated_on_is_not_less_because_few_are_trained_on(folder: Path) -> None:
    for name in ("validation", "test"):
        (folder / "data" / f"{name}-00000-of-00001.parquet").unlink()
    rows(3000).to_parquet(folder / "data" / "train-00000-of-00001.parquet")
    for asked, there in ((200, 200), (None, 300)):
        found = texts(folder, train_samples=10, eval_samples=asked)
        assert (len(found.train), len(found.evaluation)) == (10, there)
    assert found.notes == ["10 of 2,700 texts to train on are used: task.train_samples=null takes all"]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"text_column": "review"}, r"set, train' has no column 'review': set task\.text_column to one of sentence1, "),
        ({"text_pair_column": "b"}, r"has no column 'b': set task\.text_pair_column to one of"),
        ({"label_column": "stars"}, r"has no column 'stars': set task\.label_column to one of"),
        ({"text_column": "tags"}, r"set, train' row 1: column 'tags' holds a list, not one text"),
        ({"label_column": "score"}, r"'score' holds 72 different values in 72 rows: that is no label"),
        ({"subset": "mrpc"}, r"data set '.*set' cannot be loaded \(.*mrpc.*\): name one by task\.subset"),
    ],
)
def test_what_is_not_there_is_one_clear_error(folder: Path, changes: dict, says: str) -> None:
    with pytest.raises(TaskError, match=says) as raised:
        texts(folder, **changes)
    assert "\n" not in str(raised.value)


def test_without_a_hub_a_name_is_refused_within_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "unreachable", lambda: "https://hub.example does not answer: ConnectTimeout")
    with pytest.raises(
        TaskError, match=r"stanfordnlp/sst2 cannot be had from the Hugging Face hub \(https:.*or set task"
    ):
        texts(Path("stanfordnlp/sst2"))
    (tmp_path / "hf" / "nyu-mll___glue" / "sst2").mkdir(parents=True)
    with pytest.raises(TaskError, match="nyu-mll/glue cannot be had from the Hugging Face hub"):
        texts(Path("nyu-mll/glue"), subset="mrpc")
    (tmp_path / "empty").mkdir()
    with pytest.raises(TaskError, match=r"cannot be loaded \(.*\): give a folder that it reads, or task\.name=text"):
        texts(tmp_path / "empty")


def test_what_the_library_is_asked_for(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a name: its subset and revision; here a folder answers for it."""
    asked, real = [], datasets.load_dataset

    def answer(*given, **more):
        asked.append((given, more))
        return real(str(folder))

    monkeypatch.setattr(datasets, "load_dataset", answer)
    monkeypatch.setattr(hub, "unreachable", lambda: None)
    found = texts(Path("nyu-mll/glue"), subset="mrpc", revision="abc", text_pair_column="sentence2")
    assert asked == [(("nyu-mll/glue", "mrpc"), {"revision": "abc"})]
    assert len(found.train) == 60 and found.train_pairs is not None


def test_what_is_in_the_cache_needs_no_hub(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = datasets.load_dataset
    monkeypatch.setattr(datasets, "load_dataset", lambda *given, **more: real(str(folder)))
    monkeypatch.setattr(hub, "unreachable", lambda: "HF_HUB_OFFLINE is set")
    (tmp_path / "hf" / "SetFit___sent_eval-cr").mkdir(parents=True)  # as `datasets` writes capitals
    name = Path("SetFit/SentEval-CR")
    assert len(texts(name).train) == 60
    commit = Path(real(str(folder))["train"].cache_files[0]["filename"]).parent.name
    assert len(texts(name, revision=commit).train) == 60
    with pytest.raises(TaskError, match=rf"revision 'main' of .* cannot be told .*in the cache \({commit}\)"):
        texts(name, revision="main")
    with pytest.raises(TaskError, match=r"task\.revision is of data sets on the hub, and .* is a folder: remove it"):
        texts(folder, revision="main")


def test_bad_specs_are_refused() -> None:
    for values, says in (
        ({"name": "hub"}, "needs path: the name of a data set"),
        ({"name": "hub", "path": "a", "eval_split": "train"}, "both 'train': evaluate on another"),
        ({"name": "text", "path": "a", "subset": "b"}, "subset belongs to task hub, not to text"),
        ({"name": "hub", "path": "a", "eval_path": "b"}, "eval_path belongs to task text, not to hub"),
        ({"name": "dummy", "path": "a"}, "path belongs to task text, hub or imdb, not to dummy"),
    ):
        with pytest.raises(ValidationError, match=says):
            TaskSpec(**values)
