"""GradientAsBucketView: under DDP, gradients lie where they are exchanged, and nowhere else.

**Why it is faster.** It buys memory, and a copy. DDP averages gradients in buckets. Unless told otherwise it holds each
gradient twice, as `p.grad` and in its bucket: of BERT-base 438 MB more on each GPU, of BERT-large 1.3 GB. It copies
them into the buckets, and the averages out of them again. Here `p.grad` is a view of the bucket: the second copy is
gone, and the way out. What is saved can go into a larger batch.

**Numerics.** None: bit for bit the same gradients and updates.

**When it pays.** Whenever several ranks train with DDP; most where weights are a large part of the memory: large
models, small batches. Two ranks of one machine, one core each, had 1.07x the speed with it and 260 MB less, BERT-base,
batch 8 of 64 tokens (benchmarks/results/2026-11-29_cpu_two_ranks); of four narrow layers it is not seen.

**Needs.** DDP with two or more ranks, as `composer -n 2` starts them. FSDP shards gradients, which saves more. A tensor
that something else puts into `p.grad` between two backward passes is copied into the bucket at the next, as ever.

Source: `gradient_as_bucket_view` of PyTorch's DistributedDataParallel, which Composer makes without it.
"""

from __future__ import annotations

import torch
import torch.distributed
from composer.core import Event, State
from composer.loggers import Logger
from torch.nn.parallel import DistributedDataParallel

from composer_speedups.ddp import hook_of, refuse_forced_sync, why_alone
from composer_speedups.errors import SpeedUpUnavailable
from composer_speedups.speedup import SpeedUp, Stage

__all__ = ["GradientAsBucketView", "apply_gradient_as_bucket_view"]


def apply_gradient_as_bucket_view(model: torch.nn.Module) -> int:
    """Let DDP keep the gradients of `model` in its buckets, in place. Before its first backward pass, or between two.

    Args:
        model: a `DistributedDataParallel`, or what holds one. With Accelerate or the Hugging Face Trainer it is what
            `accelerator.prepare` returns. Whoever makes DDP can as well pass it `gradient_as_bucket_view=True`.

    Returns:
        How many parameters have gradients that lie there now; 0 if they did already, or `model` holds no DDP.

    Raises:
        SpeedUpUnavailable: the DDP is one of several dtypes, or updates in its hooks: those know its old buckets.
    """
    found = [module for module in model.modules() if isinstance(module, DistributedDataParallel)]
    return sum(_rebuild(ddp) for ddp in found if not ddp.gradient_as_bucket_view)


class GradientAsBucketView(SpeedUp):
    """Apply `apply_gradient_as_bucket_view` to the Trainer's DDP, at `Event.FIT_START`, when it is there.

    >>> GradientAsBucketView()
    GradientAsBucketView()
    """

    stage = Stage.LOOP
    in_buckets = True
    no_fsdp = "it has no such buckets, but shards gradients, which saves more. Remove the speed-up"
    events = frozenset({Event.FIT_START})

    def unavailable(self, device: torch.device) -> str | None:
        return why_alone()

    def install(self, state: State, logger: Logger) -> None:
        """Nothing yet: Composer puts DDP around the model when this is over."""

    def on_event(self, event: Event, state: State, logger: Logger) -> None:
        if isinstance(state.model, DistributedDataParallel) and state.model.gradient_as_bucket_view:
            return  # since an earlier fit: a Trainer makes its DDP once
        refuse_forced_sync(self.key())
        count = apply_gradient_as_bucket_view(state.model)
        self.report(logger, count, "no parameter is trained, so that Composer has put no DDP around the model")


def _rebuild(ddp: DistributedDataParallel) -> int:
    """Make its buckets anew, as it does when it is unpickled, but for the same ranks and with the same hooks."""
    reasons = {
        "mixed_precision": ddp.mixed_precision is not None,
        "delayed parameters": bool(ddp._delay_all_reduce_params),
        "optimizers in the backward pass": any(hasattr(p, "_in_backward_optimizers") for p in ddp.parameters()),
        f"the built-in communication hook {hook_of(ddp)}": bool(hook_of(ddp)) and not ddp._comm_hooks,
    }
    if kept := [reason for reason, there in reasons.items() if there]:
        raise SpeedUpUnavailable(
            f"gradient_as_bucket_view: this DDP has {kept[0]}, which know its buckets as they are. Make it with "
            "gradient_as_bucket_view=True instead"
        )
    ddp._remove_autograd_hooks()
    ddp.gradient_as_bucket_view = True
    parameters, sparse = ddp._build_params_for_reducer()
    ddp._ddp_init_helper(parameters, sparse, ddp._build_debug_param_to_name_mapping(parameters), ddp.static_graph)
    if ddp.static_graph:
        ddp._static_graph_delay_allreduce_enqueued = False  # the new one's first exchange, too, is asked for by DDP
        ddp.reducer._set_static_graph()
        ddp.logger._set_static_graph()
    for hook, hook_state in ddp._comm_hooks:
        ddp.logger._set_comm_hook_name(hook.__qualname__)  # by which `hook_of` knows it
        torch.distributed._register_comm_hook(ddp.reducer, hook_state, hook)
    return len(parameters)
