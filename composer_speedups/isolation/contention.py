"""Whether other work on the machine, a build or a browser, had the cores that a run wanted, and for how long.

A thread that is ready and has no core waits, and Linux counts for how long (`schedstat`). Not all of it is others'
doing: a run with more threads than cores makes itself wait, and so does a container that has used up its share. So
waiting counts only as far as processes outside of the run used its cores meanwhile; what the hypervisor gave to another
virtual machine ("steal") comes on top. Not seen: others' use of the memory's bandwidth and of a GPU, and the waiting of
a run's own helpers (data loaders, compilers).
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import psutil

from composer_speedups import cgroup

__all__ = ["NOTABLE", "Contention"]

NOTABLE = 0.1  # a run alone on a machine of two cores, its display beside it, stays below 0.03
_LEAST = 1.0  # seconds: less is no loss to speak of, whatever its share in a run that hardly computes


@dataclass
class _Seconds:
    """Since their counters began: for which its threads waited, and it and its children computed; of its cores, those
    that all processes had, and those stolen."""

    waited: float
    own: float
    all: float
    stolen: float


class Contention:
    """Counts from its making on, for this process; make one where the run begins."""

    def __init__(self) -> None:
        self._begin = _seconds()

    def waited(self) -> float | None:
        """Of the time in which this run wanted a core, the share that others had it, 0 to 1.

        None where that cannot be told: outside of Linux, or where the kernel does not count it.
        """
        end = _seconds()
        if self._begin is None or end is None:
            return None
        own = end.own - self._begin.own
        others = max(0.0, end.all - self._begin.all - own)
        # A thread that has ended takes its count along, so the sum can shrink.
        lost = min(max(0.0, end.waited - self._begin.waited), others) + end.stolen - self._begin.stolen
        return lost / (lost + own) if lost >= _LEAST else 0.0


def _seconds() -> _Seconds | None:
    if not os.path.exists("/proc/self/schedstat"):
        return None
    try:
        waited = sum(_waited(task) for task in os.listdir("/proc/self/task"))
        process = psutil.Process()
        own = sum(_used(one) for one in (process, *process.children(recursive=True)))
        cores = psutil.cpu_times(percpu=True)
        cores = [cores[number] for number in os.sched_getaffinity(0)]
    except (OSError, ValueError, IndexError, psutil.Error):
        return None
    busy = sum(core.user + core.nice + core.system + core.irq + core.softirq for core in cores)
    return _Seconds(waited - cgroup.throttled_seconds(), own, busy, sum(core.steal for core in cores))


def _waited(task: str) -> float:
    try:
        with open(f"/proc/self/task/{task}/schedstat") as file:
            return int(file.read().split()[1]) / 1e9
    except (FileNotFoundError, ProcessLookupError):  # it ended meanwhile
        return 0.0


def _used(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return times.user + times.system + times.children_user + times.children_system  # children's once they have ended
