"""Triton kernels without a GPU: the files `interpreted_*.py`, each folder's in a process of its own.

Once in Triton's interpreter, which runs what a kernel says, and once as its compiler translates it for a kind of GPU,
in an emulator of that code (`emulated.py`): with a GPU's layouts, barriers and approximate instructions, and no access
outside of a tensor. `TRITON_INTERPRET` counts when Triton's kernels are defined, so it cannot be set in a process where
another test may have imported them already. One process for a folder: it takes as long to start as most of these files.
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
FOLDERS = sorted({file.parent.name for file in FILES})
# A100 and H100; the others are those of a T4, of consumer cards (RTX 3090, 4090, 5090), and a B200.
CAPABILITIES = [80, 90, *(pytest.param(c, marks=pytest.mark.slow) for c in (75, 86, 89, 100, 120))]
# The emulator has those of the others (`tensor_cores.py`). Attention asks for 8.0 or newer.
_OTHER_TENSOR_CORES = (75, 100)


@pytest.mark.parametrize("folder", FOLDERS)
def test_in_the_interpreter(folder: str) -> None:
    run(folder, "-k", "not planted", TRITON_INTERPRET="1")  # those faults are planted into what is compiled


@pytest.mark.parametrize("folder", FOLDERS)
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_as_compiled_for_a_gpu(capability: int, folder: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    newest = Version(triton.__version__) >= Version("3.6")
    if capability == (80 if newest else 90) and request.config.option.markexpr == "not slow":
        pytest.skip(f"sm_{capability} with the {'pinned' if newest else 'modern'} stack, or in make test-all")
    left_out = "attention" if capability in _OTHER_TENSOR_CORES else None
    run(folder, "-p", "emulated", without=left_out, EMULATED=str(capability), TRITON_CACHE_DIR=str(tmp_path))


def test_rows_loaded_ahead_are_the_same(tmp_path: Path) -> None:
    """Copies to shared memory while a row is computed, as `benchmarks/launches.py` tries them."""
    some = ("-k", "rows and not planted")
    run("kernels", *some, "-p", "emulated", EMULATED="90", STAGES="3", TRITON_CACHE_DIR=str(tmp_path))


def run(folder: str, *options: str, without: str | None = None, **variables: str) -> None:
    """`without`: what the names of files left out have in them."""
    files = [str(file) for file in FILES if file.parent.name == folder]
    files = [file for file in files if without is None or without not in Path(file).name]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent)])}
    command = [sys.executable, "-m", "pytest", "-p", "no:xdist", "-v", *options, *files]
    done = subprocess.run(command, env=environment | variables, cwd=TESTS.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert not re.search(r"\d+ skipped", done.stdout), done.stdout[-500:]
    for file in files:
        assert Path(file).name in done.stdout, f"{file} has no test"
