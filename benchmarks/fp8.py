"""Products in fp8 beside those in bf16: one dense layer of BERT's, forward and backward.

Whether training gains by fp8 at such widths is a question of the casts around the products: each operand is scaled to
the range of fp8 by its largest number and written twice, as it is and transposed, since the products take one of their
operands by rows and the other by columns. So three lines: bf16, fp8 with operands that are ready, which nobody has, and
fp8 with its casts. Of the numbers fp8 leaves a relative error of some per cent in each product (`in_fp8`), where bf16's
is some thousandths: a gain here is not yet one in training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from benchmarks.kernels import Kernel

__all__ = ["Operand", "cast", "in_bf16", "in_fp8", "products"]

_NAME = "dense layer, both ways"


class Operand(NamedTuple):
    """A matrix in fp8: [rows, columns], [columns, rows], and what to multiply both with, a float32 scalar."""

    rows: Any
    columns: Any
    scale: Any


def products(device: Any, tokens: int, width: int) -> Iterator[Kernel]:
    """Of a GPU that has fp8, from Ada and Hopper on; nothing elsewhere."""
    import torch

    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 9):
        return
    x = torch.randn(tokens, width, device=device).bfloat16()
    weight = (torch.randn(4 * width, width, device=device) * 0.02).bfloat16()
    gradient = torch.randn(tokens, 4 * width, device=device).bfloat16()
    flops = 3 * 2 * tokens * width * 4 * width
    fused = torch.compile(cast, dynamic=False)
    dtypes = torch.float8_e4m3fn, torch.float8_e4m3fn, torch.float8_e5m2

    def casts() -> list[Operand]:
        return [fused(matrix, dtype) for matrix, dtype in zip((x, weight, gradient), dtypes, strict=True)]

    ready = casts()
    yield Kernel("fp8", f"{_NAME}: bf16", lambda: in_bf16(x, weight, gradient), flops=flops)
    yield Kernel("fp8", f"{_NAME}: fp8, operands ready", lambda: in_fp8(*ready), flops=flops)
    yield Kernel("fp8", f"{_NAME}: fp8, with its casts", lambda: in_fp8(*casts()), flops=flops)


def in_bf16(x: Any, weight: Any, gradient: Any) -> tuple[Any, Any, Any]:
    """The output [tokens, out], and the gradients of `x` [tokens, in] and `weight` [out, in], given the output's."""
    return x @ weight.t(), gradient @ weight, gradient.t() @ x


def in_fp8(x: Operand, weight: Operand, gradient: Operand) -> tuple[Any, Any, Any]:
    """The same, in bf16 from products of fp8 that are summed in float32."""
    return (
        _product(x.rows, x.scale, weight.rows, weight.scale),
        _product(gradient.rows, gradient.scale, weight.columns, weight.scale),
        _product(gradient.columns, gradient.scale, x.columns, x.scale),
    )


def cast(matrix: Any, dtype: Any) -> Operand:
    """`matrix` scaled by its largest number to the range of `dtype`."""
    import torch

    most = torch.finfo(dtype).max
    scale = matrix.abs().amax().float().clamp_min(1e-12) / most
    rows = (matrix.float() / scale).clamp(-most, most).to(dtype)
    return Operand(rows, rows.t().contiguous(), scale)


def _product(left: Any, left_scale: Any, right: Any, right_scale: Any) -> Any:
    """`left @ right.T`: cuBLAS takes the right one by columns, which is what a transposed view of its rows is."""
    import torch

    product: Callable[..., Any] = torch._scaled_mm
    return product(left, right.t(), scale_a=left_scale, scale_b=right_scale, out_dtype=torch.bfloat16)
