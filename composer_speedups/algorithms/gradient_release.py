"""GradientRelease: parameters are updated in the backward pass, and their gradients are gone before the next come.

**Why it is faster.** By itself it hardly is: it buys memory. A training step holds a gradient for each weight from the
backward pass to the optimizer's step: in float32 as much as the weights, of BERT-large 1.3 GB. Here a layer is updated
as soon as the backward pass has its gradients, and these are dropped before it comes to the layer below. What a step
holds of gradients is then one bucket of `bucket_mb`, or the largest tensor (of BERT the word embeddings). What is saved
can go into a larger batch, a longer text or a larger model. On a CPU small layers' gradients are updated while they are
in the cache.

**Numerics.** None: bit for bit the same updates, with the same learning rate, momenta and weight decay, as each
parameter's update looks at its own gradient alone.

**When it pays.** When memory is what limits you, and weights, rather than activations, are most of it: small batches of
large models, with `GradientCheckpointing`, `AdamW8bit` or `Adafactor`. `composer-speedups doctor --recipe NAME` says
what a step of your model holds with it and without. Each bucket is a step of the optimizer: some twenty for BERT-large,
for which a GPU's host takes some milliseconds.

**Needs.** One process: DDP keeps all gradients in its buckets, FSDP shards them. The whole batch at once: what is
accumulated must be kept (two backward passes to one step are an error). An optimizer that updates each parameter by
itself: PyTorch's but LBFGS, Composer's Decoupled ones, bitsandbytes', so with `FusedAdamW`, `ForeachAdamW`,
`AdamW8bit`, `BnbAdamW` and `Adafactor`; not Apex's, which counts its steps for all. Nothing that looks at all gradients
before the step: no clipping by their norm (Composer's GradientClipping is refused), no gradient scaler (fp16; bf16
needs none), no SAM; callbacks that log gradients find none. Under `TorchCompile(scope="model")` all gradients come at
once, when the compiled backward pass ends, so that little is saved; `CUDAGraphs` keeps them in memory of its own and is
refused. Hooks on the optimizer's step are called once a step, as ever. In a loop of your own go on calling
`optimizer.step()`: it updates what is left (parameters that get no gradient in each step), and ends the step.

Source: Lv et al., "Full Parameter Fine-tuning for Large Language Models with Limited Resources" (LOMO), 2023,
https://arxiv.org/abs/2306.09782; PyTorch's tutorial "How to save memory by fusing the optimizer step into the backward
pass"; gradient release in optimi, `optimizer_in_bwd` in torchtune.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from composer.core import Event, Precision, State
from composer.loggers import Logger
from composer.utils import dist
from torch.optim import Optimizer

from composer_speedups.arguments import check_count
from composer_speedups.errors import ConflictError, SpeedUpUnavailable
from composer_speedups.gradient_buckets import GradientBuckets
from composer_speedups.speedup import SpeedUp, Stage

__all__ = ["GradientRelease", "apply_gradient_release"]

_MB = 2**20
_BY_THEMSELVES = ("torch.optim.", "composer.optim.", "bitsandbytes.optim.")  # whose updates look at one parameter each
_ALL_GRADIENTS = ("GradientClipping", "SAM")  # Composer's, which look at the gradients of all parameters together


def apply_gradient_release(optimizer: Optimizer, bucket_mb: int = 32) -> int:
    """Let `optimizer` update parameters in the backward pass, and drop their gradients; return how many parameters.

    Loops keep their `optimizer.step()`, which updates what is left and ends the step. Other speed-ups may change the
    optimizer before or after.

    Args:
        optimizer: over parameters of one process, whose gradients are neither accumulated, scaled nor clipped by norm.
        bucket_mb: MiB of gradients that are updated together.

    Raises:
        SpeedUpUnavailable: its update may look at all gradients together, or there are several processes.
        ConflictError: another optimizer updates some of the parameters so already.

    >>> import torch
    >>> layer = torch.nn.Linear(4, 4)
    >>> optimizer = torch.optim.AdamW(layer.parameters())
    >>> apply_gradient_release(optimizer), apply_gradient_release(optimizer)
    (2, 0)
    >>> layer(torch.ones(1, 4)).sum().backward()
    >>> layer.weight.grad is None
    True
    """
    check_count("bucket_mb", bucket_mb)
    if GradientBuckets.of(optimizer) is not None:
        return 0
    _refuse(optimizer)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if any(set(parameters).intersection(buckets.parameters) for buckets in GradientBuckets.all()):
        raise ConflictError(
            "gradient_release: another optimizer updates these parameters in the backward pass already. Give one "
            "optimizer to one model, or make the model anew"
        )
    update = _Update(optimizer)
    buckets = GradientBuckets(parameters, bucket_mb * _MB, update)
    buckets.belong_to(optimizer)
    weakref.finalize(optimizer, buckets.remove).atexit = False  # another one may come for these parameters
    optimizer.register_step_post_hook(update.end_step)
    return len(buckets.parameters)


class GradientRelease(SpeedUp):
    """Apply `apply_gradient_release` at `Event.INIT`; it acts while the Trainer fits.

    Args:
        bucket_mb: MiB of gradients that are updated together.

    >>> GradientRelease()
    GradientRelease(bucket_mb=32)
    """

    stage = Stage.LOOP
    for_memory = True
    at_once = True
    events = frozenset({Event.AFTER_LOAD, Event.FIT_START, Event.BATCH_START, Event.FIT_END})

    def __init__(self, bucket_mb: int = 32) -> None:
        self.bucket_mb = check_count("bucket_mb", bucket_mb)

    def install(self, state: State, logger: Logger) -> None:
        if not state.optimizers:
            raise SpeedUpUnavailable(f"{self!r} found no optimizer. Pass one to the Trainer: optimizers=AdamW(...).")
        if state.fsdp_config is not None:
            raise _several()
        self._refuse(state)
        optimizer = state.optimizers[0]
        count = apply_gradient_release(optimizer, self.bucket_mb)
        buckets = GradientBuckets.of(optimizer)
        assert buckets is not None
        buckets.active = False  # until it fits: other backward passes are the user's own
        nothing = "the optimizer has no parameter that is trained"
        self.report(logger, count, nothing, already=bool(buckets.parameters), buckets=len(buckets))

    def on_event(self, event: Event, state: State, logger: Logger) -> None:
        buckets = GradientBuckets.of(state.optimizers[0])
        if buckets is None:  # of a Trainer that was closed
            return
        if event is Event.AFTER_LOAD:
            self.at_close(state, buckets.remove)
        elif event is Event.FIT_START:
            self._refuse(state)
            _refuse_microbatches(state)
            buckets.active = True
        elif event is Event.BATCH_START:
            buckets.begin_step()
        else:
            buckets.active = False
            self.tell(logger, gradients_mb=round(buckets.most / _MB, 1))

    def released(
        self, parameters: Sequence[torch.nn.Parameter], update: Callable[[Sequence[torch.nn.Parameter]], None]
    ) -> GradientBuckets:
        return GradientBuckets(parameters, self.bucket_mb * _MB, update)

    def _refuse(self, state: State) -> None:
        for other in state.algorithms:
            name = type(other).__name__
            if name in _ALL_GRADIENTS and type(other).__module__.startswith("composer."):
                raise ConflictError(
                    f"gradient_release has dropped most gradients before {name} could look at all of them. Remove one"
                )
            if isinstance(other, SpeedUp) and other.key() == "cuda_graphs":
                raise ConflictError("cuda_graphs keeps the memory that gradient_release gives back. Remove one of them")
        if state.precision == Precision.AMP_FP16:
            raise ConflictError(
                "gradient_release updates before a gradient scaler can find infinities, which fp16 needs. Use "
                "mixed_precision with dtype: bf16, or remove the speed-up"
            )


class _Update:
    """The update of some parameters of an optimizer, which it does not keep."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = weakref.ref(optimizer)

    def __call__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        optimizer = self._optimizer()
        assert optimizer is not None  # else nobody would be called
        now = set(parameters)
        everything = [p for group in optimizer.param_groups for p in group["params"]]
        others = [(p, p.grad) for p in everything if p.grad is not None and p not in now]
        # Groups and their order stay as they are: bitsandbytes finds what it was told of a parameter by its place.
        for p, _ in others:
            p.grad = None
        try:
            _step_of(type(optimizer))(optimizer)
        finally:
            for p, gradient in others:
                p.grad = gradient

    @staticmethod
    def end_step(optimizer: Optimizer, *_: Any) -> None:
        if (buckets := GradientBuckets.of(optimizer)) is not None:
            buckets.end_step()


