"""PyTorch's attention over padded sequences with a bias that is learnt: a number more for each score.

PyTorch chooses among its kernels by dtype, head size, mask and dropout, not by whether the bias wants a gradient.
cuDNN's has none for it, and on Hopper and Blackwell is the first choice from torch 2.11 on, where there is no dropout
or a multiple of 1/16: training would end in an error. So it is left out; memory-efficient attention has the gradient.

Numerics: those of `scaled_dot_product_attention`.

Source: https://pytorch.org/docs/stable/generated/torch.nn.attention.sdpa_kernel.html; the derivative of
`_scaled_dot_product_cudnn_attention`, which says "not differentiable with respect to argument 'attn_bias'".
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

__all__ = ["attention_with_bias"]

_ENABLED = {  # by kernel that has a gradient for a bias. Dynamo cannot read such keys: they stand once more below
    SDPBackend.FLASH_ATTENTION: torch.backends.cuda.flash_sdp_enabled,  # on CPUs it takes one
    SDPBackend.EFFICIENT_ATTENTION: torch.backends.cuda.mem_efficient_sdp_enabled,
    SDPBackend.MATH: torch.backends.cuda.math_sdp_enabled,
}


def attention_with_bias(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor, dropout_p: float, scale: float
) -> torch.Tensor:
    """softmax(q k^T scale + bias) v, with dropout on the probabilities: of kernels with a gradient for `bias`.

    What the user has turned off stays so, but while `torch.compile` traces, which cannot ask.

    Args:
        q: [rows, heads, queries, width].
        k: [rows, heads, keys, width].
        v: the same shape as `k`.
        bias: [rows, heads, queries, keys], of the same dtype.
        dropout_p: 0 outside of training.
        scale: of the products of queries and keys.

    >>> x = torch.ones(1, 2, 3, 8)
    >>> bool(attention_with_bias(x, x, x, torch.zeros(1, 2, 3, 3), 0.0, 0.5).allclose(x))
    True
    """
    kernels = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    if not torch.compiler.is_compiling():
        kernels = [kernel for kernel, enabled in _ENABLED.items() if enabled()] or kernels
    with sdpa_kernel(kernels):
        return F.scaled_dot_product_attention(q, k, v, bias, dropout_p, scale=scale)
