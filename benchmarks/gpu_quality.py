"""Does `finetune/fastest` learn on a GPU what `finetune/fp32` does? Whole trainings of a small BERT, ten seeds of both.

Several studies run side by side, each of some of the seeds, as a small model leaves most of a GPU idle: the speeds that
they tell are nobody's. Model, texts, batch, learning rate and length are those of the studies of `cpu/fastest`; but the
texts are collected from what is installed, so that trainings elsewhere are no baseline for these (`quality.py`).
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from benchmarks.quality import compare
from composer_speedups.errors import UserError

__all__ = ["FIRST", "measure", "table"]

FIRST = 300  # of ten seeds
_SEEDS = 10
_STUDIES = 5  # at a time
_RECIPES = ("finetune/fp32", "finetune/fastest")
_CHANGES = (
    "task={name: docstrings, max_length: 256, train_samples: 8000, eval_samples: 2000}",
    "model.pretrained=false",
    "model.config={hidden_size: 256, intermediate_size: 1024, num_attention_heads: 4, num_hidden_layers: 4}",
    "batch_size=32",
    "learning_rate=7e-4",
    "schedule.warmup=0.3dur",
    "duration=3ep",
)
_ROOT = Path(__file__).parents[1]


def measure(folder: Path, deadline: float, changes: tuple[str, ...] = ()) -> bool:
    """Train until `deadline` (`time.monotonic`) at most, into `folder`; whether every study came to its end."""
    folder.mkdir(parents=True, exist_ok=True)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [str(_ROOT), os.getenv("PYTHONPATH")]))}
    studies: list[subprocess.Popen[bytes]] = []
    each = _SEEDS // _STUDIES
    try:
        for first in range(FIRST, FIRST + _SEEDS, each):
            command = [sys.executable, "-m", "composer_speedups", "ablate", *_RECIPES, *_CHANGES, *changes]
            command += [f"seed={first}", "--seeds", str(each), "--no-profile", "--out", str(folder / f"seeds_{first}")]
            with (folder / f"seeds_{first}.txt").open("wb") as log:
                studies.append(subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT))
        for study in studies:
            with suppress(subprocess.TimeoutExpired):
                study.wait(max(0.0, deadline - time.monotonic()))
    finally:
        for study in studies:  # a study that is told to end keeps what it has
            study.terminate()
        for study in studies:
            study.wait()
    return not any(study.returncode for study in studies)


def table(folder: Path) -> str:
    """The verdict on all seeds that both recipes were trained with."""
    folders = sorted(path.parent for path in folder.glob("seeds_*/runs.sqlite"))
    if not folders:
        raise UserError(f"{folder} has no study: see what they said in {folder}/seeds_*.txt")
    return compare(folders, folders)
