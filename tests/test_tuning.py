"""Tuning: the search's arithmetic, the record, searches of fake tries in real processes, and one of real training."""

from __future__ import annotations

import io
import json
import math
import mmap
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import tuning_fakes as fakes
from rich.console import Console

from composer_speedups import hardware
from composer_speedups.ablation import jobs
from composer_speedups.ablation.isolate import Isolation
from composer_speedups.ablation.presence import Presence
from composer_speedups.ablation.store import Store
from composer_speedups.cli import main
from composer_speedups.errors import OutOfMemory, SpeedUpUnavailable, UserError
from composer_speedups.measure import reset_peak_memory
from composer_speedups.recipes import load_recipe
from composer_speedups.tune_command import memory_bytes
from composer_speedups.tuning import jobs as tuning_jobs
from composer_speedups.tuning import rate as rates
from composer_speedups.tuning import tune as tune_module
from composer_speedups.tuning.batch import Tried, fastest, largest
from composer_speedups.tuning.evidence import batch_reason
from composer_speedups.tuning.record import Record, RecordError
from composer_speedups.tuning.rows import expected_tuning, tune_rows
from composer_speedups.tuning.search import _same_samples
from composer_speedups.tuning.settings import Settings
from composer_speedups.tuning.sizes import batch_sizes, microbatch_sizes, starting_size
from composer_speedups.tuning.tune import record_path, tune


@pytest.fixture(scope="module")
def isolation():
    with Isolation(fakes.ENTRIES.train, fakes.ENTRIES.preload) as made:
        yield made


SIZES = ("batch_size=32", "task.train_samples=1152")  # what the figures below are about


def search(
    out: Path, isolation: Isolation | None = None, recipe: str = "demo/bf16", overrides=(), width=140, **options
):
    """`tune` with fake tries; what it printed comes with the result."""
    console = Console(file=io.StringIO(), width=width)
    base = load_recipe(recipe, check_arguments=False)
    loaded = load_recipe(recipe, [*SIZES, "duration=2ep", *overrides], check_arguments=False)
    settings = Settings(**options)
    result = tune(
        loaded,
        out=out,
        base=base,
        extends=recipe,
        settings=settings,
        console=console,
        entries=fakes.ENTRIES,
        isolation=isolation,
    )
    return result, console.file.getvalue()


# --- Sizes ---


def test_sizes_are_what_the_hardware_likes():
    assert batch_sizes(40) == [1, 2, 4, 8, 16, 24, 32, 40]
    volta, ampere = batch_sizes(1024, 7.0), batch_sizes(1024, 8.0)
    assert 520 in volta and 520 not in ampere and 576 in ampere
    assert all(size % 64 == 0 for size in ampere if size > 512) and max(ampere) == 1024
    assert max(batch_sizes(10**6)) <= 16_384
    assert microbatch_sizes(56) == [1, 2, 4, 7, 8, 14, 28, 56]


def test_the_first_size_is_where_memory_should_end():
    sizes = batch_sizes(4096, 9.0)
    assert starting_size({8: 1_080, 32: 1_320}, 6_000, sizes) == 496  # 1000 + 10 a sample: 500
    assert starting_size({8: 1_080, 32: 1_320}, 500, sizes) == 1


# --- The largest ---


def device(limit: int, tries: list[int], fixed: int = fakes.FIXED):
    def measure(size: int) -> Tried:
        tries.append(size)
        if size > limit:
            return Tried(size, "out_of_memory", "no room")
        return Tried(size, "ok", "", 10.0, fixed + size * fakes.SAMPLE)

    return measure


@pytest.mark.parametrize("limit", [1, 3, 8, 31, 64, 217, 700, 4095])
@pytest.mark.parametrize("start", [1, 64, 4096])
@pytest.mark.parametrize("known", [True, False])
def test_the_largest_that_fits_is_found_in_few_tries(limit: int, start: int, known: bool):
    sizes, tries = batch_sizes(4096, 8.0), []
    bytes_ = fakes.FIXED + limit * fakes.SAMPLE if known else None
    assert largest(device(limit, tries), sizes, start, bytes_, fakes.FIXED) == max(s for s in sizes if s <= limit)
    assert len(tries) == len(set(tries)) and len(tries) <= (16 if known else 20)


