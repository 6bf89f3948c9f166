"""GELU(x + bias) with the error function as one kernel each way, on CUDA and on the CPU.

What it computes is `reference_bias_gelu`, in float32 whatever the input's type, rounded once, when stored. Kept for
backward is `x` alone, the matrix product before its bias. Backward makes the sum and the slope again, and sums up its
gradient for the bias in float32, before it is rounded: by programs or chunks of rows and then over these, no atomics,
so that a run repeats bit for bit on as many threads as there may be.

The work is done by `bias_gelu_triton.py` on CUDA and by `bias_gelu.c` on the CPU; `_torch_forward` and
`_torch_backward` serve on the CPU where there is no compiler, and for float16 and float64. The kernels' distribution
function is the rational approximation 7.1.26 of Abramowitz and Stegun, "Handbook of Mathematical Functions", off by at
most 7.5e-8, half a unit in float32's last place at 1, and by what its root and exponential add. The exponential is the
density that the slope needs; no library call is made.

Eager code goes through an `autograd.Function`, `torch.compile` through a custom operator; see `layer_norm.py`. On CUDA
that is one which the compiler looks into and launches itself: `inductor_operators.py`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from types import ModuleType

import torch
from torch.autograd.function import once_differentiable

from composer_speedups.kernels.native import checked
from composer_speedups.kernels.tensors import refuse_batched, shape_only, to_save
from composer_speedups.kernels.two_sides import CPU, CUDA, NAMES, as_float, chunks_of, cuda_side

__all__ = ["bias_gelu", "has_kernel", "native", "operators", "reference_bias_gelu", "why_not"]

_P, _N, _I = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int


def reference_bias_gelu(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """What the kernels mean, in plain PyTorch; in float64 if `x` is."""
    wide = torch.promote_types(x.dtype, torch.float32)
    h = x.to(wide) + bias.to(wide)
    return (h * 0.5 * (1 + torch.erf(h * 0.5**0.5))).to(x.dtype)


def bias_gelu(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """GELU(x + bias); the result has the dtype of `x`.

    Args:
        x: `[..., width]`, any strides: float32, float16 or bfloat16, on the CPU also float64.
        bias: `[width]`, of any of these dtypes.

    >>> bias_gelu(torch.zeros(2), torch.tensor([0.0, 1.0]))
    tensor([0.0000, 0.8413])
    """
    if (reason := why_not(x, bias)) is not None:
        raise ValueError(f"bias_gelu: {reason}")
    if torch.compiler.is_compiling() and x.is_cuda:
        from composer_speedups.kernels.inductor_operators import bias_gelu_op

        return bias_gelu_op(x, bias)
    if torch.compiler.is_compiling() or shape_only(x):
        return _forward_op(x, bias)
    return _BiasGELU.apply(x, bias)


def why_not(x: torch.Tensor, bias: torch.Tensor) -> str | None:
    """Why the kernels do not take these; None if they do."""
    width = x.shape[-1] if x.dim() else 0
    dtypes = CUDA if x.is_cuda else CPU
    for name, tensor in (("x", x), ("bias", bias)):
        if tensor.dtype not in dtypes:
            return f"{name} is in {tensor.dtype}, and must be in one of {', '.join(map(str, dtypes))}"
    if width < 1 or bias.shape != (width,) or bias.device != x.device:
        return f"bias must have the shape ({width},) on {x.device}, not {tuple(bias.shape)} on {bias.device}"
    if not (x.is_cuda or x.is_cpu):
        return f"x must be on a CUDA device or on the CPU, not on {x.device}"
    return None


def has_kernel(device: str, dtype: torch.dtype) -> bool:
    """Whether tensors on `cuda` or `cpu` have a kernel here, and not only what it means in PyTorch's operations."""
    return dtype in CUDA if device == "cuda" else dtype in NAMES and native() is not None


def _triton(x: torch.Tensor) -> ModuleType | None:
    return cuda_side("bias_gelu", x)


