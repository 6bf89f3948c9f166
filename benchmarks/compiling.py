"""What compiling costs: of the whole model and of the repeated block, with a cold cache and with a warm one.

Twelve layers, as BERT-base has; each repetition begins with an empty cache folder, in which the warm runs then find
what the cold ones left. Each row that is cold has a cache of its own. "PyTorch's own" is `model.compile()` in a bare
loop: what one would use instead.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from benchmarks.harness import Entry, Rows, interleaved, markdown, plot, ratios, shown, spread
from composer_speedups.hardware import suite_section

__all__ = ["run"]

_LAYERS, _BATCH = 12, 8
_SIZES = (f"model.config.num_hidden_layers={_LAYERS}", f"batch_size={_BATCH}")


def run(folder: Path, repetitions: int, batches: int) -> str:
    """Measure into `folder`; return the table."""
    rows: Rows = []
    for repetition in range(repetitions):
        with tempfile.TemporaryDirectory() as cache:
            # Cold before warm, so not rotated.
            rows += interleaved(_entries(cache), folder, repetitions=1, batches=batches, first=repetition)
    base = "whole model, PyTorch's own, cold"
    body = [
        (
            shown(rows, name),
            spread(_seconds(rows, name), ".1f"),
            spread([s for row in rows if row["entry"] == name and (s := _first_step(row))], ".1f"),
            spread(ratios(rows, name, base, _compile_seconds), unit="x"),
            spread([s for row in rows if row["entry"] == name and (s := row["samples_per_second"])], ".1f"),
        )
        for name in _entries("")
    ]
    head = ("", "seconds compiling", "first step, seconds", f"against {base}", "samples/s afterwards")
    heading = (
        f"{repetitions} repetitions, each run in a fresh process; {_recipe()} with {_LAYERS} layers and batch "
        f"{_BATCH}; median [lowest, highest]; ratios of the seconds within each repetition."
    )
    plot(folder, {name: _seconds(rows, name) for name in _entries("")}, "seconds compiling")
    return markdown(folder, heading, head, body)


def _recipe() -> str:
    return "cpu/fp32" if suite_section() == "cpu_without_bf16" else "cpu/bf16"


def _entries(cache: str) -> dict[str, Entry]:
    recipe = _recipe()

    def entry(scope: str) -> Entry:
        compile = f"speedups.torch_compile={{scope: {scope}, cache_dir: '{cache}/{scope}'}}"
        return Entry("ours", recipe, (*_SIZES, compile))

    return {
        "not compiled": Entry("ours", recipe, _SIZES),
        "whole model, PyTorch's own, cold": Entry("bare_loop", recipe, _SIZES, {"compile_cache": f"{cache}/own"}),
        "whole model, PyTorch's own, warm": Entry("bare_loop", recipe, _SIZES, {"compile_cache": f"{cache}/own"}),
        "whole model, cold": entry("model"),
        "whole model, warm": entry("model"),
        "block, cold": entry("block"),
        "block, warm": entry("block"),
    }


def _seconds(rows: Rows, name: str) -> list[float]:
    return [s for row in rows if row["entry"] == name and (s := _compile_seconds(row))]


def _compile_seconds(row: dict[str, Any]) -> float | None:
    return row.get("compile_seconds") or None


def _first_step(row: dict[str, Any]) -> float | None:
    return row["seconds"][0] if row.get("seconds") else None
