"""What the hostile tests run in fresh processes: trainings that are killed, starved of memory, or of disk."""

from __future__ import annotations

import math
import os
import resource
import signal
import time
from collections.abc import Callable
from typing import Any

TINY = [
    "task={name: dummy, max_length: 32, mean_length: 16, length_std: 6, vocabulary: 256, train_samples: 128, "
    "eval_samples: 16}",
    # Dropout: the random state must come back too, or resumed runs differ.
    "model.config={num_hidden_layers: 1, hidden_size: 32, num_attention_heads: 2, intermediate_size: 64, "
    "hidden_dropout_prob: 0.1, attention_probs_dropout_prob: 0.1}",
    "batch_size=8",
    "duration=2ep",
    "schedule.warmup=2ba",
]


def train(payload: dict[str, Any], report: Callable[[Any], None]) -> dict[str, Any]:
    """`training.run` with what `payload` says: overrides, save, resume, interval, and what is to go wrong.

    `kill_after`: seconds until kill -9; `kill_after_step`: the same, at the first report from that step on.
    `memory`: bytes of address space beyond what is used already. `file_size`: no file may grow beyond these bytes.
    """
    import torch
    from composer.utils.collect_env import get_cpu_model

    from composer_speedups.recipes import load_recipe
    from composer_speedups.training.run import run

    known = get_cpu_model.cache_info().currsize
    torch.set_num_threads(1)  # other threads would need address space of their own
    began = time.monotonic()
    recipe = load_recipe("demo/fp32", [*TINY, *payload.get("overrides", ())])
    if "file_size" in payload:
        resource.setrlimit(resource.RLIMIT_FSIZE, (payload["file_size"], payload["file_size"]))
    if "memory" in payload:
        with open("/proc/self/statm") as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + payload["memory"],) * 2)
    killer = _kill_me_after(payload["kill_after"]) if "kill_after" in payload else 0
    first: list[float] = []

    def progress(now: Any) -> None:
        if now.phase == "train" and not first:
            first.append(time.monotonic() - began)
        report({"phase": now.phase, "step": now.step})
        if now.phase == "train" and now.step >= payload.get("kill_after_step", math.inf):
            os.kill(os.getpid(), signal.SIGKILL)

    result = run(
        recipe,
        report=progress,
        save=payload.get("save"),
        resume=payload.get("resume", False),
        checkpoint_interval=payload.get("interval", "1ba"),
    )
    if killer:
        os.kill(killer, signal.SIGKILL)
        os.waitpid(killer, 0)
    return {
        "losses": result.losses,
        "eval_loss": result.eval_loss,
        "seconds": time.monotonic() - began,
        "setup": first[0] if first else time.monotonic() - began,
        "processor_known": bool(known),
    }


def _kill_me_after(seconds: float) -> int:
    me, killer = os.getpid(), os.fork()
    if killer == 0:
        time.sleep(seconds)
        os.kill(me, signal.SIGKILL)
        os._exit(0)
    return killer


def cli(capsys: Any, *arguments: str) -> tuple[int, list[str]]:
    """The command's code, and the lines of its stderr."""
    from composer_speedups.cli import main

    capsys.readouterr()
    code = main(arguments)
    captured = capsys.readouterr()
    assert "Traceback" not in captured.out + captured.err
    return code, captured.err.splitlines()
