"""The numeric check of LayerNorm, one function for the kernel, for its mutants and for the algorithm."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import torch
from rounding import rounding

from composer_speedups.kernels.layer_norm import reference_layer_norm

EPS = 1e-2  # large, so that a wrong or missing eps shows
LayerNorm = Callable[..., torch.Tensor]


def case(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    weight: torch.dtype | None = torch.float32,
    bias: torch.dtype | None = torch.float32,
    device: str = "cpu",
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Input with mean 3 and deviation 1 or so (a mean of 0 would hide its errors), weight and bias normal."""
    x = torch.randn(shape, device=device).add(3.0).to(dtype).requires_grad_()
    parameters = [
        None if kind is None else torch.randn(shape[-1], device=device).to(kind).requires_grad_()
        for kind in (weight, bias)
    ]
    return x, *parameters


def check(layer_norm: LayerNorm, x, weight, bias, eps: float = EPS) -> None:
    """Compare output and gradients with the same function in float64; raise AssertionError on a difference.

    Tolerances, with u the spacing at 1 of the result's dtype and e that of float32:
    * storing rounds once, relative u/2; the interpreter truncates to bf16 instead, relative u;
    * the sums of a row are float32, at most 16 terms in sequence and 10 levels of a tree: with the divisions
      and the root below 32 roundings of e/2, of values no larger than |x|max (mean) or |y|max;
    * dx is a difference of three such terms, each up to |dy|max |w|max / deviation;
    * the sums over `rows` for the weight's gradient: at most rows + 32 roundings of e/2 of the sum of |terms|,
      each of which already carries the error of x_hat.
    """
    rows = prod(x.shape[:-1])
    inputs = [t for t in (x, weight, bias) if t is not None]
    doubles = [t.detach().double().requires_grad_() for t in inputs]
    named = iter(doubles)
    x64, w64, b64 = (None if t is None else next(named) for t in (x, weight, bias))
    expected = reference_layer_norm(x64, w64, b64, eps)
    y = layer_norm(x, weight, bias, eps)
    assert y.dtype == x.dtype and y.shape == x.shape
    dy = torch.randn_like(y)
    grads = torch.autograd.grad(y, inputs, dy)
    grads64 = torch.autograd.grad(expected, doubles, dy.double())

    e = torch.finfo(torch.float32).eps
    scale = 1.0 if w64 is None else w64.detach().abs().amax().item()
    largest = x64.detach().abs().amax().item() if rows else 0.0
    rstd = (x64.detach().var(-1, correction=0) + eps).rsqrt().amax().item() if rows else 0.0
    # From the mean, and from the deviation: relative, hence times x_hat, which seldom passes 4.
    x_hat_error = 16 * e * (1 + largest * rstd) * 4

    def near(actual: torch.Tensor, wanted: torch.Tensor, absolute: float, what: str) -> None:
        assert actual.dtype in (torch.float32, torch.float16, torch.bfloat16)
        u = torch.finfo(actual.dtype).eps
        tiny = torch.finfo(actual.dtype).smallest_normal * u  # fp16: subnormal spacing
        relative = rounding(actual.dtype) * 1.01 + 4 * e
        torch.testing.assert_close(
            actual.double(), wanted, rtol=relative, atol=absolute + tiny, msg=lambda m: f"{what}: {m}"
        )

    near(y, expected.detach(), x_hat_error * scale, "y")
    grown = dy.double().abs().amax().item() * scale * rstd if rows else 0.0
    near(grads[0], grads64[0], 4 * x_hat_error * grown, "dx")
    terms = dy.double().abs().sum() / max(1, x.shape[-1]) * 4 + 1 if rows else torch.tensor(0.0)
    for got, want in zip(grads[1:], grads64[1:], strict=True):
        near(got, want, (terms * (x_hat_error + (rows + 32) * e / 2)).item(), "dw or db")
    assert [g.dtype for g in grads] == [t.dtype for t in inputs]
