"""The process that starts the runs is killed, as the system does where memory is short."""

from __future__ import annotations

import fakes
import pytest

from composer_speedups.ablation.isolate import Isolation, ServerEnded

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


def test_its_last_words_are_told(isolation) -> None:
    isolation.close()
    isolation.preload = ("ends_by_itself",)
    with pytest.raises(ServerEnded, match=r"ended with exit code 3, twice\. .* Its last words: enough$"):
        isolation.run(WELL, timeout=60)