def test_a_device_that_refuses_earlier_than_its_memory_says():
    """Fragments: at 70 % of the memory it is over. The search must halve, not creep."""
    sizes, tries = batch_sizes(4096, 8.0), []
    assert largest(device(700, tries), sizes, 1024, fakes.FIXED + 1000 * fakes.SAMPLE, 0) == 640
    assert len(tries) <= 12


def test_nothing_fits_or_something_else_is_wrong():
    assert largest(lambda size: Tried(size, "out_of_memory"), [1, 2, 4], 4, None, 0) is None
    with pytest.raises(UserError, match=r"not for lack of memory: no such file"):
        largest(lambda size: Tried(size, "failed", "no such file"), [1, 2, 4], 4, None, 0)


# --- The fastest ---


def speeds(law, limit: int = 10**9, budget: int = 100):
    tries: list[int] = []

    def measure(size: int) -> Tried | None:
        if len(tries) >= budget:
            return None
        tries.append(size)
        return Tried(size, "ok" if size <= limit else "out_of_memory", "", law(size), 1000 + 10 * size)

    return measure, tries


def test_the_fastest_is_found_and_measured_again():
    measure, tries = speeds(lambda size: 100 - abs(size - 96))
    assert fastest(measure, batch_sizes(4096), 32, None) == 96
    assert tries.count(96) == 2 and len(tries) <= 14


def test_where_all_are_as_fast_the_own_batch_stays():
    measure, tries = speeds(lambda size: 100 + 0.5 * (size % 16 == 0))
    assert fastest(measure, batch_sizes(64), 24, None) == 24
    assert max(tries) <= 64


@pytest.mark.parametrize("budget", [6, 100], ids=["each size once", "the best again"])
def test_a_gain_within_the_machines_noise_is_none(budget: int):
    measured: dict[int, list[float]] = {}

    def law(size: int) -> float:  # the first of each size is 1 or 8 % above the second, as it happens
        found = measured.setdefault(size, [])
        found.append(100.0 if found else 101.0 if size == 32 else 108.0)
        return found[-1]

    measure, tries = speeds(law, budget=budget)
    assert fastest(measure, batch_sizes(256), 32, None) == 32
    assert (len(set(tries)) == len(tries)) == (budget == 6)


def test_what_is_far_slower_ends_a_direction():
    measure, tries = speeds(lambda size: 100.0 if size <= 64 else 50.0)
    assert fastest(measure, batch_sizes(4096), 32, None) == 32
    assert max(tries) == 128


def test_the_limit_is_kept_and_not_run_into():
    measure, tries = speeds(lambda size: float(size), limit=100)
    assert fastest(measure, batch_sizes(4096), 8, 1000 + 10 * 100) in (64, 96)
    assert max(tries) <= 128, "what the line of the others forbids is not tried"


def test_the_reason_names_what_was_measured():
    found = ((32, 95.0), (32, 91.0), (64, 97.0), (16, 60.0))
    tried = [{"size": size, "samples_per_second": speed, "status": "ok"} for size, speed in found]
    assert batch_reason(tried, 64, "fastest") == "the fastest of 3 tried, 97.0 samples/s"
    assert batch_reason(tried, 32, "fastest") == (
        "as fast as the fastest of 3 tried (64: 97.0 samples/s) within the noise of these tries, and nearer to the old "
        "one, 93.0 samples/s"
    )
    tried.append({"size": 128, "samples_per_second": 120.0, "status": "over_limit"})
    assert batch_reason(tried, 64, "fastest") == "the fastest of 4 tried, 97.0 samples/s"
    tried.pop()
    assert batch_reason(tried, 32, "largest") == "the largest of 3 tried, 93.0 samples/s"


def test_a_budget_ends_it_with_the_best_so_far():
    measure, _ = speeds(float, budget=2)
    assert fastest(measure, batch_sizes(4096), 32, None) == 64
    assert fastest(lambda size: None, [8], 8, None) is None


def test_a_size_that_fits_only_sometimes_is_not_taken():
    """Out of memory when the best are measured once more: the next best is taken, and none where none is left."""
    seen: list[int] = []

    def measure(size: int, never: bool = False) -> Tried:
        seen.append(size)
        if seen.count(size) > 1 and (size == 96 or never):
            return Tried(size, "out_of_memory", "no room")
        return Tried(size, "ok", "", 100.0 - abs(size - 96), 1000)

    assert fastest(measure, batch_sizes(4096), 32, None) not in (96, None)
    assert seen.count(96) == 2
    seen.clear()
    assert fastest(lambda size: measure(size, never=True), [8, 16], 8, None) is None


