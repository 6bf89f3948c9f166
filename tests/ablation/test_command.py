"""`ablate` and `report` as they are called, with the shipped recipes and fake runs."""

from __future__ import annotations

import io
import json
import re
import shlex
import sys
from dataclasses import replace
from html import escape
from pathlib import Path

import fakes
import pytest
from rich.console import Console

import composer_speedups.tuning.tune  # noqa: F401  makes its own `Entries` before `_fake_runs` replaces the class
from composer_speedups.ablation import study, work
from composer_speedups.ablation.selection import check_trainings
from composer_speedups.ablation.store import Store
from composer_speedups.cli import main
from composer_speedups.recipes.files import suite_names
from composer_speedups.recipes.suites import SUITE_SECTIONS, load_suite


@pytest.fixture(autouse=True)
def _fake_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(study, "Entries", lambda: fakes.ENTRIES)
    monkeypatch.chdir(tmp_path)


def rows(out: Path) -> list[dict]:
    return json.loads((out / "results.json").read_text())["rows"]


def test_recipes_with_overrides(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    code = main(["ablate", "demo/fp32", "demo/bf16", "batch_size=4", "--seeds", "2", "--out", "out"])
    assert code == 0
    found = rows(tmp_path / "out")
    assert [(row["recipe"], row["status"], len(row["seeds"])) for row in found] == [
        ("demo/fp32", "ok", 2),
        ("demo/bf16", "ok", 2),
    ]
    text = capsys.readouterr().out
    assert "To run: 4 runs" in text and "bf16" in text
    assert main(["report", "out"]) == 0
    assert "128 tokens padded" in capsys.readouterr().out


def test_numbers_are_compared_once_for_each_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    command = ["ablate", "demo/fp32", "demo/bf16", "--out", "out", "--seeds"]
    assert main([*command, "2", "--verify"]) == 0
    with Store(tmp_path / "out" / "runs.sqlite") as store:
        compared = [(run.recipe, run.seed) for run in store.runs() if run.result.get("numerics")]
        assert "--verify" in store.study()["command"]
    assert sorted(compared) == [("demo/bf16", 17), ("demo/fp32", 17)]
    assert all(row["numerics"]["holds"] for row in rows(tmp_path / "out"))
    text = " ".join(capsys.readouterr().out.split())
    assert "(the plain model's in the same precision): fp32 6.2e-03 (3.9e-03), bf16 6.2e-03 (3.9e-03)" in text


def test_numbers_that_cannot_be_compared_are_told_with_the_reason(monkeypatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(study, "Entries", lambda: replace(fakes.ENTRIES, verify="fakes:killed"))
    assert main(["ablate", "demo/fp32", "--out", "out", "--verify"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "demo/fp32: its numbers cannot be verified: killed" in text
    monkeypatch.setattr(study, "Entries", lambda: fakes.ENTRIES)
    assert main(["ablate", "demo/fp32", "--out", "out", "--verify"]) == 0
    assert "cannot be verified: killed" in " ".join(capsys.readouterr().out.split()), "it is tried again if asked"
    assert main(["ablate", "demo/fp32", "--out", "out", "--verify", "--retry"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "fp32 6.2e-03 (3.9e-03)" in text and "cannot be verified" not in text


def test_numbers_of_runs_that_were_made_without_are_compared_afterwards(capsys: pytest.CaptureFixture[str]):
    command = ["ablate", "demo/fp32", "demo/bf16", "--out", "out"]
    assert main(command) == 0
    assert "against float64" not in capsys.readouterr().out
    assert main([*command, "--verify"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "seed 17 started" not in text and "fp32: comparing its numbers with float64" in text
    assert "(the plain model's in the same precision): fp32 6.2e-03 (3.9e-03), bf16 6.2e-03 (3.9e-03)" in text
    assert main([*command, "--verify"]) == 0
    assert "comparing its numbers" not in capsys.readouterr().out, "once is enough"


def test_failed_runs_are_made_again_if_asked(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    command = ["ablate", "demo/fp32", "--out", "out"]
    with monkeypatch.context() as patch:
        patch.setattr(study, "Entries", lambda: replace(fakes.ENTRIES, train="fakes:killed"))
        assert main(command) == 1
    assert "killed by SIGKILL" in (text := capsys.readouterr().out) and "with --retry makes failed runs again" in text
    assert main([*command, "--retry"]) == 0
    assert "--retry" not in capsys.readouterr().out


def test_what_cannot_run_here_is_not_to_be_retried(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(study, "Entries", lambda: replace(fakes.ENTRIES, survey="fakes:survey_without_tf32"))
    assert main(["ablate", "demo/fp32", "demo/tf32", "--out", "out"]) == 0
    assert "needs a thing: install it" in (text := capsys.readouterr().out) and "--retry" not in text


def test_a_suite_goes_to_its_own_folder(tmp_path: Path):
    assert main(["ablate", "demo"]) == 0
    found = rows(tmp_path / "runs" / "demo")
    assert found[0]["recipe"] == "demo/fp32" and found[0]["baseline"] and len(found) > 5


def test_a_dry_run_tells_and_leaves_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    command = ["ablate", "finetune/fp16_larger_batch", "--plan", "leave-one-out", "--seeds", "2", "--dry-run"]
    assert main(command) == 0
    text = capsys.readouterr().out
    assert "To run: 8 runs, about" in text and "Nothing was run" in text
    assert "8. fp16_larger_batch seed" in text and "batch 56, LR 0.00015" in text
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_of_a_study_that_is_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["ablate", "demo/fp32", "demo/bf16", "--out", "out"]) == 0
    before = {path: path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()}
    capsys.readouterr()
    assert main(["ablate", "demo/fp32", "demo/bf16", "--out", "out", "--seeds", "2", "--dry-run"]) == 0
    text = capsys.readouterr().out
    assert "2 runs are finished already, and kept" in text and "To run: 2 runs" in text
    assert {path: path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()} == before


def test_a_dry_run_names_the_folder_that_it_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["ablate", "demo/fp32", "--out", "s1"]) == 0
    capsys.readouterr()
    assert main(["ablate", "demo/fp32", "batch_size=4", "--out", "s1", "--dry-run"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: s1 holds another study: demo/fp32 has batch_size") and error.count("\n") == 1
    (tmp_path / "s1" / "runs.sqlite").write_bytes(b"garbage")
    assert main(["ablate", "demo/fp32", "--out", "s1", "--dry-run"]) == 2
    assert capsys.readouterr().err.startswith("error: s1/runs.sqlite is damaged")


def test_a_plan_and_equal_batch(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    command = ["ablate", "finetune/fp16_larger_batch", "--plan", "one-at-a-time", "--equal-batch", "batch_size=8"]
    assert main(command) == 0
    name = "fp16_larger_batch-one-at-a-time-equal-batch"
    found = rows(tmp_path / "runs" / name)
    assert found[0]["recipe"] == "finetune/fp32" and found[0]["baseline"]
    assert "finetune/fp32+mixed_precision" in [row["recipe"] for row in found]
    assert not any(row["recipe"].endswith(".equal_batch") for row in found), "a plan's rows have the baseline's batch"
    study = json.loads((tmp_path / "runs" / name / "results.json").read_text())["study"]
    assert study["command"].endswith("--plan one-at-a-time --equal-batch batch_size=8 --seeds 1")


def studied(out: Path) -> dict[str, dict]:
    """The recipes of a study, as they were run."""
    with Store(out / "runs.sqlite", create=False) as store:
        return store.recipes()


def test_a_baseline_from_outside_gets_the_overrides(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    changes = ["task.max_length=64", "duration=4ba", "batch_size=4", "speedups.torch_compile.scope=model"]
    command = ["ablate", "demo/compile", "--plan", "one-at-a-time", "--baseline", "demo/fp32", *changes]
    assert main([*command, "speedups.mixed_precision=null", "speedups.reuse_host_memory={}", "--out", "out"]) == 0
    found = studied(tmp_path / "out")
    base = found["demo/fp32"]
    assert {(r["task"]["max_length"], r["duration"], r["batch_size"]) for r in found.values()} == {(64, "4ba", 4)}
    assert set(base["speedups"]) == {"matmul_precision", "reuse_host_memory"}, "what it lacks is not changed in it"
    assert "cannot be compared" not in capsys.readouterr().out


def test_a_ladder_of_recipes_with_a_baseline_from_outside(tmp_path: Path):
    command = ["ablate", "demo/bf16", "demo/compile", "--plan", "ladder", "--baseline", "demo/fp32", "--out", "out"]
    assert main(command) == 0
    assert list(studied(tmp_path / "out")) == ["demo/fp32", "demo/bf16", "demo/compile"]


PLAN = ["--plan", "one-at-a-time", "--baseline", "finetune/fp32"]


@pytest.mark.parametrize("options", [[], PLAN], ids=["list", "plan"])
def test_a_row_with_another_task_is_refused(options: list[str], capsys: pytest.CaptureFixture[str]):
    recipes = ["demo/bf16"] if options else ["finetune/fp32", "demo/bf16"]
    fixed = ["task.name=docstrings", "task.train_samples=64", "task.eval_samples=64", "task.vocabulary=2048"]
    row = "finetune/fp32+foreach_adamw" if options else "demo/bf16"
    message = f"{row} has task.max_length 128, the baseline finetune/fp32 256: their speeds cannot be compared. "
    assert main(["ablate", *recipes, *options, *fixed]) == 2
    error = capsys.readouterr().err
    assert message + "Name another baseline, or add task.max_length=256" in error and error.count("\n") == 1
    assert main(["ablate", *recipes, *options, *fixed, "task.max_length=256"]) == 0


def test_a_row_that_trains_longer_or_pads_otherwise_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    Path("longer.yaml").write_text("extends: demo/bf16\nduration: 60ba\n")
    Path("unpadded.yaml").write_text("extends: demo/bf16\ntask: {padding: longest}\n")
    Path("as_long.yaml").write_text("extends: demo/bf16\nbatch_size: 96\nduration: 10ba\n")
    command = ["ablate", "demo/fp32", "longer.yaml", "as_long.yaml", "unpadded.yaml", "--out", "out"]
    assert main(command) == 0
    text = capsys.readouterr().out
    assert "longer: duration 60ba, the baseline 30ba: wall-clock and quality cannot be compared" in text
    assert "unpadded: task.padding longest, the baseline max_length: speeds differ by that, too" in text
    assert "as_long: " not in text


def test_a_row_with_another_model_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    Path("wider.yaml").write_text("extends: demo/bf16\nmodel: {config: {hidden_size: 128}}\n")
    assert main(["ablate", "demo/fp32", "demo/bf16", "wider.yaml", "--out", "out"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "wider: model.config {" in text and "speeds differ by that, too. Give all rows one model" in text
    assert "; not the same in wider" in text and "; not the same in wider" in Path("out/table.md").read_text()


def test_the_baseline_may_be_named_by_its_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for folder in ("a", "b"):
        Path(folder).mkdir()
    Path("a/mine.yaml").write_text("extends: demo/fp32\nname: plain\n")
    Path("b/mine.yaml").write_text("extends: demo/bf16\n")
    Path("suite.yaml").write_text("recipes: [./b/mine.yaml, ./a/mine.yaml]\nbaseline: ./a/mine.yaml\n")
    for number, options in enumerate(([], ["--plan", "ladder"])):
        command = ["ablate", "b/mine.yaml", "a/mine.yaml", "--baseline", "a/mine.yaml", *options]
        assert main([*command, "--out", f"out{number}"]) == 0
        assert json.loads(Path(f"out{number}/results.json").read_text())["study"]["baseline"] == "plain"
    assert main(["ablate", "suite.yaml", "--out", "out2"]) == 0
    assert json.loads(Path("out2/results.json").read_text())["study"]["baseline"] == "plain"
    Path("a/mine.yaml").write_text("extends: demo/fp32\n")
    capsys.readouterr()
    for options in ([], ["--plan", "one-at-a-time"]):  # another file of the same name is not that row
        assert main(["ablate", "b/mine.yaml", "--baseline", "a/mine.yaml", *options, "--out", "out4"]) == 2
        assert "two files make a recipe called mine: give one of them a name:" in capsys.readouterr().err
    assert main(["ablate", "suite.yaml", "--out", "out3"]) == 2
    assert "suite.yaml:1: two files make a recipe called mine. Give one of them a name:" in capsys.readouterr().err


@pytest.mark.parametrize("hardware", SUITE_SECTIONS)
@pytest.mark.parametrize("name", suite_names())
def test_the_rows_of_shipped_suites_train_the_same(name: str, hardware: str):
    suite = load_suite(name, hardware, check_arguments=False)
    console = Console(file=io.StringIO())
    check_trainings(suite.recipes, suite.baseline, console)
    assert console.file.getvalue() == ""


def test_a_dry_run_tells_how_long_tuning_would_take(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    command = ["ablate", "demo/fp32", "demo/bf16", "--tune", "--tune-samples", "4000", "--dry-run", "--out", "out"]
    assert main(command) == 0
    few = re.search(r"To tune before that: 2 rows, 4,000 samples each, about (.*)", capsys.readouterr().out)
    assert few is not None
    command[5] = "40000"
    assert main(command) == 0
    many = re.search(r"2 rows, 40,000 samples each, about (.*)", capsys.readouterr().out)
    assert many is not None and few[1] != many[1]
    assert list(tmp_path.iterdir()) == []


def test_the_command_in_the_report_is_what_was_typed(tmp_path: Path):
    odd = 'description=it\'s "odd" & $HOME'
    typed = ["--no-profile", "demo/fp32", "--timeout=0.5", odd, "--seeds", "2", "--out", "an out"]
    assert main(["ablate", *typed[:3], "--retry", *typed[3:]]) == 0
    study = json.loads((tmp_path / "an out" / "results.json").read_text())["study"]
    assert shlex.split(study["command"]) == ["composer-speedups", "ablate", *typed]
    assert escape(study["command"]) in (tmp_path / "an out" / "report.html").read_text()


def test_two_studies_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for out in ("before", "after"):
        assert main(["ablate", "demo/fp32", "demo/bf16", "--out", out]) == 0
    capsys.readouterr()
    assert main(["report", "before", "after"]) == 0
    text = capsys.readouterr().out
    assert "Same environment" in text and "after / before" in text and "1.00x" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ablate", "demoo"], "demoo"),
        (["ablate", "batch_size=4"], "name a suite or a recipe"),
        (["ablate", "demo", "finetune/fp32"], "demo is a suite"),
        (["ablate", "demo/fp32", "batch_size=-4"], "batch_size"),
        (["ablate", "demo/fp32", "demo/fp32"], "more than one recipe is called demo/fp32"),
        (["ablate", "demo/fp32", "--baseline", "bf16"], "'bf16'"),
        (["ablate", "demo/fp32", "--baseline", "x" * 300], "is none of the recipes: demo/fp32"),
        (["ablate", f"{'x' * 300}.yaml"], "x.yaml: cannot be read: File name too long"),
        (["ablate", "demo/fp32", "--seeds", "0"], "seeds"),
        (["ablate", "demo", "--tune", "--tune-samples", "-5", "--dry-run"], "--tune-samples"),
        (["ablate", "demo/compile", "--plan", "stairs"], "unknown plan 'stairs'"),
        (["ablate", "demo/fp32", "--plan", "pairs"], "nothing to compare"),
        (["report", "nowhere"], "no study in nowhere"),
        (["report", "nowhere", "nothing"], "no study in nowhere"),
        (["report", "."], "no study in"),
    ],
)
def test_mistakes_are_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert not Path("runs").exists()


def test_interrupted_is_130(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    def interrupt(self, run, display):
        raise KeyboardInterrupt

    monkeypatch.setattr(work.Work, "_one", interrupt)
    assert main(["ablate", "demo/fp32", "--out", "out"]) == 130
    assert "The same command goes on from here" in capsys.readouterr().out
    assert rows(tmp_path / "out")[0]["status"] == "skipped"


def test_the_parent_stays_free_of_torch():
    """A study's own process must not take memory and threads from what it measures."""
    import subprocess

    code = (
        "import sys, composer_speedups.commands.ablate, composer_speedups.ablation.study; "
        "from composer_speedups.ablation.selection import load_rows; load_rows(['demo/fp32']); "
        "print(sorted({'torch', 'composer', 'transformers'} & sys.modules.keys()))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    # `demo/fp32` alone asks for no GPU, so not even `hardware()` needs torch.
    assert found.strip() == "[]"
