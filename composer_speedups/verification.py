"""`verify`: whether a model computes with speed-ups what it computes without them, on this machine.

Each speed-up is tested against float64, but not on your GPU, with your model, your texts and your other speed-ups. So
loss and gradients of a real training with them are compared with the plain model's in float64, which the CPU computes
with none of our kernels. What is allowed is not chosen by hand: it is the error that the plain model makes in the same
precision, by PyTorch's own autocast, with some room. Rounding to 16 bits hides small mistakes; so the same is done once
more in float32. The optimizer's updates are compared with AdamW's in float64, given the same gradients.

Dropout is off, as no two implementations draw the same masks; that masks are right is for the tests. So is how
`TokenBudgetBatches` weighs batches of unequal numbers of samples: here there is one batch of all samples.
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
from torch.utils.data import DataLoader, IterableDataset

from composer_speedups import compat, registry
from composer_speedups.errors import UserError, is_out_of_memory
from composer_speedups.speedup import SpeedUp, Stage
from composer_speedups.surgery import stock_class
from composer_speedups.trained_steps import Step, Watch, one_batch, part_of, train
from composer_speedups.true_gradients import Errors, Gradients, errors, gradients, loss_of, mapped, without_dropout
from composer_speedups.true_updates import Updates, another_optimizer, compare_updates
from composer_speedups.weighting import of_tokens

__all__ = ["ROOM", "SAMPLES", "Comparison", "Verification", "verify"]

# Times the plain model's error. Independent roundings add up by their squares, so this is sixteen times as many.
# LowPrecisionNorm and the fused norms, which keep the residual stream in 16 bits, take 1.2 to 1.7 times the error.
ROOM = 4.0
SAMPLES = 8  # of the batch, where nobody says otherwise
# Times that, of a parameter whose true gradient is nothing beside the plain model's error, as keys' biases': there one
# kernel's rounding is compared with another's, which were up to 13 times as large.
_NOTHING = 8.0
_LOSS = 0.1  # of the gradients' relative error, what a loss may be off by where the plain model's is off by less
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
        worst: what is furthest off for what is allowed: a parameter's gradient, `all gradients`, or the `loss`.
        share: its error, of what is allowed: above 1 it is too large.
    """

    precision: str
    step: int
    plain: Errors
    errors: Errors
    worst: str
    share: float


@dataclass(frozen=True)
class Verification:
    """What `verify` found.

    Attributes:
        comparisons: by precision and step.
        updates: the optimizer's; None where it is no AdamW, as Adafactor.
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
    samples: int = SAMPLES,
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
        UserError: what was given cannot be compared, as an algorithm that is no speed-up, a model that has some already
            or that gives another loss each time without dropout; or it cannot be used here.

    >>> from composer_speedups import FusedAdamW, Unpadding
    >>> verify(model, dataloader, [Unpadding(), FusedAdamW()]).holds  # doctest: +SKIP
    True
    """
    algorithms = _checked(model, dataloader, algorithms, samples, microbatch_size)
    plain = copy.deepcopy(model)
    without_dropout(plain)
    optimizer = optimizer or _adamw
    run = partial(train, plain, optimizer, microbatch_size)
    loader = one_batch(dataloader, samples)
    say("training with the speed-ups")
    watch, changed, notes = run(loader, algorithms)
    first = watch.kept[0]
    if microbatch_size is not None and microbatch_size < samples and of_tokens(first.batch):
        raise UserError(
            "microbatch_size is for models with one label a sample: with one a token, Composer weighs parts of a batch "
            "by their samples, and so computes something else than the batch at once"
        )
    _check_repeatable(plain, first)
    seen = _other_texts(loader, first)
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
    updates = compare_updates(plain, optimizer, algorithms, watch)
    seen += another_optimizer(algorithms, watch)
    mask = first.batch.get("attention_mask") if isinstance(first.batch, Mapping) else None
    tokens = None if mask is None else int(mask.sum())
    return Verification(
        comparisons,
        updates,
        tokens,
        0.0 if mask is None else 1 - int(mask.sum()) / mask.numel(),
        changed,
        notes,
        [*seen, *_wrong(plain, comparisons, updates, watch)],
    )


def _checked(
    model: ComposerModel, loader: DataLoader, algorithms: Sequence[Algorithm], samples: int, microbatch: int | None
) -> list[Algorithm]:
    """The algorithms as a list; raise `UserError` for what cannot be compared."""
    if dist.get_world_size() > 1:
        raise UserError("verify is for one process: it compares with the plain model on the whole batch")
    if not isinstance(model, ComposerModel):
        raise UserError(f"verify takes a ComposerModel, got {type(model).__name__}: HuggingFaceModel(model) makes one")
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        raise UserError("verify takes a torch DataLoader over a dataset with a length, of which it makes a batch")
    for name, value in (("samples", samples), ("microbatch_size", microbatch)):
        if value is not None and (type(value) is not int or value < 1):
            raise UserError(f"{name} must be a whole number from 1 on, got {value!r}")
    algorithms = [algorithms] if isinstance(algorithms, Algorithm) else list(algorithms)
    for algorithm in algorithms:
        if not isinstance(algorithm, SpeedUp):
            name = algorithm.__name__ if isinstance(algorithm, type) else type(algorithm).__name__
            what = "is a class, not a speed-up" if isinstance(algorithm, type) else "changes what is trained"
            raise UserError(f"verify compares speed-ups with the plain model, and {name} {what}: leave it out")
    for module in model.modules():
        cls = type(module)
        if stock_class(cls) is not cls or cls.__module__.startswith("composer_speedups."):
            raise UserError(f"{cls.__name__} has a speed-up already: give the model as it was before any")
    for name, parameter in model.named_parameters():
        if parameter.dtype is not torch.float32:
            raise UserError(
                f"verify compares with weights in float32, and {name} is in {parameter.dtype}: convert the model by "
                "model.float()"
            )
    return algorithms


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


