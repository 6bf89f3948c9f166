"""GradientCompression: ranks exchange their gradients in 16 bits.

**Why it is faster.** DDP averages all gradients over its ranks in each step: of BERT-base 438 MB in float32. It sends
them in buckets while the backward pass still computes, but the last bucket, which is the largest where a model begins
with an embedding table, has nothing left to hide behind. In 16 bits half the bytes travel.

**Numerics.** The update's input alone: each rank's gradients are rounded, divided by the number of ranks (which rounds
again unless that is a power of two), and their sum is rounded at each addition, as the transport adds in that dtype:
each time by at most 2^-8 of the value in bf16, 2^-11 in fp16. Weights, gradients (`p.grad`) and moments stay float32,
accumulated microbatches are summed in float32 before, and all ranks get the same bits. fp16 has less room: below 3e-8
it knows zero, above 65,504 infinity. With `MixedPrecision("fp16")` its scaler sees those infinities, as ever, and skips
the step; without a scaler take bf16.

**When it pays.** Several GPUs that talk over PCIe, or machines that talk over a network; many weights and little
computing for them: small batches, short texts, a large vocabulary. Over NVLink little is left to gain. On CPUs not: two
ranks of one machine had 0.83x the speed with it, one core each, BERT-base, batch 8 of 64 tokens
(benchmarks/results/2026-11-29_cpu_two_ranks). No GPUs have been measured.

**Needs.** DDP with two or more ranks, as `composer -n 2` starts them. FSDP exchanges gradients by itself, in the
`reduce_dtype` of its configuration. Copies in 16 bits of the buckets that are on their way: of 25 MB or the largest
tensor each, and in the first step, in which DDP has one bucket, of all gradients.

Source: PyTorch's DDP communication hooks, `bf16_compress_hook` and `fp16_compress_hook`; "DDP Communication Hooks" in
the Accelerate guides. Halving the bytes of a gradient: Micikevicius et al., "Mixed Precision Training", 2017.
"""

from __future__ import annotations

import torch
from composer.core import Event, State
from composer.loggers import Logger
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from composer_speedups.arguments import check_choice
from composer_speedups.ddp import hook_of, refuse_forced_sync, why_alone
from composer_speedups.errors import ConflictError
from composer_speedups.speedup import SpeedUp, Stage

__all__ = ["GradientCompression", "apply_gradient_compression"]

_HOOKS = {"bf16": default_hooks.bf16_compress_hook, "fp16": default_hooks.fp16_compress_hook}


def apply_gradient_compression(model: torch.nn.Module, dtype: str = "bf16") -> int:
    """Let DDP average the gradients of `model` in 16 bits, before its first backward pass.

    Args:
        model: a `DistributedDataParallel`, or what holds one. With Accelerate or the Hugging Face Trainer it is what
            `accelerator.prepare` returns.
        dtype: `bf16` or `fp16`.

    Returns:
        How many parameters have gradients that are exchanged so; 0 if they were already, or `model` holds no DDP.

    Raises:
        ConflictError: the model has another communication hook, and DDP takes one.
    """
    check_choice("dtype", dtype, tuple(_HOOKS))
    count = 0
    for ddp in (module for module in model.modules() if isinstance(module, DistributedDataParallel)):
        name = hook_of(ddp)
        if name not in ("", _HOOKS[dtype].__qualname__):
            raise ConflictError(
                f"gradient_compression with dtype {dtype}: this model's DDP has the communication hook {name} already, "
                "and takes one. Remove one of the two"
            )
        if not name:
            # Of None PyTorch's hook makes all ranks. A group cannot be copied, as Composer's SWA copies the model.
            everyone = ddp.process_group is torch.distributed.group.WORLD
            ddp.register_comm_hook(None if everyone else ddp.process_group, _HOOKS[dtype])
            count += sum(p.requires_grad for p in ddp.parameters())
    return count


class GradientCompression(SpeedUp):
    """Apply `apply_gradient_compression` to the Trainer's DDP, at `Event.FIT_START`, when it is there.

    Args:
        dtype: `bf16` or `fp16`.

    >>> GradientCompression()
    GradientCompression(dtype='bf16')
    """

    stage = Stage.LOOP
    events = frozenset({Event.FIT_START})
    no_fsdp = (
        "it exchanges gradients in a dtype of its own. Set reduce_dtype in its mixed_precision to bf16, and remove the "
        "speed-up"
    )

    def __init__(self, dtype: str = "bf16") -> None:
        self.dtype = check_choice("dtype", dtype, tuple(_HOOKS))

    def unavailable(self, device: torch.device) -> str | None:
        return why_alone()

    def install(self, state: State, logger: Logger) -> None:
        """Nothing yet: Composer puts DDP around the model when this is over."""

    def on_event(self, event: Event, state: State, logger: Logger) -> None:
        if isinstance(state.model, DistributedDataParallel) and hook_of(state.model) == _HOOKS[self.dtype].__qualname__:
            return  # since an earlier fit: a Trainer makes its DDP once
        refuse_forced_sync(self.key())
        count = apply_gradient_compression(state.model, self.dtype)
        self.report(logger, count, "no parameter is trained, so that Composer has put no DDP around the model")
