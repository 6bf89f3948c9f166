"""`benchmarks/limits.py` and its kernels: all can be called, and one that fails costs the others nothing."""

from __future__ import annotations

import json
import tarfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import apart, fp8, gpu, harness, kernels, limits


@pytest.mark.parametrize("key", [k for k in kernels.OPTIMIZERS if k != "apex_fused_adamw"])
def test_every_optimizer_is_converted_without_a_model(key: str) -> None:
    """Those of bitsandbytes are not measured on a CPU, so only this sees them before a GPU does."""
    parameter = torch.nn.Parameter(torch.randn(64, 128))
    parameter.grad = torch.randn_like(parameter)
    optimizer = torch.optim.AdamW([parameter], lr=1e-2, foreach=False)
    before = parameter.detach().clone()
    kernels.convert(optimizer, key)
    optimizer.step()
    assert not torch.equal(parameter, before)
    if key == "adamw_8bit":
        assert optimizer.state[parameter]["state1"].dtype == torch.uint8


def test_kernels_run_and_leave_no_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gradient that stays is added to in the next call, which moves bytes that nobody counts."""
    device, left = torch.device("cpu"), []
    made = [*kernels.norms(device, 8, 64), *kernels.activations(device, 8, 64), *kernels.projections(device, 8, 64)]
    made += kernels.attention(device, 64)
    accumulate = torch.Tensor.backward
    monkeypatch.setattr(torch.Tensor, "backward", lambda *a, **k: left.append(1) or accumulate(*a, **k))
    monkeypatch.setattr(torch.autograd, "backward", lambda *a, **k: left.append(1))
    for kernel in made:
        kernel.call()
        assert kernel.bytes or kernel.flops
    assert not left
    assert len(made) >= 10


def test_products_in_fp8_are_those_of_a_dense_layer() -> None:
    """Each number of e4m3 is off by 2^-4 at most, of e5m2 by 2^-3, a third of that as a rule; errors of two factors."""
    torch.manual_seed(0)
    x, weight, gradient = torch.randn(48, 32), torch.randn(64, 32) * 0.02, torch.randn(48, 64) * 1e-4
    exact = fp8.in_bf16(x.double(), weight.double(), gradient.double())
    for found, expected in zip(fp8.in_bf16(x, weight, gradient), exact, strict=True):
        torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-7)
    dtypes = torch.float8_e4m3fn, torch.float8_e4m3fn, torch.float8_e5m2
    operands = [fp8.cast(m.bfloat16(), dtype) for m, dtype in zip((x, weight, gradient), dtypes, strict=True)]
    for operand, matrix, off in zip(operands, (x, weight, gradient), (2**-4, 2**-4, 2**-3), strict=True):
        back = operand.rows.double() * operand.scale.double()
        # Below the least normal number steps stay as large as there.
        torch.testing.assert_close(back, matrix.double(), rtol=off + 2**-8, atol=matrix.abs().max().item() * 2**-9)
        assert torch.equal(operand.columns.t().float(), operand.rows.float())
    try:
        found = fp8.in_fp8(*operands)
    except NotImplementedError:
        pytest.skip("this PyTorch has products of fp8 on GPUs only")
    for product, expected in zip(found, exact, strict=True):
        error = ((product.double() - expected).norm() / expected.norm()).item()
        assert 0.01 < error < 0.09


# Kernels of `limits`, of which one ruins the process for all that come after it, as an illegal access of memory does
# where there is a GPU, and another ends it, as bitsandbytes does where CUDA reports an error.
RUINED = """
import os

from benchmarks import apart, kernels, limits

lost = []
apart.context_lost = lambda: bool(lost)
limits.suite_section = lambda: "cpu"
limits.matmul_peak = lambda *_: 1e9
limits._SECONDS = 0.0


def kernel(name, ruins=False, ends=False, group="copy"):
    def call():
        if ruins:
            lost.append(name)
        if lost:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        if ends:
            os._exit(1)

    return kernels.Kernel(group, name, call, bytes=8)


def refuse():
    raise ValueError("no such launch")


def optimizers(_):
    yield kernel("before")
    if lost:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    os._exit(1)


