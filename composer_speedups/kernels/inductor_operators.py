"""Triton kernels of this package as operators that Inductor looks into: CUDA under `torch.compile`.

An opaque operator, as on the CPU, is called by way of Python: its dispatch, Triton's launcher and the allocations cost
the host more than a small kernel takes on the GPU, 72 times a step of BERT-base. Of a `triton_op` the compiler sees the
launch itself: it puts it into its own code, reuses memory for the results, and fuses what follows the partial sums.
Source: https://docs.pytorch.org/tutorials/recipes/torch_compile_user_defined_triton_kernel_tutorial.html

Code that Inductor keeps on disk is found again by the names of the operators in a graph, not by what they launch: so
these names have a digest of the sources, and a new version of the kernels is compiled anew.
"""

from __future__ import annotations

from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from types import ModuleType

from torch.library import triton_op, wrap_triton

from composer_speedups.kernels import (
    bias_gelu,
    bias_gelu_triton,
    dropout_add_norm,
    dropout_add_norm_triton,
    launch,
    layer_norm,
)

__all__ = ["bias_gelu_op", "dropout_add_norm_op"]


def _operator(name: str, meaning: ModuleType, kernels: ModuleType) -> Callable:
    """The forward operator of `meaning`, whose `operators` make it, launching what `kernels` launch."""
    sources = b"".join(Path(module.__file__).read_bytes() for module in (meaning, kernels, launch, layer_norm))

    def forward(*arguments):
        return kernels.forward(*arguments, kernel=wrap_triton(kernels.forward_kernel))

    def backward(*arguments):
        return kernels.backward(*arguments, kernel=wrap_triton(kernels.backward_kernel))

    return meaning.operators(triton_op, f"{name}_{sha256(sources).hexdigest()[:12]}", forward, backward)[0]


dropout_add_norm_op = _operator("dropout_add_norm", dropout_add_norm, dropout_add_norm_triton)
bias_gelu_op = _operator("bias_gelu", bias_gelu, bias_gelu_triton)
