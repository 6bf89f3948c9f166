"""What the two bitsandbytes speed-ups share: making its optimizers from any AdamW."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch.optim import Optimizer

from composer_speedups.optim.optimizers import become, refuse_other, refuse_unsupported, torch_groups
from composer_speedups.optim.states import MIN_8BIT_SIZE, Layout

__all__ = ["NO_FSDP", "become_bnb"]

NO_FSDP = "bitsandbytes would read a sharded parameter's memory as if it were a whole one. Use fused_adamw, or DDP."


def become_bnb(
    optimizer: Optimizer,
    class_name: str,
    *,
    keep_32_bit: Collection[torch.Tensor] = (),
    min_8bit_size: int = MIN_8BIT_SIZE,
) -> int:
    """Make any AdamW the bitsandbytes optimizer of that name; return how many parameters it updates, 0 if it was so.

    Args:
        optimizer: changed in place.
        class_name: `AdamW` (32-bit state) or `AdamW8bit`.
        keep_32_bit: parameters whose state stays in 32 bits in any case.
        min_8bit_size: smaller tensors keep 32-bit state.
    """
    import bitsandbytes.optim as bnb

    refuse_other(optimizer)
    cls = getattr(bnb, class_name)
    if type(optimizer) is cls:
        return 0
    refuse_unsupported(optimizer, f"bitsandbytes {class_name}")
    groups = torch_groups(optimizer)
    for group in groups:
        group["lr"] = float(group["lr"])
    template = cls(groups, min_8bit_size=min_8bit_size)
    # bitsandbytes keeps overrides in one global manager, by position in the groups: those of one model would
    # change another's. This optimizer gets its own, with what the user has asked of the global one.
    shared = template.mng
    template.mng = type(shared).__new__(type(shared))
    template.mng.initialize()
    template.mng.pid2config.update(shared.pid2config)
    template.mng.module_weight_config_triple.extend(shared.module_weight_config_triple)
    if keep_32_bit:
        template.mng.override_config(list(keep_32_bit), "optim_bits", 32)
    parameters = [p for group in groups for p in group["params"]]
    kept = {id(p) for p in keep_32_bit}
    quantise = class_name == "AdamW8bit"
    layouts: dict[torch.Tensor, Layout] = {
        p: "bnb8" if quantise and id(p) not in kept and p.numel() >= min_8bit_size else "bnb32" for p in parameters
    }
    become(optimizer, template, layouts)
    return len(parameters)
