from __future__ import annotations

import subprocess
import sys

import pytest

from composer_speedups.isolation import worker

PROBE = """
import os
from composer_speedups.isolation import worker
if {quiet}:
    os.environ.update(worker._WHILE_IMPORTING)
import pyarrow
print(worker.unsafe_to_fork())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="runs are forks on Linux only")
@pytest.mark.parametrize("quiet", [True, False])
def test_pyarrow_has_no_thread_where_runs_are_forks(quiet: bool) -> None:
    """pandas 3 imports it, and much imports pandas: each run would wait for an interpreter to import everything."""
    done = subprocess.run([sys.executable, "-c", PROBE.format(quiet=quiet)], capture_output=True, text=True, check=True)
    assert ("jemalloc_bg_thd" in done.stdout) != quiet, done.stdout
    assert not quiet or not done.stdout.strip(), done.stdout
    assert "JE_ARROW_MALLOC_CONF" in worker._WHILE_IMPORTING
