"""How the ranks of a test shard a model, and how they end."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch

__all__ = ["end_together", "sharded", "try_all"]


def end_together() -> None:
    """End this process well, once all ranks are here, without taking the process group down.

    Gloo's thread may still hold the tensors of the last gathering, and wants the interpreter's lock to free them, which
    the main thread keeps in the group's destructor while it waits for that thread: both for good (torch 2.7, seen
    twice; a barrier before it holds on to the gathering, too). Left to the interpreter's end, that thread was once
    still running there (torch 2.11, a busy machine): SIGABRT.
    """
    torch.distributed.barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def try_all(tries: Mapping[str, Callable[[], Any]], folder: str) -> None:
    """Write FOLDER/results.pt: what each try gave, of all ranks; or its error, where that is the same on all."""
    from composer.utils import dist

    dist.initialize_dist("cpu")
    warnings.simplefilter("ignore")
    results: dict[str, Any] = {}
    for name, attempt in tries.items():
        try:
            found = attempt()
        except Exception as error:
            found = f"{type(error).__name__}: {error}"
        everywhere = dist.all_gather_object(found)
        same = isinstance(found, str) and all(other == found for other in everywhere)
        results[name] = found if same else everywhere
    if dist.get_global_rank() == 0:
        torch.save(results, f"{folder}/results.pt")


def sharded() -> dict[str, Any]:
    """A Composer Trainer's arguments for FSDP2."""
    from composer.utils.parallelism import FSDP2Config, ParallelismConfig

    config = FSDP2Config(mixed_precision="FULL", state_dict_type="full")
    return {"parallelism_config": ParallelismConfig(fsdp2=config)}
