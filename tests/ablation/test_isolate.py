"""The process that starts the runs is killed, as the system does where memory is short."""

from __future__ import annotations

import os

import fakes
import pytest

from composer_speedups.errors import OutOfMemory, SpeedUpUnavailable, TaskError
from composer_speedups.isolation.isolate import CannotStart, Isolation, ServerEnded
from composer_speedups.isolation.presence import Presence
from composer_speedups.isolation.worker import classify

WELL = {"recipe": fakes.Recipe("base").to_dict(), "seed": 17}


@pytest.fixture
def isolation():
    with Isolation(fakes.ENTRIES.train, fakes.ENTRIES.preload) as isolation:
        assert isolation.run(WELL, timeout=60).status == "ok"
        yield isolation


def kill(isolation: Isolation) -> int:
    isolation._server.kill()
    return isolation._server.wait()


def test_the_next_run_gets_another(isolation) -> None:
    first = isolation._server.pid
    kill(isolation)
    outcome = isolation.run(WELL, timeout=60)
    assert outcome.status == "ok", outcome.log
    assert isolation._server.pid != first


def test_killed_again_and_again_is_one_line(isolation, monkeypatch) -> None:
    start = isolation.start

    def and_kill() -> None:
        start()
        kill(isolation)

    monkeypatch.setattr(isolation, "start", and_kill)
    with pytest.raises(ServerEnded, match=r"^the process .* killed by SIGKILL, twice: .* memory\? .* here\.$"):
        isolation.run(WELL, timeout=60)


def test_modules_that_cannot_be_imported_are_one_line(isolation) -> None:
    isolation.close()
    isolation.preload = ("no_such_module_anywhere",)
    with pytest.raises(CannotStart, match=r"could not import what they need: ModuleNotFoundError: .*anywhere'$"):
        isolation.run(WELL, timeout=60)


def test_elsewhere_than_on_linux_it_says_so(monkeypatch) -> None:
    monkeypatch.setattr("sys.platform", "darwin")
    with pytest.raises(CannotStart, match=r"need Linux, and this is darwin: use a container"):
        Isolation(fakes.ENTRIES.train, fakes.ENTRIES.preload).start()


def test_a_run_that_cannot_begin_leaves_no_descriptor(isolation, monkeypatch) -> None:
    def fails(*_) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(Presence, "__enter__", fails)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with pytest.raises(OSError, match="no space left"):
            isolation.run(WELL, timeout=60)
    assert len(os.listdir("/proc/self/fd")) == before


def test_its_last_words_are_told(isolation) -> None:
    isolation.close()
    isolation.preload = ("ends_by_itself",)
    with pytest.raises(ServerEnded, match=r"ended with exit code 3, twice\. .* Its last words: enough$"):
        isolation.run(WELL, timeout=60)


def test_an_error_of_the_users_keeps_its_remedy_however_long_it_is():
    path = "/a/very/long/folder" * 20
    for kind, status in ((SpeedUpUnavailable, "skipped"), (OutOfMemory, "out_of_memory"), (TaskError, "failed")):
        assert classify(kind(f"{path} is not there: choose another\nmore")) == (
            status,
            f"{path} is not there: choose another",
        )
    status, reason = classify(RuntimeError(path))
    assert status == "failed" and reason == f"RuntimeError: {path[:200]}"
    assert classify(ValueError()) == ("failed", "ValueError")