def _other_texts(loader: DataLoader, step: Step) -> list[str]:
    """What is to be said of a first batch with other texts or labels than its samples have, if that can be seen."""
    texts: Any = loader.dataset
    expected = loader.collate_fn([texts.dataset[i] for i in texts.first])
    rows = [_texts_of(batch) for batch in (expected, step.batch)]
    return [] if None in rows or rows[0] == rows[1] else ["the first batch has other texts or labels than its samples"]


def _texts_of(batch: Any) -> list[Any] | None:
    """Of each row its tokens and label, in any order; of those with a label a token, which a collator may have masked
    by chance, how many tokens."""
    if not isinstance(batch, Mapping) or not {"input_ids", "attention_mask", "labels"} <= set(batch):
        return None
    masks = batch["attention_mask"].bool()
    if of_tokens(batch):
        return sorted(int(mask.sum()) for mask in masks)
    ids = zip(batch["input_ids"], masks, batch["labels"], strict=True)
    return sorted((row[mask].tolist(), label.tolist()) for row, mask, label in ids)


class _True:
    """Gradients of `plain` in float64; of a first step once, as with the same weights and batch they are the same."""

    def __init__(self, plain: ComposerModel, say: Callable[[str], None]) -> None:
        self.plain, self.say = plain, say
        self._first: tuple[Step, Gradients] | None = None

    def of(self, step: Step) -> Gradients:
        if self._first is not None and _same(self._first[0], step):
            return self._first[1]
        self.say(f"computing its step {step.number} in float64, on the CPU")
        try:
            found = gradients(self.plain, step.batch, step.weights, dtype=torch.float64)
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            raise UserError(f"the plain model cannot be computed in float64: {error}") from error
        if not found.finite:
            raise UserError(
                "the plain model's loss or gradients are not finite in float64, as of eager attention that fills masks "
                "with float64's lowest number: give it attn_implementation='sdpa'"
            )
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
        same = _stock(true.plain, step, dtype)
    finally:
        compat.write_float32_precision(before)
    stock, found = errors(same, exact), errors(step.gradients, exact)
    step.found = {}  # of a large model gigabytes
    worst, share = _worst(stock, found)
    return Comparison(_precision(step, dtype), step.number, stock, found, worst, share)


def _stock(plain: ComposerModel, step: Step, dtype: torch.dtype | None) -> Gradients:
    """The plain model's, with a loss scale at which they are finite."""
    device, scale = "cuda" if torch.cuda.is_available() else "cpu", step.loss_scale
    while True:
        found = gradients(plain, step.batch, step.weights, device=device, autocast=dtype, loss_scale=scale)
        if found.finite:
            return found
        if scale <= 1:
            raise UserError(
                f"the plain model's gradients are not finite in {_precision(step, dtype)}: there is nothing to compare "
                "with"
            )
        scale = max(1.0, scale / 16)


def _precision(step: Step, dtype: torch.dtype | None) -> str:
    if dtype is not None:
        return {torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
    return "float32" if step.precision.matmul == "highest" else f"float32, products in {step.precision.matmul!r}"


def _worst(stock: Errors, found: Errors) -> tuple[str, float]:
    """What is furthest off for what is allowed, and its share of that.

    A parameter may be as far off as the plain model's is, or, relative to it, as all its gradients are: of few numbers
    some are exact by chance.
    """
    epsilon = torch.finfo(torch.float32).eps
    usual = max(stock.gradients, 2 * epsilon)
    shares = {
        "loss": found.loss / max(stock.loss, _LOSS * usual, 2 * epsilon),
        "all gradients": found.gradients / usual,
    }
    for name, error in found.tensors.items():
        same = stock.tensors.get(name, 0.0)
        most = max(same * (_NOTHING if found.norms[name] < 0.1 * same else 1.0), usual * found.norms[name])
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
        if again.not_finite:
            continue
        others = [_compare(true, step, again.dtype) for step in again.kept]
        calm = [min(least, c.plain.gradients) for least, c in zip(calm, others, strict=True)]
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


def _wrong(plain: ComposerModel, comparisons: Sequence[Comparison], updates: Updates | None, watch: Watch) -> list[str]:
    began = watch.kept[0].weights
    other = [name for name, p in plain.named_parameters() if name in began and not torch.equal(p.cpu(), began[name])]
    wrong = [f"{name}: other weights than the plain model's before the first step" for name in other[:1]]
    wrong += _off(comparisons)
    if watch.not_finite:
        wrong.insert(0, f"step {watch.not_finite}: its gradients are not finite")
    before = {name: part_of(weight) for name, weight in watch.kept[0].weights.items()}
    some = [name for part in watch.parts for name, gradient in part.items() if gradient.any()]
    # AdamW's updates are compared, unless they are as small as rounding.
    if updates is None and some and all(torch.equal(before[name], part) for name, part in watch.after.items()):
        wrong.append(f"{watch.optimizer} updated nothing")
    if updates is not None and updates.allowed is not None and not updates.error <= updates.allowed:
        wrong.append(
            f"updates of {updates.optimizer}: {updates.error:.1e} off AdamW's in float64, {updates.allowed:.1e} allowed"
        )
    return wrong
