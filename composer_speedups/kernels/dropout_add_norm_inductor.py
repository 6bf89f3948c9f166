"""The Triton kernels of `dropout_add_norm_triton.py` as operators that Inductor looks into: CUDA under `torch.compile`.

An opaque operator, as on the CPU, is called by way of Python: its dispatch, Triton's launcher and the allocations cost
the host more than a small kernel takes on the GPU, 48 times a step of BERT-base. Of a `triton_op` the compiler sees the
launch itself: it puts it into its own code, reuses memory for the results, and fuses what follows the partial sums.
Source: https://docs.pytorch.org/tutorials/recipes/torch_compile_user_defined_triton_kernel_tutorial.html

Code that Inductor keeps on disk is found again by the names of the operators in a graph, not by what they launch: so
these names have a digest of the sources, and a new version of the kernels is compiled anew.
"""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

from torch.library import triton_op, wrap_triton

from composer_speedups.kernels import dropout_add_norm_triton as kernels
from composer_speedups.kernels import launch, layer_norm
from composer_speedups.kernels.dropout_add_norm import operators

__all__ = ["forward_op"]

_SOURCES = b"".join(Path(module.__file__).read_bytes() for module in (kernels, launch, layer_norm))


def _forward(*arguments):
    return kernels.forward(*arguments, wrap_triton(kernels.forward_kernel))


def _backward(*arguments):
    return kernels.backward(*arguments, wrap_triton(kernels.backward_kernel))


forward_op, _ = operators(triton_op, f"dropout_add_norm_{sha256(_SOURCES).hexdigest()[:12]}", _forward, _backward)
