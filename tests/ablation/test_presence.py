"""Runs that disturb each other know of it, and the dead disturb nobody."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import fakes

from composer_speedups.isolation import presence
from composer_speedups.isolation.isolate import Isolation
from composer_speedups.isolation.presence import Presence

HOLD = """
import sys, time
from pathlib import Path
from composer_speedups.isolation.presence import Presence
with Presence(Path(sys.argv[1])):
    print("here", flush=True)
    time.sleep(60)
"""


def other(folder: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(folder)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "here\n"
    return process


def test_alone_and_not_alone(tmp_path: Path):
    with Presence(tmp_path) as first:
        first.look(now=True)
        assert not first.overlapped
        with Presence(tmp_path) as second:
            assert second.overlapped, "seen at the start"
        first.look(now=True)
        assert not first.overlapped, "nobody is there any more, and nobody looked meanwhile"
    with Presence(tmp_path) as after:
        pass
    assert not after.overlapped and list(tmp_path.iterdir()) == []


def test_one_that_was_killed_is_gone(tmp_path: Path):
    process = other(tmp_path)
    with Presence(tmp_path) as seen:
        pass
    assert seen.overlapped
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert len(list(tmp_path.iterdir())) == 1, "it could not clean up"
    with Presence(tmp_path) as alone:
        pass
    assert not alone.overlapped and list(tmp_path.iterdir()) == []


def test_where_nothing_can_be_locked_nothing_is_left(tmp_path: Path, monkeypatch):
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "no locks here")

    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(presence.fcntl, "flock", refuse)
    with Presence(tmp_path) as unknown:
        pass
    assert not unknown.overlapped and list(tmp_path.iterdir()) == [] and len(os.listdir("/proc/self/fd")) == before


def test_a_folder_that_cannot_be_had_costs_nothing(tmp_path: Path):
    (tmp_path / "file").touch()
    with Presence(tmp_path / "file") as found:
        found.look(now=True)
    assert not found.overlapped


def test_a_run_in_a_fresh_process_is_marked():
    payload = {"recipe": fakes.Recipe("base", seconds=2.0).to_dict(), "seed": 1}
    with Isolation(fakes.ENTRIES.train, fakes.ENTRIES.preload) as isolation:
        timer = threading.Timer(0.5, lambda: starts.append(other(Path(os.environ["COMPOSER_SPEEDUPS_PRESENCE"]))))
        starts: list[subprocess.Popen[str]] = []
        timer.start()
        assert isolation.run(payload).overlapped, "another one came while it ran"
        timer.join()
        starts[0].kill()
        starts[0].communicate()
        payload["recipe"]["seconds"] = 0.0
        assert not isolation.run(payload).overlapped
