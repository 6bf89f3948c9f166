"""The learning rate for a batch: where to start, and which rates to try within a budget of samples.

Optuna's sampler proposes rates around the scaling rule's, its successive halving decides which of them are worth a
longer run. Each run is a whole training of its own, schedule and all, on the same samples from the same weights, so
that what is compared is the rate alone.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType

from composer_speedups.errors import UserError

__all__ = ["LEAST_STEPS", "Plan", "Rated", "optuna_or_error", "plan", "scaled_rate", "search", "shown_lower"]

_SPAN = 8.0  # rates from an eighth to eight times the scaling rule's
_FIRST = (1.0, 0.5, 2.0)  # of the rule's: the neighbours tell on which side to look
_KEPT = 2  # of so many, one goes on to a run of so many times the length
_LEVELS = 3
_BLOCKS = 4  # of the last steps, whose means are compared: more of them would be shorter, and go together
_SHORT_BLOCK = 4  # steps: rather one block less than shorter ones
_MISTAKEN = 0.05  # how often the best of equal rates may be taken for better
LEAST_STEPS = 20  # of the shortest run: with fewer, the warm-up weighs too much, and low rates look best


@dataclass(frozen=True)
class Plan:
    """How a budget is spent: at most `trials` rates, in runs of `samples[0]`, the better ones of `samples[1]` ..."""

    trials: int
    samples: tuple[int, ...]


@dataclass(frozen=True)
class Rated:
    """How far one rate came: its loss after each of its runs, and why it went no further."""

    rate: float
    losses: tuple[float, ...]
    ended: str  # "", "pruned", or what went wrong


Train = Callable[
    [float, int], float | None
]  # loss of a run with this rate and so many samples; None: it did not end well


def optuna_or_error() -> ModuleType:
    """Optuna, which is not installed unless asked for."""
    try:
        import optuna
    except ImportError:
        raise UserError(
            'the search for the learning rate needs Optuna: pip install "optuna>=4,<5", or use --no-lr '
            "to take the scaling rule's"
        ) from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def scaled_rate(rate: float, before: int, after: int) -> float:
    """The rate that goes with another batch, for optimizers like Adam: it grows with the square root.

    Malladi et al., "On the SDEs and Scaling Rules for Adaptive Gradient Algorithms", 2022.

    >>> scaled_rate(1e-4, 32, 128)
    0.0002
    """
    return rounded(rate * math.sqrt(after / before))


def rounded(rate: float) -> float:
    """Three digits: more of a learning rate means nothing."""
    return float(f"{rate:.3g}")


def plan(budget: int, batch: int, trials: int, longest: int) -> Plan | None:
    """How to spend `budget` samples; None if they are too few for as much as two rates.

    Args:
        budget: samples, over all runs.
        batch: samples of a step.
        trials: rates, at most.
        longest: samples of one run, at most: the recipe's own duration.

    >>> plan(30_000, 32, 8, 100_000)
    Plan(trials=8, samples=(1024, 2048, 4096))
    """
    least = LEAST_STEPS * batch
    for levels in range(_LEVELS, 0, -1):
        # Halving as runs come in promotes somewhat more than every second one.
        share = sum((trials / _KEPT**n + n / 2) * _KEPT**n for n in range(levels))
        shortest = int(budget / share) // batch * batch
        shortest = min(shortest, longest // _KEPT ** (levels - 1) // batch * batch)
        if shortest >= least:
            return Plan(trials, tuple(shortest * _KEPT**n for n in range(levels)))
    shortest = min(least, longest // batch * batch)
    count = min(trials, budget // shortest) if shortest else 0
    return Plan(count, (shortest,)) if count >= 2 else None


def search(train: Train, start: float, chosen: Plan, budget: int, seed: int) -> tuple[float | None, list[Rated]]:
    """The rate with the lowest loss among those that came furthest and did not diverge, and all that were tried.

    None if every one diverged.

    Args:
        train: makes one run.
        start: the scaling rule's rate, tried first.
        chosen: from `plan`.
        budget: samples; the search ends before it would go over it.
        seed: of the sampler: the same losses lead to the same proposals, so a record can be gone through again.
    """
    optuna = optuna_or_error()
    low, high = start / _SPAN, start * _SPAN
    study = optuna.create_study(
        sampler=optuna.samplers.TPESampler(seed=seed, n_startup_trials=len(_FIRST)),
        pruner=optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=_KEPT),
    )
    for factor in _FIRST:
        study.enqueue_trial({"rate": start * factor})
    tried: list[Rated] = []
    left = budget
    pruned, failed = optuna.trial.TrialState.PRUNED, optuna.trial.TrialState.FAIL
    while len(tried) < chosen.trials and left >= chosen.samples[0]:
        trial = study.ask()
        rate = trial.suggest_float("rate", low, high, log=True)
        rate = rate if rate == start else rounded(rate)
        losses: list[float] = []
        ended = ""
        for level, samples in enumerate(chosen.samples):
            if samples > left:
                ended = "the budget was used up"
                break
            loss = train(rate, samples)
            left -= samples
            if loss is None or not math.isfinite(loss):
                ended = "diverged" if loss is not None else "failed"
                break
            losses.append(loss)
            trial.report(loss, step=_KEPT**level)
            if level + 1 < len(chosen.samples) and trial.should_prune():
                ended = "pruned"
                break
        tried.append(Rated(rate, tuple(losses), ended))
        if losses and ended in ("", "the budget was used up"):
            study.tell(trial, losses[-1])
        else:
            study.tell(trial, state=pruned if losses else failed)
    sound = [one for one in tried if one.losses and one.ended not in ("diverged", "failed")]
    if not sound:
        return None, tried
    furthest = max(len(one.losses) for one in sound)
    best = min((one for one in sound if len(one.losses) == furthest), key=lambda one: one.losses[-1])
    return best.rate, tried


def shown_lower(losses: Sequence[float], other: Sequence[float], tried: int = 2) -> bool:
    """Whether `losses` are below `other` by more than their steps scatter: both of the same last steps and batches.

    Student's t of the means of a few long blocks of steps: losses of successive steps go together, so that each step by
    itself is no evidence of its own. What another seed would change is not in it: one run each does not show that.

    Args:
        losses: of the rate that was chosen.
        other: of the rate that it is compared with.
        tried: rates, of which the one with the lowest loss was chosen: the more, the lower it is by luck (Bonferroni).

    >>> shown_lower([1.0, 1.2, 1.1], [1.3, 1.5, 1.4]), shown_lower([1.0, 1.4, 1.1], [1.3, 1.2, 1.2])
    (True, False)
    """
    from scipy import stats

    count = _BLOCKS if len(losses) >= _BLOCKS * _SHORT_BLOCK else _BLOCKS - 1
    size = len(losses) // count
    if not size:
        return False
    differences = [a - b for a, b in zip(losses, other, strict=True)][-count * size :]
    means = [statistics.mean(differences[n * size : (n + 1) * size]) for n in range(count)]
    error = statistics.stdev(means) / math.sqrt(count)
    return statistics.mean(means) < -float(stats.t.ppf(1 - _MISTAKEN / max(1, tried - 1), count - 1)) * error
