"""Several linear layers of one input as one matmul, queries, keys and values, and a part of one.

It reads the input once, its gradient comes out of one matmul instead of being summed from several, and the weights'
gradients are one matmul large enough to fill a device. The layers stay what they are: their weights are put beside
each other for each call, which costs little beside what many tokens save. Equal to the layers one by one, to
rounding.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from composer_speedups.kernels import joined_gradient
from composer_speedups.kernels.tensors import beside, plain, shape_only
from composer_speedups.surgery import hooked

__all__ = ["joint_linear", "only_linear", "part_of_linear"]


def joint_linear(layers: Sequence[torch.nn.Module], x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """What each of `layers` makes of `x`: by one matmul if they are nothing but linear and nobody listens to one.

    Args:
        layers: of the same input width. An adapter's or a quantised layer is called, and so are the others then.
        x: [..., width].

    >>> layers = [torch.nn.Linear(2, 3), torch.nn.Linear(2, 1)]
    >>> [tuple(y.shape) for y in joint_linear(layers, torch.ones(5, 2))]
    [(5, 3), (5, 1)]
    """
    biased = [m.bias is not None for m in layers if only_linear(m)]
    if len(biased) < len(layers) or any(biased) != all(biased):
        return tuple(m(x) for m in layers)
    weight, bias = torch.cat([m.weight for m in layers]), torch.cat([m.bias for m in layers]) if biased[0] else None
    widths = [m.out_features for m in layers]
    traced = torch.compiler.is_compiling() or torch.jit.is_tracing()
    if not traced and bias is not None and bias.requires_grad and joined_gradient.serves(x, widths):
        return _PartsOfBiased.apply(F.linear(x, weight, bias.detach()), bias, widths)
    y = F.linear(x, weight, bias)
    return _Parts.apply(y, widths) if y.is_cpu and y.requires_grad and plain(y) and not traced else y.split(widths, -1)


class _Parts(torch.autograd.Function):
    """`y.split(widths, -1)`, whose gradient is no copy where attention makes it in one piece: its C kernels do."""

    @staticmethod
    def forward(ctx, y: torch.Tensor, widths: list[int]):
        return y.split(widths, -1)

    @staticmethod
    def backward(ctx, *gradients: torch.Tensor):
        # A gradient to be differentiated once more must know where it came from.
        return (torch.cat(gradients, -1) if torch.is_grad_enabled() else beside(gradients)), None


class _PartsOfBiased(torch.autograd.Function):
    """As `_Parts`, with the gradient of the bias that `y` has in it, which the product then does not know of."""

    @staticmethod
    def forward(ctx, y: torch.Tensor, bias: torch.Tensor, widths: list[int]):
        ctx.dtype = bias.dtype
        return y.split(widths, -1)

    @staticmethod
    def backward(ctx, *gradients: torch.Tensor):
        if torch.is_grad_enabled() or not all(map(plain, gradients)):  # to be differentiated once more, or many at once
            joined = torch.cat(gradients, -1)
            return joined, joined.reshape(-1, joined.shape[-1]).sum(0).to(ctx.dtype), None
        joined, sums = joined_gradient.joined_and_summed(gradients)
        return joined, sums.to(ctx.dtype), None


def part_of_linear(layer: torch.nn.Linear, x: torch.Tensor, part: slice) -> torch.Tensor:
    """`layer(x)[..., part]`, of a layer that is `only_linear`.

    >>> part_of_linear(torch.nn.Linear(2, 6), torch.ones(5, 2), slice(4, None)).shape
    torch.Size([5, 2])
    """
    return F.linear(x, layer.weight[part], None if layer.bias is None else layer.bias[part])


def only_linear(layer: torch.nn.Module) -> bool:
    """Whether calling `layer` is nothing but a matmul with its weight. A quantised weight is a tensor of other type.

    PyTorch's hooks for all modules at once do not count: where one matmul stands for several layers, they hear of none.
    """
    if type(layer) is not torch.nn.Linear or hooked(layer) or layer._compiled_call_impl is not None:
        return False
    parameters = (layer.weight,) if layer.bias is None else (layer.weight, layer.bias)
    return all(type(p) in (torch.nn.Parameter, torch.Tensor) or shape_only(p) for p in parameters)
