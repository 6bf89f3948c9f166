"""What compiling costs: of the whole model, of the repeated block, and of kernels in C, with a cold and a warm cache.

Twelve layers, as BERT-base has; each repetition begins with an empty cache folder, in which the warm runs then find
what the cold ones left. Each row that is cold has a cache of its own. "PyTorch's own" is `model.compile()` in a bare
loop: what one would use instead. `fastest` compiles no model, but C where a kernel is first asked for. From the call
of a training to the end of its first step also model, Trainer and data, which are in a cache, take their time.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from benchmarks.harness import Entry, Rows, begin, interleaved, markdown, plot, ratios, read, shown, spread, times_run
from benchmarks.peers import named
from composer_speedups.hardware import suite_section

__all__ = ["measure", "table"]

_LAYERS, _BATCH = 12, 8
_FASTEST = {"cpu/fp32": "cpu/fastest_fp32", "cpu/bf16": "cpu/fastest"}
_SIZES = (f"model.config.num_hidden_layers={_LAYERS}", f"batch_size={_BATCH}")


def measure(folder: Path, repetitions: int, batches: int, only: tuple[str, ...] = ()) -> None:
    """`only`: names of entries, or parts of names. What is warm needs what was cold before it."""
    chosen = named(only, _entries("")) if only else list(_entries(""))
    chosen += [name.removesuffix("warm") + "cold" for name in chosen if name.endswith(", warm")]
    begin(folder, "compiling", recipe=_recipe(), layers=_LAYERS, batch=_BATCH)
    for repetition in range(repetitions):
        with tempfile.TemporaryDirectory() as cache:
            # Cold before warm, so not rotated.
            entries = {name: entry for name, entry in _entries(cache).items() if name in chosen}
            interleaved(entries, folder, repetitions=1, batches=batches, first=repetition)


def table(folder: Path) -> str:
    found = read(folder)
    rows, of = found.rows, found.conditions
    base = "whole model, PyTorch's own, cold"
    # When a training began is known of this package's own, and not in folders of before.
    starts = [("from the start to its end, seconds", _start)] if any(map(_start, rows)) else []
    columns = [("first step, seconds", _first_step), *starts]
    body = [
        (
            shown(rows, name),
            spread(_seconds(rows, name), ".1f"),
            *(
                spread([s for row in rows if row["entry"] == name and (s := seconds(row))], ".1f")
                for _, seconds in columns
            ),
            spread(ratios(rows, name, base, _compile_seconds), unit="x"),
            spread([s for row in rows if row["entry"] == name and (s := row["samples_per_second"])], ".1f"),
        )
        for name in found.names
    ]
    head = ("", "seconds compiling", *(word for word, _ in columns), f"against {base}", "samples/s afterwards")
    heading = (
        f"{times_run(rows)}, each run in a fresh process; {of['recipe']} with {of['layers']} layers and batch "
        f"{of['batch']}; median [lowest, highest]; ratios of the seconds within each repetition."
    )
    plot(folder, {name: _seconds(rows, name) for name in found.names}, "seconds compiling")
    return markdown(folder, heading, head, body)


def _recipe() -> str:
    return "cpu/fp32" if suite_section() == "cpu_without_bf16" else "cpu/bf16"


def _entries(cache: str) -> dict[str, Entry]:
    recipe = _recipe()

    def entry(scope: str) -> Entry:
        compile = f"speedups.torch_compile={{scope: {scope}, cache_dir: '{cache}/{scope}'}}"
        return Entry("ours", recipe, (*_SIZES, compile))

    in_c = Entry("ours", _FASTEST[recipe], _SIZES, {"kernels": f"{cache}/kernels"})
    return {
        "not compiled": Entry("ours", recipe, _SIZES),
        "whole model, PyTorch's own, cold": Entry("bare_loop", recipe, _SIZES, {"compile_cache": f"{cache}/own"}),
        "whole model, PyTorch's own, warm": Entry("bare_loop", recipe, _SIZES, {"compile_cache": f"{cache}/own"}),
        "whole model, cold": entry("model"),
        "whole model, warm": entry("model"),
        "block, cold": entry("block"),
        "block, warm": entry("block"),
        f"{in_c.recipe}, kernels in C, cold": in_c,
        f"{in_c.recipe}, kernels in C, warm": in_c,
    }


def _seconds(rows: Rows, name: str) -> list[float]:
    return [s for row in rows if row["entry"] == name and (s := _compile_seconds(row))]


def _compile_seconds(row: dict[str, Any]) -> float | None:
    return row.get("compile_seconds") or None


def _start(row: dict[str, Any]) -> float | None:
    return row.get("start_seconds")


def _first_step(row: dict[str, Any]) -> float | None:
    return row["seconds"][0] if row.get("seconds") else None
