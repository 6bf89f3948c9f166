"""Triton kernels without a GPU: a file of tests in a process of its own, in Triton's interpreter.

`TRITON_INTERPRET` counts when Triton's kernels are defined, so it cannot be set in a process where another test may
have imported them already.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

__all__ = ["check_in_the_interpreter"]

ROOT = Path(__file__).parents[1]


def check_in_the_interpreter(file: Path) -> None:
    """All tests in `file` run and pass; none is skipped."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-p", "no:xdist", str(file)]
    run = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-2000:]
    assert not re.search(r"\d+ skipped", run.stdout), run.stdout[-500:]
