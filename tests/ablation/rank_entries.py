"""What the ranks of a test do, each in a process of its own."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

from composer_speedups.errors import UserError

RANK, WORLD = "RANK", "WORLD_SIZE"


def train(payload: dict[str, Any], report: Any) -> dict[str, Any]:
    rank = int(os.environ.get(RANK, 0))
    report({"rank": rank, "group": os.getpgid(0)})
    print(f"rank {rank} speaks")
    what = payload["do"]
    if what == "sum":
        import torch

        torch.distributed.init_process_group("gloo")
        mine = torch.tensor([10.0**rank])
        torch.distributed.all_reduce(mine)
        return {"sum": mine.item(), "world": os.environ[WORLD]}
    if what == "alone":
        return {"world": os.environ.get(WORLD)}
    if what == "stop in good order":
        return {"status": "interrupted", "reason": "stopped by Ctrl-C or SIGTERM"}
    if what == "end as Ctrl-C ends":
        raise KeyboardInterrupt
    if what == "ask wrongly":
        raise UserError(f"no such thing as {payload['thing']}: choose another")
    if what == "leave early":
        os._exit(0) if rank else time.sleep(600)
    if what == "wait for good" or payload["where"] not in (rank, "everywhere"):
        time.sleep(600)
    if what == "raise":
        raise ValueError("not here")
    if what == "run out of memory":
        raise MemoryError("cannot allocate memory")
    if what == "exit":
        sys.stdout.flush()
        os._exit(7)
    os.kill(os.getpid(), signal.Signals[what])
    return {}


def train_with_a_fault(payload: dict[str, Any], report: Any) -> dict[str, Any]:
    """A real training, in which one rank has one in its second forward pass or in the evaluation."""
    from composer.models import HuggingFaceModel

    from composer_speedups.recipes import load_recipe
    from composer_speedups.training.run import run

    own, passes = HuggingFaceModel.forward, []

    def forward(self: Any, batch: Any) -> Any:
        passes.append(self.training)
        at = passes.count(True) == 2 if payload["phase"] == "forward" else not self.training
        if at and os.environ[RANK] == "1":
            raise payload["error"]
        return own(self, batch)

    HuggingFaceModel.forward = forward
    return run(load_recipe("cpu/fp32", payload["overrides"])).as_dict()
