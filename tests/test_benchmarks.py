"""The benchmarks' own code: every entry can run, all do comparable work, and the bare loop applies what it should."""

from __future__ import annotations

import inspect
import json
import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import tarfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks import (  # noqa: E402
    apart,
    compiling,
    contenders,
    gpu,
    gpu_quality,
    growth,
    harness,
    kernels,
    limits,
    peers,
    quality,
    run,
    table,
    verdicts,
)
from composer_speedups import registry  # noqa: E402
from composer_speedups.compat import read_float32_precision  # noqa: E402
from composer_speedups.errors import UserError  # noqa: E402
from composer_speedups.hardware import suite_section  # noqa: E402
from composer_speedups.recipes import load_recipe  # noqa: E402
from composer_speedups.tasks import build_model, build_task  # noqa: E402

TINY = (
    "task={name: dummy, mean_length: 10, length_std: 4, max_length: 16, train_samples: 64}",
    "model.config={num_hidden_layers: 1, hidden_size: 32, num_attention_heads: 2, intermediate_size: 64, "
    "vocab_size: 128, hidden_dropout_prob: 0.0, attention_probs_dropout_prob: 0.0}",
    "model.pretrained=false",
    "batch_size=4",
)


def _all_entries() -> dict[str, harness.Entry]:
    found = {f"{hardware}: {name}": e for hardware, some in peers.ENTRIES.items() for name, e in some.items()}
    for point in growth.points():
        for hardware, recipes in growth._RECIPES.items():
            for recipe in recipes:
                found[f"{hardware}: growth {point} {recipe}"] = harness.Entry("ours", recipe, growth.overrides(point))
    return found | {f"compiling: {name}": entry for name, entry in compiling._entries("/nowhere").items()}


ENTRIES = _all_entries()


def job(recipe: str, *overrides: str, steps: int = 3, counted: int = 2) -> contenders.Job:
    return contenders.Job(load_recipe(recipe, (*TINY, *overrides)), steps, counted, seed=5)


# --- Entries -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ENTRIES)
def test_every_entry_can_be_built(name: str) -> None:
    entry = ENTRIES[name]
    recipe = load_recipe(entry.recipe, entry.overrides)  # with the arguments of all speed-ups checked
    # A batch more than the steps take: nobody who looks ahead may find the end.
    assert harness.large_enough(entry, 12).task.train_samples >= 13 * recipe.batch_size
    assert all(algorithm.slot != "batches" for algorithm in recipe.algorithms()), "every contender has the same batches"
    inspect.signature(contenders.CONTENDERS[entry.contender]).bind(job("cpu/fp32"), **entry.arguments)


@pytest.mark.parametrize("hardware", peers.ENTRIES)
def test_who_is_compared_has_the_same_work(hardware: str) -> None:
    kinds: dict[str, list[Any]] = {}
    for name, entry in peers.ENTRIES[hardware].items():
        recipe = load_recipe(entry.recipe, entry.overrides)
        work = (recipe.task, recipe.batch_size, recipe.learning_rate, recipe.optimizer.weight_decay, recipe.model.name)
        memory = peers._kind(name) == "memory/"  # one process each, and no loader to speak of
        kinds.setdefault(peers._kind(name), []).append((*work, None if memory else recipe.workers))
        if entry.contender.startswith(("huggingface", "composer")):
            assert recipe.model.attn_implementation != "eager", "peers have the attention that a user gets"
    for kind, works in kinds.items():
        assert all(work == works[0] for work in works), kind
    assert set(kinds) == ({"", "mlm/", "memory/"} if hardware == "cuda" else {""})


