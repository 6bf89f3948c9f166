from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from composer_speedups import ReuseHostMemory
from composer_speedups.algorithms import reuse_host_memory

# A step's worth: two tensors of 40 MiB, made, filled and freed. Faults of eight steps after three first ones, without
# the speed-up and then with it.
STEPS = """
import resource, torch
from composer_speedups import apply_reuse_host_memory
def step():
    first = torch.ones(10 << 20)
    second = first * 2
    return float(second[-1])
def faults():
    for _ in range(3):
        step()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    assert {step() for _ in range(8)} == {2.0}
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
plain = faults()
assert apply_reuse_host_memory() == 3
print(plain, faults())
"""


@pytest.mark.elsewhere  # glibc is the same with each
@pytest.mark.skipif(reuse_host_memory._why_not() is not None, reason="glibc's malloc is not in use here")
def test_freed_pages_are_used_again() -> None:
    done = subprocess.run([sys.executable, "-c", STEPS], capture_output=True, text=True, check=True)
    plain, reused = map(int, done.stdout.split())
    # 16 tensors of 40 MiB are 163,840 pages of 4 KiB (with huge pages fewer, of 2 MiB each).
    assert plain >= 16 * 20, plain
    # A small block that lands in a freed hole sends the next tensor to fresh pages: seen for three of twenty.
    assert reused < plain / 3, (plain, reused)


def test_refused_where_it_has_no_effect(monkeypatch) -> None:
    assert "remove it" in ReuseHostMemory().unavailable(torch.device("cuda"))
    monkeypatch.setenv("LD_PRELOAD", "/usr/lib/libjemalloc.so.2")
    assert "libjemalloc" in ReuseHostMemory().unavailable(torch.device("cpu"))
    monkeypatch.delenv("LD_PRELOAD")
    monkeypatch.setattr("sys.platform", "darwin")
    assert "jemalloc" in ReuseHostMemory().unavailable(torch.device("cpu"))


@pytest.mark.parametrize(("largest", "taken"), [(1 << 30, 3), (32 << 20, 3), (0, 0)])
def test_what_older_libraries_refuse(monkeypatch, largest: int, taken: int) -> None:
    """glibc before 2.35 maps from 32 MiB on at the latest; where no threshold is taken, nothing is set at all."""
    settings = {}

    def mallopt(name: int, value: int) -> int:
        if name == -3 and value > largest:
            return 0
        settings[name] = value
        return 1

    monkeypatch.setattr(reuse_host_memory, "_mallopt", lambda: mallopt)
    assert reuse_host_memory.apply_reuse_host_memory() == taken
    assert settings.get(-3, 0) == largest and len(settings) == taken
