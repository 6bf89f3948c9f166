"""How far a step with speed-ups is off from float64, beside what the plain model is in the same precision."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable

import torch
from composer.models import ComposerModel

from composer_speedups import compat
from composer_speedups.algorithms.mixed_precision import DTYPES
from composer_speedups.errors import UserError, is_out_of_memory
from composer_speedups.everyone import everyones, worst
from composer_speedups.verification.findings import Comparison, Errors
from composer_speedups.verification.trained_steps import Step, Watch
from composer_speedups.verification.true_gradients import Gradients, averaged, errors, gradients, tensors_of

__all__ = ["ROOM", "Reference", "compare", "looked_again", "off", "precision_of"]

# Times the plain model's error. Independent roundings add up by their squares, so this is sixteen times as many.
# LowPrecisionNorm and the fused norms, which keep the residual stream in 16 bits, take 1.2 to 1.7 times the error.
ROOM = 4.0
# Times that, of a parameter whose true gradient is nothing beside the plain model's error, as keys' biases': there one
# kernel's rounding is compared with another's, which were up to 13 times as large.
_NOTHING = 8.0
# Times that at most, as the plain model's error of the same parameter in other layers says: where much cancels, as in
# the biases of keys that are turned to their places, the error is about one random number, and may be small by chance.
_KIN = 4.0
_LOSS = 0.1  # of the gradients' relative error, what a loss may be off by where the plain model's is off by less
# In 16 bits a unit next to a ReLU's kink may be on in one model and off in the other, a tenth of a small head's
# gradient: of tiny DistilBERTs with LowPrecisionNorm one in two batches of eight texts has such a unit, of plain ones
# one in four. Of two other texts few have, while what is wrong is wrong with all texts.
_LOOKS = 8
_SHORT = {dtype: name for name, dtype in DTYPES.items()}


class Reference:
    """Gradients of `plain` in float64; of a first step once, as with the same weights and batch they are the same."""

    def __init__(self, plain: ComposerModel, say: Callable[[str], None]) -> None:
        self.plain, self.say = plain, say
        self._first: tuple[Step, Gradients] | None = None

    def of(self, step: Step) -> Gradients:
        if self._first is not None and all(everyones(_same(self._first[0], step))):
            return self._first[1]
        self.say(f"computing its step {step.number} in float64, on the CPU")
        try:
            found = gradients(self.plain, step.batch, step.weights, dtype=torch.float64)
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            raise UserError(f"the plain model cannot be computed in float64: {error}") from error
        found = averaged(found, step.share)
        if not found.finite:
            raise UserError(
                "the plain model's loss or gradients are not finite in float64, as of eager attention that fills masks "
                "with float64's lowest number: give it attn_implementation='sdpa'"
            )
        self._first = self._first or (step, found)
        return found


def compare(true: Reference, step: Step, dtype: torch.dtype | None, sent_in: torch.dtype | None = None) -> Comparison:
    """`step` against float64, beside the plain model in the same precision, on the same device.

    Of several ranks the one that is furthest off, as seen from all.

    Args:
        true: what it is compared with.
        step: of a training with speed-ups.
        dtype: of its autocast; None without.
        sent_in: what ranks round their gradients to when they exchange them; None where they do not.
    """
    exact = true.of(step)
    before = compat.read_float32_precision()
    try:
        compat.write_float32_precision(step.precision)
        same = _stock(true.plain, step, dtype, sent_in)
    finally:
        compat.write_float32_precision(before)
    stock, found = errors(same, exact), errors(step.gradients, exact)
    step.found = {}  # of a large model gigabytes
    furthest, share = _worst(stock, found)
    precision = precision_of(step.precision, dtype)
    if sent_in is not None:
        precision += f", sent in {_SHORT[sent_in]}"
    return worst(Comparison(precision, step.number, stock, found, furthest, share), lambda one: one.share)


def looked_again(
    comparisons: list[Comparison],
    train_at: Callable[[int], Watch],
    compared: Callable[[Step, torch.dtype | None], Comparison],
    say: Callable[[str], None],
) -> tuple[list[Comparison], list[str]]:
    """What is too far off in 16 bits, compared with a few other texts, until it is not; and what is to be said of it.

    Not where the plain model itself is further off than with some of the texts: then nothing would be seen.
    """
    rounded, exact = ([c for c in comparisons if (c.precision == "float32") is is_exact] for is_exact in (False, True))
    calm = [c.plain.gradients for c in rounded]
    for look in range(1, _LOOKS if off(rounded) else 1):
        say(f"looking again, at other texts ({look} of at most {_LOOKS - 1})")
        again = train_at(look)
        if again.not_finite:
            continue
        others = [compared(step, again.dtype) for step in again.kept]
        calm = [min(least, c.plain.gradients) for least, c in zip(calm, others, strict=True)]
        near = all(c.plain.gradients <= 2 * least for least, c in zip(calm, others, strict=True))
        if near and not off(others):
            return [*others, *exact], [f"with other texts it is not so, by chance then: {'; '.join(off(rounded))}"]
    return comparisons, []


def off(comparisons: Iterable[Comparison]) -> list[str]:
    return [
        f"{c.worst}, step {c.step} in {c.precision}: {c.share:.3g} times the error that is allowed"
        for c in comparisons
        if not c.share <= 1
    ]


def _same(one: Step, other: Step) -> bool:
    first, second = ([*step.weights.values(), *tensors_of(step.batch)] for step in (one, other))
    return len(first) == len(second) and all(map(torch.equal, first, second))


def _stock(plain: ComposerModel, step: Step, dtype: torch.dtype | None, sent_in: torch.dtype | None) -> Gradients:
    """The plain model's, with a loss scale at which they are finite."""
    device, scale = "cuda" if torch.cuda.is_available() else "cpu", step.loss_scale
    while True:
        own = gradients(plain, step.batch, step.weights, device=device, autocast=dtype, loss_scale=scale)
        found = averaged(own, step.share, sent_in, scale)
        if found.finite:
            return found
        if scale <= 1:
            raise UserError(
                f"the plain model's gradients are not finite in {precision_of(step.precision, dtype)}: there is "
                "nothing to compare with"
            )
        scale = max(1.0, scale / 16)


def precision_of(precision: compat.Float32Precision, dtype: torch.dtype | None) -> str:
    """Autocast's `dtype` in a word, or float32 as it is."""
    if dtype is not None:
        return _SHORT[dtype]
    return "float32" if precision.matmul == "highest" else f"float32, products in {precision.matmul!r}"


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
    kin: dict[str, float] = {}
    for name, error in stock.tensors.items():
        kin[_kind(name)] = max(kin.get(_kind(name), 0.0), error)
    for name, error in found.tensors.items():
        own = stock.tensors.get(name, 0.0)
        same = max(own, min(kin.get(_kind(name), 0.0), _KIN * own))
        most = max(same * (_NOTHING if found.norms[name] < 0.1 * own else 1.0), usual * found.norms[name])
        shares[name] = error / most if most else (math.inf if error else 0.0)
    # NaN is no number to be compared: it is the worst there is.
    shares = {name: math.inf if math.isnan(share) else share for name, share in shares.items()}
    furthest = max(shares, key=lambda name: shares[name])
    return furthest, shares[furthest] / ROOM


def _kind(name: str) -> str:
    """The parameter's name without the number of its layer.

    >>> _kind("layers.11.k_proj.bias")
    'layers.*.k_proj.bias'
    """
    return re.sub(r"\d+", "*", name)