# --- Learning rates ---


def test_the_scaling_rule():
    assert rates.scaled_rate(1e-4, 32, 128) == pytest.approx(2e-4)
    assert rates.scaled_rate(1e-4, 64, 32) == pytest.approx(7.07e-5)


@pytest.mark.parametrize("budget", [1_400, 4_000, 16_000, 50_000])
@pytest.mark.parametrize("trials", [2, 8, 20])
def test_rates_stay_within_the_budget(budget: int, trials: int):
    plan = rates.plan(budget, 32, trials, 10_000)
    assert plan is not None and plan.samples[0] >= 20 * 32 and plan.samples[-1] <= 10_000
    used = []

    def train(rate: float, samples: int) -> float:
        used.append((rate, samples))
        return abs(rate - 3e-4) * 1e3 + 1 / samples

    best, tried = rates.search(train, 1e-3, plan, budget, seed=17)
    assert sum(samples for _, samples in used) <= budget
    assert tried[0].rate == 1e-3 and best in [one.rate for one in tried]
    again = []
    rates.search(lambda r, n: again.append((r, n)) or train(r, n), 1e-3, plan, budget, seed=17)
    assert again == used[: len(again)], "the same losses lead to the same proposals"


def test_a_few_samples_are_too_few():
    assert rates.plan(1_000, 32, 8, 10_000) is None


def test_rates_that_diverge_are_not_taken():
    plan = rates.Plan(6, (256, 512))
    best, tried = rates.search(lambda r, n: float("nan") if r > 5e-4 else r, 1e-3, plan, 10**6, seed=1)
    assert best <= 5e-4 and tried[0].ended == "diverged"
    best, tried = rates.search(lambda r, n: None, 1e-3, plan, 10**6, seed=1)
    assert best is None and {one.ended for one in tried} == {"failed"}
    # One that goes further than all others, has the lowest loss until then, and diverges at last.
    plan = rates.Plan(6, (256, 512, 1024))
    best, tried = rates.search(lambda r, n: float("nan") if n == 1024 else -r, 1e-3, plan, 10**6, seed=1)
    furthest = max(len(one.losses) for one in tried)
    assert {one.ended for one in tried if len(one.losses) == furthest} == {"diverged"}
    assert next(one.ended for one in tried if one.rate == best) == "pruned"


def lowest_of_equals_shown(correlation: float, steps: int, shown, rates_tried: int = 8, searches: int = 400) -> float:
    """How often the lowest of equal rates is "shown" to be lower than the rule's, with noise that lasts over steps."""
    random = np.random.default_rng(17)
    losses = random.normal(size=(searches, rates_tried, steps))
    for n in range(1, steps):
        losses[..., n] = correlation * losses[..., n - 1] + (1 - correlation**2) ** 0.5 * losses[..., n]
    best = losses.mean(axis=-1).argmin(axis=-1)
    claims = sum(b != 0 and shown(one[b].tolist(), one[0].tolist()) for one, b in zip(losses, best, strict=True))
    return claims / searches


@pytest.mark.parametrize("steps", [8, 32])
@pytest.mark.parametrize(("correlation", "most"), [(0.0, 0.05), (0.5, 0.05), (0.9, 0.25)])
def test_the_luckiest_of_equal_rates_is_seldom_shown_to_be_lower(correlation: float, most: float, steps: int):
    """Two standard errors of the steps showed it in 12 %, 41 % and 75 % of searches with 32 steps."""
    assert lowest_of_equals_shown(correlation, steps, lambda a, b: rates.shown_lower(a, b, 8)) < most


def test_a_rate_that_is_clearly_better_is_shown_to_be():
    random = np.random.default_rng(17)
    pairs = random.normal(size=(200, 2, 32)) - [[[2.0], [0.0]]]
    assert sum(rates.shown_lower(a.tolist(), b.tolist(), 8) for a, b in pairs) > 150
    assert not rates.shown_lower([1.0, 1.0], [2.0, 2.0], 8), "two steps show nothing"


# --- The record ---


