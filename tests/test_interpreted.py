"""Triton kernels without a GPU: the files `interpreted_*.py`, each folder's in one process, in Triton's interpreter.

`TRITON_INTERPRET` counts when Triton's kernels are defined, so it cannot be set in a process where another test may
have imported them already. One process for a folder: starting one takes as long as most of these files.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
FILES = sorted(TESTS.glob("*/interpreted_*.py"))


@pytest.mark.parametrize("folder", sorted({file.parent.name for file in FILES}))
def test_in_the_interpreter(folder: str) -> None:
    files = [str(file) for file in FILES if file.parent.name == folder]
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-p", "no:xdist", "-v", *files]
    run = subprocess.run(command, env=environment, cwd=TESTS.parent, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-2000:]
    assert not re.search(r"\d+ skipped", run.stdout), run.stdout[-500:]
    for file in files:
        assert Path(file).name in run.stdout, f"{file} has no test"
