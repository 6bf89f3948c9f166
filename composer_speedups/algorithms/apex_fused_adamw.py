"""ApexFusedAdamW: NVIDIA Apex's FusedAdam in AdamW mode.

**Why it is faster.** One multi-tensor kernel updates all parameters of a group in a few launches, as torch's fused
AdamW does; it was the first to.

**Numerics.** The same formula in float32, with bias correction, decoupled weight decay scaled by the learning rate
(`adam_w_mode`). One step counter per group instead of one per parameter: a parameter that had no gradient for some
steps gets a different bias correction than torch's.

**When it pays.** On a CUDA GPU where Apex is installed already. `FusedAdamW` needs no extra package and does the
same work; Warner (2023) measured Apex ahead of torch's fused kernel of that year (278 against 245 samples/s).

**Needs.** CUDA, and Apex built from source with `--cuda_ext` (the package named `apex` on the Python index is
another project). Without AMSGrad; parameters in float32, float16 or bfloat16.

Source: github.com/NVIDIA/apex, `apex.optimizers.FusedAdam`.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from composer_speedups.errors import SpeedUpUnavailable
from composer_speedups.optim.optimizers import become, refuse_other, refuse_unsupported, torch_groups
from composer_speedups.optim.speedup import OptimizerSpeedUp, adamw_state_bytes

__all__ = ["ApexFusedAdamW", "apply_apex_fused_adamw"]

_REMEDY = "build it from github.com/NVIDIA/apex with --cuda_ext, or use fused_adamw, which needs nothing"


def apply_apex_fused_adamw(optimizer: Optimizer) -> int:
    """Make `optimizer`, an AdamW of any kind, Apex's FusedAdam in AdamW mode, in place.

    Groups, rates, moments, hooks and schedulers stay. Returns for how many parameters the update changed;
    0 if it was this already.

    Raises:
        SpeedUpUnavailable: Apex is not installed, or the optimizer is no AdamW, or uses what Apex has not (amsgrad).
    """
    refuse_other(optimizer)
    fused_adam = _fused_adam()
    if type(optimizer) is fused_adam:
        return 0
    refuse_unsupported(optimizer, "Apex FusedAdam")
    template = fused_adam(torch_groups(optimizer), adam_w_mode=True, set_grad_none=True)
    parameters = [p for g in optimizer.param_groups for p in g["params"]]
    become(optimizer, template, dict.fromkeys(parameters, "apex"))
    return len(parameters)


class ApexFusedAdamW(OptimizerSpeedUp):
    """Apply `apply_apex_fused_adamw` at `Event.INIT`.

    Args:
        no_decay_on_bias_and_norm: take the weight decay off parameters of fewer than two dimensions.

    >>> ApexFusedAdamW()
    ApexFusedAdamW(no_decay_on_bias_and_norm=False)
    """

    no_fsdp = "Apex does not know its sharded parameters. Use fused_adamw."

    def unavailable(self, device: torch.device) -> str | None:
        if device.type != "cuda":
            return f"Apex FusedAdam needs a CUDA device, this is {device.type}; use fused_adamw"
        try:
            _fused_adam()
        except SpeedUpUnavailable as error:
            return str(error)
        return None

    def state_bytes(self, model: torch.nn.Module, trained: Sequence[torch.Tensor]) -> int:
        return adamw_state_bytes(trained, step=0)  # counted in a plain integer

    def convert(self, optimizer: Optimizer, model: torch.nn.Module) -> int:
        return apply_apex_fused_adamw(optimizer)


def _fused_adam() -> Any:
    """Apex's class, if its CUDA extension is there too: without it the import works, and making an optimizer fails."""
    try:
        from apex.optimizers import FusedAdam

        importlib.import_module("amp_C")
    except (ImportError, OSError) as error:  # OSError: built against another torch
        raise SpeedUpUnavailable(f"NVIDIA Apex with its CUDA extensions is not installed: {_REMEDY}") from error
    return FusedAdam