def _forward(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    if (kernels := _triton(x)) is not None:
        return kernels.forward(x, bias)
    if x.dtype in NAMES and (library := native()) is not None:
        return _native_forward(library, x, bias)
    return _torch_forward(x, bias)


def _backward(dy: torch.Tensor, x: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`dx` like `x`, and the bias's gradient, in float32 at least."""
    if (kernels := _triton(x)) is not None:
        return kernels.backward(dy, x, bias)
    if x.dtype in NAMES and (library := native()) is not None:
        return _native_backward(library, dy, x, bias)
    return _torch_backward(dy, x, bias)


# --- the CPU ----------------------------------------------------------------------------------------------------------


@checked("bias_gelu")
def native(library: ctypes.CDLL) -> bool:
    """Whether the C kernels agree with their meaning in PyTorch operations."""
    _declare(library)
    x, dy = torch.linspace(-6, 6, 3 * 37 * 2, dtype=torch.float32, device="cpu").view(2, 3, 37)
    bias = x[0] / 2
    ours = (_native_forward(library, x, bias), *_native_backward(library, dy, x, bias))
    wanted = (_torch_forward(x, bias), *_torch_backward(dy, x, bias))
    return all(a.allclose(b, rtol=1e-4, atol=1e-5) for a, b in zip(ours, wanted, strict=True))


def _declare(library: ctypes.CDLL) -> None:
    for name in NAMES.values():
        forward, backward = getattr(library, f"forward_{name}"), getattr(library, f"backward_{name}")
        forward.argtypes, forward.restype = (*[_P] * 3, _N, _N, _I), None
        backward.argtypes, backward.restype = (*[_P] * 5, _N, _N, _N, _I), None


def _native_forward(library, x, bias):
    x, bias, width = x.contiguous(), as_float(bias), x.shape[-1]
    y = torch.empty_like(x)
    call = getattr(library, f"forward_{NAMES[x.dtype]}")
    call(x.data_ptr(), bias.data_ptr(), y.data_ptr(), x.numel() // width, width, torch.get_num_threads())
    return y


def _native_backward(library, dy, x, bias):
    refuse_batched(dy)
    dy, x, bias, width = dy.contiguous(), x.contiguous(), as_float(bias), x.shape[-1]
    rows = x.numel() // width
    chunks = chunks_of(rows)
    dx, partial = torch.empty_like(x), x.new_empty((chunks, width), dtype=torch.float32)
    call = getattr(library, f"backward_{NAMES[x.dtype]}")
    call(*(t.data_ptr() for t in (dy, x, bias, dx, partial)), rows, width, chunks, torch.get_num_threads())
    return dx, partial.sum(0)


def _torch_forward(x, bias):
    wide = torch.promote_types(x.dtype, torch.float32)
    return torch.nn.functional.gelu(x.to(wide) + bias.to(wide)).to(x.dtype).contiguous()


def _torch_backward(dy, x, bias):
    wide = torch.promote_types(x.dtype, torch.float32)
    dx = torch.ops.aten.gelu_backward(dy.to(wide), x.to(wide) + bias.to(wide))
    return dx.to(x.dtype).contiguous(), dx.reshape(-1, x.shape[-1]).sum(0)


# --- autograd ---------------------------------------------------------------------------------------------------------


class _BiasGELU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, bias):
        ctx.save_for_backward(x, to_save(bias))
        return _forward(x, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        return _gradients(_backward, ctx, dy)


def _gradients(backward, ctx, dy):
    x, bias = ctx.saved_tensors
    dx, dbias = backward(dy, x, bias)
    return dx if ctx.needs_input_grad[0] else None, dbias.to(bias.dtype) if ctx.needs_input_grad[1] else None


def operators(define: Callable, name: str, forward: Callable, backward: Callable) -> tuple[Callable, Callable]:
    """`forward` and `backward` as operators that `define` makes (`custom_op`, `triton_op`), the second of the first."""

    @define(f"composer_speedups::{name}", mutates_args=())
    def forward_op(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return forward(x, bias)

    @define(f"composer_speedups::{name}_backward", mutates_args=())
    def backward_op(dy: torch.Tensor, x: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return backward(dy, x, bias)

    def remember(ctx, inputs, output) -> None:
        ctx.save_for_backward(*inputs)

    forward_op.register_autograd(lambda ctx, dy: _gradients(backward_op, ctx, dy), setup_context=remember)
    return forward_op, backward_op


_forward_op, _backward_op = operators(
    torch.library.custom_op,
    "bias_gelu",
    lambda *arguments: _forward(*arguments),  # looked up when called, as in `_BiasGELU`
    lambda *arguments: _backward(*arguments),
)


@_forward_op.register_fake
def _(x, bias):
    return x.new_empty(x.shape)


@_backward_op.register_fake
def _(dy, x, bias):
    return x.new_empty(x.shape), x.new_empty((x.shape[-1],), dtype=torch.promote_types(x.dtype, torch.float32))
