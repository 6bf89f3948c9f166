"""GradientCheckpointing: the repeated blocks compute their activations again in the backward pass instead of keeping
them.

**Why it is faster.** By itself it is not: it buys memory with time. Of each block only the input is kept; everything
between, which is most of what a training step holds, is made again when the backward pass comes to the block.
Autocast's casts of a block's weights, which it would keep to the end of the forward pass, go with the block: half as
much as the weights. What is saved can go into a larger batch, a longer text or a larger model, which is where
speed may come from. In arithmetic: a backward pass costs two forward passes, so a second forward pass of the blocks is
a third more compute.

**Numerics.** The same operations on the same numbers. Gradients equal the plain model's bit for bit wherever its
operations are deterministic, with dropout, too: the state of PyTorch's generators is kept for each block and put
back for the recomputation, as is autocast. `FastDropout`, `FusedDropoutAddNorm` and `Unpadding` take their keys from
those generators. Only of an encoder that is called twice under one autocast (two texts of a pair, say) are the two
gradients of a weight added in float32 then, and not in 16 bits.

**When it pays.** When memory is what limits you: `composer-speedups doctor --recipe NAME` says what a step of your
model keeps with it and without. `every=2` recomputes every second block: half the saving for half the price.

**Needs.** A model with a list of equal blocks: any Hugging Face encoder or decoder, or your own; of several lists the
one with the most parameters. It is `torch.utils.checkpoint` without re-entrance, so DDP, frozen weights and
accumulation work as ever; transformers' own checkpointing is refused beside it, also if it is switched on later, as
the Hugging Face Trainer does it: blocks would be computed three times. Hooks inside a block run twice. A
decoder's cache of keys and values is left out in training, as it would be filled twice; blocks called in evaluation
with a cache are not checkpointed. A block may not change anything outside itself; with `torch.func.functional_call` the
backward pass belongs inside of it, as with PyTorch's own. Under `TorchCompile(scope="block")` the compiled block is run
twice; under `scope="model"` the compiler recomputes.

Source: Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016, https://arxiv.org/abs/1604.06174.
"""

from __future__ import annotations

import logging
from contextlib import nullcontext
from functools import cache
from typing import Any

import torch
import torch._dynamo
from composer.core import Event, State
from composer.loggers import Logger
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop
from transformers.cache_utils import Cache

from composer_speedups.arguments import check_count
from composer_speedups.compat import own_checkpointing
from composer_speedups.errors import ConflictError
from composer_speedups.first_request import with_request
from composer_speedups.speedup import SpeedUp, Stage
from composer_speedups.surgery import compiled, mix_in, repeated_blocks

__all__ = ["GradientCheckpointing", "apply_gradient_checkpointing"]

log = logging.getLogger("composer_speedups")

_SHARED = "_casts_come_again"  # of a block: whether the model calls it more than once in a pass


def apply_gradient_checkpointing(model: torch.nn.Module, every: int = 1) -> int:
    """Let the repeated blocks of `model` recompute their activations in backward, in place; return how many.

    Args:
        model: changed in place; it may be changed further, or compiled, before or after.
        every: 1 for every block, 2 for every second one, counted from the first.

    Raises:
        ConflictError: transformers' own gradient checkpointing is on already.

    >>> import torch
    >>> layers = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(5)))
    >>> apply_gradient_checkpointing(layers, every=2), apply_gradient_checkpointing(layers, every=2)
    (3, 0)
    """
    check_count("every", every)
    _refuse_own(model)
    every_block = repeated_blocks(model)
    blocks = [block for block in every_block[::every] if not isinstance(block, _Checkpointed)]
    shared = _shares(model, len(every_block))
    for block in blocks:
        mix_in(_Checkpointed, block)
        block.__dict__[_SHARED] = shared
    return len(blocks)


