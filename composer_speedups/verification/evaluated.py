"""What a model with speed-ups gives when it is evaluated, beside float64: much of it depends on `training`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from composer.models import ComposerModel

from composer_speedups import compat
from composer_speedups.everyone import worst
from composer_speedups.verification.compared_steps import ROOM, precision_of
from composer_speedups.verification.findings import Evaluated
from composer_speedups.verification.trained_steps import Watch
from composer_speedups.verification.true_gradients import placed, tensors_of

__all__ = ["compare_evaluated"]


def compare_evaluated(plain: ComposerModel, watch: Watch, usual: float) -> Evaluated | None:
    """Its outputs for the batch that it was evaluated on after its last step; None if it was not.

    Args:
        plain: the model without speed-ups.
        watch: of its training.
        usual: the relative error of the plain model's gradients in this precision, which outputs may have, too: few
            numbers are exact by chance.
    """
    seen = watch.evaluated
    if seen is None:
        return None
    exact = _outputs(plain, seen.batch, seen.weights, torch.float64, torch.device("cpu"), None)
    before = compat.read_float32_precision()
    try:
        compat.write_float32_precision(seen.precision)
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        same = _outputs(plain, seen.batch, seen.weights, torch.float32, device, watch.dtype)
    finally:
        compat.write_float32_precision(before)
    mask = seen.batch.get("attention_mask") if isinstance(seen.batch, Mapping) else None
    stock, error = (_error(outputs, exact, mask) for outputs in (same, seen.outputs))
    allowed = max(stock, usual, 2 * torch.finfo(torch.float32).eps)
    share = math.inf if math.isnan(error) else error / allowed / ROOM
    found = Evaluated(precision_of(seen.precision, watch.dtype), stock, error, share)
    return worst(found, lambda one: one.share)


def _outputs(
    plain: ComposerModel,
    batch: Any,
    weights: Mapping[str, torch.Tensor],
    dtype: torch.dtype,
    device: torch.device,
    autocast: torch.dtype | None,
) -> list[torch.Tensor]:
    twin, batch = placed(plain, batch, weights, dtype, device)
    with torch.no_grad(), torch.autocast(device.type, dtype=autocast, enabled=autocast is not None):
        return [x.cpu() for x in tensors_of(twin.eval().eval_forward(batch))]


def _error(found: list[torch.Tensor], exact: list[torch.Tensor], mask: torch.Tensor | None) -> float:
    """Of all outputs together, relative; of those that there are for each token, at real tokens."""
    if [x.shape for x in found] != [x.shape for x in exact]:
        return math.nan
    off, size = [], []
    for one, other in zip(found, exact, strict=True):
        if not other.is_floating_point():
            continue
        one, other = one.double(), other.double()
        if mask is not None and other.shape[:2] == mask.shape:
            one, other = one[mask.bool()], other[mask.bool()]
        off.append(float((one - other).norm()))
        size.append(float(other.norm()))
    return math.hypot(*off) / max(math.hypot(*size), 1e-30)
