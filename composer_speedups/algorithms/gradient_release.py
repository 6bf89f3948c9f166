"""GradientRelease: parameters are updated in the backward pass, and their gradients are gone before the next come.

**Why it is faster.** By itself it is not: it buys memory. A training step holds a gradient for each weight from the
backward pass to the optimizer's step: in float32 as much as the weights, of BERT-large 1.3 GB. Here a layer is updated
as soon as the backward pass has its gradients, and these are dropped before it comes to the layer below. What a step
holds of gradients is then a bucket of `bucket_mb` for each parameter group, or the largest tensor (of BERT the word
embeddings). What is saved can go into a larger batch, a longer text or a larger model.

**Numerics.** None: bit for bit the same updates, with the same learning rate, momenta and weight decay, as each
parameter's update looks at its own gradient alone, and autograd is done with a parameter when its gradient is there.

**When it pays.** When memory is what limits you, and weights, rather than activations, are most of it: small batches of
large models, with `GradientCheckpointing`, `AdamW8bit` or `Adafactor`. `composer-speedups doctor --recipe NAME` says
what a step of your model holds with it and without. Each bucket is a call of the optimizer, which looks at all
parameters: of hundreds of small layers in as many buckets the host's time is felt.

**Needs.** One process without DDP, which keeps all gradients in its buckets, or FSDP, which shards them. The whole
batch at once: what is accumulated must be kept (two backward passes to one step are an error). An optimizer that
updates each parameter by itself: PyTorch's but LBFGS, Composer's Decoupled ones, bitsandbytes', so with `FusedAdamW`,
`ForeachAdamW`, `AdamW8bit`, `BnbAdamW` and `Adafactor`; not Apex's, which counts its steps for all. Nothing that looks
at all gradients before the step, as it finds none: clipping by their norm (Composer's GradientClipping is refused; the
Hugging Face Trainer clips by default, and needs `max_grad_norm=0`), hooks before the optimizer's step, a gradient
scaler (fp16; bf16 needs none), SAM, OptimizerMonitor. Not with `CUDAGraphs`, which keeps gradients in memory of its
own, nor `TorchCompile(scope="model")`, whose backward pass ends with all of them. In a loop of your own go on calling
`optimizer.step()`, which updates what is left and ends the step, and clear gradients to None, as is the default.

Source: Lv et al., "Full Parameter Fine-tuning for Large Language Models with Limited Resources" (LOMO), 2023,
https://arxiv.org/abs/2306.09782; PyTorch's tutorial "How to save memory by fusing the optimizer step into the backward
pass"; gradient release in optimi, `optimizer_in_bwd` in torchtune.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch
from composer.algorithms import SAM, GradientClipping
from composer.callbacks import OptimizerMonitor
from composer.core import Event, Precision, State
from composer.loggers import Logger
from composer.utils import dist
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from composer_speedups.arguments import check_count
from composer_speedups.errors import ConflictError, SpeedUpUnavailable
from composer_speedups.gradient_buckets import GradientBuckets, update_alone
from composer_speedups.speedup import SpeedUp, Stage

__all__ = ["GradientRelease", "apply_gradient_release"]

_MB = 2**20
_BY_THEMSELVES = ("torch.optim.", "composer.optim.", "bitsandbytes.optim.")  # whose updates look at one parameter each
_ALL_GRADIENTS = (GradientClipping, SAM, OptimizerMonitor)
_SCALED = (
    "gradient_release updates before a gradient scaler can find infinities, which fp16 needs. Use mixed_precision with "
    "dtype: bf16, or remove the speed-up"
)


def apply_gradient_release(optimizer: Optimizer, bucket_mb: int = 32) -> int:
    """Let `optimizer` update parameters in the backward pass, and drop their gradients; return how many parameters.

    Loops keep their `optimizer.step()`, which updates what is left and ends the step; whatever looks at gradients
    between the two finds none, so for the Hugging Face Trainer, which clips, set `max_grad_norm=0`. Other speed-ups may
    change the optimizer before or after. An optimizer that does it already keeps its buckets.

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
    return len(_released(optimizer, bucket_mb).parameters)


