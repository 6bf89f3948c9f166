"""How the cost of a step grows with the length of texts, the batch, the share of padding and the depth.

Random tokens of stated lengths; one thing is varied at a time from the same middle. Each line compares the padded
model with everything that pays (`fastest`): where removing padding has nothing to remove, only the rest is left.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.harness import Entry, Rows, begin, interleaved, markdown, median, plot, ratios, read, spread, times_run
from composer_speedups.hardware import suite_section

__all__ = ["measure", "table"]

# what is varied -> its values. Padding is the share of a batch's tokens if each text is padded to `length`.
AXES = {
    "length": (64, 128, 256, 512),
    "batch": (8, 16, 32, 64),
    "padding": (0.0, 0.2, 0.4, 0.6, 0.8),
    "layers": (2, 4, 8, 12),
}
MIDDLE: dict[str, Any] = {"length": 256, "batch": 16, "padding": 0.4, "layers": 4}
# BERT-base, and batches that fill a GPU.
_ON_GPU: tuple[dict[str, Any], dict[str, Any]] = ({"batch": (16, 32, 64, 128)}, {"batch": 64, "layers": 12})
_RECIPES = {
    "cpu": ("cpu/bf16", "cpu/fastest"),
    "cpu_without_bf16": ("cpu/fp32", "cpu/fastest_fp32"),
    "cuda": ("finetune/bf16", "finetune/fastest"),
}


def varied(section: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The values of each axis, and the middle, of that kind of hardware."""
    axes, middle = _ON_GPU if section == "cuda" else ({}, {})
    return AXES | axes, MIDDLE | middle


def points(section: str = "cpu") -> list[dict[str, Any]]:
    """What is measured: the middle, and each axis' other values."""
    axes, middle = varied(section)
    found = [middle]
    for axis, values in axes.items():
        found += [middle | {axis: value} for value in values if value != middle[axis]]
    return found


def overrides(point: dict[str, Any]) -> tuple[str, ...]:
    """The changes to a recipe that make it do what `point` says."""
    mean = round(point["length"] * (1 - point["padding"]))
    lengths = f", mean_length: {mean}, length_std: {max(1, round(min(mean, point['length'] - mean) / 3))}"
    task = f"task={{name: dummy, max_length: {point['length']}{lengths if point['padding'] else ''}}}"
    model = (f"model.config.num_hidden_layers={point['layers']}", "model.pretrained=false")
    return (task, *model, "model.config.max_position_embeddings=512", f"batch_size={point['batch']}")


def measure(
    folder: Path,
    repetitions: int,
    batches: int,
    deadline: float | None = None,
    after_each: Callable[[], object] = lambda: None,
) -> None:
    """`deadline` and `after_each` are those of `interleaved`."""
    section = suite_section()
    plain, fast = _RECIPES[section]
    entries = {
        f"{_name(point)}: {recipe}": Entry("ours", recipe, overrides(point))
        for point in points(section)
        for recipe in (plain, fast)
    }
    axes, middle = varied(section)
    begin(folder, "growth", batches=batches, recipes=(plain, fast), axes=axes, middle=middle)
    interleaved(entries, folder, repetitions=repetitions, batches=batches, deadline=deadline, after_each=after_each)


def table(folder: Path) -> str:
    found = read(folder)
    rows, (plain, fast), middle = found.rows, found.conditions["recipes"], found.conditions["middle"]
    batches = found.conditions["batches"]
    body, gains = [], {}
    for axis, values in found.conditions["axes"].items():
        for value in values:
            name = _name(middle | {axis: value})
            gains[f"{axis} {value}"] = _gains(rows, name, plain, fast)
            beside = any(row["overlapped"] for row in rows if row["entry"].startswith(f"{name}: "))
            mark = " (beside other work)" if beside else ""
            body.append((f"{axis} {value}{mark}", *_cells(rows, name, plain, fast)))
    heading = (
        f"{times_run(rows)}, interleaved, each run in a fresh process; {batches} batches count, after half as "
        "many (at least two); medians [lowest, highest]. Where nothing else is said: "
        + ", ".join(f"{axis} {value}" for axis, value in middle.items())
        + ". Speeds count all samples; peak memory is the process's or the allocator's."
    )
    plot(folder, gains, f"{fast} over {plain}, samples/s")
    head = ("", f"{plain}, samples/s", f"{fast}, samples/s", "ratio", "peak memory, MB: padded", "fastest")
    return markdown(folder, heading, head, body)


def _cells(rows: Rows, name: str, plain: str, fast: str) -> tuple[str, ...]:
    def shown(recipe: str, key: str, scale: float, form: str) -> str:
        value = median(rows, f"{name}: {recipe}", lambda row: row.get(key))
        return "" if value is None else f"{value / scale:{form}}"

    against = _gains(rows, name, plain, fast)
    speeds = (shown(recipe, "samples_per_second", 1, ".1f") for recipe in (plain, fast))
    memory = (shown(recipe, "peak_memory_bytes", 1e6, ".0f") for recipe in (plain, fast))
    return (*speeds, spread(against, unit="x"), *memory)


def _gains(rows: Rows, name: str, plain: str, fast: str) -> list[float]:
    return ratios(rows, f"{name}: {fast}", f"{name}: {plain}", lambda row: row["samples_per_second"])


def _name(point: dict[str, Any]) -> str:
    return ", ".join(f"{axis} {value}" for axis, value in point.items())
