"""Each in a process of its own: what Inductor was told, and which instructions it picked, stay in a process."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

from composer_speedups.compat import INDUCTOR_PRECOMPILES
from composer_speedups.inductor_cpp import _write, _write_header

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


def python(code: str, *arguments: str | Path, **environment: str) -> str:
    decided = ("TORCHINDUCTOR_VEC_ISA_OK", "TORCHINDUCTOR_CPP_WRAPPER")
    own = {name: value for name, value in os.environ.items() if name not in decided}
    full = own | {"TORCHINDUCTOR_COMPILE_THREADS": "1", "OMP_NUM_THREADS": "1"} | environment
    done = subprocess.run([sys.executable, "-c", code, *arguments], env=full, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def run(cache: Path, *compile: str, **environment: str) -> dict:
    return json.loads(python(SCRIPT, cache, *compile, **environment).splitlines()[-1])


def compiler(folder: Path, script: str, name: str = "g++") -> str:
    tool = folder / name
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    return str(tool)


@pytest.mark.parametrize("source", ["nothing", pytest.param("whole", marks=pytest.mark.slow)])
def test_fewer_probes_the_same_instructions_and_the_precompiled_header(tmp_path: Path, source: str) -> None:
    own = {"OWN_WAY": "1"}
    if source == "nothing":
        # Inductor's own probes compile PyTorch's headers, for each set of instructions anew. That the compiler knows
        # the instructions, and the CPU loads what it made, is seen with nothing to compile, too, in far less time.
        empty = 'for a; do shift; case $a in *.cpp) a=/dev/null;; esac; set -- "$@" "$a"; done'
        own["CXX"] = compiler(tmp_path, f'{empty}; exec {GXX} -x c++ "$@"', "empty_g++")
    probed = run(tmp_path / "own_way", **own)
    # `-H` names the files that a compilation reads; one that was precompiled is marked with "!".
    tool = compiler(tmp_path, f'exec {GXX} "$@" -H 2>>{tmp_path}/read')
    found = run(tmp_path / "spared", "compile", CXX=tool)
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
    # Nor does it precompile the header, which takes long and is of no interest here.
    tool = compiler(tmp_path, f'case "$*" in *-mavx*|*c++-header*) exit 1;; esac; exec {GXX} "$@"')
    found = run(tmp_path / "cache", CXX=tool)
    assert found["ok"] is None
    assert found["probes"] == 0 and "avx" not in found["isa"]  # Inductor's own probes did not compile


def test_what_the_user_says_counts(tmp_path: Path) -> None:
    # With a compiler that fails at once, as precompiling a header is of no interest here.
    assert run(tmp_path, TORCHINDUCTOR_VEC_ISA_OK="0", CXX="/bin/false")["ok"] is False


def test_nothing_is_left_of_a_compiler_that_fails(tmp_path: Path) -> None:
    target = tmp_path / "header.h.gch"

    def sh(script: str) -> None:
        _write(["/bin/sh", "-c", script], target)  # and two arguments more: -o, which is $0, and a file's name

    for script in ("echo half > $1; exit 1", "exit 0"):
        sh(script)
        assert not list(tmp_path.iterdir())
    _write([str(tmp_path / "no compiler")], target)
    assert not list(tmp_path.iterdir())
    killed, another = (tmp_path / f"header.h.gch.{name}" for name in ("killed", "another"))
    for path in (killed, another):
        path.touch()
    os.utime(killed, (0, time.time() - 3600))
    sh("echo whole > $1")
    assert target.read_text() == "whole\n"
    assert {*tmp_path.iterdir()} == {target, another}, "what is new may be another process's"


SLOW_COMPILER = """
import os, sys, threading, time
from pathlib import Path
from composer_speedups.inductor_cpp import _write
folder = Path(sys.argv[1])
command = ["/bin/sh", "-c", f"touch {folder}/begun; {sys.argv[2]}"]
thread = threading.Thread(target=_write, args=(command, folder / "header.gch"), daemon=True)
thread.start()
while not (folder / "begun").exists():
    time.sleep(0.01)
"""


def test_a_fork_leaves_the_compiler_alone(tmp_path: Path) -> None:
    code = SLOW_COMPILER + """
child = os.fork()
if not child:
    sys.exit(0)
thread.join(10)
print(os.waitpid(child, 0)[1], (folder / "header.gch").read_text())
"""  # fmt: skip
    assert python(code, tmp_path, "sleep 1; echo whole > $1", PYTHONWARNINGS="") == "0 whole\n\n"


def test_a_process_that_ends_takes_all_of_the_compiler_with_it(tmp_path: Path) -> None:
    proper = f"{tmp_path}/proper"  # as g++ starts cc1plus
    os.symlink(shutil.which("sleep"), proper)
    python(SLOW_COMPILER, tmp_path, f"echo half > $1; {proper} 60; echo whole > $1")
    deadline = time.monotonic() + 10
    while any(proper in _command(p) for p in psutil.process_iter()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert {path.name for path in tmp_path.iterdir()} == {"begun", "proper"}


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:  # it has ended meanwhile, or is waited for
        return []


def test_each_environment_has_a_header_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """GCC would take one that was made from another PyTorch's or Python's files."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))

    def write(words: tuple[str, ...] = ("g++", "-O3")) -> Path:
        return _write_header("#include <Python.h>\n", [*words])

    headers = [write(), write(("g++", "-O2"))]
    for module, name in ((torch.version, "git_version"), (sys, "version")):
        with monkeypatch.context() as changed:
            changed.setattr(module, name, "another")
            headers.append(write())
    assert write() == headers[0] and len({*headers}) == 4
    assert {path.read_text() for path in headers} == {"#include <Python.h>\n"}


