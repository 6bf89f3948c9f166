"""`benchmarks/gpu.py`: its parts share the time, and what was done is kept and brought back whatever ends it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tarfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from benchmarked import ROOT

from benchmarks import gpu, peers
from composer_speedups.hardware import suite_section
from composer_speedups.recipes import Recipe, load_recipe


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


def test_growth_ends_with_its_time_and_packs_each_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def interleaved(entries: Any, folder: Path, *, batches: int, deadline: float, after_each: Any, **_: Any) -> None:
        after_each()
        asked.append((len(entries), folder.name, batches, deadline - gpu.time.monotonic()))

    (tmp_path / "out").mkdir()
    monkeypatch.setenv("OUT", str(tmp_path / "out"))
    monkeypatch.setattr(gpu.growth, "interleaved", interleaved)
    for section in ("cpu", "cuda"):
        monkeypatch.setattr(gpu.growth, "suite_section", lambda section=section: section)
        out = tmp_path / section
        assert gpu.main(["--parts", "growth", "--minutes", "2", "--batches", "150", "--out", str(out)]) == 0
        assert (tmp_path / "out" / f"{section}.tgz").exists()
    assert [found[:3] for found in asked] == [(28, "growth", 20)] * 2
    assert all(85 < left <= 90 for *_, left in asked)


def test_each_part_about_quality_trains_what_it_is_called_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trained: dict[str, list[Recipe]] = {}

    def measure(folder: Path, _: float, objective: str, **own: tuple[str, ...]) -> bool:
        changes = own.pop("changes", ())
        values = [*gpu.gpu_quality._learning(objective, **own), *changes]
        made = [load_recipe(name, values, check_arguments=False) for name in gpu.gpu_quality.OBJECTIVES[objective]]
        assert made[0].name.partition("/")[0] == made[1].name.partition("/")[0]
        assert (made[0].model, made[0].task, made[0].duration) == (made[1].model, made[1].task, made[1].duration)
        trained[folder.name] = made
        return folder.name == "quality"

    monkeypatch.delenv("OUT", raising=False)
    monkeypatch.setattr(gpu, "hardware", lambda: "cuda")
    monkeypatch.setattr(gpu.gpu_quality, "measure", measure)
    monkeypatch.setattr(gpu.gpu_quality, "table", lambda folder: f"the table of {folder.name}")
    model = tmp_path / "minilm"
    parts = ["--parts", "quality", "quality_mlm", "quality_pretrained"]
    for words, said in (([], "need each other"), (["--model", str(model)], f"{model}: no config.json is there")):
        with pytest.raises(SystemExit):
            gpu.main([*parts, *words, "--out", str(tmp_path / "out")])
        assert said in capsys.readouterr().err
    model.mkdir()
    (model / "config.json").touch()
    assert gpu.main([*parts, "--model", str(model), "--out", str(tmp_path / "out")]) == 1
    printed = capsys.readouterr().out
    assert "FAILED: quality_mlm, quality_pretrained" in printed
    assert {f"the table of {part}" for part in trained} <= set(printed.splitlines())
    names = {part: made[1].name for part, made in trained.items()}
    assert names == dict(zip(parts[1:], ("finetune/fastest", "mlm/fastest", "finetune/fastest"), strict=True))
    how = {part: [(one.batch_size, one.learning_rate, one.duration) for one in made] for part, made in trained.items()}
    assert how["quality"] == how["quality_mlm"] == [(32, 7e-4, "3ep")] * 2
    assert how["quality_pretrained"] == [(40, 1e-4, "2ep"), (64, 1.6e-4, "2ep")], "each recipe's own"
    of, task = trained["quality_pretrained"][1].model, trained["quality_pretrained"][1].task
    assert (of.name, of.pretrained, dict(of.config)) == (str(model), True, {})
    assert (task.name, task.train_samples, task.max_length) == ("docstrings", 8000, 256)
    assert trained["quality_mlm"][1].task.objective == "mlm" and not trained["quality_mlm"][1].model.pretrained


def test_what_is_for_a_gpu_is_refused_without_one(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for part in ("launches", "quality", "quality_mlm"):
        with pytest.raises(SystemExit):
            gpu.main(["--parts", part, "--out", str(tmp_path)])
        assert f"{part} is for a GPU, and there is none: leave it out of --parts" in capsys.readouterr().err


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
@pytest.mark.elsewhere
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


@pytest.mark.elsewhere
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
