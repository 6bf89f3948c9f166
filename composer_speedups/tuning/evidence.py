"""What a search found, in the words of the new recipe's comments."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from composer_speedups.measurement.results import loss_text
from composer_speedups.tuning.rate import Rated
from composer_speedups.tuning.whole import Trained

__all__ = ["batch_lines", "batch_reason", "broken_words", "rate_lines", "whole_lines"]

_BESIDE = ", beside other work"
_WORDS = {"out_of_memory": "out of memory", "over_limit": "over the limit"}


def batch_lines(trials: Sequence[Mapping[str, Any]], noun: str) -> list[str]:
    """One line for each try of the batch, in order of size.

    Args:
        trials: as the record has them.
        noun: `batch` or `microbatch`.
    """
    rows = [(noun, "samples/s", "peak MB", "steps", "status")]
    for trial in sorted(trials, key=lambda t: (t["size"], t["number"])):
        speed, peak = trial["samples_per_second"], trial["peak_memory_bytes"]
        status = _WORDS.get(trial["status"], trial["status"])
        status += _BESIDE if trial["overlapped"] else ""
        rows.append(
            (
                str(trial["size"]),
                "-" if speed is None else f"{speed:.1f}",
                "-" if peak is None else f"{peak / 1e6:,.0f}",
                str(trial["steps"]),
                status if trial["status"] == "ok" or not trial["reason"] else f"{status}: {trial['reason'][:70]}",
            )
        )
    note = "beside other work: it shared this machine's cores meanwhile, and was slowed"
    return _aligned(rows) + [note] * any(trial["overlapped"] for trial in trials)


def batch_reason(trials: Sequence[Mapping[str, Any]], size: int, goal: str) -> str:
    """Why this size was chosen.

    Args:
        trials: as the record has them.
        size: that was chosen.
        goal: `largest` or `fastest`.
    """
    found: dict[int, list[float]] = {}
    refused = {trial["size"] for trial in trials if trial["status"] != "ok"}
    for trial in trials:
        if trial["samples_per_second"] and trial["size"] not in refused:
            found.setdefault(trial["size"], []).append(trial["samples_per_second"])
    speeds = {tried: statistics.median(values) for tried, values in found.items()}
    count = len({trial["size"] for trial in trials})
    own = f", {speeds[size]:.1f} samples/s" if size in speeds else ""
    best = max(speeds, key=lambda tried: speeds[tried], default=size)
    if goal == "fastest" and best != size:
        return (
            f"as fast as the fastest of {count} tried ({best}: {speeds[best]:.1f} samples/s) within the noise of these "
            f"tries, and nearer to the old one{own}"
        )
    return f"the {goal} of {count} tried{own}"


def rate_lines(tried: Sequence[Rated], samples: Sequence[int]) -> list[str]:
    """One line for each learning rate, in the order of the search: the loss at the end of each of its runs."""
    rows = [("rate", *(f"loss at {n:,}" for n in samples), "")]
    for one in tried:
        losses = [loss_text(loss, 4) for loss in one.losses] + ["-"] * (len(samples) - len(one.losses))
        rows.append((f"{one.rate:g}", *losses, one.ended))
    return _aligned(rows)


def whole_lines(tried: Sequence[Trained]) -> list[str]:
    """One line for each whole training, in the order of the search."""
    rows = [("rate", "evaluation loss", "accuracy", "")]
    for one in tried:
        loss = loss_text(one.loss, 4) if math.isfinite(one.loss) else "-"
        accuracy = "-" if one.accuracy is None else f"{one.accuracy:.4f}"
        ended = "" if math.isfinite(one.loss) else one.broken[:70] or "diverged"
        rows.append((f"{one.rate:g}", loss, accuracy, ended))
    return _aligned(rows)


def broken_words(trial: Mapping[str, Any]) -> str:
    """Why a try that is not `ok` is not: its status in words, and the reason."""
    words = _WORDS.get(trial["status"], trial["status"])
    return f"{words}: {trial['reason']}" if trial["reason"] else words


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns of numbers to the right; the last one, of words, to the left."""
    widths = [max(len(row[n]) for row in rows) for n in range(len(rows[0]) - 1)]
    return [
        ("  " + "  ".join([c.rjust(w) for c, w in zip(row[:-1], widths, strict=True)] + [row[-1]])).rstrip()
        for row in rows
    ]
