"""Do `finetune/fastest` and `mlm/fastest` learn on a GPU what true fp32 does? Ten whole trainings each of a small BERT.

Several studies run side by side, each of some of the seeds, as a small model leaves most of a GPU idle: the speeds that
they tell are nobody's. Model, texts, batch, learning rate and length are those of the studies of `cpu/fastest`; but the
texts are collected from what is installed, so that trainings elsewhere are no baseline for these (`quality.py`).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from benchmarks.quality import compare
from composer_speedups.errors import UserError
from composer_speedups.recipes import load_recipe

__all__ = ["FIRST", "OBJECTIVES", "measure", "pretrained", "table"]

FIRST = 700  # of ten seeds, to be looked at when all have ended: 300 to 309 were looked at, and the result is known
_SEEDS = 10
_STUDIES = 5  # at a time
OBJECTIVES = {"classification": ("finetune/fp32", "finetune/fastest"), "mlm": ("mlm/fp32", "mlm/fastest")}
_AS = "cpu/fp32"  # what is learnt, and how
_HOW = ("batch_size", "learning_rate", "optimizer", "schedule", "duration")
_ROOT = Path(__file__).parents[1]


def measure(
    folder: Path,
    deadline: float,
    objective: str = "classification",
    changes: tuple[str, ...] = (),
    how: tuple[str, ...] = _HOW,
) -> bool:
    """Train until `deadline` (`time.monotonic`) at most, into `folder`; whether every study came to its end.

    `objective`: one of `OBJECTIVES`, which says the baseline, and what is compared with it; `how`: what of the training
    is the same for both, and not each recipe's own.
    """
    folder.mkdir(parents=True, exist_ok=True)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [str(_ROOT), os.getenv("PYTHONPATH")]))}
    studies: list[subprocess.Popen[bytes]] = []
    each = _SEEDS // _STUDIES
    try:
        for first in range(FIRST, FIRST + _SEEDS, each):
            command = [sys.executable, "-m", "composer_speedups", "ablate", *OBJECTIVES[objective]]
            command += [*_learning(objective, how), *changes]
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


def _learning(objective: str, how: tuple[str, ...] = _HOW) -> list[str]:
    """Task and model, and `how`, as `KEY=VALUE`."""
    recipe = load_recipe(_AS, [f"task.objective={objective}"]).to_dict()
    model = {key: recipe["model"][key] for key in ("name", "pretrained", "config")}
    values = {"model": model, "task": recipe["task"], **{key: recipe[key] for key in how}}
    return [f"{key}={json.dumps(value)}" for key, value in values.items()]


def pretrained(model: Path) -> tuple[str, ...]:
    """What to change to fine-tune the encoder in the folder `model`; each recipe at its own batch and rate, with `how`
    of none, as 2026-11-28_cpu_finetune_quality_minilm_2 did."""
    return (f"model.name={model.resolve()}", "model.pretrained=true", "model.config={}")


def table(folder: Path) -> str:
    """The verdict on all seeds that both recipes were trained with."""
    folders = sorted(path.parent for path in folder.glob("seeds_*/runs.sqlite"))
    if not folders:
        raise UserError(f"{folder} has no study: see what they said in {folder}/seeds_*.txt")
    return compare(folders, folders)
