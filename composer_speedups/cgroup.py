"""What the control group of this process, a container's say, may take of memory and cores and has taken.

Linux has two forms of these files, "v1" and "v2". Where there are none, everything here is None.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["memory_limit", "memory_used", "oom_kills", "throttled_seconds"]

_V2 = Path("/sys/fs/cgroup")
_V1 = Path("/sys/fs/cgroup/memory")


def memory_limit() -> int | None:
    """Bytes; None where there is no limit. v1 says that by a number beyond every machine's memory."""
    limit = _number(_V2 / "memory.max")
    return limit if limit is not None else _number(_V1 / "memory.limit_in_bytes")


def memory_used() -> int | None:
    """Bytes, without the pages of files that are given up when memory is needed."""
    used, given_up = _number(_V2 / "memory.current"), _field(_V2 / "memory.stat", "inactive_file")
    if used is None:
        used = _number(_V1 / "memory.usage_in_bytes")
        given_up = _field(_V1 / "memory.stat", "total_inactive_file")
    return None if used is None else used - (given_up or 0)


def oom_kills() -> int | None:
    """How many of its processes the kernel has killed for lack of memory so far."""
    kills = _field(_V2 / "memory.events", "oom_kill")
    return kills if kills is not None else _field(_V1 / "memory.oom_control", "oom_kill")


def throttled_seconds() -> float:
    """For how long its processes, on all cores together, had to wait because they had used up its share of cores."""
    microseconds = _field(_V2 / "cpu.stat", "throttled_usec")
    if microseconds is not None:
        return microseconds / 1e6
    return (_field(_V1.parent / "cpu" / "cpu.stat", "throttled_time") or 0) / 1e9


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # "max" is no limit
        return None


def _field(path: Path, name: str) -> int | None:
    """The number behind `name`, of a file with one name and number a line."""
    try:
        return next((int(line.split()[1]) for line in path.read_text().splitlines() if line.split()[0] == name), None)
    except (OSError, ValueError, IndexError):
        return None
