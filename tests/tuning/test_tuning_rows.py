"""`ablate --tune`: every row of a study tuned."""

from __future__ import annotations

import io
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import tuning_fakes as fakes
from rich.console import Console

from composer_speedups.ablation.store import Store
from composer_speedups.cli import main
from composer_speedups.errors import UserError
from composer_speedups.recipes import load_recipe
from composer_speedups.tuning.rows import expected_tuning, tune_rows
from composer_speedups.tuning.settings import Settings

# --- Every row of a study ---


def test_rows_are_tuned_once_and_what_cannot_run_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    diary = tmp_path / "diary"
    monkeypatch.setenv("TUNING_DIARY", str(diary))
    names = ("demo/fp32", "demo/bf16", "demo/fp16")
    recipes = [load_recipe(name, [*fakes.SIZES, "duration=1ep"], check_arguments=False) for name in names]
    console = Console(file=io.StringIO())
    settings = Settings(samples=6000, trials=3)
    options = {"console": console, "entries": fakes.ENTRIES}
    found = tune_rows(recipes, "demo/fp32", tmp_path / "recipes", settings, **options)
    assert found is not None
    rows, baseline = found
    assert [row.name for row in rows] == ["demo/fp32.tuned", "demo/bf16.tuned", "demo/fp16"]
    assert baseline == "demo/fp32.tuned" and rows[0].batch_size != 32 and rows[2].batch_size == 32
    before = diary.read_text()
    again = tune_rows(recipes, "demo/fp32", tmp_path / "recipes", settings, **options)
    assert again is not None and [r.to_dict() for r in again[0]] == [r.to_dict() for r in rows]
    patient = tune_rows(recipes, "demo/fp32", tmp_path / "recipes", replace(settings, timeout=7200.0), **options)
    assert patient is not None and patient[1] == baseline, "another time limit asks for nothing else"
    assert diary.read_text() == before, "nothing was tried again"
    with pytest.raises(UserError, match="tuned from another recipe, or with another budget"):
        tune_rows(recipes, "demo/fp32", tmp_path / "recipes", Settings(samples=7000), **options)


def test_ablate_tune_studies_the_tuned_recipes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    sys.path.insert(0, str(Path(__file__).parents[1] / "ablation"))
    import fakes as study_fakes

    from composer_speedups.ablation import study
    from composer_speedups.tuning import rows

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(study, "Entries", lambda: study_fakes.ENTRIES)
    monkeypatch.setattr(rows.tune_rows, "__kwdefaults__", rows.tune_rows.__kwdefaults__ | {"entries": fakes.ENTRIES})
    command = ["ablate", "demo/fp32", "demo/bf16", "duration=1ep", "--tune", "--tune-samples", "4000", "--out", "out"]
    assert main(command) == 0
    table = json.loads((tmp_path / "out" / "results.json").read_text())["rows"]
    assert [row["recipe"] for row in table] == ["demo/fp32.tuned", "demo/bf16.tuned"] and table[0]["baseline"]
    assert sorted(p.name for p in (tmp_path / "out" / "recipes").iterdir()) == ["demo.bf16.yaml", "demo.fp32.yaml"]
    capsys.readouterr()
    assert main(command) == 0
    assert "is there already" in capsys.readouterr().out


def tuned_study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *command: str) -> tuple[list[dict], str]:
    """The recipes of a study with fake tries and fake runs, and its sentence."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "ablation"))
    import fakes as study_fakes

    from composer_speedups.ablation import study
    from composer_speedups.tuning import rows

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(study, "Entries", lambda: study_fakes.ENTRIES)
    monkeypatch.setattr(rows.tune_rows, "__kwdefaults__", rows.tune_rows.__kwdefaults__ | {"entries": fakes.ENTRIES})
    options = ["--tune", "--tune-samples", "4000", "--out", "out"]
    assert main(["ablate", *command, *fakes.SIZES, *options]) == 0
    verdict = json.loads((tmp_path / "out" / "results.json").read_text())["study"]["verdict"]
    with Store(tmp_path / "out" / "runs.sqlite", create=False) as store:
        return list(store.recipes().values()), verdict


def test_equal_batch_rows_are_made_of_the_tuned_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Tuned before, they would be no longer equal."""
    (tmp_path / "own.yaml").write_text("extends: demo/bf16\nlearning_rate: 2e-3\n")
    recipes, _ = tuned_study(tmp_path, monkeypatch, "demo/fp32", "own.yaml", "duration=40ba", "--equal-batch")
    assert [r["name"] for r in recipes] == ["demo/fp32.tuned", "own.tuned", "own.equal_batch"]
    base, tuned, equal = recipes
    assert tuned["learning_rate"] != base["learning_rate"] or tuned["batch_size"] != base["batch_size"]
    for key in ("batch_size", "learning_rate", "microbatch_size", "duration", "schedule", "task"):
        assert equal[key] == base[key]
    assert equal["speedups"] == tuned["speedups"]
    written = sorted(p.name for p in (tmp_path / "out" / "recipes").iterdir())
    assert written == ["demo.fp32.yaml", "own.yaml"], "an equal-batch row is not tuned"


def test_leave_one_out_of_tuned_rows_keeps_its_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    recipes, verdict = tuned_study(tmp_path, monkeypatch, "demo/bf16", "duration=1ep", "--plan", "leave-one-out")
    assert [r["name"] for r in recipes] == [
        "demo/bf16.tuned",
        "demo/bf16.tuned.without_foreach_adamw",
        "demo/bf16.tuned.without_mixed_precision",
    ]
    assert "without foreach_adamw, " in verdict or "without mixed_precision, " in verdict


def test_the_expected_time_is_of_what_is_left_to_tune(tmp_path: Path):
    recipes = [load_recipe(name, ["evaluate=true"], check_arguments=False) for name in ("demo/fp32", "demo/bf16")]
    few, many = Settings(samples=1000), Settings(samples=3000)
    peaks = {"fp32": 1e9, "bf16": 1e9}
    count, seconds = expected_tuning(recipes, tmp_path, few, peaks, "cpu")
    three = expected_tuning(recipes, tmp_path, many, peaks, "cpu")[1]
    assert count == 2 and seconds is not None and three is not None
    tries = 2 * (12 + 2 * few.trials) * 5
    assert three - tries == pytest.approx(3 * (seconds - tries)) and seconds > tries
    assert expected_tuning(recipes, tmp_path, few, {}, "cpu") == (2, None)
    (tmp_path / "demo.fp32.yaml").touch()
    assert expected_tuning(recipes, tmp_path, few, peaks, "cpu") == (1, pytest.approx(seconds / 2))
