"""FastDropout: dropout masks from cheap bits, in one pass, on the CPU.

**Why it is faster.** PyTorch on the CPU asks its Mersenne twister for one double an element, on one thread. Here a
hash of a counter and two keys gives 16 bits an element; a C kernel draws, compares, scales and stores in one pass, on
all threads. Backward makes the mask again, so that none is kept in memory.

**Numerics.** The same distribution, other random numbers. The probability is rounded to a multiple of 1/65536
and the scale is exact for the rounded one, so the expectation is that of the input. Results are rounded once. A
dropped NaN or infinity becomes 0, where PyTorch makes it NaN. Keys come from PyTorch's default generator, one
draw a call: seeds, resumption and gradient checkpointing repeat bit for bit, whatever the number of threads.

**When it pays.** On the CPU, for every model with dropout: 0.5 ms where PyTorch takes 12.2, for 6,144 x 256 in bf16,
forward and backward (`benchmarks/results/2026-11-23_cpu_limits_2`). On CUDA PyTorch's dropout is one fused kernel
already. Dropout inside `scaled_dot_product_attention` is not a module and stays PyTorch's: `Unpadding` has its own
attention.

**Needs.** A C compiler (`cc`, `gcc`, `clang` or `$CC`) for full speed, used once for under a second; without
one, PyTorch's integer operations compute the same masks, bit for bit. Under `TorchCompile` the compiler fuses
those. Dropout on other devices, of tensor subclasses and under `torch.func` stays PyTorch's.

Source: counter-based generators, Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011); the
hash has the multipliers of Chris Wellons' lowbias32.
"""

from __future__ import annotations

import logging

import torch
from composer.core import State
from composer.loggers import Logger

from composer_speedups.speedup import SpeedUp, Stage
from composer_speedups.surgery import having, swap_classes

__all__ = ["FastDropout", "apply_fast_dropout"]

log = logging.getLogger("composer_speedups")


def apply_fast_dropout(model: torch.nn.Module) -> int:
    """Let every plain `nn.Dropout` in `model` draw its mask from cheap bits, in place; return how many.

    Subclasses of `nn.Dropout` are left alone.

    >>> import torch
    >>> apply_fast_dropout(torch.nn.Sequential(torch.nn.Dropout(0.1)))
    1
    """
    return swap_classes(model, {torch.nn.Dropout: DropoutOfCheapBits})


class FastDropout(SpeedUp):
    """Apply `apply_fast_dropout` at `Event.INIT`.

    >>> FastDropout()
    FastDropout()
    """

    stage = Stage.NORM

    def unavailable(self, device: torch.device) -> str | None:
        if device.type == "cpu":
            return None
        return (
            f"it is for the CPU, and the run is on {device}, where PyTorch's dropout is one kernel already; remove it"
        )

    def install(self, state: State, logger: Logger) -> None:
        from composer_speedups.kernels.fast_dropout import native

        count = apply_fast_dropout(state.model)
        active = sum(isinstance(m, DropoutOfCheapBits) and m.p > 0 for m in state.model.modules())
        kernel = "C" if native() is not None else "PyTorch"
        self.report(
            logger,
            count,
            "no torch.nn.Dropout in the model",
            already=having(state.model, DropoutOfCheapBits),
            active=active,
            bits_by=kernel,
        )
        if count and not active:  # somebody may raise it later
            log.warning("%r has nothing to draw: every dropout in the model has the rate 0", self)


class DropoutOfCheapBits(torch.nn.Dropout):  # so named: many look for modules whose class begins with "Dropout"
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        from composer_speedups.kernels.fast_dropout import fast_dropout

        return fast_dropout(input, self.p, self.training, self.inplace)
