"""Who holds a claim: a process, told from later ones with its number and from those of other machines."""

from __future__ import annotations

import os
import socket
from pathlib import Path

__all__ = ["is_dead", "lives_here", "this_process"]


def this_process() -> str:
    """The name of this process: machine, number, and when it was started."""
    return f"{_machine()}:{os.getpid()}:{_birth(os.getpid())}"


def is_dead(owner: str) -> bool:
    """True if `owner` was a process of this machine and is no more; of another machine's, nothing is known."""
    host, pid, birth = owner.rsplit(":", 2)
    if host != _machine():
        return False
    if birth:
        return _birth(int(pid)) != birth
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False


def lives_here(owner: str) -> bool:
    """True if `owner` is a process of this machine that still runs."""
    return owner.rsplit(":", 2)[0] == _machine() and not is_dead(owner)


def _machine() -> str:
    """What tells whether a process number means anything here: host, boot, and container."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{socket.gethostname()}/{boot}/{os.readlink('/proc/self/ns/pid').replace(':', '')}"
    except OSError:
        return socket.gethostname()


def _birth(pid: int) -> str:
    """When a process was started, in the kernel's ticks: tells it from a later one with the same number."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""
