"""Building C kernels, and trying each before it is used."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest

from composer_speedups import kernels
from composer_speedups.kernels import native
from composer_speedups.kernels.native import _FLAGS, _TRIES, _version, load

CHECKED = sorted(
    path.stem for path in Path(kernels.__file__).parent.glob("*.py") if "\n@checked(" in path.read_text("utf-8")
)


def test_they_are_found() -> None:
    assert {"bias_gelu", "dropout_add_norm", "fast_dropout", "per_sequence", "rotary"} <= set(CHECKED)


def test_asked_for_first_in_a_dry_run_they_are_tried_on_numbers() -> None:
    """A tensor without numbers has the address 0. In a process of its own: what writes there ends it."""
    if load("fast_dropout") is None:
        pytest.skip("no C compiler on this machine")
    code = (
        "import importlib\n"
        "from torch._subclasses.fake_tensor import FakeTensorMode\n"
        f"for name in {CHECKED}:\n"
        "    module = importlib.import_module(f'composer_speedups.kernels.{name}')\n"
        "    with FakeTensorMode():\n"
        "        print(name, module.native(), flush=True)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    found = [line.split()[0] for line in done.stdout.splitlines() if "CDLL" in line]
    assert done.returncode == 0 and found == CHECKED, done.stdout + done.stderr


@pytest.mark.parametrize("name", ["bias_gelu", "dropout_add_norm", "fast_dropout", "per_sequence"])
@pytest.mark.skipif(platform.machine() != "x86_64" or not shutil.which("gcc"), reason="about GCC's code for x86 CPUs")
def test_choices_are_made_by_vectors_without_avx512_too(name: str) -> None:
    """Most consumers' CPUs have AVX2 alone. Where a loop's choice is a branch, it takes one element at a time."""
    source = Path(kernels.__file__).with_name(f"{name}.c")
    flags = [flag.replace("=native", "=haswell") for flag in _FLAGS]
    done = subprocess.run(
        ["gcc", *flags, "-fopenmp", "-S", "-o", "-", str(source)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"v(and|andn|blendv)ps\b.*%ymm", done.stdout)


@pytest.fixture
def kernels_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, of which nothing is kept in this process."""
    if load("fast_dropout") is None:
        pytest.skip("no C compiler on this machine")
    monkeypatch.setenv("COMPOSER_SPEEDUPS_CACHE", str(tmp_path))
    for cached in (load, _version):
        monkeypatch.setattr(native, cached.__name__, cache(cached.__wrapped__))
    return tmp_path / "kernels"


@pytest.mark.parametrize("left", [0.0, 0.5], ids=["empty", "half"])
def test_a_file_that_was_cut_off_is_built_again_with_the_same_flags(
    left: float, kernels_in: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as only_built:  # what is loaded once is not read again
        only_built.setattr(native.ctypes, "CDLL", lambda path: SimpleNamespace(path=path))
        built = Path(native.load("fast_dropout").path)
    good = built.read_bytes()
    built.write_bytes(good[: int(left * len(good))])  # as a machine that lost power may leave it
    native.load.cache_clear()
    assert native.load("fast_dropout").threaded
    assert [built] == list(kernels_in.iterdir()) and len(built.read_bytes()) == len(good)


def test_another_compiler_of_the_same_name_builds_again(
    kernels_in: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = tmp_path / "cc"
    monkeypatch.setenv("CC", str(compiler))
    for release in (12, 13):
        compiler.write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo {release} || exec gcc "$@"\n')
        compiler.chmod(0o755)
        native.load.cache_clear()
        native._version.cache_clear()
        assert native.load("fast_dropout") is not None
        assert len(list(kernels_in.iterdir())) == release - 11


# How many bytes these move between a register and memory.
_BYTES = {"kmovb": 1, "kmovw": 2, "kmovd": 4, "kmovq": 8, "movb": 1, "movw": 2, "movl": 4, "movq": 8}
_BYTES |= {"movzbl": 1, "movzwl": 2, "movslq": 4}


def wider_than_written(assembly: str) -> list[str]:
    """Reads of a place in the stack of more than was last written to it, in the order of the text."""
    found, written = [], {}
    for line in assembly.splitlines():
        if re.match(r"[A-Za-z_][\w.]*:", line):  # another function
            written = {}
        move = re.fullmatch(r"\s+(\w+)\s+(?:.*, )?(\S+), (\S+)", line)
        if move is None:
            continue
        size, source, target = _BYTES.get(move[1], 64), move[2], move[3]  # 64: a vector at most
        if re.search(r"\((%rsp|%rbp)\)$", target):
            written[target] = size
        elif move[1] in _BYTES and source in written and size > written[source]:
            found.append(f"{line.strip()}, where {written[source]} bytes were written")
    return found


@pytest.mark.elsewhere  # GCC is the same with each
@pytest.mark.parametrize("source", sorted(Path(kernels.__file__).parent.glob("*.c")), ids=lambda source: source.stem)
@pytest.mark.skipif(platform.machine() != "x86_64" or not shutil.which("gcc"), reason="about GCC's code for x86 CPUs")
def test_nothing_is_read_back_wider_than_it_was_spilled(source: Path) -> None:
    """GCC 12 wrote 32 bits of a dropout mask and read 64: what the stack held decided, on CPUs with AMX alone."""
    flags = [flag.replace("=native", "=sapphirerapids") for flag in (*_FLAGS, *_TRIES[0])]
    done = subprocess.run(["gcc", *flags, "-S", "-o", "-", str(source)], capture_output=True, text=True, timeout=120)
    if "bad value" in done.stderr:
        pytest.skip("this GCC is older than the CPUs with AMX")
    assert done.returncode == 0 and not wider_than_written(done.stdout), done.stderr


def test_what_is_read_wider_is_found() -> None:
    assert not wider_than_written("f:\n\tkmovq\t%k3, 8(%rsp)\n\tmovq\t8(%rsp), %rax\n\tmovl\t8(%rsp), %eax")
    assert len(wider_than_written("f:\n\tkmovd\t%k3, 8(%rsp)\n\tmovq\t8(%rsp), %rax")) == 1
    assert not wider_than_written("f:\n\tkmovd\t%k3, 8(%rsp)\n\tvmovups\t%zmm1, 8(%rsp)\n\tmovq\t8(%rsp), %rax")
    assert not wider_than_written("f:\n\tkmovd\t%k3, 8(%rsp)\ng:\n\tmovq\t8(%rsp), %rax")
