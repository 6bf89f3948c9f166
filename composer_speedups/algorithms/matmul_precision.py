"""MatmulPrecision: how exactly float32 matrix products are computed.

**Why it is faster.** Tensor cores multiply in TF32 (10 bits of mantissa instead of 23) and add in float32, at
a multiple of the rate of true float32. It concerns float32 products only: under `MixedPrecision` what autocast
has cast already is not affected.

**Numerics.** `highest`: true float32. `high`: TF32, inputs rounded to 10 bits of mantissa. `medium`: bf16
inputs (7 bits) where the hardware has such a product, otherwise as `high`; on CUDA it is TF32. cuDNN follows:
float32 for `highest`, TF32 otherwise. The evidence holds the error measured on this device against float64; by
the number of bits about 1e-7 is to be expected of float32, 3e-4 of TF32, 2e-3 of bf16. It counts the settings
that are held and matter on the device (cuDNN's does not on a CPU), and names those that were `already_so`.

**When it pays.** `high` in any float32 run on an Ampere or newer GPU. `highest` is for honest baselines:
Composer's Trainer turns TF32 **on** for every GPU, which makes its "fp32" something else.

**Needs.** `high`: a CUDA GPU of compute capability 8.0 (Ampere) or newer. `medium`: that, or a CPU with bf16
products (AMX; AVX512-BF16 takes oneDNN's path but stays exact). `highest`: nothing.

The setting belongs to the process: it holds while a Trainer fits or evaluates, and what was there before
comes back at the end, also when the Trainer is closed after a failure.

Source: https://pytorch.org/docs/stable/generated/torch.set_float32_matmul_precision.html
"""

from __future__ import annotations

import torch
from composer.core import State
from composer.loggers import Logger

from composer_speedups import compat
from composer_speedups.arguments import check_choice
from composer_speedups.holds import Hold
from composer_speedups.speedup import SpeedUp, Stage

__all__ = ["MatmulPrecision", "PrecisionHold", "apply_matmul_precision"]

PRECISIONS = ("highest", "high", "medium")


def apply_matmul_precision(precision: str) -> PrecisionHold:
    """Set the precision of float32 products, matmul and cuDNN, for the process; returns what undoes it.

    Use the result in a `with` statement, call its `restore()`, or ignore it to leave the setting on. The arguments are
    those of `MatmulPrecision`.

    >>> import torch
    >>> before = torch.get_float32_matmul_precision()
    >>> with apply_matmul_precision("highest"):
    ...     torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    ('highest', False)
    >>> torch.get_float32_matmul_precision() == before
    True
    """
    hold = PrecisionHold(precision)
    hold.hold()
    return hold


class MatmulPrecision(SpeedUp):
    """Hold `precision` while the Trainer works, whatever Composer's device set-up decided.

    Args:
        precision: `highest` (true float32), `high` (TF32) or `medium` (bf16 where there is such a product).

    >>> MatmulPrecision("high")
    MatmulPrecision(precision='high')
    """

    stage = Stage.PRECISION
    slot = "matmul"
    choices = ({"precision": "high"}, {"precision": "medium"})
    redundant_with = {"mixed_precision": "mixed_precision takes the matmuls over"}

    def __init__(self, precision: str) -> None:
        self.precision = check_choice("precision", precision, PRECISIONS)

    def unavailable(self, device: torch.device) -> str | None:
        if self.precision == "highest":
            return None
        if device.type == "cuda":
            if torch.cuda.is_available() and torch.cuda.get_device_capability(device) >= (8, 0):
                return None
        elif device.type == "cpu" and _changes_cpu_products(self.precision):
            return None
        if device.type == "cpu" and self.precision == "medium":
            return (
                "on this CPU float32 products stay exact (only AMX changes them), and TF32 needs an Ampere or newer "
                "CUDA GPU. "
                "Use precision='highest', or leave it out"
            )
        return "TF32 needs an Ampere or newer CUDA GPU. Use precision='highest', or leave it out"

    def install(self, state: State, logger: Logger) -> None:
        before = compat.read_float32_precision()
        # Held again whenever it fits: another Trainer made meanwhile sets `allow_tf32=True`: "medium" becomes "high".
        self.keep(state, PrecisionHold(self.precision))
        after, device = compat.read_float32_precision(), state.device._device
        already = _already_so(before, after, device)
        self.report(
            logger,
            # All that are held, as what was so already is now kept so: a 0 would warn of every float32 baseline.
            len(already),
            "",
            already_so=", ".join(name for name, same in already.items() if same) or "none",
            before=str(before),
            after=str(after),
            relative_error=_relative_error(device),
        )


class PrecisionHold(Hold):
    """A precision of float32 products, matmul and cuDNN."""

    def __init__(self, precision: str) -> None:
        self.precision = check_choice("precision", precision, PRECISIONS)

    def read(self) -> compat.Float32Precision:
        return compat.read_float32_precision()

    def make(self) -> None:
        compat.set_float32_precision(self.precision, cudnn_tf32=self.precision != "highest")

    def write(self, before: compat.Float32Precision) -> None:
        compat.write_float32_precision(before)


def _already_so(
    before: compat.Float32Precision, after: compat.Float32Precision, device: torch.device
) -> dict[str, bool]:
    """Of the settings that matter on `device`: whether each was before as it is now."""
    same = {"matmul": before.matmul == after.matmul}
    if device.type == "cuda":
        same["cuDNN"] = before.cudnn_tf32 == after.cudnn_tf32
    return same


def _product(device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A float32 product on `device` and its two factors, the same every time."""
    generator = torch.Generator().manual_seed(0)  # its own, so that no run's random numbers change
    left, right = (torch.randn(256, 256, generator=generator).to(device) for _ in range(2))
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        return left @ right, left, right


def _relative_error(device: torch.device) -> float:
    product, left, right = (t.cpu().double() for t in _product(device))
    exact = left @ right
    return float(f"{((product - exact).norm() / exact.norm()).item():.2g}")


def _changes_cpu_products(precision: str) -> bool:
    """Whether the setting has any effect here: by trying, as CPUs and versions of oneDNN differ."""
    cpu = torch.device("cpu")
    with PrecisionHold("highest"):
        exact = _product(cpu)[0]
    with PrecisionHold(precision):
        return not torch.equal(_product(cpu)[0], exact)