MADE = {
    "copies": [kernel("copy"), kernel("ruins it", ruins=True), kernel("after")],
    "norms": [kernels.Kernel("norm", "fails", refuse, bytes=8), kernel("ends it", ends=True)],
    "losses": [kernel("last")],
}
for group in ("activations", "attention", "copies", "embeddings", "losses", "norms", "projections"):
    setattr(kernels, group, lambda *_, group=group: iter(MADE.get(group, ())))
kernels.optimizers = optimizers
limits.fp8.products = lambda *_: iter(())
measure, table = limits.measure, limits.table
"""


@pytest.mark.elsewhere
def test_what_ends_a_process_of_kernels_costs_the_others_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """In the programme for a GPU: also the training runs come, and what was done is brought back."""
    (tmp_path / "ruined.py").write_text(RUINED)
    (tmp_path / "brought").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("OUT", str(tmp_path / "brought"))
    monkeypatch.setattr(gpu, "limits", SimpleNamespace(__name__="ruined", table=limits.table))
    monkeypatch.setattr(gpu.peers, "measure", lambda *_, **__: print("the peers are measured"))
    out = tmp_path / "out"
    assert gpu.main(["--parts", "limits", "training", "--out", str(out)]) == 1
    text = capfd.readouterr()
    assert "the peers are measured" in text.out and "; FAILED: limits" in text.out
    rows = harness.rows_in(out / "limits")
    assert Counter(row["entry"] for row in rows) == {"copy": 5, "after": 5, "before": 5, "last": 5}
    assert apart.failed_before(out / "limits") == {
        "optimizers, those after before": apart._DIED,
        "ruins it": "RuntimeError: CUDA error: an illegal memory access was encountered",
        "fails": "ValueError: no such launch",
        "ends it": apart._DIED,
    }
    words = (out / "limits" / "failed.txt").read_text()
    assert words.count("=== ruined: ") == 3 and "ValueError: no such launch" in words and "Traceback" in words
    assert "(exit code 1); a new process goes on without ends it and fails\n" in text.err
    table = (out / "limits" / "table.md").read_text()
    assert "failed: ends it: its process ended" in table and "| last |" in table
    with tarfile.open(tmp_path / "brought" / "out.tgz") as archive:
        assert {"out/limits/rows.jsonl", "out/limits/table.md", "out/peers/environment.json"} <= set(archive.getnames())
    assert [file.name for file in (tmp_path / "brought").iterdir()] == ["out.tgz"]


def test_a_kernel_that_fails_leaves_the_others_their_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those of others have never run on a GPU here: in making, or when they are called."""

    def refuse() -> None:
        raise ValueError("no such\nlaunch")

    def fails(*_: Any) -> Iterator[kernels.Kernel]:
        yield kernels.Kernel("copy", "copy", lambda: None, bytes=8)
        yield kernels.Kernel("one", "one that refuses", refuse, bytes=8)
        yield kernels.Kernel("one", "another", lambda: None, bytes=8)
        raise TypeError("a new signature")

    monkeypatch.setattr(limits, "suite_section", lambda: "cpu")
    monkeypatch.setattr(limits, "_SECONDS", 0.0)
    for group in ("optimizers", "norms", "activations", "projections", "embeddings", "losses"):
        monkeypatch.setattr(kernels, group, lambda *_: iter(()))
    monkeypatch.setattr(fp8, "products", lambda *_: iter(()))
    monkeypatch.setattr(kernels, "copies", fails)
    monkeypatch.setattr(kernels, "attention", lambda *_: iter([kernels.Kernel("last", "last", lambda: None, bytes=8)]))
    monkeypatch.setattr(limits, "matmul_peak", lambda *_: 1e9)
    with pytest.raises(RuntimeError) as failure:
        harness.run(limits, harness.new_folder("limits", tmp_path / "out"), 2, 1)
    assert str(failure.value).splitlines() == [
        "failed:",
        "copies, those after another: TypeError: a new signature",
        "one that refuses: ValueError: no such",
    ]
    rows = [json.loads(line) for line in (tmp_path / "out" / "rows.jsonl").read_text().splitlines()]
    assert Counter(row["entry"] for row in rows) == {"copy": 2, "another": 2, "last": 2}
    text = capsys.readouterr()
    assert "| another |" in text.out and text.err.count("Traceback") == 2
