"""Tuning: tries on data that changed, the earlier version's records, and words that would break YAML or the screen."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
import tuning_fakes as fakes
from rich.console import Console

from composer_speedups.cli import main
from composer_speedups.errors import TaskError, UserError
from composer_speedups.isolation.isolate import Isolation
from composer_speedups.recipes import load_recipe
from composer_speedups.recipes.written import write_recipe
from composer_speedups.tasks.inputs import changed
from composer_speedups.tuning import jobs, rows
from composer_speedups.tuning.record import RecordError
from composer_speedups.tuning.rows import tune_rows
from composer_speedups.tuning.settings import Settings
from composer_speedups.tuning.tune import record_path, tune

ROWS = "text,label\ngood,1\nbad,0\n"
SWAPPED = "text,label\ngood,0\nbad,1\n"
LONG = "x" * 300  # longer than a file's name can be


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "my.csv"
    path.write_text(ROWS)
    return path


def reading(data: Path, name: str = "demo/fp32"):
    task = f"task={{name: text, path: '{data}', text_column: text, label_column: label}}"
    return load_recipe(name, [task, "batch_size=32", "duration=2ep"], check_arguments=False)


def search(recipe, out: Path, *, isolation: Isolation | None = None, command: str = "", **options):
    """`tune` with fake tries, the batch left as it is; what it printed comes with the result."""
    console = Console(file=io.StringIO(), width=300)
    settings = Settings(**({"batch": False, "samples": 8_000, "trials": 2} | options))
    more = {"console": console, "entries": fakes.ENTRIES, "isolation": isolation, "command": command}
    return tune(recipe, out=out, settings=settings, **more), console.file.getvalue()


def stopped(recipe, out: Path, monkeypatch: pytest.MonkeyPatch, tries: int) -> None:
    """Begin a search, or go on with it, until `tries` are recorded in all."""
    monkeypatch.setenv("TUNING_DIARY", str(out.with_suffix(".diary")))
    monkeypatch.setenv("TUNING_FAULT", f"disk:{tries}")
    with pytest.raises(UserError, match="No space left"):
        search(recipe, out)
    monkeypatch.delenv("TUNING_FAULT")


def test_a_search_is_not_gone_on_with_on_other_data(tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch):
    """The path is the same, and what is there is not: no table may show tries of both."""
    out = tmp_path / "tn.yaml"
    stopped(reading(data), out, monkeypatch, 1)
    before = record_path(out).read_bytes()
    data.write_text(SWAPPED)
    with pytest.raises(RecordError, match=r"another search \(.*my\.csv has changed since it began\)\. It was left"):
        search(reading(data), out)
    assert record_path(out).read_bytes() == before and not out.exists()
    data.write_text(ROWS)  # the same, with another time of change
    result, text = search(reading(data), out)
    assert result.recipe is not None and "1 tries of an earlier start are kept" in text


def test_a_record_of_an_earlier_version_goes_on_and_is_watched_from_then_on(tmp_path: Path, data: Path, monkeypatch):
    out = tmp_path / "tn.yaml"
    stopped(reading(data), out, monkeypatch, 1)
    lines = record_path(out).read_text().splitlines(keepends=True)
    assert len(lines) == 3 and "my.csv" in lines[1] + lines[0]
    record_path(out).write_text("".join(line for line in lines if "inputs" not in line))
    out.with_suffix(".diary").write_text("one\n")
    stopped(reading(data), out, monkeypatch, 2)
    assert len(record_path(out).read_text().splitlines()) == 4
    data.write_text(SWAPPED)
    with pytest.raises(RecordError, match=r"my\.csv has changed since it began"):
        search(reading(data), out)


def test_each_try_is_told_what_its_data_was(tmp_path: Path, data: Path):
    asked = []

    class Watched(Isolation):
        def run(self, payload, **options):
            asked.append(payload)
            return super().run(payload, **options)

    with Watched(fakes.ENTRIES.train, fakes.ENTRIES.preload) as isolation:
        search(reading(data), tmp_path / "tn.yaml", isolation=isolation)
    tries = [payload for payload in asked if "seed" in payload]
    assert tries and all(list(one["inputs"]) == [str(data)] and changed(one["inputs"]) is None for one in tries)
    data.write_text(SWAPPED)
    with pytest.raises(TaskError, match=r"my\.csv has changed"):
        jobs.trial(tries[0], lambda event: None)


def tuned_rows(recipes, folder: Path, command: str = ""):
    console = Console(file=io.StringIO(), width=300)
    settings = Settings(samples=2_000, trials=2)
    options = {"command": command, "console": console, "entries": fakes.ENTRIES}
    return tune_rows(recipes, recipes[0].name, folder, settings, **options), console.file.getvalue()


def test_rows_tuned_on_other_data_are_not_taken(tmp_path: Path, data: Path):
    recipe, folder = reading(data), tmp_path / "recipes"
    tuned_rows([recipe], folder)
    assert "is there already" in tuned_rows([recipe], folder)[1]
    data.write_text(SWAPPED)
    with pytest.raises(UserError, match=r"demo\.fp32\.yaml was tuned from another recipe, .*, or on other data\."):
        tuned_rows([recipe], folder)
    # One of an earlier version, which did not keep what it was tuned on.
    path = folder / "demo.fp32.yaml"
    old = rows._digest(recipe, Settings(samples=2_000, trials=2), {})
    path.write_text(re.sub("of [0-9a-f]{12}", f"of {old}", path.read_text(), count=1))
    assert "is there already" in tuned_rows([recipe], folder)[1]


def test_rows_of_one_call_are_tuned_on_the_same_data(tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch):
    def then_swap(*arguments, **options):
        found = tune(*arguments, **options)
        data.write_text(SWAPPED)
        return found

    monkeypatch.setattr(rows, "tune", then_swap)
    with pytest.raises(UserError, match=r"my\.csv has changed since the tuning began"):
        tuned_rows([reading(data), reading(data, "demo/bf16")], tmp_path / "recipes")


# --- Words ---

ODD = "composer-speedups tune demo/fp32 'description=a\nbatch_size: 7\r\x85\u2028learning_rate: 9\x07\udcff'"


def test_a_newline_in_an_override_loses_no_recipe(tmp_path: Path):
    recipe = load_recipe("demo/fp32", ["description='a\n\nbatch_size: 7'"], check_arguments=False)
    assert "\n" in recipe.description
    search(recipe, tmp_path / "nl.yaml", command=ODD, samples=300)
    found = load_recipe(tmp_path / "nl.yaml", check_arguments=False)
    assert (found.batch_size, found.learning_rate) == (recipe.batch_size, recipe.learning_rate)
    head = (tmp_path / "nl.yaml").read_text().splitlines()[0]
    assert head.endswith(": " + " ".join(re.split(r"[\n\r\x85\u2028\x07\udcff]", ODD)))


def test_a_newline_in_a_reason_is_a_space(tmp_path: Path):
    recipe = load_recipe("demo/fp32", check_arguments=False)
    reasons = {"batch_size": "out of memory:\nlearning_rate: 9"}
    write_recipe(tmp_path / "x.yaml", recipe, None, None, description="x", evidence=[], reasons=reasons)
    assert "# out of memory: learning_rate: 9\n" in (tmp_path / "x.yaml").read_text()


def test_a_newline_in_an_override_loses_no_row(tmp_path: Path):
    recipe = load_recipe("demo/fp32", ["batch_size=32", "duration=1ep"], check_arguments=False)
    (found, _), _ = tuned_rows([recipe], tmp_path, command="ablate 'a\nlearning_rate: 9' --tune")
    assert [row.name for row in found] == ["demo/fp32.tuned"] and found[0].learning_rate != 9
    assert "is there already" in tuned_rows([recipe], tmp_path, command="another")[1]


def test_a_path_with_brackets_is_shown_as_it_is(tmp_path: Path):
    class Stopped(Isolation):
        def run(self, payload, **options):
            if "seed" in payload:
                raise KeyboardInterrupt
            return super().run(payload, **options)

    out = tmp_path / "[" / "notes].yaml"
    recipe = load_recipe("demo/fp32", check_arguments=False)
    with Stopped(fakes.ENTRIES.train, fakes.ENTRIES.preload) as isolation:
        result, text = search(recipe, out, isolation=isolation)
    assert result.recipe is None and f"0 tries are kept in {record_path(out)}" in text and "[/notes]" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([f"{LONG}=1"], "name the recipe first"),
        (["demo/fp32", "--out", f"{LONG}.yaml"], f"--out: cannot write to {LONG}.yaml: File name too long"),
        (["demo/fp32", "--out", f"{LONG}/x.yaml"], f"--out: cannot write to {LONG}/x.yaml: File name too long"),
        (["demo/fp32", "--out", "file/x.yaml"], "--out: cannot write to file: Not a directory. Choose another"),
        (["demo/fp32", "--memory-limit", f"{'9' * 400}GB"], "--memory-limit '99999"),
        (["demo/fp32", "--memory-limit", f"{'9' * 305}GB"], "is no size. Write e.g. --memory-limit 8GB"),
    ],
)
def test_names_and_numbers_that_are_too_long_are_one_line(arguments, message, tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    assert main(["tune", *arguments]) == 2
    captured = capsys.readouterr()
    assert message in captured.err and captured.err.count("\n") == 1 and captured.out == ""