def _step_of(kind: type[Optimizer]) -> Any:
    """Its `step` without the profiler's name and the users' hooks around it, for which a step is a whole one."""
    step = kind.step
    return step.__wrapped__ if getattr(step, "hooked", False) else step


def _refuse(optimizer: Optimizer) -> None:
    if dist.get_world_size() > 1:
        raise _several()
    kind = type(optimizer)
    name = f"{kind.__module__}.{kind.__qualname__}"
    if not name.startswith(_BY_THEMSELVES) or kind is torch.optim.LBFGS:
        raise SpeedUpUnavailable(
            f"gradient_release: the optimizer is {name}, whose update may look at all gradients together. Use one of "
            "torch.optim, composer.optim or bitsandbytes, before anything is put around it (as by accelerator.prepare)"
        )


def _several() -> SpeedUpUnavailable:
    return SpeedUpUnavailable(
        "gradient_release is for one process: DDP keeps all gradients in its buckets, and FSDP shards them, which "
        "saves more. Remove it. Use fused_adamw or adamw_8bit."
    )


def _refuse_microbatches(state: State) -> None:
    size = getattr(state.dataloader, "batch_size", None)
    micro = state.device_train_microbatch_size
    if state.auto_microbatching or (size is not None and micro is not None and micro < size):
        what = "'auto'" if state.auto_microbatching else f"{micro} of {size}"
        raise ConflictError(
            f"gradient_release saves nothing where gradients are accumulated (device_train_microbatch_size is {what}). "
            "Take the batch at once, with gradient_checkpointing if it is too large for that, or remove the speed-up"
        )
