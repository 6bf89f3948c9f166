"""Triton kernels without a GPU: the files `interpreted_*.py`, some of them in each process.

Once in Triton's interpreter, which runs what a kernel says, and once as its compiler translates it for a kind of GPU,
in an emulator of that code (`emulated.py`): with a GPU's layouts, barriers and approximate instructions, and no access
outside of a tensor. `TRITON_INTERPRET` counts when Triton's kernels are defined, so it cannot be set in a process where
another test may have imported them already. A process takes as long to start as most of these files: `GROUPS` are as
many as the suite's workers can share, and none takes half of the time that a test may take, also on a slow machine.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import triton
from packaging.version import Version

TESTS = Path(__file__).parent
FILES = sorted(TESTS.glob("*/interpreted_*.py"))
# Of the emulator attention asks for tensor cores.
GROUPS = {name: [file for file in FILES if file.match(f"kernels/*{name}*")] for name in ("attention", "norm")}
GROUPS["others"] = [file for file in FILES if all(file not in group for group in GROUPS.values())]
# A100 and H100; the others are those of a T4, of consumer cards (RTX 3090, 4090, 5090), and a B200.
CAPABILITIES = [80, 90, *(pytest.param(c, marks=pytest.mark.slow) for c in (75, 86, 89, 100, 120))]
NEWER, NEWEST = (Version(triton.__version__) >= Version(first) for first in ("3.6", "3.8"))  # than the pinned stack
# The emulator has those of the others (`tensor_cores.py`). Attention asks for 8.0 or newer.
_OTHER_TENSOR_CORES = (75, 100)


def test_every_file_is_in_one_group() -> None:
    assert sorted(file for files in GROUPS.values() for file in files) == FILES and all(GROUPS.values())


@pytest.mark.elsewhere  # it runs Python, the same with each Triton
@pytest.mark.parametrize("group", GROUPS)
def test_in_the_interpreter(group: str) -> None:
    # Those faults are planted into what is compiled, which takes a third of the interpreter's time for a wide row.
    run(group, "-k", "not planted and not widest", TRITON_INTERPRET="1")


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_as_compiled_for_a_gpu(capability: int, group: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    # A minute and more each: one of the two with each stack, but attention on the pinned one, which is to be quick.
    mine = 90 if NEWER and not NEWEST else 80
    other = capability in (80, 90) and (capability != mine or (group == "attention" and not NEWER))
    if other and request.config.option.markexpr == "not slow":
        pytest.skip(f"sm_{capability} of {group} with another stack, or in make test-all")
    if group == "attention" and capability in _OTHER_TENSOR_CORES:
        pytest.skip(f"the emulator has no tensor cores of sm_{capability}")
    # Whether faults in what was compiled are found is asked on the newer stacks, as the pinned one is to be quick.
    some = ("-k", "not planted") if not NEWER and request.config.option.markexpr == "not slow" else ()
    run(group, "-p", "emulated", *some, EMULATED=str(capability), TRITON_CACHE_DIR=str(tmp_path))


@pytest.mark.elsewhere
def test_rows_loaded_ahead_are_the_same(tmp_path: Path) -> None:
    """Copies to shared memory while a row is computed, as `benchmarks/launches.py` tries them."""
    some = ("-k", "rows and not planted")
    run("norm", *some, "-p", "emulated", EMULATED="90", STAGES="3", TRITON_CACHE_DIR=str(tmp_path))


def run(group: str, *options: str, **variables: str) -> None:
    files = GROUPS[group]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent)])}
    command = [sys.executable, "-m", "pytest", "-p", "no:xdist", "-v", *options, *map(str, files)]
    done = subprocess.run(command, env=environment | variables, cwd=TESTS.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert not re.search(r"\d+ skipped", done.stdout), done.stdout[-500:]
    for file in files:
        assert file.name in done.stdout, f"{file} has no test"
