"""About how much memory a training step on a GPU takes, by arithmetic: where the search for the batch begins.

Counted is what autograd keeps of a BERT-like encoder, as in Korthikanti et al., "Reducing Activation Recomputation in
Large Transformer Models", 2022 (their 34 bytes per token and unit of width in 16 bits), with what PyTorch's autocast
does otherwise: norms read and keep float32. Imports nothing heavy, so that it can be checked on any machine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Memory", "Shape", "batch_that_fits", "batch_sizes", "estimate", "microbatch_sizes"]

_MASTER = 4  # bytes of a weight, and of its gradient: recipes train in float32 with autocast around it
_WORKSPACE = 64 * 2**20  # cuBLAS and the allocator's rounding
_STEP = 8  # half-precision tensor cores want multiples of 8 ...
_WIDE_STEP = 64  # ... and from Ampere on like 128 bytes at a time
_FULL_STEP = 512  # below it, multiples of 64 would give away more than an eighth of the batch
_MOST = 16_384  # samples: no machine takes more of them at once to advantage


@dataclass(frozen=True)
class Shape:
    """The sizes of an encoder that decide about memory."""

    layers: int
    hidden: int
    heads: int
    inner: int
    vocabulary: int
    positions: int = 512

    @property
    def parameters(self) -> int:
        """Weights, biases and norms of embeddings, layers and pooler."""
        norm = 2 * self.hidden
        embeddings = (self.vocabulary + self.positions + 2) * self.hidden + norm
        attention = 4 * (self.hidden**2 + self.hidden) + norm
        feed_forward = 2 * self.hidden * self.inner + self.hidden + self.inner + norm
        return embeddings + self.layers * (attention + feed_forward) + self.hidden**2 + self.hidden


@dataclass(frozen=True)
class Memory:
    """Bytes by kind. `fixed` does not depend on the batch; `per_sample` comes with each sample."""

    weights: int
    gradients: int
    optimizer: int
    per_sample: int

    @property
    def fixed(self) -> int:
        return self.weights + self.gradients + self.optimizer + _WORKSPACE

    def total(self, batch: int) -> int:
        return self.fixed + batch * self.per_sample


def estimate(shape: Shape, tokens: float, recipe: Mapping[str, Any], precision: str, length: int) -> Memory:
    """Memory of one training step.

    Args:
        shape: of the model.
        tokens: that are computed per sample, padding included where it is computed.
        recipe: resolved, as plain data.
        precision: of the matmuls: `fp32`, `tf32`, `fp16` or `bf16`.
        length: to which a sample is padded; eager attention keeps its square.

    >>> bert = Shape(layers=12, hidden=768, heads=12, inner=3072, vocabulary=30522)
    >>> round(bert.parameters / 1e6)
    109
    >>> round(estimate(bert, 256, {}, "fp32", 256).per_sample / 2**20)
    153
    """
    speedups = recipe.get("speedups") or {}
    half = precision in ("fp16", "bf16")
    size = 2 if half else 4
    norm = 2 if half and ("low_precision_norm" in speedups or "fused_layer_norm" in speedups) else 4
    # Inputs of the four linear maps; query, key, value; GELU's input: 6 + 2 inner / hidden values. Norms: their input.
    # Dropout: a mask of one byte after attention and one after the feed-forward part.
    per_unit = size * (6 + 2 * shape.inner / shape.hidden) + 2 * norm + 2
    layer = tokens * shape.hidden * per_unit
    if (recipe.get("model") or {}).get("attn_implementation") == "eager" and not (
        {"sdp_attention", "unpadding"} & speedups.keys()
    ):
        layer += shape.heads * length**2 * (4 + size + 1)  # softmax in float32, after dropout, and dropout's mask
    activations = shape.layers * layer + tokens * shape.hidden * (4 + 1)
    task = recipe.get("task") or {}
    if task.get("objective") == "mlm":
        share = float(task.get("mlm_probability") or 0.15) if "masked_token_head" in speedups else 1.0
        # Logits, their softmax in float32, and its gradient; the head's transform keeps a layer's inputs.
        kept = size if "fused_cross_entropy" in speedups else size + 4 + 4
        activations += share * tokens * (shape.vocabulary * kept + 3 * shape.hidden * size)
    count = shape.parameters
    copies = 2 * count if half else 0  # autocast keeps the weights in 16 bits until the backward pass is over
    state = 8 * count  # two moments in float32
    if "adamw_8bit" in speedups:
        embeddings = (shape.vocabulary + shape.positions + 2) * shape.hidden  # these keep 32 bits
        state = 8 * embeddings + 2 * (count - embeddings)
    return Memory(_MASTER * count + copies, _MASTER * count, state, round(activations))


def batch_that_fits(memory: Memory, limit: int, sizes: Sequence[int]) -> int:
    """The largest of `sizes` (ascending) that should fit into `limit` bytes; the smallest if none does."""
    return max((size for size in sizes if memory.total(size) <= limit), default=sizes[0])


def batch_sizes(most: int, capability: float | None = None) -> list[int]:
    """The batch sizes worth trying, ascending.

    Args:
        most: the largest that the data allow.
        capability: the GPU's compute capability; None is a CPU. From 8.0 on, large batches are multiples of 64.

    >>> batch_sizes(24), batch_sizes(704, 8.0)[-4:]
    ([1, 2, 4, 8, 16, 24], [504, 512, 576, 640, 704])
    """
    most = min(most, _MOST)
    small = [n for n in (1, 2, 4) if n <= most]
    wide = capability is not None and capability >= 8.0
    middle = range(_STEP, min(most, _FULL_STEP if wide else most) + 1, _STEP)
    return [*small, *middle, *(range(_FULL_STEP + _WIDE_STEP, most + 1, _WIDE_STEP) if wide else ())]


def microbatch_sizes(batch: int) -> list[int]:
    """Those into which a batch divides evenly, ascending: no microbatch is smaller than the others.

    >>> microbatch_sizes(12)
    [1, 2, 3, 4, 6, 12]
    """
    return [n for n in range(1, batch + 1) if batch % n == 0]