def test_a_record_survives_a_kill_and_refuses_damage(tmp_path: Path):
    path = tmp_path / "x.jsonl"
    record = Record(path, {"recipe": 1})
    record.add({"kind": "batch", "size": 8, "status": "ok"})
    record.add({"kind": "batch", "size": 16, "status": "ok"})
    with pytest.raises(RecordError, match="another process is at"):
        Record(path, {"recipe": 1})
    record.close()
    whole = path.read_bytes()
    for cut in range(1, 30):
        path.write_bytes(whole[:-cut])
        record = Record(path, {"recipe": 1})
        assert [t["size"] for t in record.trials] == [8]
        record.close()
    path.write_bytes(whole)
    with pytest.raises(RecordError, match=r"another search .recipe was 1, is 2"):
        Record(path, {"recipe": 2})
    for content in (whole.replace(b"16", b"17"), b"\n", b"{}\n", b"some text", whole[:40] + b"\n" + whole[41:]):
        path.write_bytes(content)
        with pytest.raises(RecordError, match="is damaged in line"):
            Record(path, {"recipe": 1})
        assert path.read_bytes() == content, "left as it was"


# --- Whole searches, in real processes ---


def test_the_largest_batch_then_its_rate(tmp_path: Path, isolation: Isolation):
    out = tmp_path / "new.yaml"
    result, text = search(out, isolation, goal="largest", samples=320_000, trials=8)
    assert result.recipe is not None
    assert result.recipe.batch_size == 216, "the largest multiple of 8 that is no more than what fits"
    found = load_recipe(out, check_arguments=False)
    assert found.batch_size == 216 and found.learning_rate == result.recipe.learning_rate
    assert found.speedups == load_recipe("demo/bf16", check_arguments=False).speedups and found.duration == "2ep"
    assert abs(math.log2(found.learning_rate / fakes.BEST_WHOLE)) < 1, "not the scaling rule's 2.6e-3"
    content = out.read_text()
    assert "extends: demo/bf16" in content and "out of memory" in content and "pruned" in content
    assert "0.001 x sqrt(216/32) = 0.0026" in content
    assert "Budget: 320,000 samples" in text and not record_path(out).exists()
    assert "lowest evaluation loss of 4 whole" in content and "with another seed close rates may rank" in content


def test_the_fastest_batch_within_a_limit(tmp_path: Path, isolation: Isolation):
    limit = fakes.FIXED + 70 * fakes.SAMPLE
    free, _ = search(tmp_path / "free.yaml", isolation, rate=False)
    held, _ = search(tmp_path / "held.yaml", isolation, rate=False, memory_limit=limit)
    assert free.recipe is not None and held.recipe is not None
    assert 64 <= free.recipe.batch_size <= 128 and 48 <= held.recipe.batch_size <= 70
    scaled = rates.scaled_rate(1e-3, 32, free.recipe.batch_size)
    assert free.recipe.learning_rate == scaled


def test_the_effective_batch_can_stay(tmp_path: Path, isolation: Isolation):
    overrides = ["batch_size=512", "learning_rate=1e-3"]
    result, _ = search(tmp_path / "x.yaml", isolation, overrides=overrides, constant=True, goal="largest", rate=False)
    assert result.recipe is not None
    found = load_recipe(tmp_path / "x.yaml", check_arguments=False)
    assert (found.batch_size, found.microbatch_size, found.learning_rate) == (512, 128, 1e-3)


def test_batches_and_warm_up_counted_in_batches_last_as_many_samples(tmp_path: Path, isolation: Isolation):
    overrides = ["duration=6000ba", "schedule.warmup=64ba"]
    search(tmp_path / "x.yaml", isolation, overrides=overrides, rate=False, goal="largest")
    found = load_recipe(tmp_path / "x.yaml", check_arguments=False)
    assert found.batch_size == 216 and found.duration == "889ba" and found.schedule.warmup == "9ba"


