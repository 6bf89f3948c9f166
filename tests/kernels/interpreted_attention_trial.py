"""What a trial of attention finds wrong, without a GPU: `test_interpreted.py` runs this file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from mutants import triton_mutant
from packed_attention_check import tensors

from composer_speedups.kernels import attention_trial as module
from composer_speedups.kernels import packed_attention as kernels
from composer_speedups.kernels import packed_attention_triton as cuda
from composer_speedups.kernels.varlen_attention import Lengths

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")
LENGTHS = [70, 1, 30, 0, 64]


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """In the place of a device's, which there is none of here: how long a pause takes."""
    times = {"pause": 5.0}
    monkeypatch.setattr(module, "_milliseconds", lambda call: times["pause"])
    return times


def trial(lengths: list[int] = LENGTHS, change=lambda q, k, v: (q, k, v)) -> module._Trial:
    of = Lengths.of(lengths)
    return module._Trial(*change(*(x.detach() for x in tensors(of, 2, 32, torch.float16))), of)


@pytest.mark.parametrize("p", [0.0, 1e-9, 0.9])
def test_nothing_is_wrong_with_rows_of_any_length(p: float) -> None:
    assert trial().fault(p) is None


CHANGES = {
    "equal queries": lambda q, k, v: (q[:1].expand_as(q), k, v),
    "equal keys": lambda q, k, v: (q, k[:1].expand_as(k), v),
    "equal values": lambda q, k, v: (q, k, v[:1].expand_as(v)),
    "zeros": lambda q, k, v: (0 * q, 0 * k, 0 * v),
    "zero values": lambda q, k, v: (q, k, 0 * v),
    "values far from zero": lambda q, k, v: (q, k, v + 20),
    "large values": lambda q, k, v: (q, k, 500 * v),
    "large scores": lambda q, k, v: (3 * q, 3 * k, v),
}


@pytest.mark.parametrize("name", CHANGES)
def test_nor_with_numbers_of_any_kind(name: str) -> None:
    assert trial(change=CHANGES[name]).fault(0.2) is None, "which looks without dropout first"


@pytest.mark.parametrize("lengths", [[1], [1, 1, 1], [0, 2, 0]])
def test_nor_with_next_to_no_tokens(lengths: list[int]) -> None:
    assert trial(lengths).fault(0.2) is None


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning", "ignore:overflow:RuntimeWarning")
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_numbers_that_are_none_tell_nothing(bad: float) -> None:
    def spoil(q, k, v):
        v[5] = bad
        return q, k, v

    with pytest.raises(module._Undecided, match="not finite"):
        trial(change=spoil).fault(0.0)
    with pytest.raises(module._Undecided, match="no tokens"):
        trial([]).fault(0.0)


def test_a_clock_that_does_not_go(clock: dict[str, float]) -> None:
    clock["pause"] = 0.001
    assert trial().fault(0.1) == "the device's clock does not go"


KEEP = "keep = _keep(of_keys, of_queries"
FAULTS = {
    "output": ("(kept / total_of)", "(1.2 * kept / total_of)", "Triton's output is off by"),
    "numbers": ("tl.log2(total_of)", "tl.log2(-total_of)", "Triton's gradient of queries is off by nan"),
    "keys": ("dk * (scale", "dk * (1.1 * scale", "Triton's gradient of keys is off by"),
    "values": ("dv * kept", "dv * kept * 0.9", "Triton's gradient of values is off by"),
    # What only dropout shows.
    "masks of keys": (KEEP, f"{KEEP} + 2", "with dropout, Triton's gradient of keys is off by"),
    "masks of queries": (
        "_keep(of_queries, of_keys, DROPPED), dp",
        "_keep(of_queries + 2, of_keys, DROPPED), dp",
        "with dropout, Triton's gradient of queries is off by",
    ),
    "delta": ("tl.float32), 1) / kept", "tl.float32), 1)", "with dropout, Triton's gradient of queries is off by"),
    "nothing dropped": (">= DROPPED * 65536", ">= DROPPED * 0", "with dropout, Triton's output is off by"),
    "half dropped": (">= DROPPED * 65536", ">= DROPPED * 32768", "with dropout, Triton's output is off by"),
    "heads": ("(end * tl.num_programs(1) + tl.program_id(1))", "(end * tl.num_programs(1))", "with dropout, Triton's"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_planted_faults_are_found(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where what values have in common outweighs what they differ in."""
    old, new, said = FAULTS[name]
    monkeypatch.setattr(kernels, "cuda_side", lambda *_: mutant)
    mutant = triton_mutant(cuda, old, new, tmp_path)
    assert said in trial(change=lambda q, k, v: (q, k, v + 3 * torch.randn_like(v[:1]))).fault(0.2)
