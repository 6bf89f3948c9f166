"""Dropout under Inductor: the backward pass must drop what the forward pass dropped.

The other tests compile with `aot_eager`, which calls the same operators; Inductor may draw numbers anew, reorder, or
compute something twice. Here masks are read out of outputs and out of gradients, and must be one.
"""

from __future__ import annotations

import pytest
import torch

from composer_speedups.kernels.dropout_add_norm import dropout_add_norm
from composer_speedups.kernels.fast_dropout import fast_dropout
from composer_speedups.kernels.varlen_attention import Lengths, varlen_attention

P = 0.25
FLASH = torch.bfloat16  # what flash attention takes; on a CPU there is a kernel of its own for it, too


def compiled(function):
    """By Inductor, as a part of a graph that has something to fuse before and after."""

    @torch.compile(backend="inductor", fullgraph=True)
    def run(*tensors):
        return function(*(x * 1.0 for x in tensors)) * 1.0

    return run


def share(dropped: torch.Tensor) -> float:
    return float(dropped.float().mean())


def test_fast_dropout() -> None:
    run = compiled(lambda x: fast_dropout(x, P))
    masks = []
    for _ in range(2):
        x = torch.ones(64, 128, requires_grad=True)
        out = run(x)
        out.sum().backward()
        assert torch.equal(out == 0, x.grad == 0)
        masks.append(out == 0)
    assert abs(share(masks[0]) - P) < 0.03 and not torch.equal(*masks), "each call draws anew"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_dropout_add_norm(device: str, dtype: torch.dtype) -> None:
    width = 256
    weight, bias = torch.ones(width, device=device), torch.zeros(width, device=device)
    residual = torch.randn(64, width, device=device).to(dtype)
    run = compiled(lambda x, r, w, b: dropout_add_norm(x, r, w, b, p=P))
    masks = []
    for _ in range(2):
        x = torch.full((64, width), 1000.0, device=device, dtype=dtype, requires_grad=True)
        out = run(x, residual, weight, bias)
        (out * torch.randn_like(out)).sum().backward()
        dropped = out < 0  # of 1000 and 0, with a residual of about 1: below the mean is what was dropped
        assert torch.equal(dropped, x.grad == 0)
        masks.append(dropped)
    assert abs(share(masks[0]) - P) < 0.03 and not torch.equal(*masks), "each call draws anew"


@pytest.mark.parametrize("dtype", [torch.float32, FLASH], ids=str)
def test_attention(device: str, dtype: torch.dtype) -> None:
    """With the identity as values the output is the matrix of attention, and their gradient is of its transpose."""
    size, heads = 32, 2
    lengths = Lengths.of([size] * 3, device)
    run = compiled(lambda q, k, v: varlen_attention(q, k, v, lengths, lengths, P))
    q, k = (torch.randn(3 * size, heads, size, device=device).to(dtype) for _ in range(2))
    eye = torch.eye(size, device=device, dtype=dtype)[:, None].expand(size, heads, size).repeat(3, 1, 1)
    outs = []
    for _ in range(2):
        v = eye.clone().requires_grad_()
        out = run(q, k, v)
        gradient = torch.randn_like(out)
        out.backward(gradient)
        attention = out.detach().unflatten(0, (3, size)).double()  # [sequence, query, head, key]
        expected = torch.einsum("sqhk,sqhd->skhd", attention, gradient.unflatten(0, (3, size)).double()).flatten(0, 1)
        # Probabilities rounded once to the dtype on either way, sums of 32 products in float32.
        torch.testing.assert_close(v.grad.double(), expected, rtol=0, atol=40 * torch.finfo(dtype).eps)
        outs.append(out.detach())
    assert abs(share(outs[0] == 0) - P) < 0.05 and not torch.equal(*outs), "each call draws anew"
