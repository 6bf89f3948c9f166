"""Other work that takes the cores is seen; what a run does to itself is not held against others."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from composer_speedups.isolation import contention
from composer_speedups.isolation.contention import Contention
from composer_speedups.isolation.isolate import Isolation

if not os.path.exists("/proc/self/schedstat"):
    pytest.skip("this system does not count how long threads wait for a core", allow_module_level=True)


def compute(payload: float, report: object) -> str:
    """Use a core for so many seconds."""
    end = time.process_time() + payload
    while time.process_time() < end:
        pass
    return "done"


@contextlib.contextmanager
def busy(cores: int) -> Iterator[None]:
    # Each in a session of its own, as Linux may share the cores among sessions first.
    command = [sys.executable, "-c", "while True: pass"]
    others = [subprocess.Popen(command, start_new_session=True) for _ in range(cores)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


@pytest.mark.elsewhere
def test_other_work_on_all_cores_is_seen():
    with Isolation("test_contention:compute") as isolation:
        isolation.run(0.0)  # its modules are imported
        with busy(2 * len(os.sched_getaffinity(0))):
            outcome = isolation.run(2.0)
    assert outcome.value == "done" and not outcome.overlapped
    assert 0.4 < outcome.waited < 1 and not outcome.alone, "two others on each core: it had a third of one"


def test_only_the_cores_that_a_run_may_use_count(monkeypatch: pytest.MonkeyPatch):
    """Four threads on one core wait for each other; whoever is busy on another core has no part in that."""
    own, other = (
        SimpleNamespace(user=u, nice=1.0, system=0.0, irq=0.0, softirq=0.0, steal=u / 10) for u in (20.0, 900.0)
    )
    monkeypatch.setattr(contention.psutil, "cpu_times", lambda percpu: [other, own])
    monkeypatch.setattr(contention.os, "sched_getaffinity", lambda _: {1})
    monkeypatch.setattr(contention.cgroup, "throttled_seconds", lambda: 3.0)
    before = sum(contention._waited(task) for task in os.listdir("/proc/self/task"))
    found = contention._seconds()
    assert (found.all, found.stolen) == (21.0, 2.0)
    assert before - 3.0 <= found.waited < before - 3.0 + 5.0, "waiting for a share of one's own is no others' doing"
    monkeypatch.setattr(contention.os, "sched_getaffinity", lambda _: {5})
    assert contention._seconds() is None, "cores that are not listed"


def test_a_run_that_hardly_computes_loses_nothing():
    with Isolation("test_contention:compute") as isolation:
        assert isolation.run(0.0).alone


def length(payload: str, report: object) -> int:
    return len(payload)


def test_a_run_may_be_described_at_length():
    with Isolation("test_contention:length") as isolation:
        assert isolation.run("x" * 2_000_000).value == 2_000_000, "more than fits into a message"


def figures(waited: float, own: float, everyone: float, stolen: float = 0.0) -> contention._Seconds:
    return contention._Seconds(waited, own, everyone, stolen)


@pytest.mark.parametrize(
    ("end", "share"),
    [
        (figures(10.0, 10.0, 10.2), 0.0),  # only its own threads were in each other's way
        (figures(10.0, 10.0, 15.0), 1 / 3),  # others used 5 seconds, so they kept it waiting for 5 at most
        (figures(5.0, 10.0, 90.0), 1 / 3),  # others used much, but elsewhere: it waited for 5
        (figures(0.0, 9.0, 9.0, 3.0), 0.25),  # the hypervisor
        (figures(-2.0, 9.0, 30.0), 0.0),  # of a thread that ended
        (figures(0.9, 1.0, 90.0), 0.0),  # under a second
    ],
)
def test_what_counts_as_lost(monkeypatch: pytest.MonkeyPatch, end: contention._Seconds, share: float):
    seen = iter([figures(0.0, 0.0, 0.0), end])
    monkeypatch.setattr(contention, "_seconds", lambda: next(seen))
    assert Contention().waited() == pytest.approx(share)


def test_where_it_is_not_counted_nothing_is_told(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(contention, "_seconds", lambda: None)
    assert Contention().waited() is None


def test_its_own_children_are_its_own():
    """A compile worker or a data loader that uses a core is no other work."""
    before = contention._seconds()
    subprocess.run([sys.executable, "-c", "import time\nwhile time.process_time() < 1: pass"], check=True)
    after = contention._seconds()
    assert after.own - before.own > 0.9  # both are counted in hundredths of a second
