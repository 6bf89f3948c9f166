"""AdamW8bit: bitsandbytes' AdamW with block-wise 8-bit state.

**Why it is faster.** It is above all smaller: two bytes of state per weight instead of eight, so the update also
moves less memory. The memory saved can go into a larger batch.

**Numerics.** Each block of 256 values of a moment shares one float32 scale, and each value is one of 256 codes of a
dynamic (roughly logarithmic) code book. A stored moment is off by up to 0.7 % (second moments 0.35 %) of the
largest in its block, made anew at every step; small ones by more of themselves. Tensors below 4,096 elements
(biases, norms) and, unless asked otherwise, embeddings keep 32-bit state: embedding gradients are sparse and of
very different sizes, which is where 8 bits have been seen to diverge.

**When it pays.** When memory is what limits the batch: it saves 6 bytes a weight outside the embeddings, half a GB for
BERT-base. On a CPU it is slower than 32-bit state. On a GPU bitsandbytes waits after each parameter's update, so
`SyncFreeLoop` brings nothing beside it, and a step takes longer: on an H200 11.7 ms for BERT-base's weights, where
`FusedAdamW` takes 0.8 (`benchmarks/results/2026-11-27_h200_limits`).

**Needs.** bitsandbytes (installed with this package); a CPU or CUDA device; no AMSGrad; not under FSDP.

Source: Dettmers et al., "8-bit Optimizers via Block-wise Quantization", 2021; `bitsandbytes.optim.AdamW8bit`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.optim import Optimizer

from composer_speedups.arguments import check_count, check_flag
from composer_speedups.optim.bnb import NO_FSDP, become_bnb
from composer_speedups.optim.speedup import OptimizerSpeedUp, adamw_state_bytes
from composer_speedups.optim.states import BLOCK_SIZE, MIN_8BIT_SIZE

__all__ = ["AdamW8bit", "apply_adamw_8bit"]


def apply_adamw_8bit(
    optimizer: Optimizer,
    model: torch.nn.Module | None = None,
    *,
    embeddings_32bit: bool = True,
    min_8bit_size: int = MIN_8BIT_SIZE,
) -> int:
    """Make `optimizer`, an AdamW of any kind, bitsandbytes' 8-bit AdamW, in place.

    Groups, rates, hooks and schedulers stay; moments already accumulated are quantised. Returns for how many
    parameters the update changed; 0 if it was this already.

    Args:
        optimizer: changed in place.
        model: where embeddings are looked for; needed unless `embeddings_32bit` is False.
        embeddings_32bit: keep 32-bit state for the weights of `nn.Embedding`, tied ones too.
        min_8bit_size: tensors of fewer elements keep 32-bit state.

    Raises:
        ValueError: no model was given to look for embeddings in.
        SpeedUpUnavailable: the optimizer is no AdamW, or uses what bitsandbytes has not (amsgrad, maximize, float64).

    >>> import torch
    >>> layer = torch.nn.Linear(64, 64)
    >>> optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-3)
    >>> apply_adamw_8bit(optimizer, layer), type(optimizer).__name__
    (2, 'AdamW8bit')
    """
    if embeddings_32bit and model is None:
        raise ValueError("embeddings_32bit=True needs the model to find the embeddings in: pass model=")
    keep = _embeddings(model) if embeddings_32bit else []
    return become_bnb(optimizer, "AdamW8bit", keep_32_bit=keep, min_8bit_size=min_8bit_size)


class AdamW8bit(OptimizerSpeedUp):
    """Apply `apply_adamw_8bit` at `Event.INIT`.

    Args:
        embeddings_32bit: keep 32-bit state for embeddings.
        min_8bit_size: tensors of fewer elements keep 32-bit state.
        no_decay_on_bias_and_norm: take the weight decay off parameters of fewer than two dimensions.

    >>> AdamW8bit(embeddings_32bit=False)
    AdamW8bit(embeddings_32bit=False, min_8bit_size=4096, no_decay_on_bias_and_norm=False)
    """

    no_fsdp = NO_FSDP
    for_memory = True

    def __init__(
        self,
        embeddings_32bit: bool = True,
        min_8bit_size: int = MIN_8BIT_SIZE,
        no_decay_on_bias_and_norm: bool = False,
    ) -> None:
        super().__init__(no_decay_on_bias_and_norm)
        self.embeddings_32bit = check_flag("embeddings_32bit", embeddings_32bit)
        self.min_8bit_size = check_count("min_8bit_size", min_8bit_size)

    def state_bytes(self, model: torch.nn.Module, trained: Sequence[torch.Tensor]) -> int:
        whole = {id(weight) for weight in _embeddings(model)} if self.embeddings_32bit else set()
        small = [p for p in trained if p.numel() < self.min_8bit_size or id(p) in whole]
        counts = [p.numel() for p in trained if p.numel() >= self.min_8bit_size and id(p) not in whole]
        blocks = sum(-(-count // BLOCK_SIZE) for count in counts)
        tables = 2 * 256 * 4 if counts else 0  # of values, which all parameters share
        return adamw_state_bytes(small, step=0) + 2 * (sum(counts) + 4 * blocks) + tables

    def convert(self, optimizer: Optimizer, model: torch.nn.Module) -> int:
        return apply_adamw_8bit(
            optimizer,
            model,
            embeddings_32bit=self.embeddings_32bit,
            min_8bit_size=self.min_8bit_size,
        )


def _embeddings(model: torch.nn.Module) -> list[torch.Tensor]:
    return [module.weight for module in model.modules() if isinstance(module, torch.nn.Embedding)]
