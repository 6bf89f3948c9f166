"""`PeakMemory`: what was held at once, with what graphs keep for themselves."""

from __future__ import annotations

import gc
from types import SimpleNamespace

import pytest
import torch

from composer_speedups import hardware
from composer_speedups.measurement.peak_memory import PeakMemory, _kept_by_graphs

MIB = 2**20


@pytest.mark.parametrize(("platform", "unit"), [("linux", 1024), ("darwin", 1)])
def test_peak_memory_without_proc(platform: str, unit: int, monkeypatch) -> None:
    def missing(*_):
        raise FileNotFoundError

    monkeypatch.setattr(hardware, "open", missing, raising=False)
    monkeypatch.setattr("resource.getrusage", lambda who: SimpleNamespace(ru_maxrss=5000))
    monkeypatch.setattr("sys.platform", platform)
    assert PeakMemory(torch.device("cpu")).bytes() == 5000 * unit


def held() -> int:
    """Bytes of tensors at present, and of graphs: those of tests before this one may still be there."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated() + _kept_by_graphs(torch.device("cuda"))


@pytest.mark.gpu
def test_what_graphs_keep_for_their_replays_is_held() -> None:
    """Between two replays it is nobody's tensor, and yet nobody else can have it."""
    x = torch.ones(8 * MIB, device="cuda")  # 32 MiB
    before, tensors = held(), torch.cuda.memory_allocated()
    peak = PeakMemory(x.device)
    peak.start()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = (x * 2) * 3  # two of 32 MiB, of which the first is free in the graph's memory when it is done
        z = y.sum()
        del y
    peak.look()
    while_recording = peak.bytes()
    assert while_recording == pytest.approx(before + 64 * MIB, abs=4 * MIB)
    beside = [torch.ones(8 * MIB, device="cuda") for _ in range(3)]
    peak.look()
    assert peak.bytes() == pytest.approx(before + (64 + 96) * MIB, abs=4 * MIB)
    allocated = torch.cuda.max_memory_allocated()
    assert allocated == pytest.approx(tensors + 96 * MIB, abs=4 * MIB), "the allocator's own peak leaves it out"
    del beside, z
    peak.start()
    assert peak.bytes() < while_recording + 4 * MIB
    del graph


@pytest.mark.gpu
def test_without_graphs_it_is_the_allocators() -> None:
    before, peak = held(), PeakMemory(torch.device("cuda"))
    assert peak.bytes() == torch.cuda.max_memory_allocated(), "as of a run that has nothing left to train"
    peak.start()
    for count in (4, 40, 8):
        tensors = [torch.ones(MIB // 4, device="cuda") for _ in range(count)]
        del tensors
        peak.look()
    assert peak.bytes() == pytest.approx(before + 40 * MIB, abs=4 * MIB)
