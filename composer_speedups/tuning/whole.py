"""The learning rate in whole trainings: short runs, which are cheap, like higher rates than long ones do.

Runs of 58 steps kept a pretrained encoder at 7e-4; its 250 ended 2.5 to 3.3 points of accuracy higher with 2e-4 to
3.5e-4 (`2026-11-27_cpu_tune_minilm`, `2026-11-27_cpu_pretrained_minilm` among the benchmarks' results). So from where
short runs ended the search goes on in trainings as long as the recipe's own, by halves while those get better, or else
by doubles. They are compared by the task's evaluation texts: the loss over what was seen in the epoch before tells of
memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from composer_speedups.tuning.rate import rounded

__all__ = ["MOST_TRAININGS", "Trained", "affordable", "lowest", "walk"]

MOST_TRAININGS = 4  # from a rate that is four times too high to one that is too low
_LEAST_TRAININGS = 2  # one by itself is compared with nothing
_STEP = 2.0  # rates nearer to each other end alike, and two seeds of one differ by more


@dataclass(frozen=True)
class Trained:
    """What came of one whole training: loss and accuracy on the evaluation texts, and else why there are none.

    A training that diverged tells of its rate, and has an infinite loss; one that came to no end tells nothing.
    """

    rate: float
    loss: float = math.inf
    accuracy: float | None = None
    broken: str = ""  # what happened to it, if that has nothing to do with its rate


def affordable(samples: int, own: int) -> int:
    """How many trainings of `own` samples each to make with `samples`; 0 if they would be too few to compare.

    >>> affordable(15_000, 8_000), affordable(17_000, 8_000), affordable(10**6, 8_000)
    (0, 2, 4)
    """
    count = min(MOST_TRAININGS, samples // own)
    return count if count >= _LEAST_TRAININGS else 0


def walk(train: Callable[[float], Trained], start: float, most: int) -> list[Trained]:
    """At most `most` trainings, from `start` to where the loss is lowest, in the order in which they were made.

    It ends with the first that came to no end: the next one would hardly do better.
    """
    best = train(start)
    tried = [best]
    for factor in (1 / _STEP, _STEP):
        while len(tried) < most and not tried[-1].broken:
            tried.append(train(rounded(best.rate * factor)))
            if not (tried[-1].loss < best.loss or math.isinf(best.loss)):
                break
            best = tried[-1]
        if best is not tried[0]:
            break
    return tried


def lowest(tried: Sequence[Trained]) -> Trained | None:
    """The training with the lowest loss; None if none ended well."""
    best = min(tried, key=lambda one: one.loss)
    return None if math.isinf(best.loss) else best
