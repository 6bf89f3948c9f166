"""Which batch to try next, and which to take: the largest that fits, or the fastest.

Knows nothing of processes and models: `measure` tries one size and says what came of it.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from composer_speedups.errors import UserError
from composer_speedups.tuning.sizes import memory_line

__all__ = ["Measure", "Tried", "fastest", "fits", "largest"]

_NOISE = 0.03  # speeds that differ by less are taken for equal: two runs of the same thing do, on a quiet machine
_UNREPEATED = 0.10  # the same, where no size was measured twice and the machine's noise is not known
_CLEAR = 0.15  # slower by so much is no noise
_REFINED = 3  # the fastest few are measured once more


@dataclass(frozen=True)
class Tried:
    """One size that was tried. `status` is a run's; `over_limit` is one that ran, but in more memory than allowed."""

    size: int
    status: str
    reason: str = ""
    samples_per_second: float | None = None
    peak_memory_bytes: int | None = None


Measure = Callable[[int], Tried | None]  # None: the budget is used up


def fits(tried: Tried) -> bool:
    """Whether it ran within the limit; a mistake that has nothing to do with the size raises."""
    if tried.status == "failed":
        raise UserError(f"a batch of {tried.size} failed, and not for lack of memory: {tried.reason}")
    if tried.status == "skipped":
        raise UserError(tried.reason)
    return tried.status == "ok"


def largest(measure: Measure, sizes: Sequence[int], start: int, limit: int | None, fixed: int) -> int | None:
    """The largest of `sizes` that fits; None if none was found to.

    Every size that fitted says what a sample costs, which says where to look next: so it takes few tries. It ends
    when the next size is known not to fit.

    Args:
        measure: tries one.
        sizes: candidates, ascending.
        start: the first to try.
        limit: bytes; None leaves it to the device to refuse.
        fixed: bytes that do not depend on the size: a guess, until two sizes have been measured.
    """
    low, high = -1, len(sizes)  # indices: all up to `low` fit, all from `high` on do not
    peaks: dict[int, int] = {}
    index = max(n for n, size in enumerate(sizes) if size <= max(start, sizes[0]))
    while high - low > 1:
        tried = measure(sizes[index])
        if tried is None:
            break
        if fits(tried):
            low = index
            if tried.peak_memory_bytes:
                peaks[sizes[index]] = tried.peak_memory_bytes
        else:
            high = index
        if high - low <= 1:
            break
        index = _next(sizes, low, high, _predicted(peaks, limit, fixed))
    return sizes[low] if low >= 0 else None


def _next(sizes: Sequence[int], low: int, high: int, predicted: float | None) -> int:
    """The index between `low` and `high` to try: where memory should end, else twice the size, or the middle."""
    if predicted is not None:
        wanted = max((n for n, size in enumerate(sizes) if size <= predicted), default=0)
        if low < wanted < high:
            # The line is a guess: beyond four times what is known to fit it is not followed.
            far = max(n for n, size in enumerate(sizes) if size <= 4 * sizes[max(low, 0)] or n <= low + 1)
            return min(wanted, far)
        if wanted <= low:
            return low + 1
        # It should have fitted and did not: the line forgets fragments and workspaces. Halve from here.
    if high == len(sizes):
        doubled = [n for n in range(low + 1, high) if sizes[n] <= 2 * sizes[max(low, 0)]]
        return doubled[-1] if doubled else low + 1
    return (low + high) // 2


def _predicted(peaks: dict[int, int], limit: int | None, fixed: int) -> float | None:
    """The size at which memory should reach the limit, on the line through what was measured."""
    if limit is None or not peaks:
        return None
    base, slope = memory_line(peaks)
    if slope <= 0:
        big, most = max(peaks.items())
        base, slope = fixed, (most - fixed) / big
    return (limit - base) / slope if slope > 0 else None


def fastest(measure: Measure, sizes: Sequence[int], start: int, limit: int | None) -> int | None:
    """The size with the most samples per second among those that fit; None if none was found to.

    From `start` it doubles, then halves, while that brings speed; then looks between the best and its neighbours,
    and measures the best few once more. Of sizes that are as fast, within what two measurements of one size differ
    by, the one nearest to `start` is taken: it asks for the smallest change of the learning rate.
    """
    speeds: dict[int, list[float]] = {}
    peaks: dict[int, int] = {}
    refused: set[int] = set()

    def look(size: int, again: bool = False) -> bool | None:
        """Whether it fits and is no slower than the best; None: the budget is used up."""
        if size in refused or (size in speeds and not again):
            return size not in refused
        predicted = _peak_at(size, peaks)
        if limit is not None and predicted is not None and predicted > 1.1 * limit:
            refused.add(size)
            return False
        best = max(map(statistics.median, speeds.values()), default=0.0)
        tried = measure(size)
        if tried is None:
            return None
        if not fits(tried) or not tried.samples_per_second:
            refused.add(size)
            speeds.pop(size, None)  # what fits only sometimes is not taken
            return False
        speeds.setdefault(size, []).append(tried.samples_per_second)
        if tried.peak_memory_bytes:
            peaks[size] = max(tried.peak_memory_bytes, peaks.get(size, 0))
        return tried.samples_per_second > (1 - _NOISE) * best

    first = max(size for size in sizes if size <= max(start, sizes[0]))
    enough = look(first) is not None
    for factor in (2, 0.5):
        if factor > 1 and first in refused:
            continue
        size, misses = first, 0
        while enough and misses < 2:  # one step without gain may be noise, or a size that this machine dislikes
            size = _nearest(sizes, size * factor)
            if size in speeds or size in refused:
                break
            better = look(size)
            enough = better is not None
            misses = 0 if better or size in refused else misses + 1
            if (size in refused and factor > 1) or _far_below_the_best(size, speeds):
                break
    if not speeds:
        return None
    best = _best(speeds, first)
    for factor in (1.5, 0.75):
        enough = enough and look(_nearest(sizes, best * factor)) is not None
    ranked = sorted(speeds, key=lambda size: -statistics.median(speeds[size]))[:_REFINED]
    for size in ranked if len(speeds) > 1 else ():
        enough = enough and look(size, again=True) is not None
    return _best(speeds, first) if speeds else None


def _far_below_the_best(size: int, speeds: dict[int, list[float]]) -> bool:
    best = max(map(statistics.median, speeds.values()), default=0.0)
    return size in speeds and statistics.median(speeds[size]) < (1 - _CLEAR) * best


def _best(speeds: dict[int, list[float]], start: int) -> int:
    top = max(map(statistics.median, speeds.values()))
    repeated = [1 - min(found) / max(found) for found in speeds.values() if len(found) > 1]
    noise = max(_NOISE, *repeated) if repeated else _UNREPEATED
    equal = [size for size, found in speeds.items() if statistics.median(found) >= (1 - noise) * top]
    return min(equal, key=lambda size: (max(size / start, start / size), size))


def _nearest(sizes: Sequence[int], wanted: float) -> int:
    return min(sizes, key=lambda size: (abs(size - wanted), size))


def _peak_at(size: int, peaks: dict[int, int]) -> float | None:
    """Memory at `size`, on the line through the smallest and the largest measured."""
    if not peaks:
        return None
    base, slope = memory_line(peaks)
    return base + slope * size if slope > 0 else None
