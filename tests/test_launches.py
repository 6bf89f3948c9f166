"""`benchmarks/launches.py`: ways to launch a kernel are tried, restored and compared as they should be."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_null_gpu import needs_cuda_13, on_null_gpu

from benchmarks import gpu, harness, launches, run
from composer_speedups.errors import UserError
from composer_speedups.kernels import bias_gelu_triton, cross_entropy, launch

KERNELS = [
    f"{kernel} {direction}"
    for kernel in ("LayerNorm", "bias + dropout + residual + LayerNorm", "bias + GELU", "cross-entropy")
    for direction in ("forward", "backward")
]


def sweep(seen: list[tuple[int, int]], module: Any, refused: tuple[int, int] | None = None) -> launches.Sweep:
    def call() -> None:
        if (now := (module.warps, module.rows)) == refused:
            raise ValueError("out of\nshared memory")
        seen.append(now)

    choices = {"warps": (module, "warps", (4, 8)), "rows": (module, "rows", (1, 2))}
    return launches.Sweep("kernel", 16, choices, call, bytes=8)


def test_every_way_is_tried_and_none_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launches, "_SECONDS", 0.0)
    seen, module = [], SimpleNamespace(warps=4, rows=2)
    tried = sweep(seen, module)
    ways = list(tried.ways())
    assert ways[0] == {"warps": 4, "rows": 2} and len(ways) == 4
    for way in ways:
        assert tried.seconds(way, torch.device("cpu")) > 0
    assert list(dict.fromkeys(seen)) == [(4, 2), (4, 1), (8, 1), (8, 2)]
    assert (module.warps, module.rows) == (4, 2)


def test_a_way_that_fails_costs_the_others_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen, module = [], SimpleNamespace(warps=4, rows=2)
    monkeypatch.setattr(launches, "_SECONDS", 0.0)
    monkeypatch.setattr(launches, "hardware", lambda: "cuda")
    monkeypatch.setattr(launches, "_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(launches, "_copy", lambda _: launches.Sweep("copy", 0, {}, lambda: None, bytes=8))
    monkeypatch.setattr(launches, "_sweeps", lambda *_: iter([sweep(seen, module, refused=(8, 1))]))
    harness.run(launches, harness.new_folder("launches", tmp_path), 2, 1)
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert len(rows) == 2 * (1 + 2 * 3) and sum(row["present"] for row in rows) == 2 * (1 + 2)
    text = capsys.readouterr()
    assert "| kernel, 16 tokens: warps 4, rows 2 (present) |" in text.out and "| 1.00x |" in text.out
    assert "warps 8, rows 1" not in text.out and text.err.count("Traceback") == 1, "it is not tried again"


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


@pytest.mark.slow
@needs_cuda_13
def test_all_ways_on_the_gpu_that_is_not_there(tmp_path: Path) -> None:
    """They compile and are launched, if nothing is computed: no way is left out."""
    done = on_null_gpu(
        "-m", "benchmarks.run", "launches", "--repetitions", "1", "--batches", "1", "--out", str(tmp_path)
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Traceback" not in done.stderr, done.stderr[-3000:]
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert list(dict.fromkeys(row["kernel"] for row in rows)) == ["copy", *KERNELS]
    present = {row["kernel"]: row["way"] for row in rows if row["present"]}
    assert present["LayerNorm backward"] == {
        "warps": launch._WARPS,
        "held": launch._HELD,
        "together": launch._TOGETHER,
        "stages": launch.STAGES,
    }
    assert present["bias + GELU forward"]["rows"] == bias_gelu_triton._ROWS_FORWARD
    assert present["cross-entropy backward"]["held"] == cross_entropy._MOST