class GradientCheckpointing(SpeedUp):
    """Apply `apply_gradient_checkpointing` at `Event.INIT`.

    Args:
        every: 1 for every block, 2 for every second one, counted from the first.

    >>> GradientCheckpointing(every=2)
    GradientCheckpointing(every=2)
    """

    stage = Stage.RECOMPUTE
    for_memory = True
    events = frozenset({Event.FIT_START})

    def __init__(self, every: int = 1) -> None:
        self.every = check_count("every", every)

    def install(self, state: State, logger: Logger) -> None:
        if getattr(state.fsdp_config, "activation_checkpointing", False):
            raise ConflictError(
                "gradient_checkpointing and activation_checkpointing in the Trainer's FSDP config would recompute "
                "every block twice. Keep one of them"
            )
        count = apply_gradient_checkpointing(state.model, self.every)
        blocks = repeated_blocks(state.model)
        done = bool(blocks) and isinstance(blocks[0], _Checkpointed)
        nothing = "its blocks are checkpointed already" if done else "no list of equal blocks in the model"
        self.report(logger, count, nothing, blocks=len(blocks))

    def on_event(self, event: Event, state: State, logger: Logger) -> None:
        _refuse_own(state.model)  # again: it may have been switched on since


def _refuse_own(model: torch.nn.Module) -> None:
    if any(getattr(m, "gradient_checkpointing", False) for m in model.modules()):
        raise _conflict()


def _conflict() -> ConflictError:
    own = own_checkpointing()
    return ConflictError(
        f"gradient_checkpointing and the model's own {own}_enable() would recompute every block "
        f"twice. Call model.{own}_disable(), or remove the speed-up"
    )


class _Checkpointed:
    """Mixed into a block: calling it keeps its arguments alone.

    It is the call and not `forward` that is recomputed. So it does not matter which other surgery puts its `forward`
    around or in place of the block's, before or after, and a block that `TorchCompile` compiled is recomputed by its
    compiled code.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.training and getattr(self, "gradient_checkpointing", False):  # switched on since we came
            raise _conflict()
        call, kwargs = super().__call__, with_request(self, kwargs)  # in backward nobody asks any more
        if not torch.is_grad_enabled() or torch.jit.is_tracing():  # a trace would hold both of its forward passes
            return call(*args, **kwargs)
        if any(isinstance(value, Cache) for value in (*args, *kwargs.values())):
            if not self.training:  # a cache that is asked for: recomputing would fill it twice
                return call(*args, **kwargs)
            args, kwargs = _without_cache(args, kwargs)
        if torch.compiler.is_compiling():
            return checkpoint(call, *args, use_reentrant=False, **kwargs)
        # All by position: of tensors given by name `checkpoint` would not look at the device, whose generator it
        # then would not keep, and dropout on a GPU would draw another mask.
        names, count = tuple(kwargs), len(args)

        def run(*values: Any) -> Any:
            return call(*values[:count], **dict(zip(names, values[count:], strict=True)))

        # Recomputing ends early, by an exception. One that comes through code compiled with Dynamo's backend "eager"
        # passes over its ends of autocast, whose casts of weights would then be kept for good, in all trainings.
        with set_checkpoint_early_stop(False) if compiled(self) else nullcontext():
            out = checkpoint(run, *args, *kwargs.values(), use_reentrant=False)
        if not self.__dict__.get(_SHARED, True):
            # Autocast would keep its casts of weights until the model's forward pass is over: half the weights' memory.
            torch.clear_autocast_cache()
        return out


def _shares(model: torch.nn.Module, blocks: int) -> bool:
    """Whether a block stands for several layers, as ALBERT's do."""
    configs = [getattr(module, "config", None) for module in model.modules()]
    return any(getattr(config, "num_hidden_layers", blocks) > blocks for config in configs)


def _without_cache(args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """The arguments without a decoder's cache: None for one that is empty, as when training on whole texts."""
    caches = [value for value in (*args, *kwargs.values()) if isinstance(value, Cache)]
    if any(value.get_seq_length() for value in caches):
        raise ConflictError(
            "gradient_checkpointing would fill the cache given as past_key_values twice. Train without it, or remove "
            "the speed-up"
        )
    _say_without_cache()
    args = tuple(None if isinstance(value, Cache) else value for value in args)
    kwargs = {name: None if isinstance(value, Cache) else value for name, value in kwargs.items()}
    return args, kwargs | ({"use_cache": False} if "use_cache" in kwargs else {})


@cache
def _say_without_cache() -> None:
    log.info("GradientCheckpointing: training keeps no cache of keys and values")
