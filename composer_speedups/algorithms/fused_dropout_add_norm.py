"""FusedDropoutAddNorm: the end of each half of a post-norm block, bias + dropout + residual + LayerNorm, in one kernel.

**Why it is faster.** Behind each of its two last matrix products a BERT block computes `LayerNorm(dropout(x + bias) +
residual)`: kernels that wait for memory, under autocast with casts to float32 between them, and as many backward, with
one more pass for the bias. Here one kernel reads `x` and `residual` and writes the output; backward reads both again
with the gradient, and writes both gradients, while it sums up those of weight and biases. The mask is never stored: its
bits are hashed again.

**Numerics.** Under autocast both inputs are taken in the autocast dtype and the output is rounded once to it, as
`LowPrecisionNorm` does, but the sum before the norm stays in float32, as do weight, biases, mean and variance. Without
autocast the result differs from PyTorch's by float32 rounding. Masks are those of `FastDropout`: a multiple of 1/65536
is dropped, the scale is exact for it; keys come from PyTorch's generator of the device, so that seeds and gradient
checkpointing repeat bit for bit. A dropped NaN or infinity becomes 0. Gradients are summed in a fixed order; there
are no second derivatives (gradient penalties).

**When it pays.** On the CPU in bf16: 2.6 ms where PyTorch takes 15.9, and `FastDropout` with `LowPrecisionNorm` 3.5,
for 6,144 x 256, forward and backward, without the bias (`benchmarks/results/2026-11-24_cpu_limits_3`); less in float32.
On an H200, in eager mode, 0.81 ms where PyTorch takes 3.36 and with `LowPrecisionNorm` 2.06, for 262,144 x 768
(`2026-11-27_h200_limits`): 94 % of the bandwidth, with 8 passes over the activations instead of 16, and 4 launches
instead of 6 or more. Under `TorchCompile` Inductor fuses the forward pass as well, and launches these kernels itself on
CUDA; what is saved there are the stored mask and the second pass for the gradients of weight and biases.

**Needs.** Blocks that compute what BertSelfOutput and BertOutput do: BERT, RoBERTa, XLM-R, CamemBERT, ELECTRA,
DeBERTa-v2 and others, known by their code and not by their names; MPNet's, and DistilBERT's, which drop nothing behind
the attention (in both the projection behind it adds its bias itself); and layers that compute what NomicBertLayer does,
as Jina embeddings v3's and GTE's (whose projections all add their biases themselves). On CUDA the package triton and a
width up to 8192; on the CPU a C compiler for speed: without one PyTorch's operations compute the same masks. Other
devices are refused; tensor subclasses, `torch.func`, and a norm or dropout of a block that somebody hooks or has
replaced take the block's own code; a linear layer that somebody hooks or has replaced adds its bias itself. It takes
the norms and dropouts of the blocks; `LowPrecisionNorm`, `FusedLayerNorm` and `FastDropout` take the others.

Source: dropout + add + LayerNorm of MosaicML's and NVIDIA's MLPerf BERT; the masks are counter-based, see FastDropout.
"""

from __future__ import annotations

import torch
from composer.core import State
from composer.loggers import Logger

from composer_speedups.compilation import missing_kernel
from composer_speedups.errors import SpeedUpUnavailable
from composer_speedups.kernels import dropout_add_norm as kernel
from composer_speedups.post_norm import FUSED, ends_in
from composer_speedups.speedup import SpeedUp, Stage
from composer_speedups.surgery import having

__all__ = ["FusedDropoutAddNorm", "apply_fused_dropout_add_norm"]


def apply_fused_dropout_add_norm(model: torch.nn.Module) -> int:
    """Let every post-norm block end in `model` run as one kernel, in place; return how many: two for each layer.

    Parameters stay the same objects. Apply it before `apply_low_precision_norm`, `apply_fused_layer_norm` and
    `apply_fast_dropout`, which then count what they really change.

    Raises:
        SpeedUpUnavailable: the parameters are on a device that has no kernel.

    >>> from transformers import BertConfig, BertModel
    >>> bert = BertModel(BertConfig(hidden_size=8, num_attention_heads=2, num_hidden_layers=3, vocab_size=9))
    >>> apply_fused_dropout_add_norm(bert), apply_fused_dropout_add_norm(bert)
    (6, 0)
    """
    found = ends_in(model)
    for device in {norm.weight.device for ends in found for norm in ends.norms}:
        if (reason := missing_kernel(device)) is not None:
            raise SpeedUpUnavailable(f"apply_fused_dropout_add_norm cannot be used here: {reason}")
    for ends in found:
        ends.fuse()
    return sum(len(ends.norms) for ends in found)


class FusedDropoutAddNorm(SpeedUp):
    """Apply `apply_fused_dropout_add_norm` at `Event.INIT`, before other norms and dropouts are changed.

    >>> FusedDropoutAddNorm()
    FusedDropoutAddNorm()
    """

    stage = Stage.BLOCK

    def unavailable(self, device: torch.device) -> str | None:
        return missing_kernel(device)

    def install(self, state: State, logger: Logger) -> None:
        count = apply_fused_dropout_add_norm(state.model)
        by = "Triton" if state.device._device.type == "cuda" else "C" if kernel.native() is not None else "PyTorch"
        nothing = "no block in the model ends in dropout, LayerNorm(x + residual) as BERT's do"
        self.report(logger, count, nothing, already=having(state.model, *FUSED), kernel=by)
