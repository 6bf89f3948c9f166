"""`benchmarks/launches.py`: ways to launch a kernel are tried, restored and compared as they should be."""

from __future__ import annotations

import json
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_null_gpu import needs_cuda_13, on_null_gpu
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import apart, gpu, harness, launches, run
from composer_speedups.errors import UserError
from composer_speedups.kernels import bias_gelu_triton, cross_entropy, dropout_add_norm_triton, launch, layer_norm

KERNELS = [
    f"{kernel} {direction}"
    for kernel in ("LayerNorm", "bias + dropout + residual + LayerNorm", "bias + GELU", "cross-entropy", "attention")
    for direction in ("forward", "backward")
]


def sweep(
    seen: list[tuple[int, int]],
    module: Any,
    refused: tuple[int, int] | None = None,
    wrong: tuple[int, int] | None = None,
    tokens: int = 16,
) -> launches.Sweep:
    def call() -> torch.Tensor:
        if (now := (module.warps, module.rows)) == refused:
            raise ValueError("out of\nshared memory")
        seen.append(now)
        return torch.full((3,), 1.0 if now != wrong else 1.1)

    choices = {"warps": (module, "warps", (4, 8)), "rows": (module, "rows", (1, 2))}
    return launches.Sweep("kernel", tokens, choices, call, bytes=8)


def test_every_way_is_tried_and_none_stays() -> None:
    seen, module = [], SimpleNamespace(warps=4, rows=2)
    tried = sweep(seen, module)
    ways = list(tried.ways())
    assert ways[0] == {"warps": 4, "rows": 2} and len(ways) == 4
    for way in ways:
        with tried.set_to(way):
            tried.call()
    assert seen == [(4, 2), (4, 1), (8, 1), (8, 2)]
    assert (module.warps, module.rows) == (4, 2)


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch):
    """Measure what is given instead of the kernels; the rows that were written."""
    monkeypatch.setattr(launches, "_SECONDS", 0.0)
    monkeypatch.setattr(launches, "hardware", lambda: "cuda")
    monkeypatch.setattr(launches, "_device", lambda: torch.device("cpu"))
    copy = launches.Sweep("copy", 0, {}, lambda: torch.ones(1), bytes=8)
    monkeypatch.setattr(launches, "_copy", lambda _: copy)
    names = ("_layer_norm", "_dropout_add_norm", "_bias_gelu", "_cross_entropy", "_attention")
    for name in names[1:]:
        monkeypatch.setattr(launches, name, lambda *_: iter(()))

    def measure(folder: Path, **options: Any) -> list[dict[str, Any]]:
        def make(_: torch.device, tokens: int) -> Any:
            yield sweep([], SimpleNamespace(warps=4, rows=2), tokens=tokens, **options)

        make.__name__ = names[0]
        monkeypatch.setattr(launches, names[0], make)
        try:
            harness.run(launches, harness.new_folder("launches", folder), 2, 1)
        finally:
            rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
        return rows

    return measure


