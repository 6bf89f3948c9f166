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


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """In the place of a device's, which there is none of here: how long a pause takes."""
    times = {"pause": 5.0}
    monkeypatch.setattr(module, "_milliseconds", lambda call: times["pause"])
    return times


def trial(dtype: torch.dtype = torch.float16) -> module._Trial:
    lengths = Lengths.of([70, 1, 30, 0, 64])
    return module._Trial(*tensors(lengths, 2, 32, dtype), lengths, None)


def test_nothing_is_wrong_with_rows_of_any_length() -> None:
    assert trial().fault(0.0) is None and trial().fault(0.2) is None


def test_a_clock_that_does_not_go(clock: dict[str, float]) -> None:
    clock["pause"] = 0.001
    assert trial().fault(0.1) == "the device's clock does not go"


FAULTS = {
    "output": ("(kept / total_of)", "(1.2 * kept / total_of)", "Triton's output is off by"),
    "numbers": ("tl.log2(total_of)", "tl.log2(-total_of)", "Triton's gradient of queries is off by nan"),
    "keys": ("dk * (scale", "dk * (1.1 * scale", "Triton's gradient of keys is off by"),
    "values": ("dv * kept", "dv * kept * 0.9", "Triton's gradient of values is off by"),
    "masks": (
        "keep = _keep(of_keys, of_queries",
        "keep = _keep(of_keys, of_queries + 2",
        "is not the same forward and",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_planted_faults_are_found(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new, said = FAULTS[name]
    monkeypatch.setattr(kernels, "cuda_side", lambda *_: mutant)
    mutant = triton_mutant(cuda, old, new, tmp_path)
    assert said in trial().fault(0.2)
