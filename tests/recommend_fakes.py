"""Runs in real processes whose speed follows from their speed-ups, so that the right recommendation is known."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from composer_speedups.ablation.study import Entries
from composer_speedups.errors import SpeedUpUnavailable

ENTRIES = Entries(train=f"{__name__}:train", survey=f"{__name__}:survey", preload=(__name__,))
CANDIDATES = f"{__name__}:candidates"
GAINS = {
    "mixed_precision": 1.5,
    "unpadding": 1.4,
    "fused_adamw": 1.2,
    "foreach_adamw": 1.1,
    "fast_dropout": 1.0,
    "adamw_8bit": 0.8,
    "torch_compile": 1.1,
    "masked_token_head": 1.0,
    "sdp_attention": 1.0,
}
_STAGES = {"mixed_precision": "PRECISION", "torch_compile": "COMPILE"}
_SLOTS = {"fused_adamw": "optimizer", "foreach_adamw": "optimizer", "adamw_8bit": "optimizer"}


FACTS = {"hardware": "cpu", "python": "3", "cpu": {"model": "fake", "usable": 2}, "threads": 1, "memory_bytes": 2**30}


def candidates(payload: dict[str, Any], report: Callable[[Any], None]) -> dict[str, Any]:
    found = [
        {
            "name": "mixed_precision.bf16" if key == "mixed_precision" else key,
            "key": key,
            "arguments": {"dtype": "bf16"} if key == "mixed_precision" else {},
            "slot": _SLOTS.get(key, key),
            "stage": _STAGES.get(key, "NORM"),
            "redundant_with": {},
        }
        for key in GAINS
    ]
    return {
        "candidates": found,
        "unavailable": {"fused_layer_norm": "it needs a CUDA device"},
        "left_out": {"adafactor": "not tried: it is there to save memory"},
        "first": {"mixed_precision": {"dtype": "bf16"}, "fused_adamw": {}},
        "samples": int(os.environ.get("RECOMMEND_SAMPLES", "100000")),
        "environment": FACTS | {"ranks": payload["ranks"]},
        "error": "the text has no column 'stars'" if payload["recipe"].task.name == "imdb" else "",
    }


def elsewhere(payload: dict[str, Any], report: Callable[[Any], None]) -> dict[str, Any]:
    return candidates(payload, report) | {"environment": FACTS | {"python": "4"}}


def useless(payload: dict[str, Any], report: Callable[[Any], None]) -> dict[str, Any]:
    found = candidates(payload, report)
    return found | {"candidates": [c for c in found["candidates"] if GAINS[c["key"]] < 1], "first": {}}


def wordy(payload: dict[str, Any], report: Callable[[Any], None]) -> dict[str, Any]:
    """As `useless`, with a reason of many words, one of them long, and two lines."""
    reason = " ".join(["it needs what is not here,"] * 8) + "\nsuch as /" + "a" * 60 + "-" + "b" * 30
    return useless(payload, report) | {"unavailable": {"fused_layer_norm": reason}}


def survey(payload: dict[str, Any], report: Callable[[Any], None]) -> dict[str, Any]:
    return {"environment": FACTS | {"ranks": payload["ranks"]}, "skip": {}, "peaks": {}, "unmeasured": {}, "error": ""}


def train(payload: dict[str, Any], report: Callable[[Any], None]) -> dict[str, Any]:
    recipe, seed = payload["recipe"], payload["seed"]
    diary = os.environ.get("RECOMMEND_DIARY")
    if diary:
        with Path(diary).open("a") as file:
            file.write(f"{recipe['name']} {seed}\n")
        stop = os.environ.get("RECOMMEND_STOP")
        if stop and len(Path(diary).read_text().splitlines()) == int(stop):
            os.kill(int(os.environ["RECOMMEND_PARENT"]), signal.SIGINT)
            time.sleep(30)
    keys = recipe["speedups"].keys()
    if "sdp_attention" in keys:
        raise SpeedUpUnavailable("this model has an attention of its own")
    slow = os.environ.get("RECOMMEND_SLOW")
    if slow and recipe["name"] == "plain" and int(recipe["duration"][:-2]) > 4:
        time.sleep(float(slow))
    step = float(os.environ.get("RECOMMEND_STEP", "0.001"))
    steps = int(recipe["duration"][:-2])
    time.sleep(step * steps)
    speed = 100.0 * (1 + 0.004 * (seed % 3))
    for key in keys:
        speed *= GAINS.get(key, 1.0)
    worse = 0.05 * (seed % 3) if "unpadding" in keys and os.environ.get("RECOMMEND_WORSE") else 0.0
    spoilt = "unpadding" in keys and os.environ.get("RECOMMEND_SPOILT")
    if "RANK" in os.environ:  # half of the machine
        speed /= 2
    return {
        "status": "ok",
        "reason": "",
        "batch_size": recipe["batch_size"],
        "learning_rate": recipe["learning_rate"],
        "samples_per_second": speed,
        "peak_memory_bytes": 10**9,
        "final_loss": 9.0 if spoilt else 0.5 + worse + 0.001 * (seed % 3),
        "finite": True,
        "steps": steps,
        "losses": [0.5] * steps,
        "step_seconds": [step] * steps,
        "evidence": {key: {"changed": int(key != "masked_token_head")} for key in keys},
        "compile_seconds": 2.0 if "torch_compile" in keys else 0.0,
        "warnings": [],
    }
