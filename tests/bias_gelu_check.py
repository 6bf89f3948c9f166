"""The numeric check of bias + GELU, one function for the kernel, for its mutants and for the algorithm."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import torch
from rounding import rounding

from composer_speedups.kernels.bias_gelu import reference_bias_gelu


def case(
    shape: tuple[int, ...], dtype: torch.dtype, bias: torch.dtype = torch.float32, device: str = "cpu"
) -> list[torch.Tensor]:
    """x of deviation 2, so that both tails are there, and a bias that shows when it is forgotten."""
    x = torch.randn(shape, device=device).mul(2.0).to(dtype)
    return [x.requires_grad_(), torch.randn(shape[-1], device=device).to(bias).requires_grad_()]


def check(kernel: Callable[..., torch.Tensor], inputs: list[torch.Tensor]) -> None:
    """Compare output and gradients with the same function in float64; raise AssertionError on a difference.

    Tolerances, with u the spacing at 1 of the result's dtype and e that of the arithmetic's (float32's, or float64's):
    * storing rounds once, relative u/2; the interpreter truncates to bf16 instead, relative u;
    * Phi is off by at most 7.5e-8 by its formula and by 4 roundings of values below 1, 2.5 e together; the density by
      its argument, h^2/2 roundings of e/2 times at most exp(-h^2/2), below e, and 2 e of the exponential: y is h
      times Phi, and the slope Phi and h times a density: 4 e (1 + |h|max) bounds both;
    * the sum over `rows`: at most rows + 4 roundings of e/2 of the sum of |terms|.
    """
    x = inputs[0]
    doubles = [t.detach().double().requires_grad_() for t in inputs]
    expected = reference_bias_gelu(*doubles)
    y = kernel(*inputs)
    assert y.dtype == x.dtype and y.shape == x.shape
    dy = torch.randn_like(y)
    grads = torch.autograd.grad(y, inputs, dy)
    grads64 = torch.autograd.grad(expected, doubles, dy.double())
    e, rows = torch.finfo(torch.promote_types(x.dtype, torch.float32)).eps, prod(x.shape[:-1])
    h = (doubles[0] + doubles[1]).detach()
    error = 4 * e * (1 + (h.abs().amax().item() if rows else 0.0))

    def near(actual: torch.Tensor, wanted: torch.Tensor, absolute: float, what: str) -> None:
        u = torch.finfo(actual.dtype).eps
        tiny = torch.finfo(actual.dtype).smallest_normal * u  # fp16: subnormal spacing
        relative = rounding(actual.dtype) * 1.01 + 2 * e
        torch.testing.assert_close(
            actual.double(), wanted, rtol=relative, atol=absolute + tiny, msg=lambda m: f"{what}: {m}"
        )

    near(y, expected.detach(), error, "y")
    steepest = dy.double().abs().amax().item() if rows else 0.0
    near(grads[0], grads64[0], error * steepest, "dx")
    terms = dy.double().abs().reshape(-1, x.shape[-1]).sum(0).amax().item() if rows else 0.0
    near(grads[1], grads64[1], terms * (error + (rows + 4) * e / 2), "dbias")
    assert [g.dtype for g in grads] == [t.dtype for t in inputs]