class GradientRelease(SpeedUp):
    """Apply `apply_gradient_release` while the Trainer fits; backward passes of your own are as ever.

    Args:
        bucket_mb: MiB of gradients that are updated together.

    >>> GradientRelease()
    GradientRelease(bucket_mb=32)
    """

    no_fsdp = "it shards gradients, which saves more. Remove it. Use fused_adamw or adamw_8bit."
    stage = Stage.LOOP
    for_memory = True
    at_once = True
    events = frozenset(
        {
            Event.AFTER_LOAD,
            Event.FIT_START,
            Event.BATCH_START,
            Event.BEFORE_BACKWARD,
            Event.AFTER_BACKWARD,
            Event.FIT_END,
        }
    )
    _buckets: GradientBuckets | None = None

    def __init__(self, bucket_mb: int = 32) -> None:
        self.bucket_mb = check_count("bucket_mb", bucket_mb)

    def unavailable(self, device: torch.device) -> str | None:
        return None if dist.get_world_size() == 1 else str(_several())

    def contradicts(self, other: SpeedUp) -> str | None:
        key, arguments = other.key(), vars(other)
        if key == "torch_compile" and arguments["scope"] == "model":
            return (
                "the backward pass of a model that is compiled as a whole ends with all gradients, so that "
                "gradient_release saves nothing. Use torch_compile with scope: block, or remove one"
            )
        if key == "mixed_precision" and arguments["dtype"] == "fp16":
            return _SCALED
        if key == "apex_fused_adamw":
            return "Apex's FusedAdam updates all at once. Use fused_adamw, or remove gradient_release"
        return None

    def install(self, state: State, logger: Logger) -> None:
        if not state.optimizers:
            raise SpeedUpUnavailable(f"{self!r} found no optimizer. Pass one to the Trainer: optimizers=AdamW(...).")
        self._refuse(state)
        optimizer = state.optimizers[0]
        _refuse(type(optimizer))
        count = sum(p.requires_grad for group in optimizer.param_groups for p in group["params"])
        already = GradientBuckets.of(optimizer) is not None
        self.report(logger, 0 if already else count, "the optimizer has no parameter that is trained", already)

    def on_event(self, event: Event, state: State, logger: Logger) -> None:
        optimizer = state.optimizers[0]
        if event is Event.AFTER_LOAD:
            self.at_close(state, self._end)
        elif event is Event.FIT_START:
            self._refuse(state)
            if state.auto_microbatching:
                raise _accumulated("'auto'")
            self._end()  # of a fit that failed
            if GradientBuckets.of(optimizer) is None:  # else it is the user's own
                self._buckets = _released(optimizer, self.bucket_mb)
                self._buckets.active = False
                self.tell(logger, buckets=len(self._buckets))
        elif (buckets := self._buckets) is None:
            pass
        elif event is Event.BATCH_START:
            _refuse_microbatches(state)
            buckets.begin_step()
        elif event is Event.FIT_END:
            self.tell(logger, gradients_mb=round(buckets.most / _MB, 1))
            self._end()
        else:
            buckets.active = event is Event.BEFORE_BACKWARD

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in super().__getstate__().items() if name != "_buckets"}

    def _end(self) -> None:
        if self._buckets is not None:
            self._buckets.remove()
            self._buckets = None

    def released(
        self, parameters: Sequence[torch.nn.Parameter], update: Callable[[Sequence[torch.nn.Parameter]], None]
    ) -> GradientBuckets:
        return GradientBuckets([parameters], self.bucket_mb * _MB, update)

    def _refuse(self, state: State) -> None:
        for other in (*state.algorithms, *state.callbacks):
            if isinstance(other, _ALL_GRADIENTS):
                raise ConflictError(
                    f"gradient_release has dropped most gradients before {type(other).__name__} could look at all of "
                    "them. Remove one"
                )
        if state.precision == Precision.AMP_FP16:
            raise ConflictError(_SCALED)


def _released(optimizer: Optimizer, bucket_mb: int) -> GradientBuckets:
    _refuse(type(optimizer))
    groups = [group["params"] for group in optimizer.param_groups]
    mine = {p for group in groups for p in group}
    for others in GradientBuckets.all():
        if not mine.isdisjoint(others.parameters):
            if others.active:
                raise ConflictError(
                    "gradient_release: another optimizer updates these parameters in the backward pass already. Give "
                    "one optimizer to one model, or delete the other optimizer first"
                )
            others.remove()  # of a Trainer whose fit failed
    reference = weakref.ref(optimizer)  # as the optimizer has what calls this

    def update(parameters: Sequence[torch.nn.Parameter]) -> None:
        now = reference()
        assert now is not None
        _refuse(type(now))  # again: it may have become another one
        update_alone(now, parameters)

    buckets = GradientBuckets(groups, bucket_mb * _MB, update)
    buckets.belong_to(optimizer)
    return buckets


def _refuse(kind: type[Optimizer]) -> None:
    if dist.get_world_size() > 1:
        raise _several()
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
    micro = state.device_train_microbatch_size
    rows = [x.shape[0] for x in pytree.tree_leaves(state.batch) if isinstance(x, torch.Tensor) and x.ndim]
    if micro is not None and rows and micro < min(rows):
        raise _accumulated(f"{micro} of {min(rows)}")


def _accumulated(what: str) -> ConflictError:
    return ConflictError(
        f"gradient_release saves nothing where gradients are accumulated (device_train_microbatch_size is {what}). "
        "Take the batch at once, with gradient_checkpointing if it is too large for that, or remove the speed-up"
    )
