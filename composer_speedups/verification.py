"""`verify`: whether a model computes with speed-ups what it computes without them, on this machine.

Each speed-up is tested against float64, but not on your GPU, with your model, your texts and your other speed-ups. So
loss and gradients of a real training with them are compared with the plain model's in float64, which the CPU computes
with none of our kernels. What is allowed is not chosen by hand: it is the error that the plain model makes in the same
precision, by PyTorch's own autocast, with some room. Rounding to 16 bits hides small mistakes; so the same is done once
more in float32. The optimizer's updates are compared with AdamW's in float64, given the same gradients.

Dropout is off, as no two implementations draw the same masks; that masks are right is for the tests.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from composer.core import Algorithm
from composer.models import ComposerModel
from composer.utils import dist
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from composer_speedups import compat, registry
from composer_speedups.errors import UserError
from composer_speedups.optimizers import is_adamw, split_off_no_decay, torch_groups
from composer_speedups.speedup import SpeedUp, Stage
from composer_speedups.trained_steps import Step, Watch, one_batch, part_of, train
from composer_speedups.true_gradients import Errors, Gradients, errors, gradients, loss_of, mapped, without_dropout

__all__ = ["ROOM", "Comparison", "Updates", "Verification", "verify"]

# Times the plain model's error. Independent roundings add up by their squares, so this is sixteen times as many.
# LowPrecisionNorm and the fused norms, which keep the residual stream in 16 bits, take 1.2 to 1.7 times the error.
ROOM = 4.0
# Of a parameter whose true gradient is nothing, as of keys' biases, what the whole's rounding leaves of a thousandth.
_NOTHING = 1e-3
# In 16 bits a unit next to a ReLU's kink may be on in one model and off in the other, a tenth of a small head's
# gradient: of tiny DistilBERTs with LowPrecisionNorm one in two batches of eight texts has such a unit, of plain ones
# one in four. Of two other texts few have, while what is wrong is wrong with all texts.
_LOOKS = 8


@dataclass(frozen=True)
class Comparison:
    """One step's loss and gradients, with and without speed-ups, against float64.

    Attributes:
        precision: `bf16`, `fp16` or `float32`, in which both were computed.
        step: counted from 1.
        plain: errors of the plain model.
        errors: those of the model with its speed-ups.
        worst: the parameter whose gradient is furthest off for what is allowed.
        share: its error, of what is allowed: above 1 it is too large. Loss and all gradients together are in it, too.
    """

    precision: str
    step: int
    plain: Errors
    errors: Errors
    worst: str
    share: float


@dataclass(frozen=True)
class Updates:
    """What the optimizer made of its gradients.

    Attributes:
        optimizer: its class.
        error: of all steps' updates together, relative to AdamW's in float64 from the same gradients.
        allowed: what rounding each weight to float32 at each step explains; None where the update is another one on
            purpose (8-bit state, Adafactor, an optimizer that is no AdamW).
    """

    optimizer: str
    error: float
    allowed: float | None


@dataclass(frozen=True)
class Verification:
    """What `verify` found.

    Attributes:
        comparisons: by precision and step.
        updates: the optimizer's; None where it is no AdamW.
        tokens: real ones of the batch; None where it has no attention mask.
        padding: share of the batch.
        changed: by speed-up, what it says it changed.
        notes: what had no effect, or could not be compared, and why.
        wrong: what is not as it should be, a line each; empty if all is well.
    """

    comparisons: list[Comparison]
    updates: Updates | None
    tokens: int | None
    padding: float
    changed: dict[str, dict[str, Any]]
    notes: list[str]
    wrong: list[str]

    @property
    def holds(self) -> bool:
        return not self.wrong

    def summary(self) -> dict[str, Any]:
        """For a table: whether it `holds`, what is `wrong`, and of the first step the relative errors of `gradients`
        and of the `plain` model's, in `precision`."""
        first = self.comparisons[0]
        return {
            "holds": self.holds,
            "wrong": self.wrong,
            "precision": first.precision,
            "gradients": first.errors.gradients,
            "plain": first.plain.gradients,
        }


