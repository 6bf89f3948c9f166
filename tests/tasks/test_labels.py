"""Objectives beyond a class a text: several classes, a number, a class a word; from a file to what is measured."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
import transformers
from pydantic import ValidationError

from composer_speedups.errors import TaskError
from composer_speedups.recipes import load_recipe
from composer_speedups.tasks import ModelSpec, TaskSpec, build_model, build_task, files
from composer_speedups.tasks.labels import ClassOfWords, Number, SeveralClasses
from composer_speedups.tasks.objectives import OBJECTIVES
from composer_speedups.training.metrics import R2
from composer_speedups.training.run import run

SMALL = {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32}
MODEL = ModelSpec(pretrained=False, config=SMALL)
WORDS = ["cat", "dog", "bird", "fish", "Rome", "Paris", "river"]
CLASSES = ["animal", "place"]


def words(row: int) -> list[str]:
    return [WORDS[(row * 5 + i * i) % len(WORDS)] for i in range(3 + row % 5)] + [f"{row}x{row}"]


def of_words(row: int) -> list[str]:
    return ["animal" if WORDS.index(word) < 4 else "place" for word in words(row)[:-1]] + ["O"]


def several(row: int) -> list[str]:
    return [name for name, of in zip(CLASSES, ({"cat", "dog"}, {"Rome", "Paris"}), strict=True) if of & {*words(row)}]


def number(row: int) -> float:
    return of_words(row).count("animal") / len(words(row))


LABELS = {"multi_label": several, "regression": number, "token_classification": of_words}


def written(folder: Path, objective: str, form: str, rows: int = 80) -> Path:
    """A file of texts with labels of that objective."""
    lists = objective == "token_classification"
    texts = [words(row) if lists else " ".join(words(row)) for row in range(rows)]
    labels = [LABELS[objective](row) for row in range(rows)]
    path = folder / f"{objective}.{form}"
    if form == "jsonl":
        lines = [json.dumps({"text": text, "label": label}) for text, label in zip(texts, labels, strict=True)]
        path.write_text("\n".join(lines))
    elif form == "parquet":
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.table({"text": texts, "label": labels}), path)
    else:
        between = " " if lists else ","
        cells = [between.join(label) if isinstance(label, list) else str(label) for label in labels]
        texts = [" ".join(text) if lists else text for text in texts]
        path.write_text("\n".join(["text\tlabel", *(f"{a}\t{b}" for a, b in zip(texts, cells, strict=True))]))
    return path


def spec(path: Path, objective: str, **changes: Any) -> TaskSpec:
    usual = {"name": "text", "path": str(path), "max_length": 32, "vocabulary": 300, "padding": "longest"}
    return TaskSpec(**(usual | {"objective": objective} | changes))


def test_every_objective_of_the_recipes_is_known() -> None:
    assert set(get_args(TaskSpec.model_fields["objective"].annotation)) == set(OBJECTIVES)


@pytest.mark.parametrize("form", ["jsonl", "parquet", "tsv"])
@pytest.mark.parametrize("objective", LABELS)
def test_labels_are_those_of_the_file(tmp_path: Path, objective: str, form: str) -> None:
    texts = files.read(str(written(tmp_path, objective, form)), labels=OBJECTIVES[objective].labels)
    assert texts.label_names == {"regression": ["label"], "multi_label": CLASSES}.get(objective, ["O", *CLASSES])
    assert len(texts.train) == 72 and len(texts.evaluation) == 8
    assert texts.notes == ["2 of 80 texts are of none of the classes"] * (objective == "multi_label")
    for text, label in zip(texts.train, texts.train_labels, strict=True):
        row = int(text.split()[-1].partition("x")[0])
        expected = LABELS[objective](row)
        if objective == "multi_label":
            assert label == [int(name in expected) for name in CLASSES]
        elif objective == "token_classification":
            assert text.split(" ") == words(row) and [texts.label_names[n] for n in label] == expected
        else:
            assert label == pytest.approx(expected)


def test_a_missing_label_is_none_and_an_empty_list_is_one(tmp_path: Path) -> None:
    path = tmp_path / "moods.jsonl"
    labels = [None, [], ["joy"], ["anger", "joy"]]
    path.write_text("\n".join(json.dumps({"text": f"text {i}", "label": labels[i % 4]}) for i in range(40)))
    texts = files.read(str(path), labels=SeveralClasses())
    assert len(texts.train) + len(texts.evaluation) == 30
    assert [note.partition(f"{path} ")[2] or note for note in texts.notes] == [
        "dropped: no label", "10 of 30 texts are of none of the classes"
    ]  # fmt: skip
    for text, label in zip(texts.train, texts.train_labels, strict=True):
        assert label == [[], [0, 0], [0, 1], [1, 1]][int(text.split()[1]) % 4]


def test_texts_of_which_no_word_has_a_label_are_left_out(tmp_path: Path) -> None:
    """Their loss is a mean over nothing: NaN, and in a batch of its own all of it."""
    path = tmp_path / "some.jsonl"
    rows = [{"text": words(i), "label": of_words(i) if i % 2 else [None] * len(words(i))} for i in range(60)]
    rows += [{"text": ["word"] * 40 + ["Rome"], "label": [-100] * 40 + ["place"]} for _ in range(30)]
    path.write_text("\n".join(map(json.dumps, rows)))
    task = build_task(spec(path, "token_classification", train_samples=None), MODEL, seed=0)
    assert all((task.train[i]["label"] != -100).any() for i in range(len(task.train)))
    assert len(task.train) + len(task.evaluation) == 30
    dropped = [note for note in task.notes if "dropped: no labelled word in 32 tokens" in note]
    assert len(dropped) == 2 and any(
        "labelled train words are cut off: raise task.max_length 32" in n for n in task.notes
    )


def test_a_new_head_begins_at_the_mean(tmp_path: Path) -> None:
    path = tmp_path / "years.tsv"
    path.write_text("\n".join(["text\tlabel", *(f"year {row}\t{1990 + row % 7}" for row in range(60))]))
    task = build_task(spec(path, "regression"), MODEL, seed=0)
    batch = task.collate_train([task.train[i] for i in range(20)])
    model = build_model(MODEL, task, seed=0).eval()
    assert (model(**batch).logits - task.train.labels.mean()).abs().max() < 1
    model.save_pretrained(tmp_path / "model")
    task.tokenizer.save_pretrained(tmp_path / "model")
    with torch.no_grad():
        model.classifier.bias.fill_(1.5)
    model.save_pretrained(tmp_path / "model")
    kept = ModelSpec(name=str(tmp_path / "model"), pretrained=True)
    assert build_model(kept, build_task(spec(path, "regression"), kept, seed=0)).classifier.bias.item() == 1.5


def test_another_kind_of_head_is_not_taken_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = written(tmp_path, "token_classification", "jsonl")
    task = build_task(spec(path, "token_classification"), MODEL, seed=0)
    of_texts = transformers.BertConfig(vocab_size=304, num_labels=3, **SMALL)
    old = transformers.BertForSequenceClassification(of_texts)
    torch.nn.init.constant_(old.classifier.weight, 9.0)
    old.save_pretrained(tmp_path / "old")
    task.tokenizer.save_pretrained(tmp_path / "old")
    model = ModelSpec(name=str(tmp_path / "old"), pretrained=True)
    built = build_model(model, build_task(spec(path, "token_classification"), model, seed=0))
    assert built.classifier.weight.abs().max() < 1
    assert "its head is of another kind of task: the output layer begins at random weights" in caplog.text


def test_what_numbers_explain_is_no_number_where_they_do_not_vary() -> None:
    metric = R2()
    metric.update(torch.tensor([0.5, 0.1]), torch.tensor([0.1, 0.1]))
    assert math.isnan(metric.compute())
    metric.update(torch.tensor([0.3]), torch.tensor([0.4]))
    answers, labels = np.array([0.5, 0.1, 0.3]), np.array([0.1, 0.1, 0.4])
    expected = 1 - ((answers - labels) ** 2).sum() / ((labels - labels.mean()) ** 2).sum()
    assert metric.compute().item() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("objective", LABELS)
def test_the_models_loss_is_the_objectives_own(tmp_path: Path, objective: str) -> None:
    task = build_task(spec(written(tmp_path, objective, "jsonl"), objective), MODEL, seed=0)
    model = build_model(MODEL, task, seed=0).double()
    batch = task.collate_train([task.train[i] for i in range(12)])
    batch["labels"] = batch["labels"].double() if batch["labels"].is_floating_point() else batch["labels"]
    out, labels = model(**batch), batch["labels"]
    if objective == "regression":
        expected = ((out.logits[:, 0] - labels) ** 2).mean()
    elif objective == "multi_label":
        likely = torch.sigmoid(out.logits)
        expected = -(labels * likely.log() + (1 - labels) * (1 - likely).log()).mean()
    else:
        asked = labels != -100
        expected = -out.logits.log_softmax(-1)[asked].gather(-1, labels[asked][:, None]).mean()
    torch.testing.assert_close(out.loss, expected)
    assert model.config.id2label == dict(enumerate(task.label_names))


def test_the_first_token_of_each_word_has_its_label(tmp_path: Path) -> None:
    objective = "token_classification"
    path = written(tmp_path, objective, "jsonl", rows=400)  # more words than the vocabulary holds
    task = build_task(spec(path, objective, max_length=9), MODEL, seed=0)
    cut = split = 0
    for n in range(len(task.train)):
        sample = task.train[n]
        ids, labels = sample["input_ids"].tolist(), sample["label"].tolist()
        pieces = task.tokenizer.convert_ids_to_tokens(ids)
        cut, split = cut + (len(ids) == 9), split + any(piece.startswith("##") for piece in pieces)
        begins = [not piece.startswith("##") and piece not in ("[CLS]", "[SEP]") for piece in pieces]
        # "7x7" is no word of letters, but tokenizers cut it at white space alone: one word, of several pieces.
        assert [label != -100 for label in labels] == begins, pieces
        known = {"Rome", "Paris", "river"}
        for piece, label in zip(pieces, labels, strict=True):
            if piece in WORDS:
                assert task.label_names[label] == ("place" if piece in known else "animal")
    assert cut and split, "both happened"
    batch = task.collate_train([task.train[i] for i in range(6)])
    assert (batch["labels"][batch["attention_mask"] == 0] == -100).all()
    assert task.classes.keys() == {"O", *CLASSES} and sum(task.classes.values()) == pytest.approx(1)


@pytest.mark.parametrize("recipe", [pytest.param("cpu/fp32", marks=pytest.mark.elsewhere), "cpu/fastest_fp32"])
@pytest.mark.parametrize("objective", LABELS)
def test_recipes_train_every_objective_and_measure_it(tmp_path: Path, objective: str, recipe: str) -> None:
    path = written(tmp_path, objective, "jsonl", rows=200)
    task = {"name": "text", "path": str(path), "objective": objective, "max_length": 32, "vocabulary": 300}
    changes = [f"task={json.dumps(task)}", f"model={MODEL.model_dump_json()}", "batch_size=8", "duration=5ep"]
    changes += ["learning_rate=3e-3", "schedule.name=constant", "schedule.warmup=0ba"]
    if objective == "token_classification" and recipe != "cpu/fp32":
        changes.append("speedups.last_layer_subset=null")  # all tokens are read
    made = load_recipe(recipe, changes)
    result = run(made, save=tmp_path / "saved")
    assert result.status == "ok" and result.finite and math.isfinite(result.eval_loss)
    assert result.losses[-1] < 0.8 * result.losses[0]
    model = getattr(transformers, OBJECTIVES[objective].head).from_pretrained(tmp_path / "saved").eval()
    loss, right = measured_again(model, made.task, objective)
    assert result.eval_loss == pytest.approx(loss, rel=1e-4)
    if objective == "regression":
        assert result.eval_r2 == pytest.approx(right, abs=1e-4)
        assert result.eval_accuracy is None and result.eval_majority is None and result.classes == {}
    else:
        assert result.eval_accuracy == pytest.approx(right, abs=1e-6)
        assert result.eval_r2 is None and 0.3 < result.eval_majority < 1
        assert result.eval_accuracy > result.eval_majority, "it learnt something"


def measured_again(model: torch.nn.Module, task: TaskSpec, objective: str) -> tuple[float, float]:
    """Loss and share of right answers, or of variance explained, in float64, text by text."""
    data = build_task(task, MODEL, seed=0)
    losses, right, values = [], [], []
    for n in range(len(data.evaluation)):
        batch = data.collate_eval([data.evaluation[n]])
        with torch.no_grad():
            logits = model(batch["input_ids"], batch["attention_mask"]).logits.double()
        labels = batch["labels"]
        if objective == "regression":
            values.append((logits.item(), labels.item()))
        elif objective == "multi_label":
            losses += torch.nn.functional.binary_cross_entropy_with_logits(
                logits, labels.double(), reduction="none"
            ).flatten().tolist()  # fmt: skip
            right += ((logits > 0) == (labels > 0)).flatten().tolist()
        else:
            kept = labels[0] != -100
            losses += torch.nn.functional.cross_entropy(logits[0][kept], labels[0][kept], reduction="none").tolist()
            right += (logits[0][kept].argmax(-1) == labels[0][kept]).tolist()
    if objective == "regression":
        answers, wanted = np.array(values).T
        residual = ((answers - wanted) ** 2).mean()
        return residual, 1 - residual / wanted.var()
    return float(np.mean(losses)), float(np.mean(right))


@pytest.mark.parametrize(
    ("objective", "rows", "expected"),
    [
        ("regression", ["a\t1", "b\t1,5"], "holds '1,5', which is no number: write one with a decimal point"),
        ("regression", ["a\t1", "b\tinf"], "holds 'inf', which is no number"),
        ("regression", ["a\t1", "b\t1e39"], "holds '1e39', which is no number"),
        ("regression", ["a\t2", "b\t2.0"], "holds one number only, 2: there is nothing to learn"),
        ("multi_label", ["a\tx", "b\tx,"], "holds one label only, 'x'"),
        ("multi_label", ["a\t", "b\t,"], "holds no label: classification needs two"),
        ("multi_label", ["a\t0", "b\t1"], "holds 0 and 1, and no names: name the classes, or give each a column"),
        ("multi_label", ["a\t0,1,0", "b\t1,1,0"], "holds 0 and 1, and no names"),
        ("multi_label", ["a\t['x', 'y']", "b\t['x']"], "holds lists that are written as text"),
        ("multi_label", ["a\tx;y", "b\tx"], "holds 'x;y': write commas between names"),
        ("multi_label", ["a\tx,y", "b\ty,x"], "holds the same labels in every row: there is nothing to learn"),
        ("token_classification", ["a b\tX O", "c d\tX"], "the text 'c d' has 2 words and 1 labels"),
        ("token_classification", ["a b\tO O", "c d\tO O"], "holds one label only, 'O'"),
    ],
)
def test_what_cannot_be_learnt_is_said_with_the_value(
    tmp_path: Path, objective: str, rows: list[str], expected: str
) -> None:
    path = tmp_path / "few.tsv"
    path.write_text("\n".join(["text\tlabel", *rows]))
    with pytest.raises(TaskError, match=expected.replace("(", r"\(")):
        files.read(str(path), labels=OBJECTIVES[objective].labels)


@pytest.mark.parametrize(("scale", "told"), [(1.0, False), (1e4, True), (1e-4, True)])
def test_numbers_that_are_hard_to_reach_are_told(tmp_path: Path, scale: float, told: bool) -> None:
    path = tmp_path / "prices.tsv"
    path.write_text("\n".join(["text\tprice", *(f"house {row}\t{(2 + row % 7) * scale}" for row in range(50))]))
    notes = files.read(str(path), labels=Number(), label_column="price").notes
    assert bool(notes) == told
    assert scale < 1e4 or notes[0].startswith("the numbers of column 'price' deviate by 20,240 from their mean: scale")


@pytest.mark.parametrize("name", ["docstrings", "imdb"])
@pytest.mark.parametrize("objective", LABELS)
def test_tasks_of_one_class_a_text_have_no_other_labels(name: str, objective: str) -> None:
    with pytest.raises(ValidationError, match=f"has one class a text: objective {objective} needs text, hub, dummy"):
        TaskSpec(name=name, objective=objective)


@pytest.mark.parametrize("form", ["csv", "jsonl", "parquet"])
def test_each_class_may_have_a_column_of_its_own(tmp_path: Path, form: str) -> None:
    """As people write toxic comments: 1 or 0, which pandas makes 1.0, or true and false."""
    rows = [{"text": f"text {i}", "toxic": i % 2, "insult": i % 3 == 0, "threat": None, "mild": 0.0} for i in range(40)]
    path = tmp_path / f"toxic.{form}"
    if form == "parquet":
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    elif form == "jsonl":
        path.write_text("\n".join(map(json.dumps, rows)))
    else:
        cells = [",".join("" if value is None else str(value) for value in row.values()) for row in rows]
        path.write_text("\n".join([",".join(rows[0]), *cells]))
    asked = {"label_columns": ["toxic", "insult", "threat", "mild"]}
    texts = files.read(str(path), labels=SeveralClasses(), **asked)
    assert texts.label_names == ["toxic", "insult"], "in the order in which they are asked for"
    assert texts.notes == [
        "13 of 40 texts are of none of the classes", "no text has the label 'threat', 'mild': left out"
    ]  # fmt: skip
    for text, label in zip(texts.train, texts.train_labels, strict=True):
        number = int(text.split()[1])
        assert label == [number % 2, int(number % 3 == 0)]
    task = build_task(spec(path, "multi_label", **asked), MODEL, seed=0)
    assert task.collate_train([task.train[i] for i in range(3)])["labels"].shape == (3, 2)


def test_columns_of_classes_are_checked(tmp_path: Path) -> None:
    for changes, says in (
        ({"objective": "classification"}, "label_columns are of objective multi_label"),
        ({"objective": "multi_label", "label_columns": ["a", "a"]}, "two or more, each once"),
        ({"objective": "multi_label", "label_columns": ["a", "text"]}, "text_column and label_columns are both 'text'"),
    ):
        with pytest.raises(ValidationError, match=says):
            TaskSpec(**({"name": "text", "path": "x", "label_columns": ["a", "b"]} | changes))
    path = tmp_path / "a.csv"
    path.write_text("text,a,b\none,1,0\ntwo,2,0")
    with pytest.raises(TaskError, match=r"column 'a' of task\.label_columns says '2': write 1 where it holds, else 0"):
        files.read(str(path), labels=SeveralClasses(), label_columns=["a", "b"])
    with pytest.raises(TaskError, match="has no column 'c'"):
        files.read(str(path), labels=SeveralClasses(), label_columns=["a", "c"])
    assert "label_columns" not in TaskSpec().model_dump(), "what is stored of others stays what it was"


def test_lists_and_cells_mean_the_same() -> None:
    assert SeveralClasses().items("\x1fred, not blue\x1fsky") == ["red, not blue", "sky"]
    assert SeveralClasses().items("red, sky,") == ["red", "sky"]
    assert SeveralClasses().cleaned(" a ", "\x1fsky")[1] == "\x1fsky", "of one item, too"
    assert SeveralClasses().items("\x1f") == [] and ClassOfWords().cleaned("a b", "\x1f") == ("a b", "")
    assert ClassOfWords().cleaned("10\xa0000 euros", "X O")[0].split(" ") == ["10\xa0000", "euros"]
    one, other = ClassOfWords().cleaned("\x1fNew York\x1f\x1fis", "\x1fB\x1fX\x1f")
    assert one.split(" ") == ["New\xa0York", "is"] and other == "B -100", "a word of nothing is none, and has no label"
    assert ClassOfWords().encoded("B -100 O", {"B": 1, "O": 0}) == [1, -100, 0]
    assert Number().encoded("1e3", {}) == 1000.0


@pytest.mark.parametrize("objective", LABELS)
def test_random_tokens_have_such_labels(objective: str) -> None:
    dummy = TaskSpec(name="dummy", objective=objective, num_labels=3, max_length=16, vocabulary=300, train_samples=20)
    task = build_task(dummy, MODEL, seed=0)
    batch = task.collate_train([task.train[i] for i in range(4)])
    shape = {"regression": (4,), "multi_label": (4, 3), "token_classification": (4, 16)}[objective]
    assert batch["labels"].shape == shape
    assert torch.isfinite(build_model(MODEL, task)(**batch).loss)