def test_a_recipe_in_a_file_and_one_beside_it(tmp_path: Path, isolation: Isolation, monkeypatch):
    from composer_speedups.tuning.written import extends_as

    monkeypatch.chdir(tmp_path)
    Path("old.yaml").write_text("extends: demo/bf16\nbatch_size: 16\nspeedups: {fused_adamw: {}}\n")
    out = Path("deeper/new.yaml")
    base = load_recipe("old.yaml", check_arguments=False)
    loaded = load_recipe("old.yaml", ["speedups.fused_adamw=null", "task.max_length=32"], check_arguments=False)
    assert extends_as("old.yaml", out) == "../old.yaml" and extends_as("demo/bf16", out) == "demo/bf16"
    console = Console(file=io.StringIO())
    settings = Settings(rate=False, samples=2000)
    tune(
        loaded,
        out=out,
        base=base,
        extends="../old.yaml",
        settings=settings,
        console=console,
        entries=fakes.ENTRIES,
        isolation=isolation,
    )
    found = load_recipe(out, check_arguments=False)
    assert found.task.max_length == 32 and "fused_adamw" not in found.speedups and "mixed_precision" in found.speedups
    assert "fused_adamw: null" in out.read_text()


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")  # Ctrl-C may come while one is being read
def test_ctrl_c_keeps_what_was_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    diary, whole, out = tmp_path / "diary", tmp_path / "whole", tmp_path / "x.yaml"
    monkeypatch.setenv("TUNING_DIARY", str(diary))
    monkeypatch.setenv("TUNING_PARENT", str(os.getpid()))
    monkeypatch.setenv("TUNING_FAULT", "hang:2")
    result, text = search(out, samples=20_000)
    assert result.recipe is None and not out.exists() and "2 tries are kept" in text
    before = diary.read_text().splitlines()
    kept = record_path(out).read_text()
    assert kept.count("\n") == 3, "the head and two tries"
    # The same search, now by a process that nobody stops.
    monkeypatch.delenv("TUNING_FAULT")
    result, text = search(out, samples=20_000)
    assert result.recipe is not None and "2 tries of an earlier start are kept" in text
    after = diary.read_text().splitlines()[len(before) :]
    monkeypatch.setenv("TUNING_DIARY", str(whole))
    never, _ = search(tmp_path / "y.yaml", samples=20_000)
    assert never.recipe is not None and never.recipe.learning_rate == result.recipe.learning_rate
    assert len(before) == 3
    assert before[:2] + after == whole.read_text().splitlines(), "only what was stopped is repeated"


@pytest.mark.parametrize("fault", ["disk:2", "kill:0"])
def test_what_was_no_fault_of_the_size_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str):
    """After a full disk, or a kill by whomever, the same command goes on as if nothing had been."""
    diary, out = tmp_path / "diary", tmp_path / "x.yaml"
    monkeypatch.setenv("TUNING_DIARY", str(diary))
    monkeypatch.setenv("TUNING_FAULT", fault)
    message = "No space left on device" if fault == "disk:2" else "found to fit: killed by SIGKILL.* --memory-limit"
    with pytest.raises(UserError, match=message):
        search(out, samples=8_000)
    kept = 2 if fault == "disk:2" else 0
    assert record_path(out).read_text().count("\n") == 1 + kept
    monkeypatch.delenv("TUNING_FAULT")
    result, text = search(out, samples=8_000)
    assert result.recipe is not None and ("2 tries of an earlier start" in text) == bool(kept)


def test_a_rate_that_failed_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    out = tmp_path / "x.yaml"
    monkeypatch.setenv("TUNING_DIARY", str(tmp_path / "diary"))
    monkeypatch.setenv("TUNING_FAULT", "disk:1")
    with pytest.raises(UserError, match=r"learning rate \S+ failed: .*No space left"):
        search(out, batch=False, samples=4_000)
    monkeypatch.delenv("TUNING_FAULT")
    result, text = search(out, batch=False, samples=4_000)
    assert result.recipe is not None and "1 tries of an earlier start" in text


def test_a_kill_that_the_kernel_did_not_count_is_lack_of_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """earlyoom and its like kill without a trace: the search goes on below, and the reason is in the evidence."""
    monkeypatch.setenv("TUNING_FAULT", "kill:64")
    result, _ = search(tmp_path / "x.yaml", rate=False, goal="largest")
    assert result.recipe is not None and result.recipe.batch_size == 64
    assert "out of memory: killed by SIGKILL" in (tmp_path / "x.yaml").read_text()


