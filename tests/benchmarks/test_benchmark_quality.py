"""`benchmarks/quality.py` and `gpu_quality.py`: whole trainings of several studies are judged together."""

from __future__ import annotations

import shutil
import sqlite3
import time
from contextlib import closing
from pathlib import Path

import pytest
from benchmarked import ROOT

from benchmarks import gpu_quality, quality
from composer_speedups.errors import UserError
from composer_speedups.recipes import load_recipe


def test_quality_is_judged_as_a_study_judges_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = {
        "ten": "2026-11-23_cpu_quality_256_ten_seeds",
        "twelve": "2026-11-22_cpu_quality_64_twelve_seeds",
        "later": "2026-11-24_cpu_amx_quality_256",
    }
    ten, twelve, later = (tmp_path / name for name in folders)
    for name, folder in folders.items():
        shutil.copytree(ROOT / "benchmarks" / "results" / folder, tmp_path / name)  # opening a store may write

    def fastest(*arguments: object) -> str:
        quality.main([*map(str, arguments)])
        return capsys.readouterr().out.splitlines()[-1]

    row = fastest(ten, ten, "--confidence", 0.975)
    assert row == "| cpu/fastest | 10 | 0.8662 | 0.2002 | 0.0025 (0.010) | 0.0094 (0.020) | quality holds |"
    row = fastest(ten, later, "--confidence", 0.975)
    assert row == "| cpu/fastest | 10 | 0.8647 | 0.1960 | 0.0032 (0.010) | 0.0071 (0.020) | quality holds |"
    assert "0.0016 (0.010) | 0.0153 (0.020) | quality holds |" in fastest(twelve, twelve)
    with pytest.raises(UserError, match="cpu/fp32 has no run with a seed of the baseline: 300, 301"):
        quality.compare([twelve], [ten])
    halves = [tmp_path / "first", tmp_path / "last"]  # a study whose seeds were trained in two places
    for half, others in zip(halves, (">= 304", "< 304"), strict=True):
        shutil.copytree(later, half)
        with closing(sqlite3.connect(half / "runs.sqlite", isolation_level=None)) as db:
            db.execute(f"DELETE FROM runs WHERE seed {others}")
            for table in ("steps", "logs"):
                db.execute(f"DELETE FROM {table} WHERE run NOT IN (SELECT id FROM runs)")
            db.execute("DELETE FROM study WHERE key = 'digest'")
    assert fastest(ten, *halves, "--confidence", 0.975) == row
    with pytest.raises(UserError, match=r"cpu/fastest has the seed 300 twice: also in .*first"):
        quality.compare([ten], [later, halves[0]])
    with closing(sqlite3.connect(later / "runs.sqlite")) as db:  # with the baseline's seeds
        (text,) = db.execute("SELECT resolved FROM recipes").fetchone()
    for change, says in (
        (
            '{"model": {"name": "answerdotai/ModernBERT-base"}}',
            "model.name is answerdotai/ModernBERT-base, and there b",
        ),
        ('{"task": {"max_length": 64}}', "task.max_length is 64, and there 256"),
        ('{"duration": "750ba"}', "duration is 24000sp, and there 3ep"),
        ('{"learning_rate": 1, "speedups": {}, "batch_size": 64, "task": {"padding": "longest", "a_new_key": 1}}', ""),
    ):
        with closing(sqlite3.connect(later / "runs.sqlite", isolation_level=None)) as db:
            db.execute("UPDATE recipes SET resolved = json_patch(?, ?)", (text, change))
            db.execute("DELETE FROM study WHERE key = 'digest'")
        if not says:
            assert "quality holds" in fastest(ten, later)
            continue
        with pytest.raises(UserError, match=f"cpu/fastest cannot be compared with the baseline, cpu/fp32: its {says}"):
            quality.compare([ten], [later])
    elsewhere = ROOT / "benchmarks" / "results" / "2026-11-26_h200_quality_256" / "seeds_300"
    shutil.copytree(elsewhere, tmp_path / "elsewhere")
    with pytest.raises(
        UserError, match=r"finetune/fastest was trained on other texts .*: 39\.3316% of .* 39\.3796%\. "
    ):
        quality.compare([ten], [tmp_path / "elsewhere"])
    with pytest.raises(UserError, match=r"between 0\.5 and 1"):
        quality.main([str(ten), str(ten), "--confidence", "95"])
    with pytest.raises(UserError, match=r"runs\.sqlite is not there"):
        quality.main([str(tmp_path), str(ten)])