def test_a_way_that_fails_costs_the_others_nothing(on_cpu, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = on_cpu(tmp_path, refused=(8, 1))
    assert len(rows) == 2 * (1 + 2 * 3) and sum(row["present"] for row in rows) == 2 * (1 + 2)
    text = capsys.readouterr()
    assert "| kernel, 16,384 tokens: warps 4, rows 2 (present) |" in text.out and "| 1.00x |" in text.out
    assert "failed: kernel, 8,192 tokens, warps 8, rows 1: ValueError: out of" in text.out
    assert text.err.count("Traceback") == 2, "once for each size, and not tried again"


def test_a_way_that_computes_something_else_does_not_win(on_cpu, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="warps 8, rows 1: ArithmeticError: it computes something else"):
        on_cpu(tmp_path, wrong=(8, 1))
    assert "kernel, 16,384 tokens: warps 8, rows 1 |" not in (tmp_path / "table.md").read_text()


def test_the_present_way_may_be_the_one_that_fails(on_cpu, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="warps 4, rows 2: ValueError: out of"):
        on_cpu(tmp_path, refused=(4, 2))
    table = (tmp_path / "table.md").read_text()
    assert table.count("| kernel, ") == 6 and "(present)" not in table and "x |" not in table


def test_a_kernel_that_cannot_be_prepared_is_named(on_cpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> Any:
        raise TypeError("a new signature")
        yield

    fails.__name__ = "_bias_gelu"
    monkeypatch.setattr(launches, "_bias_gelu", fails)
    with pytest.raises(RuntimeError, match="bias_gelu, 16,384 tokens: TypeError: a new signature"):
        on_cpu(tmp_path)
    assert "| kernel, 8,192 tokens" in (tmp_path / "table.md").read_text()


# As `test_limits.py` has them: a way of the larger size ruins the process, and one that comes after it computes
# something wrong.
RUINED = """
from types import SimpleNamespace

import torch

from benchmarks import apart, launches

lost = []
apart.context_lost = lambda: bool(lost)
launches.hardware = lambda: "cuda"
launches._device = lambda: torch.device("cpu")
launches._SECONDS = 0.0
launches._copy = lambda _: launches.Sweep("copy", 0, {}, lambda: torch.ones(1), bytes=8)


def _layer_norm(_, tokens):
    module = SimpleNamespace(warps=4, rows=2)

    def call():
        now = module.warps, module.rows
        if tokens == 16384 and now == (4, 1):
            lost.append(now)
        if lost:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return torch.full((3,), 1.1 if now == (8, 1) else 1.0)

    choices = {"warps": (module, "warps", (4, 8)), "rows": (module, "rows", (1, 2))}
    yield launches.Sweep("kernel", tokens, choices, call, bytes=8)


launches._layer_norm = _layer_norm
launches._dropout_add_norm = launches._bias_gelu = launches._cross_entropy = launches._attention = lambda *_: iter(())
launches._dropout_add_norm.__name__ = "none"
measure, table = launches.measure, launches.table
"""


def test_a_new_process_goes_on_and_compares_with_the_same_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "ruined_launches.py").write_text(RUINED)
    monkeypatch.syspath_prepend(tmp_path)
    part = apart.Apart(SimpleNamespace(__name__="ruined_launches", table=launches.table))
    with pytest.raises(apart.Failed, match=r"illegal memory access(.|\n)*warps 8, rows 1: ArithmeticError"):
        harness.run(part, harness.new_folder("launches", tmp_path / "out"), 2, 1, deadline=time.monotonic() + 60)
    assert "goes on without kernel, 16,384 tokens, warps 4, rows 1\n" in capfd.readouterr().err
    rows = harness.rows_in(tmp_path / "out")
    done = Counter((row["tokens"], row["entry"].replace("warps ", "").replace("rows ", "")) for row in rows)
    right = {(16384, "4, 2"), (16384, "8, 2"), (8192, "4, 2"), (8192, "4, 1"), (8192, "8, 2")}
    assert done == dict.fromkeys({(0, "as it is"), *right}, 2), "each once a repetition, and what is wrong never"


def test_the_table_compares_with_the_present_way(tmp_path: Path) -> None:
    launches.begin(tmp_path, "launches", width=768)
    (tmp_path / "environment.json").write_text(json.dumps(harness.environment(), default=str))
    rows = [{"kernel": "copy", "tokens": 0, "entry": "as it is", "present": True, "seconds": 1e-3, "bytes": 10**9}]
    for stages, seconds in ((1, 2e-3), (2, 1e-3), (3, 4e-3)):
        for repetition in (0, 1):
            row = {"kernel": "norm", "tokens": 16384, "entry": f"stages {stages}", "bytes": 10**9}
            rows.append(row | {"repetition": repetition, "present": stages == 1, "seconds": seconds * (1 + repetition)})
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    lines = launches.table(tmp_path).splitlines()
    assert lines[4] == "| norm, 16,384 tokens: stages 1 (present) | 3.0000 [2.0000, 4.0000] | 33% | 1.00x |"
    assert lines[5] == "| norm, 16,384 tokens: stages 2 | 1.5000 [1.0000, 2.0000] | 67% | 2.00x |"
    assert "Copy 1e+03 GB/s" in lines[0] and len(lines) == 7


def test_without_a_gpu_there_is_nothing_to_try(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(UserError, match="no GPU here: measure limits"):
        run.main(["launches", "--out", str(tmp_path / "a")])
    with pytest.raises(SystemExit):
        gpu.main(["--parts", "launches", "--out", str(tmp_path / "b")])
    assert "leave it out of --parts" in capsys.readouterr().err and not (tmp_path / "b").exists()


def test_a_warp_may_have_a_row_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was before two warps shared one is among what is tried, with as many programs as run at once."""
    monkeypatch.setattr(launch, "processors", lambda _: 1)
    monkeypatch.setattr(launch, "room", lambda _: 32)
    present = launch.backward_tile_of(768, 2)
    assert (present["ROWS"], present["num_warps"], launch.held_by_a_thread(768, present)) == (1, 2, 12)
    monkeypatch.setattr(launch, "_HELD_BACKWARD", 32)
    former, cuda = launch.backward_tile_of(768, 2), SimpleNamespace(type="cuda")
    assert former == launch.tile_of(768, 2) and former["ROWS"] == former["num_warps"] == 1
    for norm in (layer_norm, dropout_add_norm_triton):
        assert launch.most_programs(former, norm._registers(768, former), cuda) in (8, 10)


def test_forgetting_writes_next_to_nothing() -> None:
    """Or the device writes that back to memory while it is timed."""
    written = []

    class Written(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **kwargs or {})
            written.append(result.numel())
            return result

    forget = launches._forgetting(torch.device("cpu"))
    with Written():
        forget()
    assert written == [1]


@pytest.mark.slow
@needs_cuda_13
def test_all_ways_on_the_gpu_that_is_not_there(tmp_path: Path) -> None:
    """They compile and are launched, if nothing is computed: no way is left out."""
    code = (
        "from benchmarks import launches, run\n"
        "launches._same = lambda *_: True\n"  # nothing is computed there
        f"run.main(['launches', '--repetitions', '1', '--batches', '1', '--out', {str(tmp_path)!r}])"
    )
    done = on_null_gpu("-c", code)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Traceback" not in done.stderr, done.stderr[-3000:]
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert list(dict.fromkeys(row["kernel"] for row in rows)) == ["copy", *KERNELS]
    present = {row["kernel"]: row["way"] for row in rows if row["present"]}
    assert present["LayerNorm backward"] == {
        "held": launch._HELD_BACKWARD,
        "filled": launch._FILLED,
        "stages": launch.STAGES,
    }
    assert present["bias + GELU forward"]["rows"] == bias_gelu_triton._ROWS_FORWARD
    assert present["cross-entropy backward"]["held"] == cross_entropy._MOST
