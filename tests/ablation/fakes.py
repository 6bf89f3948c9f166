"""Runs that take no time, and misbehave on demand. Imports nothing heavy: each test starts real processes."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from composer_speedups.ablation.study import Entries

ENTRIES = Entries(
    train=f"{__name__}:train",
    survey=f"{__name__}:survey",
    verify=f"{__name__}:verify",
    look_inside=f"{__name__}:look_inside",
    preload=(__name__,),
)
# What a run has found of itself.
INSIDE = {
    "step_profile": {"matmul": 0.04, "attention": 0.02, "norm": 0.01, "other": 0.01, "loop": 0.02},
    "step_profile_other": {"mine::stencil": 0.008},
    "memory": {"weights": 20_000_000, "gradients": 20_000_000, "optimizer": 40_000_000, "activations": 90_000_000},
    "memory_predicted": {
        "weights": 20_000_000,
        "gradients": 20_000_000,
        "optimizer": 40_000_000,
        "activations": 91_000_000,
        "peak": 150_000_000,
    },
}
SPEEDS = {"base": 100.0, "fast": 150.0, "slow": 80.0}


@dataclass
class Recipe:
    """The little of a recipe that a study needs; `does` says what its runs do, `verified` what comparing does, `looked`
    what looking inside does of several ranks."""

    name: str
    does: str = "well"
    verified: str = "well"
    looked: str = "well"
    seconds: float = 0.0
    batch_size: int = 8
    seed: int = 17
    diary: str | None = None  # a folder in which every run leaves a file when it ends well
    published: dict[str, Any] | None = field(default=None)
    task: dict[str, Any] | None = None
    model: dict[str, Any] | None = None

    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self)) | {"learning_rate": 1e-4, "duration": "4ba"}


def survey(payload: dict[str, Any], report: Callable[[Any], None]) -> dict[str, Any]:
    does = {r.name: getattr(r, "does", "well") for r in payload["recipes"]}
    return {
        "environment": {
            "ranks": payload.get("ranks", 1),
            "hardware": "cpu",
            "python": "3",
            "cpu": {"model": "fake"},
            "threads": 1,
            "memory_bytes": 2**30,
        },
        "skip": {name: "needs a thing: install it" for name, what in does.items() if what == "unavailable"},
        "peaks": {precision: 1e9 for precision in payload["peaks"].values()},
        "unmeasured": {},
        "error": "fast.yaml:3: unknown speed-up 'x'" if "wrong" in does.values() else "",
    }


def survey_without_tf32(payload: dict[str, Any], report: Callable[[Any], None]) -> dict[str, Any]:
    return survey(payload, report) | {"skip": {"demo/tf32": "needs a thing: install it"}}


def train(payload: dict[str, Any], report: Callable[[Any], None]) -> dict[str, Any]:
    recipe, seed = {"does": "well", "seconds": 0.0, "diary": None} | payload["recipe"], payload["seed"]
    print(f"{recipe['name']} begins")
    for step in range(4):
        report({"phase": "train", "step": step + 1, "steps": 4, "loss": 1.0, "samples_per_second": 5.0})
        time.sleep(recipe["seconds"] / 4)
    act(recipe["does"])
    if recipe["diary"]:
        name = f"{recipe['name']}-{seed}-{os.getpid()}-{time.monotonic_ns()}"
        Path(recipe["diary"], name).touch()
    speed = SPEEDS.get(recipe["name"].rpartition("/")[2], 100.0) * (1 + 0.01 * (seed % 3))
    loss = 0.5 + 0.001 * (seed % 3)
    return {
        "recipe": recipe["name"],
        "seed": seed,
        "status": "ok",
        "reason": "",
        "batch_size": recipe["batch_size"],
        "learning_rate": 1e-4,
        "samples_per_second": speed,
        "real_tokens_per_second": speed * 60,
        "model_flops_per_second": speed * 1e6,
        "wallclock_seconds": 100 / speed,
        "compile_seconds": 0.0,
        "peak_memory_bytes": 123_000_000,
        "final_loss": float("nan") if recipe["does"] == "diverge" else loss,
        "eval_accuracy": 0.6 if recipe["does"] == "forget" else 0.9,
        "finite": recipe["does"] != "diverge",
        "steps": 4,
        "losses": [1.0, float("nan") if recipe["does"] == "diverge" else 0.8, 0.6, loss],
        "step_seconds": [0.1, 0.1, 0.1, 0.1],
        "evidence": {},
        "kernels": [],
        "warnings": [],
        **(INSIDE if payload.get("inspect", True) else {}),
    }


def verify(payload: dict[str, Any], report: Callable[[Any], None]) -> dict[str, Any]:
    report({"phase": "verify", "message": "on the CPU"})
    act(payload["recipe"].get("verified", "well"))
    return {"numerics": numerics()}


def look_inside(payload: dict[str, Any], report: Callable[[Any], None]) -> dict[str, Any]:
    act(payload["recipe"].get("looked", "well"))
    return INSIDE | {"step_profile": INSIDE["step_profile"] | {"exchange": 0.5}}


def numerics(*wrong: str) -> dict[str, Any]:
    """As `Verification.summary`."""
    return {"holds": not wrong, "wrong": [*wrong], "precision": "bf16", "gradients": 6.2e-3, "plain": 3.9e-3}


def killed(payload: dict[str, Any], report: Callable[[Any], None]) -> None:
    act("killed")


def act(does: str) -> None:
    if does == "raise":
        raise RuntimeError("the loss function is missing\nsecond line")
    if does == "segfault":
        os.kill(os.getpid(), signal.SIGSEGV)
    if does == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if does == "memory":
        raise MemoryError("3 GiB more")
    if does == "exit":
        sys.exit(3)
    if does == "take SIGTERM as Composer does":
        sys.exit(128 + signal.SIGTERM)
    if does == "vanish":
        os._exit(5)
    if does == "hang":
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        time.sleep(600)
    if does == "unavailable_late":
        from composer_speedups.errors import SpeedUpUnavailable

        raise SpeedUpUnavailable("needs CUDA: there is none")
