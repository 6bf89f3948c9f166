"""The numeric check of dropout + add + LayerNorm, one function for every kernel, for mutants and for the algorithm."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import torch
from rounding import rounding

from composer_speedups.kernels.dropout_add_norm import reference_dropout_add_norm
from composer_speedups.kernels.fast_dropout import keep_by_torch, realised

EPS = 1e-2  # large, so that a wrong or missing eps shows
Kernel = Callable[..., torch.Tensor]


def case(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    weight: torch.dtype = torch.float32,
    bias: torch.dtype = torch.float32,
    device: str = "cpu",
    x_bias: torch.dtype | None = None,
) -> list[torch.Tensor]:
    """x and residual with means that are not 0 (which would hide their errors), weight and bias normal; and an x_bias,
    if it is given a dtype."""
    x, residual = (torch.randn(shape, device=device).add(mean).to(dtype) for mean in (2.0, 1.0))
    kinds = (weight, bias) if x_bias is None else (weight, bias, x_bias)
    parameters = [torch.randn(shape[-1], device=device).to(kind) for kind in kinds]
    return [t.requires_grad_() for t in (x, residual, *parameters)]


def kept(x: torch.Tensor, p: float, seed: int) -> torch.Tensor | None:
    """The mask that a call after `torch.manual_seed(seed)` must draw."""
    if not p:
        return None
    torch.manual_seed(seed)
    seeds = torch.randint(0, 1 << 32, (2,), device=x.device).tolist()
    return keep_by_torch(x.numel(), seeds, round(realised(p) * 65536)).view(x.shape).to(x.device)


def check(kernel: Kernel, inputs: list[torch.Tensor], p: float = 0.0, eps: float = EPS) -> None:
    """Compare output and gradients with the same function in float64; raise AssertionError on a difference.

    Tolerances, with u the spacing at 1 of the result's dtype and e that of the arithmetic's (float32's, or float64's):
    * storing rounds once, relative u/2; Triton's interpreter truncates to bf16 instead, relative u (`rounding`);
    * bias, scale and the sum with the residual round three times; the sums of a row are at most width/16 terms in
      sequence (16 lanes of a vector, or 512 threads) and 10 levels of a tree: with the divisions and the root below
      32 + width/16 roundings of e/2, of values no larger than |z|max (mean) or |y|max;
    * dz is a difference of three such terms, each up to |dy|max |w|max / deviation; dx is that times the scale;
    * the sums over `rows` for the weight's gradient: at most rows + 32 roundings of e/2 of the sum of |terms|,
      each of which already carries the error of z_hat; those for the bias of x likewise, of terms of dx.
    """
    x = inputs[0]
    rows, width = prod(x.shape[:-1]), x.shape[-1]
    doubles = [t.detach().double().requires_grad_() for t in inputs]
    x64, residual64, w64, _, *more64 = doubles
    x64 = x64 + more64[0] if more64 else x64
    keep, scale = kept(x, p, 5), 1 / (1 - realised(p))
    expected = reference_dropout_add_norm(*doubles[:4], keep, p, eps, *more64)
    torch.manual_seed(5)
    y = kernel(*inputs[:4], p, eps, *inputs[4:])
    assert y.dtype == x.dtype and y.shape == x.shape
    dy = torch.randn_like(y)
    grads = torch.autograd.grad(y, inputs, dy)
    grads64 = torch.autograd.grad(expected, doubles, dy.double())

    wide = torch.promote_types(x.dtype, torch.float32)
    e = torch.finfo(wide).eps
    weight = w64.detach().abs().amax().item()
    z = torch.where(keep, x64 * scale, 0) if p else x64
    z = (z + residual64).detach()
    largest = (x64.abs() * scale + residual64.abs()).amax().item() if rows else 0.0
    rstd = (z.var(-1, correction=0) + eps).rsqrt().amax().item() if rows else 0.0
    # From the mean, and from the deviation: relative, hence times z_hat, which seldom passes 4.
    z_hat_error = (16 + width / 32) * e * (1 + largest * rstd) * 4

    def near(actual: torch.Tensor, wanted: torch.Tensor, absolute: float, what: str) -> None:
        u = torch.finfo(actual.dtype).eps
        tiny = torch.finfo(actual.dtype).smallest_normal * u  # fp16: subnormal spacing
        relative = rounding(actual.dtype) * 1.01 + 4 * e
        torch.testing.assert_close(
            actual.double(), wanted, rtol=relative, atol=absolute + tiny, msg=lambda m: f"{what}: {m}"
        )

    near(y, expected.detach(), z_hat_error * weight, "y")
    grown = dy.double().abs().amax().item() * weight * rstd if rows else 0.0
    near(grads[0], grads64[0], 4 * z_hat_error * grown * scale, "dx")
    near(grads[1], grads64[1], 4 * z_hat_error * grown, "dresidual")
    terms = (dy.double().abs().sum() / width * 4 + 1).item() if rows else 0.0
    for got, want in zip(grads[2:4], grads64[2:4], strict=True):
        near(got, want, terms * (z_hat_error + (rows + 32) * e / 2), "dweight or dbias")
    added = 4 * z_hat_error * grown * scale * rows + grads64[0].abs().sum().item() / width * 4 * (rows + 32) * e / 2
    for got, want in zip(grads[4:], grads64[4:], strict=True):
        near(got, want, added, "dx_bias")
    assert [g.dtype for g in grads] == [t.dtype for t in inputs]
