"""What a container may take, from the files of both versions of control groups."""

from __future__ import annotations

from pathlib import Path

import pytest

from composer_speedups import cgroup

V2 = {
    "memory.max": "1000\n",
    "memory.current": "700\n",
    "memory.stat": "anon 400\ninactive_file 250\ntotal_inactive_file 9\n",
    "memory.events": "low 0\noom 3\noom_kill 2\noom_group_kill 0\n",
}
V1 = {
    "memory.limit_in_bytes": "1000\n",
    "memory.usage_in_bytes": "700\n",
    "memory.stat": "inactive_file 9\ntotal_inactive_file 250\n",
    "memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n",
}


def read(files: dict[str, str], version: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    for place in (1, 2):
        monkeypatch.setattr(cgroup, f"_V{place}", tmp_path if place == version else tmp_path / "nowhere")
    return cgroup.memory_limit(), cgroup.memory_used(), cgroup.oom_kills()


@pytest.mark.parametrize(("version", "files"), [(1, V1), (2, V2)])
def test_both_versions(version: int, files: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert read(files, version, tmp_path, monkeypatch) == (1000, 450, 2)


def test_no_limit_and_no_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert read(V2 | {"memory.max": "max\n"}, 2, tmp_path, monkeypatch) == (None, 450, 2)
    assert read({}, 3, tmp_path, monkeypatch) == (None, None, None)
    odd = {"memory.events": "\nodd\noom_kill\n", "memory.max": "", "memory.current": "x"}
    assert read(odd, 2, tmp_path, monkeypatch) == (None, None, None)


def test_throttling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "cpu").mkdir()
    monkeypatch.setattr(cgroup, "_V1", tmp_path / "memory")
    monkeypatch.setattr(cgroup, "_V2", tmp_path)
    assert cgroup.throttled_seconds() == 0
    (tmp_path / "cpu" / "cpu.stat").write_text("nr_throttled 4\nthrottled_time 2500000000\n")
    assert cgroup.throttled_seconds() == 2.5
    (tmp_path / "cpu.stat").write_text("usage_usec 9\nthrottled_usec 1500000\n")
    assert cgroup.throttled_seconds() == 1.5