def verify(
    model: ComposerModel,
    dataloader: DataLoader,
    algorithms: Sequence[Algorithm],
    optimizer: Callable[[torch.nn.Module], Optimizer] | None = None,
    *,
    samples: int = 8,
    microbatch_size: int | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Verification:
    """Train copies of `model` for a few steps with `algorithms`, and compare with the plain model in float64.

    Args:
        model: before any speed-up; stays as it is. In float32.
        dataloader: whose dataset and collator make the batch.
        algorithms: speed-ups, as for the Trainer. They stay as they are.
        optimizer: makes the optimizer for a copy of the model; None takes AdamW with a rate of 1e-4.
        samples: in the batch; long and short ones.
        microbatch_size: accumulates gradients over so many samples each; for models with one label a sample.
        say: is told what is being done.

    Raises:
        UserError: an algorithm is no speed-up, or cannot be used here; several processes; a model that gives another
            loss each time without dropout.

    >>> from composer_speedups import FusedAdamW, Unpadding
    >>> verify(model, dataloader, [Unpadding(), FusedAdamW()]).holds  # doctest: +SKIP
    True
    """
    _check(model, algorithms)
    plain = copy.deepcopy(model)
    without_dropout(plain)
    optimizer = optimizer or _adamw
    run = partial(train, plain, optimizer, microbatch_size)
    loader = one_batch(dataloader, samples)
    say("training with the speed-ups")
    watch, changed, notes = run(loader, algorithms)
    first = watch.kept[0]
    _check_repeatable(plain, first)
    true = _True(plain, say)
    comparisons = [_compare(true, step, watch.dtype) for step in watch.kept]
    if watch.dtype is not None or watch.rounded:
        say("training once more, in float32")
        try:
            exact, *_ = run(loader, _in_float32(algorithms))
            comparisons += [_compare(true, step, exact.dtype) for step in exact.kept]
        except UserError as error:
            notes.append(f"not compared in float32: {error}")
    fewer = min(samples, max(2, samples // 4))
    if watch.parts and not _off(c for c in comparisons if c.precision == "float32"):
        comparisons, chance = _looked_again(
            comparisons, lambda look: run(one_batch(dataloader, fewer, look), algorithms)[0], true, say
        )
        notes += chance
    updates = _updates(plain, optimizer, algorithms, watch)
    mask = first.batch.get("attention_mask") if isinstance(first.batch, Mapping) else None
    tokens = None if mask is None else int(mask.sum())
    return Verification(
        comparisons,
        updates,
        tokens,
        0.0 if mask is None else 1 - int(mask.sum()) / mask.numel(),
        changed,
        notes,
        _wrong(plain, comparisons, updates, watch),
    )


def _check(model: torch.nn.Module, algorithms: Sequence[Algorithm]) -> None:
    if dist.get_world_size() > 1:
        raise UserError("verify is for one process: it compares with the plain model on the whole batch")
    for algorithm in algorithms:
        if not isinstance(algorithm, SpeedUp):
            raise UserError(
                f"verify compares speed-ups with the plain model, and {type(algorithm).__name__} changes what is "
                "trained: leave it out"
            )
    for name, parameter in model.named_parameters():
        if parameter.dtype is not torch.float32:
            raise UserError(
                f"verify compares with weights in float32, and {name} is in {parameter.dtype}: convert the model by "
                "model.float()"
            )


def _adamw(model: torch.nn.Module) -> Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=False, fused=False)


def _in_float32(algorithms: Sequence[Algorithm]) -> list[Algorithm]:
    kept = [a for a in algorithms if not (isinstance(a, SpeedUp) and a.stage is Stage.PRECISION)]
    return [registry.build("matmul_precision", precision="highest"), *kept]


def _check_repeatable(plain: ComposerModel, step: Step) -> None:
    one, other = (loss_of(plain, step.batch, step.weights) for _ in range(2))
    if not math.isfinite(one):
        raise UserError(f"the plain model's loss is {one} without any speed-up: look at its weights and at the texts")
    if not math.isclose(one, other, rel_tol=1e-4, abs_tol=1e-6):
        raise UserError(
            f"the plain model's loss is {one:.6g} and then {other:.6g} for the same batch, with every dropout rate "
            "that was found at 0: switch off first what else draws random numbers in it"
        )


class _True:
    """Gradients of `plain` in float64; of a first step once, as with the same weights and batch they are the same."""

    def __init__(self, plain: ComposerModel, say: Callable[[str], None]) -> None:
        self.plain, self.say = plain, say
        self._first: tuple[Step, Gradients] | None = None

    def of(self, step: Step) -> Gradients:
        if self._first is not None and _same(self._first[0], step):
            return self._first[1]
        self.say(f"computing its step {step.number} in float64, on the CPU")
        found = gradients(self.plain, step.batch, step.weights, dtype=torch.float64)
        self._first = self._first or (step, found)
        return found


def _same(one: Step, other: Step) -> bool:
    tensors: list[list[torch.Tensor]] = [[*one.weights.values()], [*other.weights.values()]]
    for step, found in zip((one, other), tensors, strict=True):
        mapped(step.batch, lambda x, found=found: found.append(x) or x)
    return len(tensors[0]) == len(tensors[1]) and all(map(torch.equal, *tensors))


def _compare(true: _True, step: Step, dtype: torch.dtype | None) -> Comparison:
    """`step` against float64, beside the plain model in the same precision, on the same device."""
    exact = true.of(step)
    before = compat.read_float32_precision()
    try:
        compat.write_float32_precision(step.precision)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        same = gradients(
            true.plain, step.batch, step.weights, device=device, autocast=dtype, loss_scale=step.loss_scale
        )
    finally:
        compat.write_float32_precision(before)
    stock, found = errors(same, exact), errors(step.gradients, exact)
    worst, share = _worst(stock, found)
    return Comparison(_precision(step, dtype), step.number, stock, found, worst, share)


def _precision(step: Step, dtype: torch.dtype | None) -> str:
    if dtype is not None:
        return {torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
    return "float32" if step.precision.matmul == "highest" else f"float32, products in {step.precision.matmul!r}"


def _worst(stock: Errors, found: Errors) -> tuple[str, float]:
    """What is furthest off for what is allowed, and its share of that.

    A parameter may be as far off as the plain model's is, or, relative to it, as all its gradients are: of few numbers
    some are exact by chance.
    """
    usual = max(stock.gradients, 2 * torch.finfo(torch.float32).eps)
    nothing = _NOTHING * usual * math.hypot(*found.norms.values())
    shares = {"loss": found.loss / max(stock.loss, usual), "all gradients": found.gradients / usual}
    for name, error in found.tensors.items():
        most = max(stock.tensors.get(name, 0.0), usual * found.norms[name], nothing)
        shares[name] = error / most if most else (math.inf if error else 0.0)
    # NaN is no number to be compared: it is the worst there is.
    worst = max(shares, key=lambda name: math.inf if math.isnan(shares[name]) else shares[name])
    return worst, math.inf if math.isnan(shares[worst]) else shares[worst] / ROOM


def _looked_again(
    comparisons: list[Comparison], train_at: Callable[[int], Watch], true: _True, say: Callable[[str], None]
) -> tuple[list[Comparison], list[str]]:
    """What is too far off in 16 bits, compared with a few other texts, until it is not; and what is to be said of it.

    Not where the plain model itself is further off than with some of the texts: then nothing would be seen.
    """
    rounded, exact = ([c for c in comparisons if (c.precision == "float32") is is_exact] for is_exact in (False, True))
    calm = [c.plain.gradients for c in rounded]
    for look in range(1, _LOOKS if _off(rounded) else 1):
        say(f"looking again, at other texts ({look} of at most {_LOOKS - 1})")
        again = train_at(look)
        others = [_compare(true, step, again.dtype) for step in again.kept]
        calm = [min(least, c.plain.gradients) for least, c in zip(calm, others, strict=False)]
        near = all(c.plain.gradients <= 2 * least for least, c in zip(calm, others, strict=True))
        if near and not _off(others):
            return [*others, *exact], [f"with other texts it is not so, by chance then: {'; '.join(_off(rounded))}"]
    return comparisons, []


def _off(comparisons: Iterable[Comparison]) -> list[str]:
    return [
        f"{c.worst}, step {c.step} in {c.precision}: {c.share:.3g} times the error that is allowed"
        for c in comparisons
        if not c.share <= 1
    ]


def _updates(
    plain: ComposerModel,
    optimizer: Callable[[torch.nn.Module], Optimizer],
    algorithms: Sequence[Algorithm],
    watch: Watch,
) -> Updates | None:
    """AdamW in float64 from the same weights and gradients, on a part of each parameter: it looks at nothing else."""
    model = copy.deepcopy(plain)
    names = {parameter: name for name, parameter in model.named_parameters()}
    reference = optimizer(model)
    if not is_adamw(reference) or not watch.parts or not watch.is_adamw:
        return None
    if any(getattr(algorithm, "no_decay_on_bias_and_norm", False) for algorithm in algorithms):
        split_off_no_decay(reference)
    before = {name: part_of(weight).double() for name, weight in watch.kept[0].weights.items()}
    weights = {name: torch.nn.Parameter(value.clone()) for name, value in before.items()}
    groups = [
        {**group, "params": [weights[names[p]] for p in group["params"] if names[p] in weights]}
        for group in torch_groups(reference)
    ]
    exact = torch.optim.AdamW([group for group in groups if group["params"]], foreach=False, fused=False)
    for part in watch.parts:
        for name, weight in weights.items():
            weight.grad = None if (gradient := part.get(name)) is None else gradient.double()
        exact.step()
    update, size, error = (
        math.hypot(*(float(difference.norm()) for difference in differences))
        for differences in (
            [weights[name].detach() - before[name] for name in weights],
            list(before.values()),
            [watch.after[name].double() - weights[name].detach() for name in weights],
        )
    )
    epsilon = torch.finfo(torch.float32).eps
    # Each step rounds each weight once, to half of `epsilon` of it at most, and computes its update in some twenty
    # roundings. Twice that.
    allowed = len(watch.parts) * epsilon * size / update + 40 * epsilon
    return Updates(watch.optimizer, error / update, None if watch.in_8_bits else allowed)


def _wrong(plain: ComposerModel, comparisons: Sequence[Comparison], updates: Updates | None, watch: Watch) -> list[str]:
    began = watch.kept[0].weights
    other = [name for name, p in plain.named_parameters() if name in began and not torch.equal(p.cpu(), began[name])]
    wrong = [f"{name}: other weights than the plain model's before the first step" for name in other[:1]]
    wrong += _off(comparisons)
    if not watch.parts:
        wrong.insert(0, "no step had gradients that are finite")
    if updates is not None and updates.allowed is not None and not updates.error <= updates.allowed:
        wrong.append(
            f"updates of {updates.optimizer}: {updates.error:.1e} off AdamW's in float64, {updates.allowed:.1e} allowed"
        )
    return wrong
