"""What speed-ups of several ranks ask of DDP."""

from __future__ import annotations

from composer.utils import dist
from torch.nn.parallel import DistributedDataParallel

__all__ = ["hook_of", "why_alone"]


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
