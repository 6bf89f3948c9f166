"""FusedEmbedding: the gradient of an embedding table by one kernel, without sorting the tokens.

**Why it is faster.** The gradient of a table is a sum of tokens' gradients for each of its rows. On CUDA PyTorch sorts
the ids, finds where each begins among them, and adds up in two stages: some 20 kernels for each table, most of them for
a few thousand numbers, for which launching takes longer than computing. BERT has three tables: of words, positions and
token types. Their gradients took 0.5 ms of a step of 19 on an H200 (BERT-base, 13,312 tokens, 96 kernels and memsets,
`benchmarks/results/2026-11-26_h200_profiles`). Here one kernel adds each token's gradient to its row where that lies:
0.10 ms for all three there, in 6 kernels (`2026-11-27_h200_profiles`). Forward is PyTorch's.

**Numerics.** The same sums in float32, in another order, and in none that is fixed: additions are atomic, so that a run
does not repeat bit for bit, as it does not with flash attention's backward pass either. Under
`torch.use_deterministic_algorithms(True)` PyTorch's gradient is taken. Tables of at most four rows (token types) are
summed up in a fixed order.

**When it pays.** Wherever tables train on CUDA, most where a step is short. Under `TorchCompile(scope="block")` the
embeddings are in no block, and it stays in force; what is compiled as a whole keeps PyTorch's.

**Needs.** A CUDA device and the package triton. Tables in float32, as they are under autocast; with `sparse=True`,
`max_norm` or `scale_grad_by_freq`, and subclasses of `nn.Embedding`, are left alone and counted.

Source: embedding of Liger Kernel (https://github.com/linkedin/Liger-Kernel), whose gradient is atomic sums, too.
"""

from __future__ import annotations

import torch
from composer.core import State
from composer.loggers import Logger

from composer_speedups.compilation import TRITON_INTERPRETED, missing_for_triton_on
from composer_speedups.errors import SpeedUpUnavailable
from composer_speedups.kernels.tensors import plain, shape_only
from composer_speedups.speedup import SpeedUp, Stage
from composer_speedups.surgery import having, swap_classes

__all__ = ["FusedEmbedding", "apply_fused_embedding"]


def apply_fused_embedding(model: torch.nn.Module) -> int:
    """Let the gradient of every plain `nn.Embedding` in `model` be one kernel's, in place; return how many.

    Parameters stay the same objects. A table that is not on a CUDA device, or not in float32, is PyTorch's as before.

    Raises:
        SpeedUpUnavailable: there is no CUDA device, or no Triton.
    """
    if (reason := _unavailable()) is not None:
        raise SpeedUpUnavailable(f"apply_fused_embedding cannot be used here: {reason}")
    return swap_classes(model, {torch.nn.Embedding: _FusedEmbedding}, only=_fits)


class FusedEmbedding(SpeedUp):
    """Apply `apply_fused_embedding` at `Event.INIT`, before DDP wraps the model.

    >>> FusedEmbedding()
    FusedEmbedding()
    """

    stage = Stage.NORM

    def unavailable(self, device: torch.device) -> str | None:
        return _unavailable(device)

    def install(self, state: State, logger: Logger) -> None:
        tables = sum(type(module) is torch.nn.Embedding for module in state.model.modules())
        count = apply_fused_embedding(state.model)
        nothing = "no torch.nn.Embedding in the model, without sparse, max_norm and scale_grad_by_freq"
        already = having(state.model, _FusedEmbedding)
        self.report(logger, count, nothing, already=already, left_alone=tables - count)


def _unavailable(device: torch.device | None = None) -> str | None:
    return missing_for_triton_on(device, "remove it: PyTorch's gradient sorts nothing on a CPU")


def _fits(table: torch.nn.Embedding) -> bool:
    return not table.sparse and table.max_norm is None and not table.scale_grad_by_freq


class _FusedEmbedding(torch.nn.Embedding):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if not self._takes(input):
            return super().forward(input)
        from composer_speedups.kernels.embedding_gradient import embedding

        return embedding(input, self.weight, self.padding_idx)

    def _takes(self, ids: torch.Tensor) -> bool:
        if torch.compiler.is_compiling() or torch.are_deterministic_algorithms_enabled() or not _fits(self):
            return False
        weight = self.weight
        known = plain(ids) and plain(weight) and not shape_only(ids) and not shape_only(weight)
        on_device = weight.is_cuda or TRITON_INTERPRETED
        return known and on_device and weight.dtype == torch.float32 and ids.dtype in (torch.int32, torch.int64)
