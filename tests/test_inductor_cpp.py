"""Each in a process of its own: what Inductor was told, and which instructions it picked, stay in a process."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from composer_speedups.compat import INDUCTOR_PRECOMPILES
from composer_speedups.inductor_cpp import _write

GXX = shutil.which("g++")
pytestmark = pytest.mark.skipif(
    not GXX or torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"),
    reason="no g++, or a CPU without AVX2",
)

SCRIPT = """
import json, os, subprocess, sys
import torch
from composer_speedups import inductor_cpp
from composer_speedups.compilation import use_cache

started, popen = [], subprocess.Popen.__init__
def record(self, args, *rest, **more):
    started.append(args if isinstance(args, str) else " ".join(map(str, args)))
    popen(self, args, *rest, **more)
subprocess.Popen.__init__ = record

use_cache(sys.argv[1])
if "OWN_WAY" in os.environ:
    inductor_cpp.prepare = lambda: None
thread = inductor_cpp.prepare()
if thread is not None:
    thread.join()
if len(sys.argv) > 2:
    x = torch.randn(8, 64)
    torch.testing.assert_close(torch.compile(torch.nn.GELU())(x), torch.nn.functional.gelu(x))
from torch._inductor import config, cpu_vec_isa
print(json.dumps({
    "ok": config.cpp.vec_isa_ok, "isa": str(cpu_vec_isa.pick_vec_isa()), "thread": thread is not None,
    "again": inductor_cpp.prepare() is not None,
    "probes": sum("cdll.LoadLibrary" in line for line in started),
}))
"""


def run(cache: Path, *compile: str, **environment: str) -> dict:
    own = {name: value for name, value in os.environ.items() if name != "TORCHINDUCTOR_VEC_ISA_OK"}
    full = own | {"TORCHINDUCTOR_COMPILE_THREADS": "1", "OMP_NUM_THREADS": "1"} | environment
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(cache), *compile], env=full, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("source", ["nothing", pytest.param("whole", marks=pytest.mark.slow)])
def test_fewer_probes_the_same_instructions_and_the_precompiled_header(tmp_path: Path, source: str) -> None:
    own = {"OWN_WAY": "1"}
    if source == "nothing":
        # Inductor's own probes compile PyTorch's headers, for each set of instructions anew. That the compiler knows
        # the instructions, and the CPU loads what it made, is seen with nothing to compile, too, in far less time.
        own["CXX"] = str(tmp_path / "empty_g++")
        empty = 'for a; do shift; case $a in *.cpp) a=/dev/null;; esac; set -- "$@" "$a"; done'
        Path(own["CXX"]).write_text(f'#!/bin/sh\n{empty}\nexec {GXX} -x c++ "$@"\n')
        Path(own["CXX"]).chmod(0o755)
    probed = run(tmp_path / "own_way", **own)
    # `-H` names the files that a compilation reads; one that was precompiled is marked with "!".
    tool = tmp_path / "g++"
    tool.write_text(f'#!/bin/sh\nexec {GXX} "$@" -H 2>>{tmp_path}/read\n')
    tool.chmod(0o755)
    found = run(tmp_path / "spared", "compile", CXX=str(tool))
    assert (probed["ok"], found["ok"]) == (None, True)
    assert found["isa"] == probed["isa"]
    assert found["probes"] == 0 < probed["probes"]
    assert found["thread"] != INDUCTOR_PRECOMPILES
    assert not found["again"]
    if not INDUCTOR_PRECOMPILES:  # torch 2.8 and later do it themselves, and in their own place
        (header,) = (tmp_path / "spared").glob("*/*.gch")
        assert header.stat().st_mode & 0o777 == 0o666 & ~_umask()
        assert f"! {header}" in (tmp_path / "read").read_text().splitlines()
        assert not list((tmp_path / "spared").glob("*/*.gch.*"))


def test_a_compiler_without_the_instructions_is_probed(tmp_path: Path) -> None:
    tool = tmp_path / "g++"
    # Nor does it precompile the header, which takes long and is of no interest here.
    tool.write_text(f'#!/bin/sh\ncase "$*" in *-mavx*|*c++-header*) exit 1;; esac\nexec {GXX} "$@"\n')
    tool.chmod(0o755)
    found = run(tmp_path / "cache", CXX=str(tool))
    assert found["ok"] is None
    assert found["probes"] == 0 and "avx" not in found["isa"]  # Inductor's own probes did not compile


def test_what_the_user_says_counts(tmp_path: Path) -> None:
    # With a compiler that fails at once, as precompiling a header is of no interest here.
    assert run(tmp_path, TORCHINDUCTOR_VEC_ISA_OK="0", CXX="/bin/false")["ok"] is False


def test_nothing_is_left_of_a_compiler_that_fails(tmp_path: Path) -> None:
    target = tmp_path / "header.h.gch"
    for script in ("echo half > {part}; exit 1", "exit 0"):
        _write(["/bin/sh", "-c", script.format(part=f"{target}.{os.getpid()}")], target)
        assert not list(tmp_path.iterdir())
    _write([str(tmp_path / "no compiler")], target)
    assert not list(tmp_path.iterdir())
    _write(["/bin/sh", "-c", f"echo whole > {target}.{os.getpid()}"], target)
    assert target.read_text() == "whole\n"


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
