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
    if what == "wait for good" or rank != payload["where"]:
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
