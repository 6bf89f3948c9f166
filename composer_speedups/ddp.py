"""DDP around a model: what speed-ups ask of it."""

from __future__ import annotations

import torch
from composer.utils import dist
from torch.nn.parallel import DistributedDataParallel

__all__ = ["hook_of", "why_alone", "without_ddp"]


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


def without_ddp(model: torch.nn.Module) -> torch.nn.Module:
    """The model inside, where Composer has put DDP around it: that one has what speed-ups gave the model's class."""
    return model.module if isinstance(model, DistributedDataParallel) else model