def test_a_longer_time_limit_tries_again_what_took_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    diary, out = tmp_path / "diary", tmp_path / "x.yaml"
    monkeypatch.setenv("TUNING_DIARY", str(diary))
    monkeypatch.setenv("TUNING_FAULT", "slow:2")
    options = {"overrides": ["batch_size=2"], "constant": True, "goal": "largest", "rate": False}
    message = "over the time limit of 0.5 s. Raise --timeout, or"
    with pytest.raises(UserError, match=message):
        search(out, timeout=0.5, **options)
    tried = diary.read_text()
    with pytest.raises(UserError, match=message):
        search(out, timeout=0.5, **options)
    assert diary.read_text() == tried, "under the same limit it would end the same way"
    result, _ = search(out, timeout=60.0, **options)
    assert result.recipe is not None and result.recipe.microbatch_size is None and "timeout" not in out.read_text()


@pytest.mark.parametrize(
    ("duration", "warmup", "share"),
    [
        ("6400ba", "0ba", "0.000000dur"),
        ("6400ba", "64ba", "0.010000dur"),
        ("4ep", "1ep", "0.250000dur"),
        ("64000sp", "16000sp", "0.250000dur"),
        ("4ep", "9000ba", "0.999999dur"),
        ("4ep", "0.06dur", "0.06dur"),
    ],
)
def test_tries_warm_up_for_the_same_share_as_the_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, duration: str, warmup: str, share: str
):
    """A rate found under a warm-up that the recipe has not may diverge in it."""
    diary = tmp_path / "diary"
    monkeypatch.setenv("TUNING_DIARY", str(diary))
    result, _ = search(
        tmp_path / "x.yaml", overrides=[f"duration={duration}", f"schedule.warmup={warmup}"], samples=8_000, trials=3
    )
    assert result.recipe is not None
    tries = [line.split() for line in diary.read_text().splitlines()]
    assert {line[4] for line in tries} == {share} and len({line[0] for line in tries}) > 1


def test_tries_beside_another_run_are_marked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COMPOSER_SPEEDUPS_PRESENCE", str(tmp_path / "presence"))
    _, text = search(tmp_path / "alone.yaml", rate=False, samples=4_000)
    assert "beside other" not in text + (tmp_path / "alone.yaml").read_text()
    with Presence():
        _, text = search(tmp_path / "x.yaml", rate=False, samples=4_000)
    assert "samples/s, 1 MB, loss" in text and ", beside other work\n" in text
    assert "tries ran beside other work on this machine" in text
    content = (tmp_path / "x.yaml").read_text()
    assert "ok, beside other work" in content and "# beside other work: it shared this machine" in content


def test_the_record_of_another_search_is_refused(tmp_path: Path, isolation: Isolation):
    out = tmp_path / "x.yaml"
    record_path(out).write_text("garbage\n")
    with pytest.raises(RecordError, match="damaged in line 1"):
        search(out, isolation, rate=False)
    assert record_path(out).read_text() == "garbage\n"


def test_what_cannot_run_here_or_is_broken(tmp_path: Path, isolation: Isolation):
    with pytest.raises(SpeedUpUnavailable, match="demo/fp16 cannot run here: fp16 needs"):
        search(tmp_path / "x.yaml", isolation, recipe="demo/fp16")
    with pytest.raises(UserError, match="the loss function is missing"):
        search(tmp_path / "x.yaml", isolation, overrides=["description=broken"])
    with pytest.raises(UserError, match="no batch of demo/bf16 was found to fit"):
        search(tmp_path / "y.yaml", isolation, memory_limit=10)
    with pytest.raises(UserError, match="1 samples are too few to try a batch of demo/bf16"):
        search(tmp_path / "y.yaml", isolation, samples=1, goal="fastest")  # in the place of a search that found nothing
    assert not (tmp_path / "x.yaml").exists()


def test_no_rate_is_recommended_that_diverged(tmp_path: Path, isolation: Isolation):
    out = tmp_path / "x.yaml"
    with pytest.raises(UserError, match=r"no learning rate from 0.5 to 2 ended .* Start lower, .* learning_rate=0.05"):
        search(out, isolation, batch=False, overrides=["learning_rate=1"], trials=3)
    assert not out.exists() and record_path(out).exists()


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("dull:0", "the loss fell by 0 only in 19,968 samples, too little to compare; 0.001 is the recipe's own"),
        ("alike:0.001", "none of 3 tried was shown to be better: 0.002 only within the noise; 0.001 is the recipe's"),
    ],
)
def test_the_rules_rate_stays_where_noise_speaks_for_another(tmp_path: Path, monkeypatch, fault: str, says: str):
    monkeypatch.setenv("TUNING_FAULT", fault)
    result, text = search(tmp_path / "x.yaml", overrides=["duration=1ep"], batch=False, trials=3, samples=160_000)
    assert result.recipe is not None and result.recipe.learning_rate == 1e-3
    assert f"learning rate 0.001: {says}" in text, text
    assert ("Give more --samples" in text) == fault.startswith("dull")


