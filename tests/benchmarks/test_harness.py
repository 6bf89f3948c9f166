"""`benchmarks/harness.py`: which runs are made in which order, what counts, and what a run that fails costs."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from benchmarked import TINY, row

from benchmarks import harness


def test_speeds_are_of_the_batches_that_count() -> None:
    found = row("ours: a", 0, 10)
    assert (found["samples_per_second"], found["real_tokens_per_second"], found["flops_per_second"]) == (4.0, 10.0, 5.0)
    failed = {"status": "failed", "reason": "x"}
    assert set(harness._speeds(failed, 4, 2).values()) == {None}
    # One of two steps takes half the time, and is not twice as fast.
    assert set(harness._speeds({"seconds": [1.0], "tokens": [10], "flops": [5.0]}, 4, 2).values()) == {None}


@pytest.mark.elsewhere
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


def test_a_plot_is_drawn_and_leaves_out_what_has_no_value(tmp_path: Path) -> None:
    harness.plot(tmp_path, {"ours: a": [1.0, 2.0], "b": [3.0], "failed": []}, "samples/s")
    assert (tmp_path / "plot.png").stat().st_size > 1000
    harness.plot(tmp_path / "nothing", {"failed": []}, "samples/s")


@pytest.mark.elsewhere
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


@pytest.mark.elsewhere
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
