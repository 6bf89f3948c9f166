"""The trial of attention: what it decides by what it has seen, and on a GPU."""

from __future__ import annotations

import gc
import logging
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from packed_attention_check import tensors

from composer_speedups.kernels import attention_trial as module
from composer_speedups.kernels import packed_attention_triton
from composer_speedups.kernels.varlen_attention import Lengths


class Seen:
    """In the place of a trial that a GPU would make: what it has seen."""

    def __init__(self, fault: str | BaseException | None = None, times: tuple[float, float] = (1.0, 1.0)) -> None:
        self._fault, self._times = fault, times

    def __call__(self, *tensors) -> Seen:
        return self

    def fault(self, dropout_p: float) -> str | None:
        if isinstance(self._fault, BaseException):
            raise self._fault
        return self._fault

    def times(self, dropout_p: float) -> tuple[float, float]:
        return self._times


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[Seen], Callable[..., module.Verdict | None]]:
    """Trials that have seen what they are given, of tensors that are not on a GPU."""
    monkeypatch.setattr(module, "attention_kernel", lambda q: "aten flash")
    monkeypatch.setattr(torch.cuda, "device", nullcontext)  # neither it nor a generator of one is here
    monkeypatch.setattr(torch.random, "fork_rng", nullcontext)
    q, k, v = tensors(lengths := Lengths.of([3, 4]), 1, 32, torch.float16)

    def trial(seen: Seen) -> module.Verdict | None:
        monkeypatch.setattr(module, "_Trial", seen)
        return module._try(q, k, v, lengths, 0.1)

    return trial


@pytest.mark.parametrize(
    ("seen", "own", "why"),
    [
        (Seen(times=(0.2, 0.3)), True, "Triton: 0.200 ms by Triton, 0.300 ms by aten flash, forward and backward"),
        (Seen(times=(0.3, 0.2)), False, "aten flash: 0.300 ms by Triton, 0.200 ms by aten flash, forward and backward"),
        (Seen(times=(0.299, 0.3)), False, "aten flash: 0.299 ms by Triton"),  # not for so little
        (Seen("Triton's output is off by 1"), False, "aten flash: Triton's output is off by 1"),
        (Seen(RuntimeError("PTX is not what it was\nand more of it")), False, "aten flash: RuntimeError: PTX is not"),
    ],
)
def test_verdicts(seen: Seen, own: bool, why: str, on_cpu, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        verdict = on_cpu(seen)
    assert verdict.own == own and verdict.why.startswith(why) and "\n" not in verdict.why
    assert bool(caplog.records) == (seen._fault is not None), "a fault is said, a slower kernel is not one"


@pytest.mark.parametrize("error", [module._Undecided("no numbers"), torch.OutOfMemoryError("of 3 GiB")])
def test_what_tells_nothing_is_no_verdict(error: Exception, on_cpu, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert on_cpu(Seen(error)) is None and not caplog.records


def test_ctrl_c_ends_a_trial(on_cpu) -> None:
    with pytest.raises(KeyboardInterrupt):
        on_cpu(Seen(KeyboardInterrupt()))


def test_a_cpu_has_no_trial() -> None:
    q, k, v = tensors(lengths := Lengths.of([3, 4]), 1, 32, torch.float16)
    trials = module.Trials()
    assert not trials.prefer_packed(q, k, v, lengths, 0.1) and trials.said() == ""


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """No verdicts yet; the dropout of each trial from now on."""
    found: list[float] = []
    trial = module._try
    monkeypatch.setattr(module, "_VERDICTS", {})
    monkeypatch.setattr(module, "_UNDECIDED", Counter())
    monkeypatch.setattr(module, "_try", lambda *arguments: found.append(arguments[-1]) or trial(*arguments))
    return found


@pytest.mark.gpu
def test_on_a_gpu(tried: list[float]) -> None:
    trials = module.Trials()
    q, k, v = tensors(lengths := Lengths.of([200, 100, 256], "cuda"), 4, 64, torch.bfloat16, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x = torch.zeros(1, device="cuda") + 1
        assert not trials.prefer_packed(q, k, v, lengths, 0.1) and x.is_cuda
    with torch.inference_mode():
        inference = [y.clone() for y in (q, k, v)]
        assert not trials.prefer_packed(*inference, lengths, 0.1)
    assert not trials.prefer_packed(*inference, lengths, 0.1)
    assert not tried and not trials.said(), "nothing is tried there"
    torch.manual_seed(3)
    own = trials.prefer_packed(q, k, v, lengths, 0.1)
    after = torch.rand(2, device="cuda")
    torch.manual_seed(3)
    assert torch.rand(2, device="cuda").equal(after), "a trial draws no numbers of the run's"
    assert trials.said().startswith("556 tokens, up to 256 a sequence: ")
    if "clock" not in trials.said():  # as on the null GPU
        assert "ms by Triton" in trials.said() and "off by" not in trials.said()
    assert trials.prefer_packed(q, k, v, lengths, 0.1) == own and tried == [0.1]
    others = module.Trials()
    assert others.prefer_packed(q, k, v, lengths, 0.1) == own and others.said() == trials.said() and tried == [0.1]
    for wrong in ((q.float(), k.float(), v.float()), (q, k, v.half()), (q, k[:, :1], v[:, :1])):
        assert not trials.prefer_packed(*wrong, lengths, 0.1)
    assert not trials.prefer_packed(q, k, v, lengths, 1.0)
    assert not trials.prefer_packed(q, k, v, Lengths.of([556] + [0] * 65535, "cuda"), 0.1)
    assert tried == [0.1]
    trials.prefer_packed(q, k, v, lengths, 0.2)
    assert tried == [0.1, 0.2] and trials.said().count("556 tokens") == 2


@pytest.mark.gpu
def test_what_cannot_be_decided_is_tried_three_times(tried: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_milliseconds", lambda call: 5.0)
    trials, lengths = module.Trials(), Lengths.of([2, 3], "cuda")
    q, k, v = tensors(lengths, 1, 32, torch.bfloat16, device="cuda")
    for _ in range(5):
        assert not trials.prefer_packed(q, k, v * float("nan"), lengths, 0.1)
    assert len(tried) == 3 and "in 3 trials nothing could be decided" in trials.said()


@pytest.mark.gpu
def test_a_trial_that_fails_half_way_keeps_nothing(monkeypatch: pytest.MonkeyPatch, tried: list[float]) -> None:
    def fail(*_):
        raise torch.OutOfMemoryError("no room for gradients")

    monkeypatch.setattr(module, "_milliseconds", lambda call: 5.0)
    monkeypatch.setattr(packed_attention_triton, "backward", fail)
    q, k, v = tensors(lengths := Lengths.of([60, 70], "cuda"), 1, 32, torch.bfloat16, device="cuda")
    gc.collect()
    before = torch.cuda.memory_allocated()
    assert not module.Trials().prefer_packed(q, k, v, lengths, 0.1) and len(tried) == 1
    gc.collect()
    assert torch.cuda.memory_allocated() == before
