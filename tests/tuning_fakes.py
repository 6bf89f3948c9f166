"""Tries in real processes that take no time: speed, memory and loss follow laws that the tests know.

Each try writes a line into the file `$TUNING_DIARY`. `$TUNING_FAULT` makes tries go wrong, `what:number`: after so many
lines `hang` stops the search as Ctrl-C does, and the `disk` is full; `kill` those of more samples; `slow`: seconds.
`dull` learns nothing, and to `alike` all rates are the same. Whole trainings alone are
`full`, are `late`, take `more` memory, `break` or `diverge`; those of rates over `number` do.
"""

from __future__ import annotations

import errno
import math
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from composer_speedups.ablation.study import Entries

ENTRIES = Entries(train=f"{__name__}:trial", survey=f"{__name__}:survey", preload=(__name__,))
FIXED, SAMPLE = 1_000_000, 10_000  # bytes
FITS = 217  # samples: one more is out of memory
PEAK = 96  # the batch with the most samples per second
BEST = 3e-4  # the rate with the lowest loss in short runs ...
BEST_WHOLE = 1.2e-4  # ... and in whole trainings, which learn more with a lower one
SAMPLES = 20_000  # of the task
SIZES = ("batch_size=32", "task.train_samples=1152")  # of a recipe, for searches whose tries are these


def survey(payload: dict[str, Any], report: Callable[[Any], None]) -> dict[str, Any]:
    recipe = payload["recipe"]
    return {
        "environment": {
            "hardware": "cpu",
            "python": "3",
            "cpu": {"model": "fake", "usable": 2},
            "threads": 2,
            "memory_bytes": 2**30,
            "gpus": [],
        },
        "skip": {recipe.name: "fp16 needs a CUDA GPU"} if "fp16" in recipe.name else {},
        "error": "",
        "peaks": {},
        "samples": SAMPLES,
        # As predictions are: somewhat off.
        "memory": {"8": FIXED + 9 * SAMPLE, "32": FIXED + 36 * SAMPLE},
    }


def trial(payload: dict[str, Any], report: Callable[[Any], None]) -> dict[str, Any]:
    from composer_speedups.errors import OutOfMemory
    from composer_speedups.recipes.schema import in_samples

    recipe, seed = payload["recipe"], payload["seed"]
    batch, rate = recipe["batch_size"], recipe["learning_rate"]
    rank, ranks = (int(os.environ.get(name, there)) for name, there in (("RANK", "0"), ("WORLD_SIZE", "1")))
    together = recipe["microbatch_size"] or batch // ranks
    whole = bool(recipe["evaluate"])
    steps = in_samples(recipe["duration"], SAMPLES, batch) // batch
    diary = os.environ.get("TUNING_DIARY")
    lines = 0
    if diary and rank == 0:
        with Path(diary).open("a") as file:
            file.write(f"{batch} {together} {rate:g} {steps} {recipe['schedule']['warmup']}\n")
        lines = len(Path(diary).read_text().splitlines())
    fault, _, number = os.environ.get("TUNING_FAULT", "").partition(":")
    if fault == "hang" and lines > int(number):
        os.kill(int(os.environ["TUNING_PARENT"]), signal.SIGINT)
        time.sleep(30)
    if fault == "disk" and lines > int(number):
        raise OSError(errno.ENOSPC, "No space left on device")
    if fault == "kill" and together > int(number):
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "slow":
        time.sleep(float(number))
    if recipe["description"] == "broken":
        raise RuntimeError("the loss function is missing")
    struck = whole and rate > float(number or 0)
    if struck and fault == "late":
        time.sleep(30)
    if struck and fault == "break":
        raise RuntimeError("the evaluation cannot be")
    if together > FITS or (struck and fault == "full"):
        raise OutOfMemory(f"out of memory with {together} samples: try {together // 2}")
    report({"phase": "train", "step": steps, "steps": steps, "loss": 1.0})
    loss, begin, noise = math.log(rate / (BEST_WHOLE if whole else BEST)) ** 2 + 1 + 8 / steps, 9.0, 0.0
    if fault == "dull":  # nothing is learnt
        begin = 0.0
    if fault == "alike":  # all rates are as good, but for noise that looks like more
        loss, noise = 1.0 - 1e-4 * rate, 0.1 * (rate != float(number))
    return {
        "status": "ok",
        "reason": "",
        "seed": seed,
        "samples_per_second": 100 * math.exp(-(math.log2(together / PEAK) ** 2) / 8),
        "peak_memory_bytes": (FIXED + SAMPLE * together) * (1000 if struck and fault == "more" else 1),
        "losses": [loss + begin * (2 * n < steps) + noise * (-1) ** (steps - n) for n in range(steps)],
        "finite": rate < 1e-2 and not (struck and fault == "diverge"),
        # The law of the training loss, and a little more: what was not trained on is harder.
        **({"eval_loss": 1.1 * loss, "eval_accuracy": math.exp(-loss)} if whole else {}),
    }