def test_what_another_process_has_written_meanwhile_stays(tmp_path: Path, isolation: Isolation, monkeypatch):
    out = tmp_path / "x.yaml"

    class Slow(tune_module.Tries):
        def __init__(self, *arguments: object) -> None:
            super().__init__(*arguments)
            out.write_text("theirs\n")

    monkeypatch.setattr(tune_module, "Tries", Slow)
    with pytest.raises(UserError, match=r"x\.yaml exists: add --overwrite"):
        search(out, isolation, rate=False)
    assert out.read_text() == "theirs\n" and list(tmp_path.iterdir()) == [out]


def test_lines_are_whole_where_nobody_cuts_them(tmp_path: Path, isolation: Isolation):
    _, text = search(tmp_path / "x.yaml", isolation, batch=False, samples=300, width=60)
    assert "300 samples are too few to compare rates at batch 32 (at least 1,280)\n" in text


# --- The memory of a try ---


def test_a_step_that_took_too_much_is_noticed_after_it(monkeypatch: pytest.MonkeyPatch):
    """What a step took is freed again when the report comes; what was taken before the training does not count."""
    amount = 300_000_000
    events = []

    def take():
        # Pages from the system itself: in this process `reuse_host_memory` may have told malloc to keep what is freed.
        with mmap.mmap(-1, amount) as pages:
            for page in range(0, amount, mmap.PAGESIZE):
                pages[page] = 1

    def train(payload, report):
        take()
        report({"phase": "data"})
        reset_peak_memory(torch.device("cpu"))
        report({"phase": "train"})
        for _ in range(payload["steps"]):
            take()
            report({"phase": "train"})

    monkeypatch.setattr(jobs, "train", train)
    monkeypatch.setattr(hardware, "hardware", lambda: "cpu")
    payload = {"memory_limit": hardware.resident_memory() + amount // 2, "device_limit": None}
    tuning_jobs.trial(payload | {"steps": 0}, events.append)
    assert [event["phase"] for event in events] == ["data", "train"]
    with pytest.raises(OutOfMemory, match=r"GB of memory taken, over the limit of"):
        tuning_jobs.trial(payload | {"steps": 1}, events.append)
    tuning_jobs.trial(payload | {"steps": 1, "memory_limit": None}, events.append)


def test_over_the_limit_is_said_as_such_by_a_real_run():
    recipe = load_recipe(
        "demo/fp32",
        ["task.name=dummy", "task.train_samples=32", "duration=2ba", "evaluate=false", "schedule.warmup=0ba"],
    )
    payload = {"recipe": recipe.to_dict(), "seed": 1, "memory_limit": 10**6, "device_limit": None}
    with pytest.raises(OutOfMemory, match=r"GB of memory taken, over the limit of 0.00 GB$"):
        tuning_jobs.trial(payload, lambda event: None)


def test_what_is_counted_in_batches_lasts_as_long_with_another_batch():
    old = load_recipe("demo/fp32", ["batch_size=32", "duration=400ba", "evaluate=100ba", "schedule.warmup=8ba"])
    found = _same_samples(old.model_copy(update={"batch_size": 256}), old)
    assert (found.duration, found.evaluate, found.schedule.warmup) == ("50ba", "12ba", "1ba")


@pytest.mark.parametrize(("limit", "share"), [(8 * 10**9, 0.1), (10**12, 1.0), (None, None)])
def test_a_gpu_is_told_the_limit(monkeypatch: pytest.MonkeyPatch, limit, share):
    """Only the calls: the refusal itself needs a GPU."""
    asked = []
    monkeypatch.setattr(jobs, "train", lambda payload, report: report({"phase": "train"}))
    monkeypatch.setattr(hardware, "hardware", lambda: "cuda")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=80 * 10**9))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", asked.append)
    tuning_jobs.trial({"memory_limit": 1, "device_limit": limit}, lambda event: None)
    assert asked == ([] if share is None else [share])


# --- Every row of a study ---


