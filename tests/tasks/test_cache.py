from __future__ import annotations

import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from small_disk import small_disk

from composer_speedups.errors import TaskError, UserError
from composer_speedups.tasks import wordpiece
from composer_speedups.tasks.cache import cached
from composer_speedups.tasks.data import TokenDataset
from composer_speedups.tasks.texts import Texts


class Builder:
    """Writes two files, and counts how often it is asked to."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, folder: Path) -> None:
        self.calls += 1
        (folder / "a.bin").write_bytes(bytes(range(256)) * 40)
        (folder / "part").mkdir()
        (folder / "part" / "b.txt").write_text("text")


def truncate(folder: Path) -> None:
    with (folder / "a.bin").open("r+b") as stream:
        stream.truncate(100)


def flip_a_bit(folder: Path) -> None:
    data = bytearray((folder / "a.bin").read_bytes())
    data[5000] ^= 1
    (folder / "a.bin").write_bytes(data)


def test_builds_once_for_each_key(cache: Path):
    build = Builder()
    first = cached("x", {"n": 1}, build)
    assert cached("x", {"n": 1}, build) == first and build.calls == 1
    assert cached("x", {"n": 2}, build) != first and build.calls == 2
    assert first.is_relative_to(cache)
    assert (first / "part" / "b.txt").read_text() == "text"


@pytest.mark.parametrize(
    "damage",
    [
        truncate,
        flip_a_bit,
        lambda folder: (folder / "part" / "b.txt").unlink(),
        lambda folder: (folder / "manifest.json").write_text("{"),
        lambda folder: (folder / "manifest.json").write_text("[]"),
        lambda folder: (folder / "manifest.json").unlink(),
    ],
    ids=["truncated", "bit flipped", "file missing", "manifest cut", "manifest of another kind", "no manifest"],
)
def test_rebuilds_what_was_damaged(damage):
    build = Builder()
    folder = cached("x", {}, build)
    whole = (folder / "a.bin").read_bytes()
    damage(folder)
    assert cached("x", {}, build) == folder
    assert build.calls == 2
    assert (folder / "a.bin").read_bytes() == whole
    assert (folder / "part" / "b.txt").read_text() == "text"


def test_a_failed_build_leaves_nothing_behind(cache: Path):
    def fail(folder: Path) -> None:
        (folder / "half").write_text("half")
        raise RuntimeError("out of luck")

    with pytest.raises(RuntimeError, match="out of luck"):
        cached("x", {}, fail)
    assert [p for p in (cache / "x").iterdir() if p.is_dir()] == []
    build = Builder()
    cached("x", {}, build)
    assert build.calls == 1


def test_clears_what_a_killed_run_left(cache: Path):
    code = (
        "import os, signal; from composer_speedups.tasks.cache import cached\n"
        "def build(folder):\n"
        "    (folder / 'half').write_text('half'); os.kill(os.getpid(), signal.SIGKILL)\n"
        "cached('x', {}, build)"
    )
    done = subprocess.run([sys.executable, "-c", code])
    assert done.returncode == -9
    folder = cached("x", {}, Builder())
    assert sorted(p.name for p in folder.iterdir()) == ["a.bin", "manifest.json", "part"]
    assert [p for p in (cache / "x").iterdir() if p.is_dir()] == [folder]


def test_two_processes_at_once_build_once(tmp_path: Path):
    code = (
        "import sys, time; from pathlib import Path; from composer_speedups.tasks.cache import cached\n"
        "log = Path(sys.argv[1])\n"
        "def build(folder):\n"
        "    with log.open('a') as f: f.write('built\\n')\n"
        "    time.sleep(0.7); (folder / 'x').write_text('done')\n"
        "print((cached('x', {}, build, lambda line: None) / 'x').read_text())"
    )
    log = tmp_path / "log"
    command = [sys.executable, "-c", code, str(log)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    assert [p.communicate()[0].strip() for p in running] == ["done"] * 3
    assert log.read_text().splitlines() == ["built"]


def test_says_so_when_it_waits_for_another_process(cache: Path):
    from filelock import FileLock

    from composer_speedups.tasks.cache import digest

    (cache / "x").mkdir(parents=True)
    lock = FileLock(cache / "x" / f".{digest({})}.lock")
    lock.acquire()
    lines = []

    def say(line: str) -> None:
        lines.append(line)
        lock.release()

    cached("x", {}, Builder(), say)
    assert len(lines) == 1 and "waiting for another process" in lines[0]


def test_a_cache_folder_that_cannot_be_written_is_one_clear_error(monkeypatch, tmp_path: Path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("COMPOSER_SPEEDUPS_CACHE", str(tmp_path / "file" / "below"))
    with pytest.raises(TaskError, match="set COMPOSER_SPEEDUPS_CACHE"):
        cached("x", {}, Builder())


def test_a_user_whom_nobody_knows_is_told_what_to_set(monkeypatch) -> None:
    """Containers run with numbers that have no name, and no HOME."""

    def unknown() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for name in ("COMPOSER_SPEEDUPS_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", unknown)
    with pytest.raises(UserError, match="set HOME, or COMPOSER_SPEEDUPS_CACHE"):
        cached("x", {}, Builder())


@contextmanager
def full_disk(limit: int) -> Iterator[None]:
    """No file grows beyond `limit` bytes: what writes is told so as it is of a disk without room."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def save_texts(folder: Path) -> None:
    Texts(["text " * 1000] * 10, [0] * 10, ["text"], [0], ["a"]).save(folder)


def save_tokens(folder: Path) -> None:
    TokenDataset.of([[1, 2, 3] * 3000], [0]).save(folder)


def save_tokenizer(folder: Path) -> None:
    wordpiece.train([f"word{i} of many" for i in range(300)], 1000, folder)


@pytest.mark.parametrize("build", [save_texts, save_tokens, save_tokenizer])
def test_a_full_disk_is_told_of_the_cache(build, cache: Path):
    """Python names no file, numpy no number, and tokenizers raises a bare Exception."""
    with full_disk(4000), pytest.raises(TaskError, match=r"cache folder .* cannot be written \(.*\): set") as error:
        cached("x", {}, build)
    assert "\n" not in str(error.value) and str(cache) in str(error.value)
    assert [p for p in (cache / "x").iterdir() if p.is_dir()] == []
    assert cached("x", {}, build).is_dir(), "with room it goes on"


@pytest.mark.parametrize("build", [save_texts, save_tokens, save_tokenizer])
def test_a_disk_that_is_really_full(build, tmp_path: Path, monkeypatch):
    with small_disk(tmp_path / "disk", "8k") as disk:
        monkeypatch.setenv("COMPOSER_SPEEDUPS_CACHE", str(disk / "cache"))
        with pytest.raises(TaskError, match=r"cannot be written \(.*\): set COMPOSER_SPEEDUPS_CACHE"):
            cached("x", {}, build)


def test_what_else_goes_wrong_is_not_said_of_the_cache():
    def fail(folder: Path) -> None:
        open(folder.parent / "of another")  # noqa: SIM115

    with pytest.raises(FileNotFoundError):
        cached("x", {}, fail)


def test_a_home_that_nobody_has(monkeypatch):
    monkeypatch.setenv("COMPOSER_SPEEDUPS_CACHE", "~nosuchuser/cache")
    with pytest.raises(UserError, match="'~nosuchuser/cache', a home that nobody has: set it to a folder"):
        cached("x", {}, Builder())