def test_recipes_of_one_study_have_the_same_texts(tmp_path: Path) -> None:
    """Batches of 48 leave other texts over than batches of 16, so that the shares of padding differ."""
    study = ROOT / "benchmarks" / "results" / "2026-11-29_cpu_mlm_quality_minilm" / "study"
    assert "| fastest | 5 | " in quality.compare([study], [study])
    shutil.copytree(study, tmp_path / "study")
    with pytest.raises(UserError, match="was trained on other texts than the baseline"):
        quality.compare([study], [tmp_path / "study"])


def test_seeds_that_were_trained_side_by_side_are_judged_together(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has no study: see what they said in"):
        gpu_quality.table(tmp_path)
    for study in (ROOT / "benchmarks" / "results" / "2026-11-26_h200_quality_256").iterdir():
        shutil.copytree(study, tmp_path / study.name)
    assert "| finetune/fastest | 10 | 0.8762 | 0.1745 |" in gpu_quality.table(tmp_path)


@pytest.mark.parametrize("objective", gpu_quality.OBJECTIVES)
def test_a_fastest_recipe_learns_what_its_baseline_does(objective: str) -> None:
    """Sample by sample: `quality.compare` would refuse another model or task."""
    names = gpu_quality.OBJECTIVES[objective]
    pair = [load_recipe(name, gpu_quality._learning(objective), check_arguments=False) for name in names]
    assert quality._trained(pair[0].to_dict(), {}) == quality._trained(pair[1].to_dict(), {})
    assert {(r.batch_size, r.learning_rate, r.task.objective, r.model.pretrained) for r in pair} == {
        (32, 7e-4, objective, False)
    }
    assert pair[0].speedups == {"matmul_precision": {"precision": "highest"}} and "cuda_graphs" in pair[1].speedups


@pytest.mark.slow
@pytest.mark.parametrize(("objective", "minutes"), [("classification", 5.0), ("mlm", 5.0), ("classification", 0.0)])
def test_studies_run_side_by_side_until_the_time_is_over(
    objective: str, minutes: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = ("cpu/fp32" if objective == "classification" else "mlm/fp32", "cpu/fastest_fp32")
    monkeypatch.setitem(gpu_quality.OBJECTIVES, objective, pair)
    monkeypatch.setattr(gpu_quality, "_SEEDS", 4)
    monkeypatch.setattr(gpu_quality, "_STUDIES", 2)
    task = "task={name: docstrings, max_length: 32, train_samples: 64, eval_samples: 64, vocabulary: 1024}"
    smaller = "model.config={hidden_size: 32, intermediate_size: 32, num_attention_heads: 2, num_hidden_layers: 2}"
    end = time.monotonic() + 60 * minutes
    whole = gpu_quality.measure(tmp_path, end, objective, (task, smaller, "duration=4ba"))
    said = "".join(path.read_text() for path in tmp_path.glob("*.txt"))
    assert whole == bool(minutes), said
    if minutes:
        rows = gpu_quality.table(tmp_path).splitlines()
        assert [row.split("|")[1:3] for row in rows[-2:]] == [[f" {name} ", " 4 "] for name in pair], said
        recipe = next(iter(quality._results(tmp_path / f"seeds_{gpu_quality.FIRST}").values()))[0]
        assert recipe["task.objective"] == objective
