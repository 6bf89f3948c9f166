"""`benchmarks/table.py`: tables are made of the committed rows, and of what a run that was stopped has left."""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from benchmarked import ROOT

from benchmarks import balanced_texts, compiling, grouping, growth, harness, run, table, verdicts
from composer_speedups.errors import UserError

# Folders from before the conditions were noted, and what those were.
MEASURED: dict[str, dict[str, Any]] = {
    "2026-11-21_cpu_growth_2": {
        "part": "growth",
        "batches": 3,
        "recipes": ["cpu/bf16", "cpu/fastest"],
        "axes": growth.AXES,
        "middle": growth.MIDDLE,
    },
    "2026-11-21_cpu_limits": {
        "part": "limits",
        "peaks": {"fp32": 0.207e12, "bf16": 0.441e12},
        "tokens": 6144,
        "width": 256,
        "missing": [],
    },
    "2026-11-22_cpu_compiling_3": {"part": "compiling", "recipe": "cpu/bf16", "layers": 12, "batch": 8},
    "2026-11-22_cpu_peers_4": {"part": "peers", "batches": 8, "precision": "bf16", "peak": 0.915e12},
}


NOTED = [file.parent.name for file in sorted((ROOT / "benchmarks" / "results").glob("*/conditions.json"))]


@pytest.mark.parametrize("name", [*MEASURED, *NOTED])
def test_a_table_is_what_its_rows_say(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    committed = ROOT / "benchmarks" / "results" / name
    for file in ("environment.json", "conditions.json", "entries.json", "rows.jsonl", "failed.json"):
        if (committed / file).exists():
            shutil.copy(committed / file, tmp_path)
    if name in MEASURED:
        harness.begin(tmp_path, **MEASURED[name])
    assert table.main([str(tmp_path)]) == 0
    assert (tmp_path / "plot.png").exists() == (committed / "plot.png").exists()
    made, there = (
        re.sub(r"[\d.]+ % \[[^]]*\]", "MFU", (folder / "table.md").read_text())  # of a peak that was noted rounded
        for folder in (tmp_path, committed)
    )
    assert made == there
    assert (tmp_path / "table.md").read_text() in capsys.readouterr().out


def test_what_was_measured_before_it_was_stopped_has_a_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = ROOT / "benchmarks" / "results" / "2026-11-22_cpu_compiling_3"

    def measure(folder: Path, repetitions: int, batches: int, only: tuple[str, ...]) -> None:
        harness.begin(folder, **MEASURED[source.name])
        lines = (source / "rows.jsonl").read_text().splitlines(keepends=True)
        (folder / "rows.jsonl").write_text("".join(lines[: repetitions * 7 + 2]) + lines[-1][:50])  # killed in a line
        raise KeyboardInterrupt

    monkeypatch.setattr(compiling, "measure", measure)
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        run.main(["compiling", "--repetitions", "2", "--out", str(out)])
    text = (out / "table.md").read_text()
    assert text in capsys.readouterr().out
    assert "2 to 3 repetitions, each run in" in text and text.count("\n|") == 9
    (out / "table.md").write_text("never edited\n")
    table.main([str(out)])
    assert (out / "table.md").read_text() == "never edited\n"


def test_folders_that_hold_no_benchmark_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=rf"{tmp_path} has no conditions.json"):
        table.main([str(tmp_path)])


def test_verdicts_are_counted_by_what_was_planted(tmp_path: Path) -> None:
    fair, lost = ("no difference shown", "quality holds"), ("no difference shown", "unstable")
    rows = [
        ("the_same_1", 1.0, [0.9, 1.1], *fair),
        ("the_same_2", 1.2, [1.1, 1.3], "faster", "quality holds"),
        ("the_same_3", 1.1, [0.8, 1.2], "no difference shown", "quality not shown to hold"),
        ("slept_a_tenth", 0.9, [0.8, 1.0], *fair),
        ("slept_half", 0.7, [0.6, 0.8], "slower", "quality holds"),
        ("wild", None, None, *lost),
    ]
    keys = ("recipe", "speedup", "speedup_interval", "speed_verdict", "quality_verdict")
    lines = [json.dumps({"study": "study_01", **dict(zip(keys, row, strict=True))}) for row in rows]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines) + "\n")
    (tmp_path / "environment.json").write_text(json.dumps(harness.environment(), default=str))
    harness.begin(tmp_path, "verdicts", steps=48, seeds=3)
    text = verdicts.table(tmp_path)
    assert "claimed 2 times in 3 comparisons of a recipe with itself" in text
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    same, tenth, half, wild = cells[2:]
    assert same[1:4] == ["3", "1.10x [1.00, 1.20]", "0.90 to 1.20"]
    assert same[4:] == ["no difference shown (2), faster (1)", "quality holds (2), quality not shown to hold (1)"]
    assert tenth[0] == "sleeps for 10% of a step" and tenth[4] == "no difference shown (1)"
    assert half[0] == "sleeps for 50% of a step" and half[4] == "slower (1)"
    assert wild[1:] == ["1", "", "", "no difference shown (1)", "unstable (1)"]


