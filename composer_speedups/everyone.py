"""What the ranks of one process group know together: sums, everyone's values, and the worst of them.

All of it is for all ranks to call. With one process each gives back what it was given.
"""

from __future__ import annotations

import math
import os
import zlib
from collections.abc import Callable, Mapping
from typing import TypeVar

import torch
from composer.utils import dist

__all__ = ["differing", "everyones", "leave_ranks", "start_ranks", "summed", "worst"]

T = TypeVar("T")


def start_ranks() -> None:
    """Have a process group where there are several ranks.

    Alone not: with one, Composer asks Gloo or NCCL five times a step for what it knows.
    """
    if dist.get_world_size() > 1:
        if "GROUP_RANK" in os.environ:  # torchrun's name for what Composer wants to know
            os.environ.setdefault("NODE_RANK", os.environ["GROUP_RANK"])
        dist.initialize_dist("gpu" if torch.cuda.is_available() else "cpu")


def leave_ranks() -> None:
    """End the process group, if there is one: Gloo's threads may outlive the interpreter, which then aborts."""
    if torch.distributed.is_initialized():
        torch.distributed.barrier()  # the others may still ask this rank for something
        torch.distributed.destroy_process_group()


def summed(tensor: torch.Tensor) -> torch.Tensor:
    """The sum of all ranks' tensors, which are alike in shape and dtype; where `tensor` is."""
    if dist.get_world_size() == 1:
        return tensor
    # NCCL takes no tensors of the CPU.
    there = torch.device("cuda") if torch.distributed.get_backend() == "nccl" else tensor.device
    total = tensor.to(there, copy=True)
    dist.all_reduce(total)
    return total.to(tensor.device)


def everyones(value: T) -> list[T]:
    """Each rank's `value`, which can be pickled, in order of rank."""
    return [value] if dist.get_world_size() == 1 else list(dist.all_gather_object(value))


def worst(value: T, how_bad: Callable[[T], float]) -> T:
    """The value of the rank for which `how_bad` is largest, or no number: the same on all."""
    return max(everyones(value), key=lambda one: math.inf if math.isnan(bad := how_bad(one)) else bad)


def differing(tensors: Mapping[str, torch.Tensor]) -> str | None:
    """The name of one of `tensors` that has other bits on another rank; None if there is none."""
    if dist.get_world_size() == 1:
        return None
    digests = everyones({name: _digest(tensor) for name, tensor in tensors.items()})
    return next((name for name in tensors if any(other.get(name) != digests[0][name] for other in digests)), None)


def _digest(tensor: torch.Tensor) -> int:
    return zlib.crc32(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
