"""What the tests of attention that knows distances share: sequences, places of distances, gradients in float64."""

from __future__ import annotations

import torch

from composer_speedups.kernels.disentangled import Places

__all__ = ["LENGTHS", "POSITIONS", "SCALE", "gradients", "places"]

LENGTHS = [7, 1, 0, 33, 16, 130]
SCALE, POSITIONS = 0.1, 24


def places(reach: int = 140) -> Places:
    """As buckets make them: near distances have positions of their own, far ones share, and the ends are clamped."""
    near = torch.arange(-reach, reach + 1)
    far = near.sign() * (8 + (near.abs() - 8) // 30)
    rows = torch.where(near.abs() <= 8, near, far) + POSITIONS // 2
    return Places(rows.clamp(0, POSITIONS - 1).int(), reach, (0, POSITIONS))


def gradients(attend, given: list[torch.Tensor], dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    """The output of `attend` and the gradients of all that it takes, in float64."""
    *inputs, gradient = (x.to(dtype) for x in given)
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = attend(*leaves)
    return [x.double() for x in (out.detach(), *torch.autograd.grad(out, leaves, gradient))]
