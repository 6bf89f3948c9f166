"""The batch sizes worth trying, and the one to begin with: where memory should end by prediction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from composer_speedups.measurement.results import MOST_SAMPLES

__all__ = ["batch_sizes", "microbatch_sizes", "memory_line", "starting_size"]

_STEP = 8  # half-precision tensor cores, and vector units, want multiples of 8 ...
_WIDE_STEP = 64  # ... and from Ampere on tensor cores like 128 bytes at a time
_FULL_STEP = 512  # below it, multiples of 64 would give away more than an eighth of the batch


def batch_sizes(most: int, capability: float | None = None) -> list[int]:
    """The batch sizes worth trying, ascending.

    Args:
        most: the largest that the data allow.
        capability: the GPU's compute capability; None is a CPU. From 8.0 on, large batches are multiples of 64.

    >>> batch_sizes(24), batch_sizes(704, 8.0)[-4:]
    ([1, 2, 4, 8, 16, 24], [512, 576, 640, 704])
    """
    most = min(most, MOST_SAMPLES)
    small = [n for n in (1, 2, 4) if n <= most]
    wide = capability is not None and capability >= 8.0
    middle = range(_STEP, min(most, _FULL_STEP if wide else most) + 1, _STEP)
    return [*small, *middle, *(range(_FULL_STEP + _WIDE_STEP, most + 1, _WIDE_STEP) if wide else ())]


def microbatch_sizes(batch: int) -> list[int]:
    """Those into which a batch divides evenly, ascending: no microbatch is smaller than the others.

    >>> microbatch_sizes(12)
    [1, 2, 3, 4, 6, 12]
    """
    return [n for n in range(1, batch + 1) if batch % n == 0]


def memory_line(peaks: Mapping[int, int]) -> tuple[float, float]:
    """Fixed bytes and bytes per sample, on the line through the smallest and the largest size of `peaks`, 0 for one.

    >>> memory_line({8: 1800, 16: 2600})
    (1000.0, 100.0)
    """
    (small, small_peak), (large, large_peak) = min(peaks.items()), max(peaks.items())
    slope = (large_peak - small_peak) / (large - small) if large > small else 0.0
    return small_peak - slope * small, slope


def starting_size(peaks: Mapping[int, int], limit: int, sizes: Sequence[int]) -> int:
    """The largest of `sizes` (ascending) that should fit into `limit` bytes; the smallest if none should.

    >>> starting_size({8: 1800, 16: 2600}, 4000, [8, 16, 24, 32])
    24
    """
    fixed, slope = memory_line(peaks)
    return max((size for size in sizes if fixed + slope * size <= limit), default=sizes[0])