def test_rows_are_tuned_once_and_what_cannot_run_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    diary = tmp_path / "diary"
    monkeypatch.setenv("TUNING_DIARY", str(diary))
    names = ("demo/fp32", "demo/bf16", "demo/fp16")
    recipes = [load_recipe(name, [*SIZES, "duration=1ep"], check_arguments=False) for name in names]
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
    sys.path.insert(0, str(Path(__file__).parent / "ablation"))
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
    sys.path.insert(0, str(Path(__file__).parent / "ablation"))
    import fakes as study_fakes

    from composer_speedups.ablation import study
    from composer_speedups.tuning import rows

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(study, "Entries", lambda: study_fakes.ENTRIES)
    monkeypatch.setattr(rows.tune_rows, "__kwdefaults__", rows.tune_rows.__kwdefaults__ | {"entries": fakes.ENTRIES})
    options = ["--tune", "--tune-samples", "4000", "--out", "out"]
    assert main(["ablate", *command, *SIZES, *options]) == 0
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


# --- The command ---


def test_sizes_of_memory():
    assert [memory_bytes(t) for t in ("8GB", "512 MB", "1GiB", "7.5gb")] == [8 * 10**9, 512 * 10**6, 2**30, 75 * 10**8]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tune", "demo/bff16"], "unknown recipe"),
        (["tune", "batch_size=4"], "name the recipe first"),
        (["tune", "demo"], "demo' is a suite"),
        (["tune", "demo/bf16", "batch_sise=4"], "unknown key"),
        (["tune", "demo/bf16", "--no-batch", "--no-lr"], "nothing to tune"),
        (["tune", "demo/bf16", "--samples", "-5"], "--samples must be positive, got -5"),
        (["tune", "demo/bf16", "--trials", "0"], "--trials must be positive"),
        (["tune", "demo/bf16", "--timeout", "-1"], "--timeout must be positive, got -1"),
        (["tune", "demo/bf16", "--memory-limit", "much"], "--memory-limit 'much' is no size"),
        (["tune", "demo/bf16", "--memory-limit", "0GB"], "is no size"),
        (["tune", "demo/bf16", "--goal", "best"], "--goal must be largest or fastest"),
        (["tune", "demo/bf16", "--out", "x.txt"], "end it with .yaml"),
        (["tune", "demo/bf16", "--out", "/proc/x.yaml"], "--out: cannot write to /proc: No such file"),
        (["tune", "demo/bf16", "--out", "taken.yaml"], "taken.yaml exists: add --overwrite"),
        (["tune", "nowhere.yaml"], "there is no such file"),
    ],
)
def test_mistakes_are_one_line(arguments, message, tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("taken.yaml").write_text("batch_size: 7\n")
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert Path("taken.yaml").read_text() == "batch_size: 7\n" and len(list(tmp_path.iterdir())) == 1


def test_without_optuna_the_remedy_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "optuna", None)
    assert main(["tune", "demo/bf16"]) == 2
    error = capsys.readouterr().err
    assert 'pip install "optuna>=4,<5"' in error and error.count("\n") == 1


def test_real_training_on_dummy_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    """The whole command with a tiny model, real tries and all."""
    monkeypatch.chdir(tmp_path)
    Path("tiny.yaml").write_text(
        "task: {name: dummy, max_length: 16, train_samples: 256, eval_samples: 16, vocabulary: 256}\n"
        "model: {name: bert-base-uncased, pretrained: false, config: {hidden_size: 32, num_hidden_layers: 1, "
        "num_attention_heads: 2, intermediate_size: 64, vocab_size: 256}}\n"
        "batch_size: 8\nlearning_rate: 1e-3\nduration: 2ep\nschedule: {name: constant, warmup: 4ba}\n"
    )
    handlers = signal.getsignal(signal.SIGTERM)
    try:
        assert main(["tune", "tiny.yaml", "--samples", "900", "--trials", "2", "--out", "new.yaml"]) == 0
    finally:
        signal.signal(signal.SIGTERM, handlers)
    text = capsys.readouterr().out
    found = load_recipe("new.yaml", check_arguments=False)
    assert 1 <= found.batch_size <= 25 and found.learning_rate > 0 and found.task.max_length == 16
    content = Path("new.yaml").read_text()
    assert "extends: ./tiny.yaml" in content and "samples/s" in content
    assert "Tuning tiny" in text and "each try a fresh process" in text
    assert main(["tune", "tiny.yaml", "--out", "new.yaml"]) == 2