# --- The bare loop -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(
    "name",
    [
        *("cpu/fastest", "finetune/fastest", "finetune/fastest_eager", "finetune/fastest_compiled"),
        *("mlm/fastest", "mlm/fastest_compiled"),
    ],
)
def test_the_bare_loop_calls_every_function_as_it_wants_to_be_called(
    name: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = load_recipe(name, TINY)
    task = build_task(recipe.task, recipe.model, seed=1)
    model = build_model(recipe.model, task, seed=1)
    optimizer = torch.optim.AdamW(model.parameters())
    loader = contenders._loader(task, contenders.Job(recipe, 3, 2, 1))
    called: dict[str, Any] = {}
    real = registry.function

    def stub(key: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> int:
            bound = inspect.signature(real(key)).bind(*args, **kwargs)
            called[key] = next(iter(bound.arguments.values()), None)
            return 1

        return call

    monkeypatch.setattr(registry, "function", stub)
    kept = contenders.apply_functions(recipe, model, optimizer, loader, torch.device(device))
    left_out = {"sync_free_loop"} | ({"prefetch_batches"} if device == "cpu" else set())
    assert set(called) == set(recipe.speedups) - left_out
    assert len(kept) == len(called)
    for key, first in called.items():
        if key == "prefetch_batches":
            assert first is loader
        elif key not in ("matmul_precision", "reuse_host_memory"):
            assert first is (optimizer if "adamw" in key else model), key


def test_the_bare_loop_refuses_other_batches() -> None:
    with pytest.raises(ValueError, match="length_grouped_batches"):
        contenders.apply_functions(load_recipe("cpu/length_grouped_batches"), None, None, None, torch.device("cpu"))


# --- Real runs ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("contender", "recipe"),
    [
        *(("ours", "cpu/fp32"), ("ours", "cpu/fastest"), ("composer", "cpu/fp32"), ("huggingface", "cpu/fp32")),
        *(("huggingface_best", "cpu/fp32"), ("bare_loop", "cpu/fp32"), ("bare_loop", "cpu/fastest")),
    ],
)
@pytest.mark.filterwarnings("ignore:.torch.cpu.amp.autocast:FutureWarning")  # by transformers 4.53, in bf16 on a CPU
def test_contenders_run_and_do_the_same_samples(
    contender: str, recipe: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    if contender.startswith("huggingface"):
        pytest.importorskip("accelerate")
    before = read_float32_precision()
    this = job(recipe, steps=10)  # a tenth of it is a step of warm-up: Composer warns at none
    payload = {"contender": contender, "recipe": this.recipe.to_dict(), "arguments": {}}
    found = contenders.measure(payload | {"steps": 10, "counted": 6, "seed": 5}, print)
    assert len(found["seconds"]) == len(found["losses"]) == len(found["tokens"]) == len(found["flops"]) == 10
    assert min(found["seconds"]) > 0 and found["peak_memory_bytes"] > 0
    assert read_float32_precision() == before, "a setting of the process outlives the contender"
    # Weights, samples and no dropout: the first loss is everybody's, to the rounding of bf16.
    if contender != "huggingface_best":
        expected = _first_loss(this)
        assert found["losses"][0] == pytest.approx(expected, rel=1e-2 if "fastest" in recipe else 1e-5)


def test_a_step_of_the_bare_loop_that_fails_leaves_the_process_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    before, within = read_float32_precision(), []

    def fail(batch: object) -> None:
        within.append(read_float32_precision())
        raise RuntimeError("a step that fails")

    monkeypatch.setattr(contenders, "hand_over", fail)
    with pytest.raises(RuntimeError, match="a step that fails"):
        contenders.CONTENDERS["bare_loop"](job("cpu/fastest", steps=10))
    assert within and within[0] != before, "the recipe sets nothing: choose another"
    assert read_float32_precision() == before


def _first_loss(this: contenders.Job) -> float:
    task, model = contenders._make(this)
    order = list(contenders._sampler(task, this))[: this.recipe.batch_size]
    with torch.no_grad():
        return float(model(**task.collate_train([task.train[i] for i in order])).loss)


@pytest.mark.parametrize("contender", ["ours", "composer", "huggingface", "huggingface_best", "bare_loop"])
@pytest.mark.filterwarnings("ignore:.torch.cpu.amp.autocast:FutureWarning")
def test_nobody_comes_to_the_end_of_the_samples(contender: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At it the workers of a DataLoader are shut down, and the last step that counts would wait for that."""
    from torch.utils.data import dataloader

    if contender.startswith("huggingface"):
        pytest.importorskip("accelerate")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    ended, drawn, real = [], [], dataloader._BaseDataLoaderIter.__next__

    def draw(self: Any) -> Any:
        try:
            batch = real(self)
        except StopIteration:
            ended.append(self)
            raise
        drawn.append(batch)
        return batch

    monkeypatch.setattr(dataloader._BaseDataLoaderIter, "__next__", draw)
    exactly = (*TINY[:-1], "batch_size=8", "task.train_samples=8")  # of 64 that are there, 80 and more are needed
    recipe = harness.large_enough(harness.Entry(contender, "cpu/fp32", exactly), 10)
    assert recipe.task.train_samples == 11 * 8
    contenders.CONTENDERS[contender](contenders.Job(recipe, 10, 6, seed=5))
    assert not ended and len(drawn) in (10, 11)


def test_real_tokens_are_those_of_the_samples() -> None:
    this = job("cpu/fp32")
    task = build_task(this.recipe.task, this.recipe.model, seed=this.seed)
    work = contenders._work(this, None)
    batches = list(contenders._loader(task, this))[:3]
    assert work["tokens"] == [float(batch["attention_mask"].sum()) for batch in batches]
    chosen = list(range(20, 32))
    assert work["mean_length"] == pytest.approx(task.train.lengths.mean())
    assert sum(contenders._work(this, chosen)["tokens"]) == task.train.lengths[20:32].sum()


# --- Length grouping ---------------------------------------------------------------------------------------------


def test_grouped_batches_are_a_whole_epochs_in_miniature() -> None:
    from transformers.trainer_pt_utils import LengthGroupedSampler

    lengths = np.random.default_rng(3).integers(10, 257, 8000)
    this = contenders.Job(load_recipe("cpu/fp32"), 12, 8, seed=5)
    order = contenders._grouped(lengths, this)
    assert len(order) == 13 * 32, "and a batch that is only looked at"
    counted = lengths[order[: 12 * 32]].reshape(12, 32)[4:]
    epoch = lengths[list(LengthGroupedSampler(32, lengths=lengths.tolist()))].reshape(250, 32)

    def padding(batches: np.ndarray) -> float:
        return 1 - batches.sum() / (32 * batches.max(1).sum())

    assert padding(epoch) < 0.05 < padding(lengths.reshape(250, 32)), "the sampler does group"
    assert padding(counted) == pytest.approx(padding(epoch), abs=0.02)
    assert counted.mean() == pytest.approx(epoch.mean(), rel=0.03)
    assert counted[0].mean() > counted[-1].mean(), "the longest come first"


# --- The harness -------------------------------------------------------------------------------------------------


def row(entry: str, repetition: int, tokens: float, **more: Any) -> dict[str, Any]:
    values = {"seconds": [9.0, 1.0, 1.0], "tokens": [9, tokens, tokens], "flops": [9, 5.0, 5.0], "losses": [1.0, 0.5]}
    found = {"entry": entry, "repetition": repetition, "reason": "", "overlapped": False, **values} | more
    return found | harness._speeds(found, 4, 2)


def test_speeds_are_of_the_batches_that_count() -> None:
    found = row("ours: a", 0, 10)
    assert (found["samples_per_second"], found["real_tokens_per_second"], found["flops_per_second"]) == (4.0, 10.0, 5.0)
    failed = {"status": "failed", "reason": "x"}
    assert set(harness._speeds(failed, 4, 2).values()) == {None}
    # One of two steps takes half the time, and is not twice as fast.
    assert set(harness._speeds({"seconds": [1.0], "tokens": [10], "flops": [5.0]}, 4, 2).values()) == {None}


def test_a_run_of_fewer_steps_than_count_is_told_as_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Short(harness.Isolation):
        def run(self, payload: dict[str, Any], timeout: float) -> harness.Outcome:
            return harness.Outcome("ok", "", {"seconds": [1.0], "tokens": [10], "flops": [5.0]}, "its words", 1.0)

    monkeypatch.setattr(harness, "Isolation", Short)
    entries = {"a": harness.Entry("ours", "cpu/fp32", TINY)}
    (found,) = harness.interleaved(entries, tmp_path, repetitions=1, batches=2)
    assert (found["status"], found["reason"]) == ("failed", "only 1 of 4 steps were made")
    assert found["samples_per_second"] is None and "only 1 of 4 steps" in harness.rows_in(tmp_path)[0]["reason"]
    assert "failed: only 1 of 4 steps were made\nits words" in (tmp_path / "failed.txt").read_text()


def test_the_table_compares_real_tokens_within_a_kind() -> None:
    names = ["ours: x/fp32", "ours: x/fastest", "ours: mlm/amp", "ours: mlm/fastest"]
    speeds = (10, 40, 5, 15)
    rows = [row(name, n, speed * (n + 1)) for n in range(3) for name, speed in zip(names, speeds, strict=True)]
    lines = {name: peers._line(rows, name, names, 100.0) for name in names}
    assert lines["ours: x/fastest"][4].startswith("4.00x")
    assert lines["ours: x/fp32"][5].startswith("4.00x")
    assert lines["ours: mlm/amp"][4:6] == ("1.00x [1.00, 1.00]", "3.00x [3.00, 3.00]")
    assert lines["ours: x/fp32"][3] == "5.0 % [5.0, 5.0]"
    rows[0]["overlapped"] = True
    assert "beside other work" in peers._line(rows, names[0], names, 100.0)[0]
    assert peers._line(rows, names[0], names, None)[3] == "", "no peak, no MFU"
    failed = [row(names[0], 0, 0, seconds=[], reason="out of memory")]
    assert peers._line(failed, names[0], names[:1], 1.0)[1] == "out of memory"


def test_a_plot_is_drawn_and_leaves_out_what_has_no_value(tmp_path: Path) -> None:
    harness.plot(tmp_path, {"ours: a": [1.0, 2.0], "b": [3.0], "failed": []}, "samples/s")
    assert (tmp_path / "plot.png").stat().st_size > 1000
    harness.plot(tmp_path / "nothing", {"failed": []}, "samples/s")


def test_nothing_runs_after_the_deadline(tmp_path: Path) -> None:
    entries = {"a": harness.Entry("ours", "cpu/fp32", TINY)}
    assert harness.interleaved(entries, tmp_path, repetitions=1, batches=1, deadline=0.0) == []


def test_what_decides_is_repeated_before_the_rest_begins() -> None:
    assert list(harness.turns("abc", 2, urgent=3)) == list(harness.turns("abc", 2))
    order = list(harness.turns("abcd", 5, urgent=2))
    assert order[:6] == [(0, "a"), (0, "b"), (1, "b"), (1, "a"), (2, "a"), (2, "b")]
    assert order[6:12] == [(0, "c"), (0, "d"), (1, "d"), (1, "c"), (2, "c"), (2, "d")]
    assert [name for _, name in order[12:]] == [*"dabc", *"abcd"], "from then on all together"
    assert Counter(order) == {(n, name): 1 for n in range(5) for name in "abcd"}


def test_a_run_that_hangs_on_a_gpu_costs_minutes_at_most(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert harness.TIMEOUT["cuda"] <= 300 < harness.TIMEOUT["cpu"]
    monkeypatch.setattr(harness, "hardware", lambda: "cuda")
    monkeypatch.setitem(harness.TIMEOUT, "cuda", 1)
    entries, done = {"a": harness.Entry("ours", "cpu/fp32", (*TINY, "duration=1ep"))}, []
    found = harness.interleaved(
        entries, tmp_path, repetitions=1, batches=20_000, after_each=lambda: done.extend(harness.rows_in(tmp_path))
    )
    assert [(row["status"], row["reason"]) for row in found] == [("timeout", "over the time limit of 1 s")]
    assert done == found
    words = (tmp_path / "failed.txt").read_text()
    assert words.startswith("=== a, repetition 0: timeout: over the time") and "benchmarks/contenders.py" in words


def test_a_peak_that_cannot_be_measured_ends_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """It is measured in a process of its own, as a device may be in a bad state."""
    assert peers._peak("fp8") is None
    assert "no MFU: ValueError: precision must be" in capfd.readouterr().err
    (tmp_path / "environment.json").write_text(json.dumps(harness.environment(), default=str))
    conditions = {"batches": 2, "precision": "bf16", "peak": None, "cache": "/cache", "urgent": 2, "early": 3}
    harness.begin(tmp_path, "peers", **conditions)
    (tmp_path / "rows.jsonl").write_text(json.dumps(row("ours: x/fp32", 0, 10)) + "\n")
    text = peers.table(tmp_path)
    assert "bf16 matmul peak measured here, which failed. Memory" in text
    assert "The first 2 lines have 3 repetitions before the others begin. Compiled code is kept" in text


# --- Tables ---

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

    def measure(folder: Path, repetitions: int, batches: int) -> None:
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


# --- Quality against another study's baseline ---------------------------------------------------------------------


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


# --- Limits ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", [k for k in kernels.OPTIMIZERS if k != "apex_fused_adamw"])
def test_every_optimizer_is_converted_without_a_model(key: str) -> None:
    """Those of bitsandbytes are not measured on a CPU, so only this sees them before a GPU does."""
    parameter = torch.nn.Parameter(torch.randn(64, 128))
    parameter.grad = torch.randn_like(parameter)
    optimizer = torch.optim.AdamW([parameter], lr=1e-2, foreach=False)
    before = parameter.detach().clone()
    kernels.convert(optimizer, key)
    optimizer.step()
    assert not torch.equal(parameter, before)
    if key == "adamw_8bit":
        assert optimizer.state[parameter]["state1"].dtype == torch.uint8


# Kernels of `limits`, of which one ruins the process for all that come after it, as an illegal access of memory does
# where there is a GPU, and another ends it, as bitsandbytes does where CUDA reports an error.
RUINED = """
import os

from benchmarks import apart, kernels, limits

lost = []
apart.context_lost = lambda: bool(lost)
limits.suite_section = lambda: "cpu"
limits.matmul_peak = lambda *_: 1e9
limits._SECONDS = 0.0


def kernel(name, ruins=False, ends=False, group="copy"):
    def call():
        if ruins:
            lost.append(name)
        if lost:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        if ends:
            os._exit(1)

    return kernels.Kernel(group, name, call, bytes=8)


def refuse():
    raise ValueError("no such launch")


def optimizers(_):
    yield kernel("before")
    if lost:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    os._exit(1)


MADE = {
    "copies": [kernel("copy"), kernel("ruins it", ruins=True), kernel("after")],
    "norms": [kernels.Kernel("norm", "fails", refuse, bytes=8), kernel("ends it", ends=True)],
    "losses": [kernel("last")],
}
for group in ("activations", "attention", "copies", "embeddings", "losses", "norms", "projections"):
    setattr(kernels, group, lambda *_, group=group: iter(MADE.get(group, ())))
kernels.optimizers = optimizers
measure, table = limits.measure, limits.table
"""


def test_what_ends_a_process_of_kernels_costs_the_others_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """In the programme for a GPU: also the training runs come, and what was done is brought back."""
    (tmp_path / "ruined.py").write_text(RUINED)
    (tmp_path / "brought").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("OUT", str(tmp_path / "brought"))
    monkeypatch.setattr(gpu, "limits", SimpleNamespace(__name__="ruined", table=limits.table))
    monkeypatch.setattr(gpu.peers, "measure", lambda *_, **__: print("the peers are measured"))
    out = tmp_path / "out"
    assert gpu.main(["--parts", "limits", "training", "--out", str(out)]) == 1
    text = capfd.readouterr()
    assert "the peers are measured" in text.out and "; FAILED: limits" in text.out
    rows = harness.rows_in(out / "limits")
    assert Counter(row["entry"] for row in rows) == {"copy": 5, "after": 5, "before": 5, "last": 5}
    assert apart.failed_before(out / "limits") == {
        "optimizers, those after before": apart._DIED,
        "ruins it": "RuntimeError: CUDA error: an illegal memory access was encountered",
        "fails": "ValueError: no such launch",
        "ends it": apart._DIED,
    }
    words = (out / "limits" / "failed.txt").read_text()
    assert words.count("=== ruined: ") == 3 and "ValueError: no such launch" in words and "Traceback" in words
    assert "(exit code 1); a new process goes on without ends it and fails\n" in text.err
    table = (out / "limits" / "table.md").read_text()
    assert "failed: ends it: its process ended" in table and "| last |" in table
    with tarfile.open(tmp_path / "brought" / "out.tgz") as archive:
        assert {"out/limits/rows.jsonl", "out/limits/table.md", "out/peers/environment.json"} <= set(archive.getnames())
    assert [file.name for file in (tmp_path / "brought").iterdir()] == ["out.tgz"]


def test_a_kernel_that_fails_leaves_the_others_their_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those of others have never run on a GPU here: in making, or when they are called."""

    def refuse() -> None:
        raise ValueError("no such\nlaunch")

    def fails(*_: Any) -> Iterator[kernels.Kernel]:
        yield kernels.Kernel("copy", "copy", lambda: None, bytes=8)
        yield kernels.Kernel("one", "one that refuses", refuse, bytes=8)
        yield kernels.Kernel("one", "another", lambda: None, bytes=8)
        raise TypeError("a new signature")

    monkeypatch.setattr(limits, "suite_section", lambda: "cpu")
    monkeypatch.setattr(limits, "_SECONDS", 0.0)
    for group in ("optimizers", "norms", "activations", "projections", "embeddings", "losses"):
        monkeypatch.setattr(kernels, group, lambda *_: iter(()))
    monkeypatch.setattr(kernels, "copies", fails)
    monkeypatch.setattr(kernels, "attention", lambda *_: iter([kernels.Kernel("last", "last", lambda: None, bytes=8)]))
    monkeypatch.setattr(limits, "matmul_peak", lambda *_: 1e9)
    with pytest.raises(RuntimeError) as failure:
        harness.run(limits, harness.new_folder("limits", tmp_path / "out"), 2, 1)
    assert str(failure.value).splitlines() == [
        "failed:",
        "copies, those after another: TypeError: a new signature",
        "one that refuses: ValueError: no such",
    ]
    rows = [json.loads(line) for line in (tmp_path / "out" / "rows.jsonl").read_text().splitlines()]
    assert Counter(row["entry"] for row in rows) == {"copy": 2, "another": 2, "last": 2}
    text = capsys.readouterr()
    assert "| another |" in text.out and text.err.count("Traceback") == 2


def test_what_decides_on_a_gpu_comes_first() -> None:
    names = list(peers.ENTRIES["cuda"])
    first, others = names[: peers.DECIDING["cuda"]], names[peers.DECIDING["cuda"] :]
    assert first[:2] == ["ours: finetune/fp32 (TF32 off)", "ours: finetune/fastest"]
    assert sum("best" in name for name in first) == 3, "all peers at their best"
    assert {peers._kind(name) for name in first} == {"", "mlm/", "memory/"} and len(first) == 10
    assert [name.partition(",")[0] for name in first[8:]] == ["Hugging Face Trainer", "Composer"]
    assert all("compiled" in name for name in first[8:]), "slow to compile where the caches are empty"
    assert {peers._kind(name) for name in others} == {"", "mlm/"} and not any("best" in name for name in others)


def test_on_a_gpu_what_decides_is_repeated_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(peers, "interleaved", lambda *_, urgent, **__: asked.append(urgent))
    monkeypatch.setattr(peers, "_peak", lambda _: 1e12)
    for section, some, urgent in (("cuda", (), 10), ("cuda", ("ours: mlm/",), 2), ("cpu", (), 0)):
        monkeypatch.setattr(peers, "suite_section", lambda section=section: section)
        peers.measure(tmp_path, 5, 2, only=some)
        said = json.loads((tmp_path / "conditions.json").read_text())
        assert (asked[-1], said.get("urgent"), "cache" in said) == (
            urgent,
            urgent or None,
            urgent > 0,
        )


def test_changes_are_in_every_entrys_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, harness.Entry] = {}
    monkeypatch.setattr(peers, "interleaved", lambda entries, folder, **_: given.update(entries))
    monkeypatch.setattr(peers, "_peak", lambda _: 1e12)  # it is measured in another process
    arguments = ["peers", "--only", "ours", "--set", "batch_size=4", "model.config.hidden_size=64"]
    run.main([*arguments, "--out", str(tmp_path)])
    for name, entry in given.items():
        recipe = load_recipe(entry.recipe, entry.overrides, check_arguments=False)
        assert (recipe.batch_size, recipe.model.config["hidden_size"]) == (4, 64), name
    assert len(given) >= 3 and all("ours" in name for name in given)
    (tmp_path / "rows.jsonl").write_text('{"entry": "ours: cpu/fp32", "repetition": 0, "reason": "not run"}\n')
    assert "Every recipe with batch_size=4, model.config.hidden_size=64." in peers.table(tmp_path)
    with pytest.raises(SystemExit):
        run.main(["limits", "--set", "batch_size=4", "--out", str(tmp_path / "other")])


def test_a_part_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[tuple[str, ...]] = []
    monkeypatch.delenv("OUT", raising=False)
    monkeypatch.setattr(gpu, "_test", lambda *_: False)
    monkeypatch.setattr(gpu.peers, "measure", lambda *_, deadline, only, after_each: asked.append(only))
    assert gpu.main(["--parts", "training", "--first", "3", "--out", str(tmp_path)]) == 0
    assert asked == [tuple(peers.ENTRIES[suite_section()])[:3]]
    assert "no test was asked for" in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["environment.json", "peers"], "and nothing is packed"
    with pytest.raises(SystemExit):
        gpu.main(["--parts", "trainings", "--out", str(tmp_path)])
    assert "invalid choice: 'trainings'" in capsys.readouterr().err
    some = ["--only", "best, compiled"]
    other = ["--out", str(tmp_path / "other")]
    monkeypatch.setattr(gpu.profiles, "measure", lambda *_, deadline, only: asked.append(tuple(only)))
    assert gpu.main(["--parts", "profiles", "training", *some, *other]) == 0
    assert asked[1:] == [("best, compiled",)] * 2
    nobody = ["training", *some, "nobody"]
    for wrong in (["limits", *some], ["training", "--first", "2", *some], nobody):
        with pytest.raises(SystemExit):
            gpu.main(["--parts", *wrong, "--out", str(tmp_path / "third")])
    assert capsys.readouterr().err.count("--only is for the parts training and profiles, and instead of --first") == 2


@pytest.mark.parametrize(
    ("parts", "minutes"),
    [
        ({"tests": 3, "limits": 2, "training": 3}, 8),
        ({"launches": 6}, 6),
        ({"launches": 3, "training": 3}, 6),
        ({"tests": 9}, 9),
    ],
)
def test_a_part_has_its_share_of_the_time_and_the_last_one_all(
    parts: dict[str, float], minutes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, given = [1000.0], {}

    def do(part: str, _: Any, end: float) -> bool:
        given[part] = (end - now[0]) / 60
        now[0] = end
        return True

    monkeypatch.setattr(gpu, "_do", do)
    monkeypatch.setattr(gpu, "hardware", lambda: "cuda")
    monkeypatch.setattr(gpu.time, "monotonic", lambda: now[0])
    assert gpu.main(["--parts", *reversed(parts), "--minutes", str(minutes), "--out", str(tmp_path)]) == 0
    assert given == pytest.approx(parts) and list(given) == list(parts)


@pytest.mark.parametrize("there", ["tests.txt", "limits/rows.jsonl", "peers/rows.jsonl"])
def test_results_that_are_there_are_named_before_anything_is_done(there: str, tmp_path: Path) -> None:
    file = tmp_path / there
    file.parent.mkdir(exist_ok=True)
    file.touch()
    with pytest.raises(SystemExit, match=rf"^error: {file.parent} holds results already.* Name another --out$"):
        gpu.main(["--out", str(tmp_path)])
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [file]


def test_what_is_done_is_brought_back_whatever_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A lent machine gives back what lies under `OUT`, and only a few files of it."""
    brought, out = tmp_path / "brought", tmp_path / "out"
    brought.mkdir()
    monkeypatch.setenv("OUT", str(brought))
    with pytest.raises(SystemExit):
        gpu.main(["--out", str(brought / "results")])
    assert "name a folder elsewhere" in capsys.readouterr().err

    def names() -> set[str]:
        with tarfile.open(brought / "out.tgz") as archive:
            return {Path(name).name for name in archive.getnames() if Path(name).suffix}

    def measure(folder: Path, *_: Any, after_each: Any, **__: Any) -> None:
        assert names() == {"tests.txt"}, "of the tests, which failed"
        (folder / "run.txt").touch()
        after_each()
        assert "run.txt" in names()
        (folder / "another.txt").touch()
        raise KeyboardInterrupt

    monkeypatch.setattr(gpu, "_test", lambda log, *_: bool(log.write_text("")))
    monkeypatch.setattr(gpu.peers, "measure", measure)
    with pytest.raises(KeyboardInterrupt):
        gpu.main(["--parts", "tests", "training", "--out", str(out)])
    assert names() == {"tests.txt", "environment.json", "run.txt", "another.txt"}
    assert [file.name for file in brought.iterdir()] == ["out.tgz"]
    monkeypatch.setenv("OUT", str(tmp_path / "nowhere"))
    gpu.pack(out)
    assert "out.tgz could not be written: " in capsys.readouterr().err


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_of_a_command_that_is_over_its_limit_nothing_goes_on(tmp_path: Path) -> None:
    brought, log = tmp_path / "brought", tmp_path / "out" / "tests.txt"
    brought.mkdir()
    command = [sys.executable, "-m", "benchmarks.gpu", "--parts", "tests", "--workers", "1", "--out", str(log.parent)]
    programme = subprocess.Popen(command, cwd=ROOT, env=os.environ | {"OUT": str(brought)}, start_new_session=True)

    def running() -> dict[int, str]:
        """All processes of its session, with their commands."""
        found = {}
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it has ended meanwhile
                state, _, _, session = (process / "stat").read_text().rpartition(")")[2].split()[:4]
                if int(session) == programme.pid and state != "Z":
                    found[int(process.name)] = (process / "cmdline").read_text()
        return found

    try:
        while not any("benchmarks.lost_workers" in command for command in running().values()):
            assert programme.poll() is None
            time.sleep(0.1)
        programme.terminate()
        assert programme.wait(30) == 143
        end = time.monotonic() + 5  # those that are killed need a moment
        while running() and time.monotonic() < end:
            time.sleep(0.05)
        assert not running()
    finally:
        for pid in running():
            os.kill(pid, signal.SIGKILL)
        programme.wait()
    with tarfile.open(brought / "out.tgz") as archive:
        assert "out/tests.txt" in archive.getnames()


def test_a_worker_that_no_test_can_use_any_more_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One test costs itself: one that leaves an error for good, and one that hangs where no signal interrupts it."""
    (tmp_path / "test_probe.py").write_text("""
import signal, time
import pytest
from benchmarks import apart

lost = []
apart.context_lost = lambda: bool(lost)

@pytest.mark.gpu
@pytest.mark.parametrize("i", range(60))
def test_x(i):
    if i == 3:
        lost.append(i)
    if i == 40:
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
        time.sleep(1000)
    if lost:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    time.sleep(0.02)
""")
    monkeypatch.setattr(gpu, "_HANGS", 3)
    assert gpu._test(tmp_path / "tests.txt", [str(tmp_path / "test_probe.py")], 2, 120) is False
    log, said = (tmp_path / "tests.txt").read_text(), capsys.readouterr().out
    named = {found.rpartition("/")[2] for found in gpu._FAILED.findall(said)}
    assert named == {"test_probe.py::test_x[3]", "test_probe.py::test_x[40]"}, log
    assert log.count("PASSED") == 58, log
    assert log.index("RuntimeError: CUDA error: an illegal") < log.index("= FAILURES ="), "why is said at once"


def test_of_tests_that_are_stopped_it_is_known_why_those_failed_that_were_done(tmp_path: Path) -> None:
    (tmp_path / "test_probe.py").write_text("""
import time

def test_fails():
    raise RuntimeError("an operation is " + "not implemented")

def test_goes_on():
    while True:
        time.sleep(1)
""")
    command = [sys.executable, "-m", "pytest", "-n", "1", "-p", "benchmarks.told_at_once", str(tmp_path)]
    tests = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        assert any("RuntimeError: an operation is not implemented" in line for line in tests.stdout)
        assert tests.poll() is None, "it was only said at the end"
    finally:
        os.killpg(tests.pid, signal.SIGKILL)
        tests.communicate()


def test_tests_that_failed_before_the_time_was_over_are_named() -> None:
    lines = [
        "tests/a.py::test_x[cuda-1] ",
        "[gw0] [ 10%] FAILED tests/a.py::test_x[cuda-1] ",
        "[gw1] [ 12%] PASSED tests/a.py::test_FAILED",
        "ERROR tests/b.py::test_y - RuntimeError: no",
        "ERROR tests/c.py - ImportError: no",
    ]
    found = [match.group(0) for line in lines if (match := gpu._FAILED.search(line))]
    assert found == ["FAILED tests/a.py::test_x[cuda-1]", "ERROR tests/b.py::test_y", "ERROR tests/c.py"]


def test_kernels_run_and_leave_no_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gradient that stays is added to in the next call, which moves bytes that nobody counts."""
    device, left = torch.device("cpu"), []
    made = [*kernels.norms(device, 8, 64), *kernels.activations(device, 8, 64), *kernels.projections(device, 8, 64)]
    made += kernels.attention(device, 64)
    accumulate = torch.Tensor.backward
    monkeypatch.setattr(torch.Tensor, "backward", lambda *a, **k: left.append(1) or accumulate(*a, **k))
    monkeypatch.setattr(torch.autograd, "backward", lambda *a, **k: left.append(1))
    for kernel in made:
        kernel.call()
        assert kernel.bytes or kernel.flops
    assert not left
    assert len(made) >= 10


def test_of_slow_entries_fewer_batches_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = harness.Entry("ours", "cpu/fp32", batches=20)
    fast = harness.Entry("ours", "cpu/fp32")
    assert [(entry.counted(150), entry.steps(150)) for entry in (slow, fast)] == [(20, 30), (150, 225)]
    assert [(entry.counted(3), entry.steps(3)) for entry in (slow, fast)] == [(3, 5), (3, 5)]
    asked: list[dict[str, Any]] = []

    class Isolation:
        note = ""

        def __init__(self, *_: Any) -> None: ...

        def __enter__(self) -> Isolation:
            return self

        def __exit__(self, *_: Any) -> None: ...

        def run(self, payload: dict[str, Any], timeout: float) -> Any:
            asked.append(payload)
            work = [1.0] * payload["steps"]
            value = {"seconds": work, "tokens": work, "flops": work}
            return SimpleNamespace(status="ok", reason="", value=value, alone=True, waited=0.0, log="")

    monkeypatch.setattr(harness, "Isolation", Isolation)
    rows = harness.interleaved({"slow": slow, "fast": fast}, tmp_path, repetitions=1, batches=40)
    assert [(payload["steps"], payload["counted"]) for payload in asked] == [(30, 20), (60, 40)]
    assert [(row["counted"], row["real_tokens_per_second"]) for row in rows] == [(20, 1.0), (40, 1.0)]


# --- Quality on a GPU --------------------------------------------------------------------------------------------


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


def test_tests_of_some_files_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given: list[list[str]] = []
    monkeypatch.setattr(gpu, "_test", lambda log, files, *_: given.append(files) or True)
    gpu.main(["--parts", "tests", "--tests", "packed_attention", "test_layer_norm", "--out", str(tmp_path)])
    assert given == [["tests/kernels/test_layer_norm.py", "tests/kernels/test_packed_attention.py"]]
    gpu.main(["--parts", "tests", "--out", str(tmp_path)])
    assert given[1] == gpu.marked() and set(given[1]) > set(given[0])
    with pytest.raises(SystemExit):
        gpu.main(["--parts", "tests", "--tests", "test_readme", "--out", str(tmp_path)])
    assert "--tests test_readme: no such file has a test for a GPU. There are: tests/" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        gpu.main(["--parts", "limits", "--tests", "test_layer_norm", "--out", str(tmp_path)])
    assert "--tests is for the part tests, which --parts leaves out" in capsys.readouterr().err


def test_what_is_for_a_gpu_is_refused_without_one(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for part in ("launches", "quality", "quality_mlm"):
        with pytest.raises(SystemExit):
            gpu.main(["--parts", part, "--out", str(tmp_path)])
        assert f"{part} is for a GPU, and there is none: leave it out of --parts" in capsys.readouterr().err
