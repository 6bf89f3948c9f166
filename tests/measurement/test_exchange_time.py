"""How long ranks do nothing but exchange: with a rank that is late, and with kernels that run beside one another."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from exchange_worker import LATE
from torch.autograd import DeviceType

from composer_speedups.measurement.exchange_time import alone, is_exchange, waited
from composer_speedups.measurement.operator_kinds import INSIDE, STEPS
from composer_speedups.measurement.profiling import _summarise


def event(name: str, start: float, end: float, **more):
    usual = {"thread": 1, "is_async": False, "device_type": DeviceType.CPU, "cpu_children": []}
    return SimpleNamespace(name=name, time_range=SimpleNamespace(start=start, end=end), **usual | more)


def kernel(name: str, start: float, end: float, **more):
    return event(name, start, end, device_type=DeviceType.CUDA, **more)


@pytest.mark.elsewhere
def test_who_is_early_waits(exchanged):
    early, late = exchanged["profile"]
    # Two steps; a busy machine may hold up either of them besides.
    assert early["exchange"] >= 2 * 0.8 * LATE and max(early, key=early.get) == "exchange"
    assert late["loop"] >= 2 * LATE and 0 < late["exchange"] < early["exchange"]


@pytest.mark.elsewhere
def test_a_profiler_that_is_late_is_no_exchange(exchanged):
    assert exchanged["profile of a late profiler"][0]["exchange"] < 0.5 * LATE


def test_what_is_done_beside_an_exchange_is_no_wait():
    """The thread has something to do from 10 to 40, and the exchange goes on from 30 to 70, then from 80 to 90."""
    work = event("aten::mm", 10, 40)
    inside = event(INSIDE, 5, 75, cpu_children=[work])
    root = event(STEPS, 0, 100, cpu_children=[inside])
    exchanges = [event("gloo:all_reduce", *span, thread=2, is_async=True) for span in ((30, 60), (50, 70), (80, 90))]
    found = waited([root, inside, work, *exchanges], 1)
    assert found == {id(inside): 30, id(root): 10}
    assert waited([root, inside, work], 1) == {}
    other = event("aten::mm", 10, 40, is_async=True)
    assert sum(waited([root, other], 1).values()) == 0, "a thread's own business is no exchange"


def test_kernels_beside_an_exchange_hide_it():
    reduce, gather = kernel("ncclDevKernel_AllReduce_Sum_f32", 0, 50), kernel("ncclKernel_AllGather", 90, 100)
    compute = [kernel("gemm", 10, 30), kernel("gemm", 20, 35), kernel("gemm", 45, 60)]
    note = kernel("nccl:all_reduce", 0, 1000, is_user_annotation=True)
    everything = [reduce, gather, *compute, note, event("aten::mm", 0, 100)]
    assert alone(everything) == 10 + 10 + 10
    assert alone(compute) == 0
    assert alone([gather]) == 10
    # As a profile of steps that begin at 1: the barrier before them, and what it called, is none of theirs.
    root = event(STEPS, 1, 101, cpu_time_total=100)
    before = event("c10d::barrier", 0, 1, self_cpu_time_total=1, kernels=[SimpleNamespace(name="fill", duration=7)])
    for one in (root, before, *everything):
        vars(one).update(
            {"cpu_parent": None, "sequence_nr": -1, "fwd_thread": 0, "scope": 0, "kernels": []} | vars(one)
        )
    found = _summarise([before, root, *everything], torch.device("cuda"), 1)
    assert found.seconds == pytest.approx({"exchange": 10e-6, "idle": 90e-6})


@pytest.mark.parametrize(
    "name", ["gloo:broadcast", "nccl:all_reduce", "ncclDevKernel_AllReduce", "ncclSymkDevKernel_AllGather"]
)
def test_exchanges_by_name(name: str):
    assert is_exchange(name) and not is_exchange(f"my_{name}")
