"""About how long a study will take: told before it starts, and better with every run that ends."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from composer_speedups.ablation.rows import precision
from composer_speedups.ablation.store import OPEN, Run
from composer_speedups.recipes.schema import in_samples
from composer_speedups.tasks.files import about_rows
from composer_speedups.tasks.known_models import described

__all__ = ["duration", "expected_seconds", "remaining_seconds", "seconds_per_sample"]

# BERT-base's, where neither the recipe nor the model's name or folder says.
_BASE = {"hidden_size": 768, "num_hidden_layers": 12, "intermediate_size": 3072, "vocab_size": 30522}
# DistilBERT's names of the same.
_ALSO = {"dim": "hidden_size", "n_layers": "num_hidden_layers", "hidden_dim": "intermediate_size"}
_SHARE = 0.35  # of the attainable matmul speed, before anything has been measured
_START = 4.0  # seconds for data, model and evaluation's start


def expected_seconds(recipe: Mapping[str, Any], peaks: Mapping[str, float], hardware: str) -> float | None:
    """A rough guess for one run, from its matmuls alone; None if the attainable speed is not known."""
    peak = peaks.get(precision(recipe, hardware)) or peaks.get("fp32")
    if not peak:
        return None
    task, model = recipe.get("task") or {}, recipe.get("model") or {}
    shape = dict(_BASE)
    for said in (described(str(model.get("name"))), model.get("config") or {}):
        shape |= {_ALSO.get(k, k): v for k, v in said.items() if _ALSO.get(k, k) in _BASE and isinstance(v, int)}
    hidden, length = shape["hidden_size"], task.get("max_length") or 256
    layer = 4 * hidden**2 + 2 * hidden * shape["intermediate_size"] + 2 * hidden * length
    weights = shape["num_hidden_layers"] * layer
    if task.get("objective") == "mlm":
        weights += hidden * shape["vocab_size"]
    samples, held_out = _samples(task)
    trained = in_samples(recipe.get("duration") or "1ep", samples, recipe.get("batch_size") or 32)
    evaluated = held_out if recipe.get("evaluate") else 0
    # Two operations a weight and token forward, twice that backward.
    operations = 2 * weights * length * (3 * trained + evaluated)
    return _START + operations / (_SHARE * peak)


def _samples(task: Mapping[str, Any]) -> tuple[int, int]:
    """To train and to evaluate on: as many as asked for, or of the user's own files as many as there seem to be.

    A tenth of them to evaluate on, which is what is held out where nothing else is said.
    """
    train, evaluation = task.get("train_samples"), task.get("eval_samples")
    path, apart = task.get("path"), task.get("eval_path")
    there = about_rows(path) if path else None
    if there is None:
        train = train or 8000
        return train, evaluation or train // 10
    held_out = (about_rows(apart) if apart else None) or there // 10
    left = there if apart else there - held_out
    return min(train or left, left), min(evaluation or held_out, held_out)


def seconds_per_sample(recipe: Mapping[str, Any], peaks: Mapping[str, float], hardware: str) -> float | None:
    """Of training alone, by the same guess; None if the attainable speed is not known."""
    plain = {**recipe, "evaluate": False}
    one, two = (expected_seconds(plain | {"duration": f"{n}sp"}, peaks, hardware) for n in (1, 2))
    return None if one is None or two is None else two - one


def remaining_seconds(
    runs: Sequence[Run], expected: Mapping[str, float | None], current: Mapping[int, float | None] | None = None
) -> float | None:
    """Seconds until the study ends.

    Args:
        runs: all runs of the study.
        expected: seconds of one run by recipe, guessed before.
        current: by run that goes on now: seconds that it needs still, as far as known.
    """
    took: dict[str, list[float]] = {}
    for run in runs:
        if run.status == "ok" and run.started is not None and run.finished is not None:
            took.setdefault(run.recipe, []).append(run.finished - run.started)
    measured = {name: sum(values) / len(values) for name, values in took.items()}
    # How far off the guesses were so far corrects those that are left.
    pairs = [(m, expected[n]) for n, m in measured.items() if expected.get(n)]
    correction = math.exp(sum(math.log(m / e) for m, e in pairs if e) / len(pairs)) if pairs else 1.0
    total = 0.0
    for run in runs:
        if run.status in OPEN:
            left = (current or {}).get(run.id)
            guess = expected.get(run.recipe)
            one = measured.get(run.recipe)
            if one is None and guess is not None:
                one = guess * correction
            if one is None and measured:
                one = sum(measured.values()) / len(measured)
            if left is None and one is None:
                return None
            total += left if left is not None else one or 0.0
    return total


def duration(seconds: float) -> str:
    """In words.

    >>> duration(42), duration(190), duration(9000)
    ('42 s', '3 min', '2.5 h')
    """
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    if seconds < 5400:
        return f"{round(seconds / 60)} min"
    return f"{seconds / 3600:.1f} h"
