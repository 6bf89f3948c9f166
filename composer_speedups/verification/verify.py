"""`verify`: whether a model computes with speed-ups what it computes without them, on this machine.

Each speed-up is tested against float64, but not on your GPU, with your model, your texts and your other speed-ups. So
loss and gradients of a real training with them are compared with the plain model's in float64, which the CPU computes
with none of our kernels. What is allowed is not chosen by hand: it is the error that the plain model makes in the same
precision, by PyTorch's own autocast, with some room. Rounding to 16 bits hides small mistakes; so the same is done once
more in float32. The optimizer's updates are compared with AdamW's in float64, given the same gradients. Batches are to
have what their samples have; and afterwards the model is evaluated on one, as much depends on whether it trains.

Dropout is off, as no two implementations draw the same masks; that masks are right is for the tests. So is how
`TokenBudgetBatches` weighs batches of unequal numbers of samples: here there is one batch of all samples.

Where several ranks call it, each computes its part of that batch, and what is compared is what they have together: of
the plain model's gradients in float64 the mean over the batch, of the training what DDP left on each rank. The rank
that is furthest off counts.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from composer.core import Algorithm
from composer.models import ComposerModel
from composer.utils import dist
from torch.optim import Optimizer
from torch.utils.data import DataLoader, IterableDataset

from composer_speedups import registry
from composer_speedups.algorithms.gradient_compression import GradientCompression
from composer_speedups.algorithms.mixed_precision import DTYPES
from composer_speedups.batches.weighting import of_tokens
from composer_speedups.errors import UserError
from composer_speedups.everyone import differing, everyones, start_ranks, worst
from composer_speedups.speedup import SpeedUp, Stage
from composer_speedups.surgery import stock_class
from composer_speedups.verification.compared_steps import Reference, compare, looked_again, off
from composer_speedups.verification.evaluated import compare_evaluated
from composer_speedups.verification.findings import SAMPLES, Comparison, Evaluated, Updates, Verification
from composer_speedups.verification.other_texts import other_texts
from composer_speedups.verification.texts import one_batch
from composer_speedups.verification.trained_steps import Step, Watch, part_of, train
from composer_speedups.verification.true_gradients import loss_of, without_dropout
from composer_speedups.verification.true_updates import another_optimizer, compare_updates

__all__ = ["verify"]


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
        samples: in the batch, of all ranks together; long and short ones.
        microbatch_size: accumulates gradients over so many samples each; for models with one label a sample. Of one
            rank.
        say: is told what is being done.

    On several ranks, for all of them to call; what one of them raises must end it, as the others may wait for it.

    Raises:
        UserError: what was given cannot be compared, as an algorithm that is no speed-up, a model that has some already
            or that gives another loss each time without dropout; or it cannot be used here.

    >>> from composer_speedups import FusedAdamW, Unpadding
    >>> verify(model, dataloader, [Unpadding(), FusedAdamW()]).holds  # doctest: +SKIP
    True
    """
    algorithms = _checked(model, dataloader, algorithms, samples, microbatch_size)
    start_ranks()
    if (name := differing(model.state_dict())) is not None:
        raise UserError(f"the ranks' models differ in {name}: make them from one seed, or load one file on all ranks")
    plain = copy.deepcopy(model)
    without_dropout(plain)
    optimizer = optimizer or _adamw
    run = partial(train, plain, optimizer, microbatch_size)
    loader = one_batch(dataloader, samples)
    say("training with the speed-ups")
    watch, changed, notes = run(loader, algorithms)
    first = watch.kept[0]
    own = samples // dist.get_world_size()
    if microbatch_size is not None and microbatch_size < own and of_tokens(first.batch):
        raise UserError(
            "microbatch_size is for models with one label a sample: with one a token, Composer weighs parts of a batch "
            "by their samples, and so computes something else than the batch at once"
        )
    _check_repeatable(plain, first)
    seen = other_texts(loader, watch)
    true = Reference(plain, say)
    sent_in = _sent_in(algorithms)
    comparisons = [compare(true, step, watch.dtype, sent_in) for step in watch.kept]
    evaluated = [compare_evaluated(plain, watch, comparisons[-1].plain.gradients)]
    if watch.dtype is not None or watch.rounded or sent_in is not None:
        say("training once more, in float32")
        try:
            exact, *_ = run(loader, _in_float32(algorithms))
            comparisons += [compare(true, step, exact.dtype, None) for step in exact.kept]
            evaluated.append(compare_evaluated(plain, exact, comparisons[-1].plain.gradients))
        except UserError as error:
            if dist.get_world_size() > 1:  # it need not be all ranks', and they would wait for this one
                raise
            notes.append(f"not compared in float32: {error}")
    fewer = min(own, max(2, own // 4)) * dist.get_world_size()
    if watch.parts and not off(c for c in comparisons if c.precision == "float32"):
        comparisons, chance = looked_again(
            comparisons,
            lambda look: run(one_batch(dataloader, fewer, look), algorithms)[0],
            partial(compare, true, sent_in=sent_in),
            say,
        )
        notes += chance
    updates = worst(compare_updates(plain, optimizer, algorithms, watch), _excess)
    seen += another_optimizer(algorithms, watch)
    evaluations = [one for one in evaluated if one is not None]
    wrong = [*seen, *_wrong(plain, comparisons, updates, watch), *_evaluated_wrong(evaluations)]
    return Verification(
        comparisons,
        updates,
        *_tokens_and_padding(first.batch),
        changed,
        notes,
        list(dict.fromkeys(line for lines in everyones(wrong) for line in lines)),
        evaluations,
    )


def _evaluated_wrong(evaluated: Sequence[Evaluated]) -> list[str]:
    return [
        f"evaluating in {one.precision}: its outputs are {one.share:.3g} times as far off as is allowed"
        if not math.isnan(one.error)
        else f"evaluating in {one.precision}: its outputs are NaN, or of other shapes than the plain model's"
        for one in evaluated
        if not one.share <= 1
    ]


def _tokens_and_padding(batch: Any) -> tuple[int | None, float]:
    """The real tokens of all ranks' parts of a batch, None if it does not say, and the share of padding."""
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    counts = [one for one in everyones(None if mask is None else (int(mask.sum()), mask.numel())) if one is not None]
    if not counts:
        return None, 0.0
    real, places = (sum(column) for column in zip(*counts, strict=True))
    return real, 1 - real / places


def _excess(updates: Updates | None) -> float:
    """How large the error is for what is allowed; below 0 where there is nothing to judge."""
    return -1.0 if updates is None or updates.allowed is None else updates.error / max(updates.allowed, 1e-30)


def _checked(
    model: ComposerModel, loader: DataLoader, algorithms: Sequence[Algorithm], samples: int, microbatch: int | None
) -> list[Algorithm]:
    """The algorithms as a list; raise `UserError` for what cannot be compared."""
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


def _sent_in(algorithms: Sequence[Algorithm]) -> torch.dtype | None:
    """What ranks round their gradients to when they exchange them; None where they do not."""
    return next((DTYPES[a.dtype] for a in algorithms if isinstance(a, GradientCompression)), None)


def _in_float32(algorithms: Sequence[Algorithm]) -> list[Algorithm]:
    kept = [a for a in algorithms if not _rounds(a)]
    return [registry.build("matmul_precision", precision="highest"), *kept]


def _rounds(algorithm: Algorithm) -> bool:
    rounds = isinstance(algorithm, SpeedUp) and algorithm.stage is Stage.PRECISION
    return rounds or isinstance(algorithm, GradientCompression)


def _check_repeatable(plain: ComposerModel, step: Step) -> None:
    found = everyones(tuple(loss_of(plain, step.batch, step.weights) for _ in range(2)))
    for one, other in found:
        if not math.isfinite(one):
            raise UserError(
                f"the plain model's loss is {one} without any speed-up: look at its weights and at the texts"
            )
        if math.isclose(one, other, rel_tol=1e-4, abs_tol=1e-6):
            continue
        raise UserError(
            f"the plain model's loss is {one:.6g} and then {other:.6g} for the same batch, with every dropout rate "
            "that was found at 0: switch off first what else draws random numbers in it"
        )


def _wrong(plain: ComposerModel, comparisons: Sequence[Comparison], updates: Updates | None, watch: Watch) -> list[str]:
    began = watch.kept[0].weights
    other = [name for name, p in plain.named_parameters() if name in began and not torch.equal(p.cpu(), began[name])]
    wrong = [f"{name}: other weights than the plain model's before the first step" for name in other[:1]]
    wrong += off(comparisons)
    wrong += [watch.apart] * bool(watch.apart)
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
