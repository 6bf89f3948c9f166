"""How long the ranks of a training do nothing but exchange: what a profile of one rank's steps tells of it.

On a CPU, Gloo exchanges in threads of its own, and the training thread waits for them without saying so: what is
counted are the moments in which an exchange goes on and that thread is in no operator. On a GPU, NCCL's kernels run
beside others; counted are the moments in which no other kernel runs. Who is early waits for the others, which counts
as exchange, too. Copies into DDP's buckets and out of them, and the starting of exchanges, are operators by
themselves: see `operator_kinds.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from torch.autograd import DeviceType

from composer_speedups.measurement.operator_kinds import AROUND

__all__ = ["alone", "is_exchange", "waited"]

_EXCHANGE = re.compile(r"^(gloo:|nccl:|nccl\w*Kernel)")

Intervals = list[tuple[float, float]]


def is_exchange(name: str) -> bool:
    """Whether that is what an exchange between ranks is called, by the thread or the kernel that does it."""
    return _EXCHANGE.search(name) is not None


def waited(events: Iterable[Any], thread: int) -> Mapping[int, float]:
    """Microseconds in which `thread` only waited for an exchange, by the id of the event that was open then."""
    events = list(events)
    exchanges = _joined(_span(e) for e in events if e.is_async and is_exchange(e.name))
    if not exchanges:
        return {}
    found = {}
    for event in events:
        # Composer runs the passes inside of the optimizer's step, and some exchanges of its own.
        around = event.name in AROUND or event.name.startswith("Optimizer.step")
        if around and event.thread == thread and not event.is_async:
            idle = _without([_span(event)], _joined(_span(child) for child in event.cpu_children))
            found[id(event)] = _length(idle) - _length(_without(idle, exchanges))
    return found


def alone(events: Iterable[Any]) -> float:
    """Microseconds in which the GPU had kernels of exchanges and no others."""
    kernels = [e for e in events if e.device_type == DeviceType.CUDA and not getattr(e, "is_user_annotation", False)]
    exchanges = _joined(_span(e) for e in kernels if is_exchange(e.name))
    return _length(_without(exchanges, _joined(_span(e) for e in kernels if not is_exchange(e.name))))


def _span(event: Any) -> tuple[float, float]:
    return event.time_range.start, event.time_range.end


def _length(intervals: Intervals) -> float:
    return sum(end - start for start, end in intervals)


def _joined(intervals: Iterable[tuple[float, float]]) -> Intervals:
    """Those intervals in order of time, the ones that overlap as one."""
    found: Intervals = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((start, end))
    return found


def _without(intervals: Intervals, taken: Intervals) -> Intervals:
    """What is left of `intervals` without `taken`; both joined, as `_joined` does.

    >>> _without([(0, 10)], [(2, 3), (8, 12)])
    [(0, 2), (3, 8)]
    """
    found: Intervals = []
    for start, end in intervals:
        for first, last in taken:
            if last <= start or first >= end:
                continue
            if first > start:
                found.append((start, first))
            start = last
        if start < end:
            found.append((start, end))
    return found