BLOCKS = """
import json, sys
import torch
from composer_speedups import apply_torch_compile
from composer_speedups.compilation import prepare_inductor, use_cache

class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.norm = torch.nn.Linear(64, 64), torch.nn.LayerNorm(64)

    def forward(self, x):
        return self.norm(x + torch.nn.functional.gelu(self.inner(x)).softmax(-1))

torch.manual_seed(0)
model = torch.nn.Sequential(*(Block() for _ in range(3)))
exact = torch.nn.Sequential(*(Block() for _ in range(3))).double()
exact.load_state_dict(model.state_dict())
use_cache(sys.argv[1])
options = prepare_inductor(block=True)["options"]
apply_torch_compile(model, scope="block")  # while the header that is asked for above is being made
x = torch.randn(8, 64, requires_grad=True)  # as for all blocks but the first otherwise: one graph for all
results = []
for which, inputs in ((model, x), (exact, x.double())):
    outputs = which(inputs)
    outputs.pow(3).sum().backward()
    results.append([outputs.detach(), *(p.grad for p in which.parameters())])
differ = max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(*results))
print(json.dumps({"options": options, "differ": differ}))
"""


def test_on_few_cores_a_graph_of_a_block_is_one_file_with_one_precompiled_header(tmp_path: Path) -> None:
    tool = compiler(tmp_path, f'exec {GXX} "$@" -H 2>>{tmp_path}/read')
    found = json.loads(python(BLOCKS, tmp_path / "cache", CXX=tool).splitlines()[-1])
    assert found["options"]["cpp_wrapper"] is True
    assert found["differ"] < 1e-5  # float32 against float64, sums of 64 and 512
    assert len(list((tmp_path / "cache").glob("*/*.so"))) == 2  # forward and backward
    (header,) = (tmp_path / "cache").glob("*/*.gch")
    read = (tmp_path / "read").read_text().splitlines()
    assert read.count(f"! {header}") == 2, "both graphs waited for it"
    assert not any(line.endswith("cpp_wrapper/cpu.h") for line in read[read.index(f"! {header}") :])


def test_when_and_with_which_header_graphs_are_one_file(tmp_path: Path) -> None:
    code = """
import os, sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch
from composer_speedups.compilation import use_cache
from composer_speedups.inductor_cpp import _INCLUDES, one_file_per_graph
from torch._inductor import config, cpp_builder
from torch._inductor.codegen.cpp_wrapper_cpu import CppWrapperCpu
from torch._inductor.virtualized import V

def included(device="cpu", aot_mode=False):
    with V.set_graph_handler(SimpleNamespace(aot_mode=aot_mode)):
        return getattr(CppWrapperCpu, next(name for name in _INCLUDES if hasattr(CppWrapperCpu, name)))(device)

own = [included(), included("cuda"), included(aot_mode=True)]
headers = []
for folder in sys.argv[1:]:
    use_cache(folder)
    assert one_file_per_graph()["cpp_wrapper"]
    first, ours, otherwise, last, end = included().splitlines()
    headers.append(Path(ours.removeprefix('#include "').removesuffix('"')))
    assert headers[-1].is_relative_to(folder) and own[0] in headers[-1].read_text()
    # A graph out of a cache may be compiled where that header is not.
    assert (first, otherwise, last, end) == (f'#if __has_include("{headers[-1]}")', "#else", own[0], "#endif")
    assert [included("cuda"), included(aot_mode=True)] == own[1:]
assert headers[0] != headers[1]

for said in "01":
    with patch.dict(os.environ, TORCHINDUCTOR_CPP_WRAPPER=said):
        assert one_file_per_graph() == {}
for changes in ({"cpp_wrapper": True}, {"compile_threads": 4}):
    with config.patch(changes):
        assert one_file_per_graph() == {}
for name in ("clang++", "nothing"):
    cpp_builder.is_gcc.cache_clear()
    with config.patch({"cpp.cxx": (None, name)}):
        assert one_file_per_graph() == {}
"""
    compiler(tmp_path, f'exec {GXX} "$@"', "clang++")
    # No header is precompiled: that takes long, and is of no interest here.
    tool = compiler(tmp_path, f'case "$*" in *c++-header*) exit 1;; esac; exec {GXX} "$@"')
    path = f"{tmp_path}:{os.environ['PATH']}"
    assert python(code, tmp_path / "one", tmp_path / "two", CXX=tool, PATH=path) == ""


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
