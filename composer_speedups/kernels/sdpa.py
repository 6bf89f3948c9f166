"""PyTorch's attention over padded sequences, by those of its kernels whose gradients are right with any mask or bias.

PyTorch chooses among its kernels by dtype, head size, mask, dropout and device. Two choices on CUDA are wrong:

- cuDNN's kernel, on Hopper and Blackwell the first choice from torch 2.11 on, may return NaN for the gradients of
  queries where there is a mask and rows are 64 longer than a multiple of 128 (pytorch/pytorch#196678), and of keys
  where there is one query (NVIDIA/cudnn-frontend#1072); and each new shape costs it a plan. It is left out.
- Memory-efficient attention keeps what backward needs if queries, keys or values want a gradient, and does not ask
  about the bias: where that alone does, as with the layers below frozen, backward reads memory that was never written
  (pytorch/pytorch#148476). The math kernel serves there.

Numerics: those of `scaled_dot_product_attention`.

Source: https://pytorch.org/docs/stable/generated/torch.nn.attention.sdpa_kernel.html
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

__all__ = ["padded_attention"]

_ENABLED = {  # Dynamo cannot read such keys: they stand once more below
    SDPBackend.FLASH_ATTENTION: torch.backends.cuda.flash_sdp_enabled,
    SDPBackend.EFFICIENT_ATTENTION: torch.backends.cuda.mem_efficient_sdp_enabled,
    SDPBackend.MATH: torch.backends.cuda.math_sdp_enabled,
}


def padded_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, dropout_p: float, scale: float
) -> torch.Tensor:
    """softmax(q k^T scale + mask) v, with dropout on the probabilities.

    What the user has turned off stays so, but while `torch.compile` traces, which cannot ask.

    Args:
        q: [rows, heads, queries, width].
        k: [rows, heads, keys, width].
        v: the same shape as `k`.
        mask: [rows, heads, queries, keys], or what broadcasts to it: bool, True where a query sees a key; or of the
            dtype of `q`, a number for each score, which may be learnt.
        dropout_p: 0 outside of training.
        scale: of the products of queries and keys.

    >>> x = torch.ones(1, 2, 3, 8)
    >>> bool(padded_attention(x, x, x, torch.zeros(1, 2, 3, 3), 0.0, 0.5).allclose(x))
    True
    """
    kernels = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    if _only_mask_learns(q, k, v, mask):
        kernels = [SDPBackend.MATH]
    elif not _may_be_cudnns(q):  # the switches are the process's: threads that set them leave them as they find them
        return F.scaled_dot_product_attention(q, k, v, mask, dropout_p, scale=scale)
    elif not torch.compiler.is_compiling():
        kernels = [kernel for kernel, enabled in _ENABLED.items() if enabled()] or kernels
    with sdpa_kernel(kernels):
        return F.scaled_dot_product_attention(q, k, v, mask, dropout_p, scale=scale)


def _may_be_cudnns(q: torch.Tensor) -> bool:
    return q.is_cuda


def _only_mask_learns(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> bool:
    learns = torch.is_grad_enabled() and mask is not None and mask.requires_grad
    return learns and not (q.requires_grad or k.requires_grad or v.requires_grad)
