"""The gradients of a product's parts beside each other, and their sums over the rows, in one pass.

Queries, keys and values are parts of one product of stacked weights (`joint_linear.py`). Attention gives their
gradients as three tensors; the product's backward pass wants one, and the bias the sums of its rows. PyTorch copies,
and then reads the copy again to sum it up, which takes as long as the copy: 31 and 32 us on an H200, for 13,312 tokens
of BERT-base in bf16 (`benchmarks/results/2026-11-26_h200_profiles`). Sums are in float32, in a fixed order. Where
attention has written its gradients beside each other (`packed_attention.py`), they are only summed up: 20 us there
(`2026-11-27_h200_profiles`).

The work is done by `joined_gradient_triton.py`, on CUDA; elsewhere PyTorch's operations serve.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch

from composer_speedups.compilation import missing_kernel
from composer_speedups.kernels.tensors import compute_dtype, plain, shape_only
from composer_speedups.kernels.two_sides import CUDA, cuda_side

__all__ = ["joined_and_summed", "serves"]


def serves(x: torch.Tensor, widths: Sequence[int]) -> bool:
    """Whether the kernel takes the gradients of parts of such `widths`, of a product of `x`."""
    if len(widths) not in (2, 3) or len(set(widths)) > 1 or not plain(x) or shape_only(x):
        return False
    return compute_dtype(x) in CUDA and _available(x.device) and cuda_side("joined_gradient", x) is not None


@cache
def _available(device: torch.device) -> bool:
    return missing_kernel(device) is None


def joined_and_summed(gradients: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """`torch.cat(gradients, -1)`, and its sum over all but the last dimension, in float32; of what `serves` took.

    What is one tensor already is not copied.
    """
    kernels = cuda_side("joined_gradient", gradients[0])
    assert kernels is not None
    return kernels.joined_and_summed(gradients)
