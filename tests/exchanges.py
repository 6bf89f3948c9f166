"""What `exchange_worker.py` finds on two ranks; pytest's workers share one pair of processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from test_ranks import environment

__all__ = ["RANKS", "exchange"]

RANKS = 2


def exchange(tmp_path_factory) -> dict[str, Any]:
    """By the try's name: what each rank found, or the error's text."""
    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "exchanged"
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            folder.mkdir()
            words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
            with open(folder / "log", "w") as log:
                command = [*words, str(Path(__file__).parent / "exchange_worker.py"), str(folder)]
                subprocess.run(command, env=environment(), stdout=log, stderr=log, timeout=300)
    assert (folder / "results.pt").exists(), (folder / "log").read_text()[-3000:]
    return torch.load(folder / "results.pt")
