"""Tuning's arithmetic: sizes, the largest and the fastest batch, rates, and the record of a search."""

from __future__ import annotations

import math
import mmap
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import tuning_fakes as fakes

from composer_speedups import hardware
from composer_speedups.ablation import jobs
from composer_speedups.errors import OutOfMemory, UserError
from composer_speedups.measurement.peak_memory import PeakMemory
from composer_speedups.recipes import load_recipe
from composer_speedups.tuning import jobs as tuning_jobs
from composer_speedups.tuning import rate as rates
from composer_speedups.tuning.batch import Tried, fastest, largest
from composer_speedups.tuning.evidence import batch_reason
from composer_speedups.tuning.record import Record, RecordError
from composer_speedups.tuning.search import _same_samples
from composer_speedups.tuning.sizes import batch_sizes, microbatch_sizes, starting_size
from composer_speedups.tuning.tries import Tries

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
        PeakMemory(torch.device("cpu")).start()
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
    monkeypatch.setenv("LOCAL_RANK", "1")  # its GPU is not the first: another rank of the try has that
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=80 * 10**9))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda *words: asked.append(words))
    tuning_jobs.trial({"memory_limit": 1, "device_limit": limit}, lambda event: None)
    assert asked == ([] if share is None else [(share, 1)])


def test_a_loss_after_fewer_samples_is_none_to_compare_with() -> None:
    """Where the loss of a longer run is higher, as over harder texts, those that were given up are not the best."""
    plan = rates.Plan(6, (256, 512, 1024))
    best, tried = rates.search(lambda r, n: abs(math.log(r / 3e-4)) + n / 256, 1e-3, plan, 10**6, seed=1)
    furthest = {one.rate: one for one in tried if len(one.losses) == max(len(o.losses) for o in tried)}
    assert min(tried, key=lambda one: one.losses[-1]).rate not in furthest, "else nothing is shown"
    assert best == min(furthest.values(), key=lambda one: one.losses[-1]).rate


@pytest.mark.parametrize(
    ("overrides", "share"),
    [
        ([], 0.95),
        (["task.padding=longest"], 0.85),
        (["speedups.unpadding={}"], 0.85),
        (["speedups.length_grouped_batches={}"], 0.85),
    ],
)
def test_where_batches_differ_in_tokens_a_gpu_keeps_more_free(overrides: list[str], share: float) -> None:
    recipe = load_recipe("demo/fp32", ["task.padding=max_length", *overrides], check_arguments=False)
    facts = {"gpus": [{"memory_bytes": 10**9}, {"memory_bytes": 2 * 10**9}]}
    tries = SimpleNamespace(recipe=recipe, facts=facts, cuda=True)
    assert Tries._whole_memory(tries) == round(share * 10**9), "of the smallest"
