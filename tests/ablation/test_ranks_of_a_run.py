"""A run of several processes ends as one, however one of them ends; and a study of two ranks trains as one process."""

from __future__ import annotations

import os
import re
import time

import pytest

from composer_speedups.errors import UserError
from composer_speedups.hardware import same_machine
from composer_speedups.isolation.isolate import CannotStart, Isolation, Outcome
from composer_speedups.isolation.ranks import check_ranks


@pytest.fixture(scope="module")
def isolation():
    with Isolation("rank_entries:train", preload=("rank_entries",)) as isolation:
        yield isolation


def run(
    isolation: Isolation, ranks: int, do: str, where: int | str = 1, timeout: float = 60.0, **more: object
) -> Outcome:
    began = time.monotonic()
    outcome = isolation.run({"do": do, "where": where, **more}, ranks=ranks, timeout=timeout)
    assert time.monotonic() - began < 30
    return outcome


def gone(group: int) -> bool:
    end = time.monotonic() + 10
    while time.monotonic() < end:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


def test_they_meet_and_the_first_answers(isolation) -> None:
    told: list[dict[str, int]] = []
    outcome = isolation.run({"do": "sum"}, ranks=3, timeout=60, report=told.append)
    assert outcome.status == "ok", outcome.log
    assert outcome.value["sum"] == 111.0 and outcome.value["world"] == "3"
    assert [one["rank"] for one in told] == [0], "the others' progress is not the run's"
    assert all(f"rank {rank} speaks" in outcome.log for rank in range(3))
    assert gone(told[0]["group"])


def test_one_process_is_no_rank(isolation) -> None:
    assert run(isolation, 1, "alone").value == {"world": None}


@pytest.mark.parametrize("where", [0, 1, 2])
def test_an_error_of_one_is_the_runs_and_says_whose_it_is(isolation, where) -> None:
    outcome = run(isolation, 3, "raise", where)
    assert (outcome.status, outcome.reason) == ("failed", f"rank {where}: ValueError: not here")
    assert "raise ValueError" in outcome.log  # its traceback


def test_what_fails_on_all_at_once_is_one_error(isolation) -> None:
    """Two ranks' words in one pipe would be neither's."""
    for _ in range(4):
        outcome = run(isolation, 4, "run out of memory", "everywhere")
        assert outcome.status == "out_of_memory", outcome
        assert re.fullmatch(r"rank [1-3]: MemoryError: cannot allocate memory", outcome.reason)
        outcome = run(isolation, 4, "ask wrongly", thing="this")
        assert (outcome.status, outcome.reason) == ("failed", "no such thing as this: choose another")


def test_one_that_leaves_as_if_done_is_missed(isolation) -> None:
    outcome = run(isolation, 2, "leave early")
    assert (outcome.status, outcome.reason) == ("failed", "a rank ended with exit code 0")


def test_under_a_launcher_it_starts_nothing(monkeypatch) -> None:
    """Each of the launcher's processes would take another run, and the two meet as ranks of one training."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(CannotStart, match=r"^WORLD_SIZE is 2, .*use --ranks, or unset WORLD_SIZE$"):
        Isolation("rank_entries:train").start()


def test_out_of_memory_in_one_is_the_runs(isolation) -> None:
    outcome = run(isolation, 2, "run out of memory")
    assert outcome.status == "out_of_memory" and outcome.reason.startswith("rank 1: MemoryError")


def test_what_is_wrong_for_all_is_said_in_the_same_words_by_whoever_is_first(isolation) -> None:
    outcome = run(isolation, 2, "ask wrongly", thing="this")
    assert (outcome.status, outcome.reason) == ("failed", "no such thing as this: choose another")


def test_one_that_is_killed_or_crashes_takes_the_run_with_it(isolation) -> None:
    killed = run(isolation, 2, "SIGKILL")
    assert killed.killed and killed.status in ("failed", "out_of_memory"), killed
    crashed = run(isolation, 2, "SIGSEGV")
    assert (crashed.status, crashed.reason) == ("failed", "a rank crashed with SIGSEGV")
    ended = run(isolation, 2, "exit")
    assert (ended.status, ended.reason) == ("failed", "a rank ended with exit code 7")


@pytest.mark.parametrize("how", ["stop in good order", "end as Ctrl-C ends"])
def test_a_signal_that_the_owner_did_not_send_is_no_ctrl_c(isolation, how) -> None:
    """earlyoom sends SIGTERM first: whoever takes that for the user's wish ends the whole study, each time anew."""
    outcome = isolation.run({"do": how}, timeout=60)
    assert outcome.status == "failed" and outcome.killed and outcome.value is None
    assert outcome.reason.startswith("ended by SIGTERM or SIGINT: of what watches over memory")


def test_a_time_limit_ends_all(isolation) -> None:
    told: list[dict[str, int]] = []
    outcome = isolation.run({"do": "wait for good"}, ranks=2, timeout=1.0, report=told.append)
    assert outcome.status == "timeout"
    assert gone(told[0]["group"])


def test_a_rank_needs_a_gpu_or_a_core_of_its_own() -> None:
    check_ranks(2, {"cpu": {"usable": 2}, "gpus": []})
    with pytest.raises(UserError, match=r"^3 ranks need a core each, this machine has 2: use --ranks 2$"):
        check_ranks(3, {"cpu": {"usable": 2}, "gpus": []})
    with pytest.raises(UserError, match="2 ranks need a GPU each, this machine has 1"):
        check_ranks(2, {"cpu": {"usable": 64}, "gpus": [{"name": "one"}]})


def test_speeds_of_other_numbers_of_ranks_are_not_compared() -> None:
    assert same_machine({}, {"ranks": 1}) == ""  # studies from before there were ranks
    assert same_machine({"ranks": 1}, {"ranks": 2}) == "ranks 1 there, 2 here"
