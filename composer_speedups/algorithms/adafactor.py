"""Adafactor: AdamW's place taken by an optimizer that keeps a row and a column for each matrix.

**Why it is faster.** It is above all smaller. AdamW keeps two numbers for each weight. Adafactor keeps no first
moment, and of the second only the means of its rows and of its columns, whose outer product stands for it: of a
[1024, 4096] matrix 5,120 numbers instead of 8,388,608. The optimizer's state, half of what BERT in fp32 holds before
the first activation, is as good as gone, and the room can go into a larger batch.

**Numerics.** Another update, not AdamW's, and its path is another one; it learns about as well on transformers. The
gradient is divided by the root of that outer product, whose decay begins at 0 and goes to 1 with the step `t` as
`1 - t^-0.8`, and the whole tensor's update is scaled down to a root mean square of 1. There is no momentum.
*Learning rate*: as an update has at most AdamW's usual size, groups, rates and schedulers stay and mean what they
meant, with two limits of PyTorch's class: a tensor whose own root mean square is above 1 takes a step larger by that
factor, and above `1/sqrt(t)` (a rate of 1e-3 after a million steps) the rate is cut. `scale_parameter=True` is the
paper's own rule, the rate times the root mean square of the weights (but at least 1e-3 of it): raise the rate to
about 1e-2 for it. *Weight decay* is AdamW's: weights shrink by `lr * weight_decay` a step. `betas` and `eps` have no
meaning here and are dropped.

**When it pays.** When memory is what limits you and 8-bit state (`AdamW8bit`) is still too much. It is a for-loop of
about ten operations a tensor that waits for the device twice for each: slower than a fused AdamW. `foreach=True`
takes fewer launches and a copy of the weights.

**Needs.** PyTorch 2.5; an AdamW or DecoupledAdamW in fp32, bf16 or float64 without AMSGrad; not under FSDP, which
shards the rows. *Checkpoints*: weights travel; state does not, as a matrix cannot be had back from its rows and
columns: a checkpoint of another optimizer in mid-training is refused, with the way out. Applied to a running AdamW by
the function, its second moments are factored and its first dropped.

Source: Shazeer and Stern, "Adafactor: Adaptive Learning Rates with Sublinear Memory Cost", 2018,
https://arxiv.org/abs/1804.04235; `torch.optim.Adafactor`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from composer.core import State
from composer.loggers import Logger
from torch.optim import Optimizer

from composer_speedups.arguments import check_flag
from composer_speedups.errors import ConflictError, SpeedUpUnavailable
from composer_speedups.optim.loading import Loading, another_way, source
from composer_speedups.optim.optimizers import become, describe, refuse_other, torch_groups
from composer_speedups.optim.speedup import OptimizerSpeedUp, sizes
from composer_speedups.optim.states import read_moments

__all__ = ["Adafactor", "apply_adafactor"]

log = logging.getLogger("composer_speedups")

# PyTorch takes the square of the first as the least second moment: the paper's 1e-30. Its default, float32's eps, is
# above the usual second moment of a gradient, so that matrices would get no adaptive rates at all.
_LEAST = 1e-15
_DTYPES = (torch.float32, torch.bfloat16, torch.float64)


def apply_adafactor(optimizer: Optimizer, *, scale_parameter: bool = False, foreach: bool = False) -> int:
    """Make `optimizer`, an AdamW of any kind, `torch.optim.Adafactor`, in place.

    Groups, rates, weight decay, hooks and schedulers stay; of moments already accumulated the second are factored.
    Returns for how many parameters the update changed; 0 if it was this already.

    Args:
        optimizer: changed in place.
        scale_parameter: make the learning rate relative to the root mean square of each tensor.
        foreach: update lists of tensors: fewer launches, and a copy of the weights in memory.

    Raises:
        SpeedUpUnavailable: the optimizer is no AdamW, or uses what Adafactor has not (amsgrad, differentiable, fp16
            parameters, a momentum that its schedule cycles).

    >>> import torch
    >>> layer = torch.nn.Linear(64, 64)
    >>> optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-3)
    >>> apply_adafactor(optimizer), type(optimizer).__name__
    (2, 'Adafactor')
    """
    check_flag("scale_parameter", scale_parameter)
    check_flag("foreach", foreach)
    if type(optimizer) is torch.optim.Adafactor:
        return 0
    refuse_other(optimizer)
    _refuse_unsupported(optimizer)
    groups = torch_groups(optimizer)
    eps = (_LEAST, 1e-3 if scale_parameter else 1.0)
    for group, old in zip(groups, optimizer.param_groups, strict=True):
        group.pop("betas", None)
        group["eps"] = eps
        group["maximize"] = old.get("maximize", False)
    template = torch.optim.Adafactor(groups, foreach=foreach)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if state := optimizer.state.pop(parameter, None):
                template.state[parameter] = _factored(state, group, parameter.dtype)
    become(optimizer, template, {})
    optimizer.defaults["eps"] = eps  # two other things than AdamW's one
    return sum(len(group["params"]) for group in groups)


class Adafactor(OptimizerSpeedUp):
    """Apply `apply_adafactor` at `Event.INIT`.

    Args:
        scale_parameter: make the learning rate relative to the root mean square of each tensor.
        foreach: update lists of tensors: fewer launches, and a copy of the weights in memory.
        no_decay_on_bias_and_norm: take the weight decay off parameters of fewer than two dimensions.

    >>> Adafactor()
    Adafactor(scale_parameter=False, foreach=False, no_decay_on_bias_and_norm=False)
    """

    no_fsdp = "it shards rows and columns, and whole ones are needed. Use fused_adamw, or DDP."
    for_memory = True

    def __init__(
        self, scale_parameter: bool = False, foreach: bool = False, no_decay_on_bias_and_norm: bool = False
    ) -> None:
        super().__init__(no_decay_on_bias_and_norm)
        self.scale_parameter = check_flag("scale_parameter", scale_parameter)
        self.foreach = check_flag("foreach", foreach)

    def install(self, state: State, logger: Logger) -> None:
        if state.optimizers and type(state.optimizers[0]) is torch.optim.Adafactor:
            before = describe(state.optimizers[0])
            self.report(logger, 0, f"the optimizer is {before} already", optimizer=before)
            return
        super().install(state, logger)

    def state_bytes(self, model: torch.nn.Module, trained: Sequence[torch.Tensor]) -> int:
        return sum(_state_bytes(parameter) for parameter in trained)

    def step_bytes(self, trained: Sequence[torch.Tensor]) -> int:
        updates = sizes(trained)
        return sum(updates) if self.foreach else max(updates, default=0)

    def convert(self, optimizer: Optimizer, model: torch.nn.Module) -> int:
        return apply_adafactor(optimizer, scale_parameter=self.scale_parameter, foreach=self.foreach)

    def knows(self, optimizer: Optimizer) -> bool:
        return type(optimizer) is torch.optim.Adafactor

    def check_moments(self, state: State, checkpoint: Loading) -> None:
        optimizer = checkpoint.optimizer
        known = [bool(values.keys() & {"row_var", "variance"}) for values in optimizer.state.values()]
        if state.timestamp.batch.value and not (known and all(known)) and checkpoint.lost(state):
            raise ConflictError(
                f"{source(state)} holds no state of {describe(optimizer)}: it was saved with another "
                "optimizer, whose moments cannot be told from rows and columns, nor these from them. Go on with that "
                f"optimizer, or {another_way(state)}."
            )

    def settle(self, state: State, checkpoint: Loading) -> None:
        groups, asked = checkpoint.optimizer.param_groups, [group["eps"] for group in checkpoint.before]
        if any(tuple(group["eps"]) != tuple(eps) for group, eps in zip(groups, asked, strict=True)):
            log.warning(
                "%s was saved with another scale_parameter, or eps: they stay as they were made here, eps=%s, and "
                "another learning rate may be right",
                source(state),
                asked[0],
            )
        for group, eps in zip(groups, asked, strict=True):  # a file of ours may have been written with others
            group["foreach"], group["eps"] = self.foreach, eps


def _state_bytes(parameter: torch.Tensor) -> int:
    """A mean for each row and each column of a matrix, for each element of a vector; and the step."""
    shape, count = parameter.shape, parameter.numel()
    kept = count if parameter.ndim < 2 else count // shape[-1] + count // shape[-2]
    return kept * parameter.element_size() + 4


def _refuse_unsupported(optimizer: Optimizer) -> None:
    for group in optimizer.param_groups:
        if "max_momentum" in group:  # of OneCycleLR and CyclicLR
            raise SpeedUpUnavailable(
                "the learning rate schedule cycles the momentum, too, and Adafactor has none. Make it with "
                "cycle_momentum=False."
            )
        for flag in ("amsgrad", "differentiable"):
            if group.get(flag):
                raise SpeedUpUnavailable(f"Adafactor has no {flag}=True, which your AdamW sets. Unset it.")
        for parameter in group["params"]:
            if parameter.dtype not in _DTYPES:
                raise SpeedUpUnavailable(
                    f"Adafactor's least second moment, 1e-30, is none in {parameter.dtype}. Keep the parameters in "
                    "float32, and let mixed_precision compute in 16 bits."
                )


def _factored(state: dict[str, Any], group: dict[str, Any], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Adam's state of one parameter as Adafactor's: the mean square of the gradients, by rows and columns."""
    moments = read_moments(state, group)
    # Adam's running mean begins at 0 and is short of the true mean by this; Adafactor's begins at the first gradient.
    square = (moments.exp_avg_sq / (1 - group["betas"][1] ** max(moments.step, 1))).to(dtype)
    new = {"step": torch.tensor(float(moments.step), dtype=torch.float32)}
    if square.ndim < 2:
        return new | {"variance": square}
    return new | {"row_var": square.mean(-1, keepdim=True), "col_var": square.mean(-2, keepdim=True)}