def test_grouping_takes_transformers_own_order_and_is_told_by_seed(tmp_path: Path) -> None:
    from transformers.trainer_pt_utils import LengthGroupedSampler as Transformers

    from composer_speedups.batches.plans import LengthGroupedSampler

    lengths = np.random.default_rng(1).integers(5, 60, 64)
    options = {"batch_size": 4, "pool": 4, "seed": 3, "drop_last": False, "num_replicas": 1, "rank": 0}
    ours = LengthGroupedSampler(list(range(64)), lengths, **options)
    found = list(grouping._as_transformers(ours))
    theirs = Transformers(4, lengths=lengths.tolist(), generator=torch.Generator().manual_seed(3))
    assert found == list(theirs) != list(ours) and sorted(found) == list(range(64))

    (tmp_path / "environment.json").write_text(json.dumps(harness.environment(), default=str))
    harness.begin(tmp_path, "grouping", recipe="cpu/fastest", length=128, steps=500)
    worse = {"eval_accuracy": {"value": 0.031}, "final_loss": {"value": 0.02}}
    runs = [{"seed": s, "status": "ok", "eval_accuracy": 0.8 + s / 100, "final_loss": 0.3} for s in range(3)]
    rows = [
        {"entry": "a", "recipe": "a", "runs": runs, "worse_by": {}, "quality_verdict": "baseline"},
        {"entry": "b", "recipe": "b", "runs": runs[:2], "worse_by": worse, "quality_verdict": "unstable"},
        {
            "entry": "c",
            "recipe": "c",
            "runs": [],
            "worse_by": {},
            "quality_verdict": "",
            "status": "failed",
            "reason": "x",
        },
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in grouping.table(tmp_path).splitlines()[4:]]
    assert lines == [
        ["a", "3", "0.810 [0.800, 0.820]", "", "0.300 [0.300, 0.300]", "", "baseline"],
        ["b", "2", "0.805 [0.800, 0.810]", "3.1", "0.300 [0.300, 0.300]", "0.020", "unstable"],
        ["c", "0", "", "", "", "", "failed: x"],
    ]


def test_balanced_texts_have_the_same_lengths_in_every_class() -> None:
    drawn = np.random.default_rng(0)
    lengths = {"short": drawn.integers(3, 40, 300), "long": drawn.integers(20, 90, 300)}
    texts = [("x" * length, label) for label, of in lengths.items() for length in of]
    kept = balanced_texts.balance(texts, len, cut=60, seed=3)
    assert kept == balanced_texts.balance(texts, len, cut=60, seed=3) != balanced_texts.balance(texts, len, 60, seed=4)
    assert not Counter(kept) - Counter(texts), "no text more often than it is there"
    steps = {label: sorted(min(len(t), 60) // 4 for t, of in kept if of == label) for label in lengths}
    assert steps["short"] == steps["long"] and len(kept) > 100
    assert max(steps["short"]) < 10 and min(steps["long"]) >= 5, "of what only one class has, nothing is kept"


@pytest.mark.slow
def test_grouping_trains_other_models_in_three_orders(tmp_path: Path) -> None:
    small = ["hidden_size=32", "intermediate_size=64", "num_attention_heads=2", "num_hidden_layers=1"]
    sizes = ["task.train_samples=64", "task.eval_samples=16", "task.max_length=32", "batch_size=8"]
    changes = [*(f"model.config.{size}" for size in small), *sizes]
    arguments = ["grouping", "--repetitions", "1", "--batches", "4", "--set", *changes, "--out", str(tmp_path / "new")]
    assert run.main(arguments) == 0
    text = (tmp_path / "new" / "table.md").read_text()
    assert "4 steps of texts cut at 32 tokens. Every recipe with model.config.hidden_size=32" in text
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()[4:]]
    assert [line[0] for line in lines] == ["shuffled", "length_grouped_batches", "transformers_sampler"]
    assert all(0 <= float(line[2].split()[0]) <= 1 for line in lines), lines


def test_of_compiling_some_can_be_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []
    monkeypatch.setattr(compiling, "interleaved", lambda entries, *_, **__: asked.append(list(entries)))
    assert run.main(["compiling", "--only", "in C", "not compiled", "--repetitions", "2", "--out", str(tmp_path)]) == 0
    fast = compiling._FASTEST[compiling._recipe()]
    assert asked == [["not compiled", f"{fast}, kernels in C, cold", f"{fast}, kernels in C, warm"]] * 2
    compiling.measure(tmp_path, 1, 2, only=("block, warm",))
    assert asked[2:] == [["block, cold", "block, warm"]], "nothing is warm without what was cold before it"
