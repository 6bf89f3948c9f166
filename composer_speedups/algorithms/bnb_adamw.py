"""BnbAdamW: bitsandbytes' AdamW with 32-bit state.

**Why it is faster.** One fused kernel per parameter does the whole update in a single pass over memory.

**Numerics.** The same formula as torch's AdamW with state in float32, also where the parameters are bf16 or fp16
(torch keeps the moments in the parameters' dtype). On a CPU equal to the for-loop's to a rounding or two per step.
On CUDA bitsandbytes decays a weight after its update, torch before: an update is off by learning rate times weight
decay of itself, about a millionth with the recipes' values (by the kernel's code, not yet measured).

**When it pays.** On an H200 not beside `FusedAdamW`: 9.4 ms for BERT-base's weights against 0.8
(`benchmarks/results/2026-11-27_h200_limits`). It launches once per parameter, where `FusedAdamW` launches once for
hundreds, and its step waits for the GPU after each parameter (`sync_gpu`, bitsandbytes 0.50), which also undoes what
`SyncFreeLoop` saves. The for-loop's 6.2 ms there are the GPU's alone, so that the two are not compared. It is here
because it can be measured against the others and because its state is what `AdamW8bit` falls back to.

**Needs.** bitsandbytes (installed with this package); a CPU or CUDA device; no AMSGrad; not under FSDP.

Source: github.com/bitsandbytes-foundation/bitsandbytes, `bitsandbytes.optim.AdamW`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.optim import Optimizer

from composer_speedups.optim.bnb import NO_FSDP, become_bnb
from composer_speedups.optim.speedup import OptimizerSpeedUp, adamw_state_bytes

__all__ = ["BnbAdamW", "apply_bnb_adamw"]


def apply_bnb_adamw(optimizer: Optimizer) -> int:
    """Make `optimizer`, an AdamW of any kind, bitsandbytes' 32-bit AdamW, in place.

    Groups, rates, moments, hooks and schedulers stay. Returns for how many parameters the update changed;
    0 if it was this already.

    Raises:
        SpeedUpUnavailable: the optimizer is no AdamW, or uses what bitsandbytes has not (amsgrad, maximize, float64).

    >>> import torch
    >>> optimizer = torch.optim.AdamW([torch.zeros(3, requires_grad=True)], lr=1e-3)
    >>> apply_bnb_adamw(optimizer), type(optimizer).__module__
    (1, 'bitsandbytes.optim.adamw')
    """
    return become_bnb(optimizer, "AdamW")


class BnbAdamW(OptimizerSpeedUp):
    """Apply `apply_bnb_adamw` at `Event.INIT`.

    Args:
        no_decay_on_bias_and_norm: take the weight decay off parameters of fewer than two dimensions.

    >>> BnbAdamW()
    BnbAdamW(no_decay_on_bias_and_norm=False)
    """

    no_fsdp = NO_FSDP

    def state_bytes(self, model: torch.nn.Module, trained: Sequence[torch.Tensor]) -> int:
        return adamw_state_bytes(trained, step=0)  # counted in a plain integer

    def convert(self, optimizer: Optimizer, model: torch.nn.Module) -> int:
        return apply_bnb_adamw(optimizer)
