"""The trial of attention: what it decides by what it has seen, and on a GPU."""

from __future__ import annotations

import logging
from contextlib import nullcontext

import pytest
import torch
from packed_attention_check import tensors

from composer_speedups.kernels import attention_trial as module
from composer_speedups.kernels.varlen_attention import Lengths


class Seen:
    """In the place of a trial that a GPU would make: what it has seen."""

    def __init__(self, fault: str | None = None, times: tuple[float, float] = (1.0, 1.0)) -> None:
        self._fault, self._times = fault, times

    def __call__(self, *tensors) -> Seen:
        return self

    def fault(self, dropout_p: float) -> str | None:
        if self._fault == "raises":
            raise RuntimeError("PTX is not what it was\nand more of it")
        return self._fault

    def times(self, dropout_p: float) -> tuple[float, float]:
        return self._times


@pytest.mark.parametrize(
    ("seen", "own", "why"),
    [
        (Seen(times=(0.2, 0.3)), True, "Triton: 0.200 ms by Triton, 0.300 ms by aten flash, forward and backward"),
        (Seen(times=(0.3, 0.2)), False, "aten flash: 0.300 ms by Triton, 0.200 ms by aten flash, forward and backward"),
        (Seen(times=(0.299, 0.3)), False, "aten flash: 0.299 ms by Triton"),  # not for so little
        (Seen("Triton's output is off by 1"), False, "aten flash: Triton's output is off by 1"),
        (Seen("raises"), False, "aten flash: RuntimeError: PTX is not what it was"),
    ],
)
def test_verdicts(
    seen: Seen, own: bool, why: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name, value in (("_Trial", seen), ("attention_kernel", lambda q: "aten flash")):
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(torch.cuda, "device", nullcontext)  # neither it nor a generator of one is here
    monkeypatch.setattr(torch.random, "fork_rng", nullcontext)
    q, k, v = tensors(lengths := Lengths.of([3, 4]), 1, 32, torch.float16)
    with caplog.at_level(logging.WARNING):
        verdict = module._try(q, k, v, lengths, 0.1, None)
    assert verdict.own == own and verdict.why.startswith(why) and "\n" not in verdict.why
    assert bool(caplog.records) == (seen._fault is not None), "a fault is said, a slower kernel is not one"


def test_a_cpu_has_no_trial() -> None:
    q, k, v = tensors(lengths := Lengths.of([3, 4]), 1, 32, torch.float16)
    assert not module.prefers_packed(q, k, v, lengths, 0.1)


@pytest.mark.gpu
def test_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_VERDICTS", {})
    q, k, v = tensors(lengths := Lengths.of([200, 100, 256], "cuda"), 4, 64, torch.bfloat16, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x = torch.zeros(1, device="cuda") + 1
        assert not module.prefers_packed(q, k, v, lengths, 0.1) and not module.verdicts(), "nothing is tried there"
    with torch.inference_mode():
        assert not module.prefers_packed(*(y.clone() for y in (q, k, v)), lengths, 0.1) and not module.verdicts()
    torch.manual_seed(3)
    own = module.prefers_packed(q, k, v, lengths, 0.1)
    after = torch.rand(2, device="cuda")
    torch.manual_seed(3)
    assert torch.rand(2, device="cuda").equal(after), "a trial draws no numbers of the run's"
    (verdict,) = module.verdicts()
    assert verdict.own == own and x.device.type == "cuda"
    if "clock" not in verdict.why:  # as on the null GPU
        assert "ms by Triton" in verdict.why and "off by" not in verdict.why
    assert module.prefers_packed(q, k, v, lengths, 0.1) == own and len(module.verdicts()) == 1
    assert not module.prefers_packed(q.float(), k.float(), v.float(), lengths, 0.1)
