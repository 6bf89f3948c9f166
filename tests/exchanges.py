"""What a worker finds on two ranks; pytest's workers share one pair of processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from filelock import FileLock
from test_ranks import environment

__all__ = ["RANKS", "worked"]

RANKS = 2


def worked(tmp_path_factory, worker: str) -> Path:
    """The folder in which `worker`, a file of this one's folder, has left its `results.pt`."""
    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / Path(worker).stem
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            folder.mkdir()
            words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
            with open(folder / "log", "w") as log:
                command = [*words, str(Path(__file__).parent / worker), str(folder)]
                subprocess.run(command, env=environment() | {"NODE_RANK": "0"}, stdout=log, stderr=log, timeout=300)
    assert (folder / "results.pt").exists(), (folder / "log").read_text()[-3000:]
    return folder
