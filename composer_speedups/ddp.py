"""DDP around a model: what speed-ups ask of it."""

from __future__ import annotations

import torch
from composer.distributed import DDPSyncStrategy
from composer.utils import dist
from torch.nn.parallel import DistributedDataParallel

from composer_speedups.calling_trainer import calling_trainer
from composer_speedups.errors import ConflictError

__all__ = ["bucket_bytes", "hook_of", "refuse_forced_sync", "why_alone", "without_ddp"]


def refuse_forced_sync(key: str) -> None:
    """Raise where the Trainer that is calling us averages gradients itself, tensor by tensor, and DDP none of them."""
    trainer = calling_trainer()
    if trainer is not None and trainer._ddp_sync_strategy == DDPSyncStrategy.FORCED_SYNC:
        raise ConflictError(
            f"{key}: with ddp_sync_strategy='forced_sync' the Trainer exchanges gradients itself, in float32, and DDP "
            "none. Take 'single_auto_sync' or 'multi_auto_sync', or remove the speed-up"
        )


def why_alone() -> str | None:
    """Why nothing is exchanged here; None where there are several ranks."""
    if dist.get_world_size() > 1:
        return None
    return (
        "one process exchanges no gradients: start several, as by ablate --ranks 2, or composer -n 2 with train or a "
        "script of yours; or remove it"
    )


def hook_of(ddp: DistributedDataParallel) -> str:
    """The name of its communication hook, one of Python's or a built-in one; empty if it has none."""
    return str(ddp._get_ddp_logging_data().get("comm_hook") or "")


def bucket_bytes(model: torch.nn.Module) -> int:
    """Bytes of the buckets of Composer's DDP around `model`; 0 without one, and where its gradients lie in them."""
    if not isinstance(model, DistributedDataParallel) or model.gradient_as_bucket_view:
        return 0
    told = model._get_ddp_logging_data()
    sizes = str(told.get("rebuilt_bucket_sizes") or told["bucket_sizes"])  # they are cut anew after the first step
    return sum(int(size) for size in sizes.split(","))


def without_ddp(model: torch.nn.Module) -> torch.nn.Module:
    """The model inside, where Composer has put DDP around it: that one has what speed-ups gave the model's class."""
    return model.module if isinstance(model, DistributedDataParallel) else model
