"""What all benchmarks share: interleaved runs in fresh processes, one line of JSON for each, a table and a plot.

A folder of results holds `environment.json`, `entries.json`, `rows.jsonl`, `table.md` and `plot.png`. It is written
once and never edited: a second run needs another folder.
"""

from __future__ import annotations

import datetime
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from composer_speedups.ablation.isolate import Isolation
from composer_speedups.ablation.jobs import PRELOAD
from composer_speedups.hardware import environment, hardware, summary
from composer_speedups.recipes import Recipe, load_recipe

__all__ = ["Entry", "Rows", "interleaved", "markdown", "median", "new_folder", "ratios", "spread"]

RESULTS = Path(__file__).parent / "results"
TIMEOUT = 1800  # seconds of one run

Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Entry:
    """One thing that is measured: a contender of `contenders.py`, doing what a recipe says.

    `overrides` are a recipe's, as on the command line; `arguments` are the contender's own.
    """

    contender: str
    recipe: str
    overrides: tuple[str, ...] = ()
    arguments: Mapping[str, Any] = field(default_factory=dict)


def new_folder(what: str, out: Path | None) -> Path:
    """`out`, or today's folder for `what`; refused if it holds results already."""
    folder = out or RESULTS / f"{datetime.date.today():%Y-%m-%d}_{hardware()}_{what}"
    if (folder / "rows.jsonl").exists():
        raise SystemExit(f"error: {folder} holds results already, and results are never edited. Name another --out")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "environment.json").write_text(json.dumps(environment(), indent=1, default=str))
    return folder


def interleaved(
    entries: Mapping[str, Entry],
    folder: Path,
    *,
    repetitions: int,
    batches: int,
    deadline: float | None = None,
    epochs: int = 2,
) -> Rows:
    """Run every entry once a repetition, each in a fresh process; return one row a run.

    Args:
        entries: by their names in the table.
        folder: where `rows.jsonl` grows.
        repetitions: how often each is run.
        batches: of an epoch. All epochs but the last warm up; the last one counts, whole, so that every contender has
            done the same samples, also one that sorts them by length.
        deadline: on the clock of `time.monotonic`: no run is begun after it, and what has run is what there is.
        epochs: how many.
    """
    # A run's interpreter does not look into the current folder.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(Path(__file__).parents[1]), os.getenv("PYTHONPATH")]))
    recipes = {name: _shortened(entry, batches) for name, entry in entries.items()}
    _write_entries(entries, recipes, folder)
    rows, names = [], list(entries)
    with Isolation("benchmarks.contenders:measure", (*PRELOAD, "benchmarks.contenders")) as isolation:
        for repetition in range(repetitions):
            # Rotated, so that no entry always follows the same other.
            for name in names[repetition % len(names) :] + names[: repetition % len(names)]:
                if deadline is not None and time.monotonic() > deadline:
                    print(f"out of time after {len(rows)} of {len(names) * repetitions} runs", file=sys.stderr)
                    return rows
                recipe = recipes[name]
                payload = {
                    "contender": entries[name].contender,
                    "recipe": recipe.to_dict(),
                    "steps": epochs * batches,
                    "seed": 17 + repetition,
                    "arguments": dict(entries[name].arguments),
                }
                outcome = isolation.run(payload, timeout=TIMEOUT)
                row = {"entry": name, "repetition": repetition, "status": outcome.status, "reason": outcome.reason}
                row |= outcome.value or {}
                row["samples_per_second"] = _speed(row, recipe.batch_size, epochs)
                rows.append(row)
                with (folder / "rows.jsonl").open("a") as file:
                    file.write(json.dumps(row) + "\n")
                speed = row["samples_per_second"]
                shown = f"{speed:.1f} samples/s" if speed else f"{outcome.status}: {outcome.reason}"
                print(f"[{len(rows)}/{len(names) * repetitions}] {name}: {shown}", file=sys.stderr, flush=True)
    return rows


def _write_entries(entries: Mapping[str, Entry], recipes: Mapping[str, Recipe], folder: Path) -> None:
    """Write `entries.json`: by its name in the table, who did what, with batch, learning rate and all else resolved."""
    facts = {
        name: {"contender": entry.contender, "arguments": dict(entry.arguments), "recipe": recipes[name].to_dict()}
        for name, entry in entries.items()
    }
    (folder / "entries.json").write_text(json.dumps(facts, indent=1, default=str))


def median(rows: Rows, entry: str, value: Callable[[dict[str, Any]], float | None]) -> float | None:
    """The median over the entry's good runs."""
    values = [v for row in rows if row["entry"] == entry and (v := value(row)) is not None]
    return statistics.median(values) if values else None


def ratios(rows: Rows, entry: str, base: str, value: Callable[[dict[str, Any]], float | None]) -> list[float]:
    """The entry's value over the base's, within each repetition."""
    of = {(row["entry"], row["repetition"]): value(row) for row in rows}
    pairs = ((of.get((entry, n)), of.get((base, n))) for n in sorted({row["repetition"] for row in rows}))
    return [one / other for one, other in pairs if one and other]


def spread(values: Sequence[float], form: str = ".2f", unit: str = "") -> str:
    """Median [lowest, highest]."""
    if not values:
        return ""
    low, high = min(values), max(values)
    return f"{statistics.median(values):{form}}{unit} [{low:{form}}, {high:{form}}]"


def markdown(folder: Path, heading: str, head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """Write `table.md`: what it ran on, the heading, and the table. Return its text."""
    lines = [f"{summary(environment())}. {heading}", "", "| " + " | ".join(head) + " |"]
    lines.append("|" + "|".join(["---", *["---:"] * (len(head) - 1)]) + "|")
    lines += ["| " + " | ".join(row) + " |" for row in body]
    text = "\n".join(lines) + "\n"
    (folder / "table.md").write_text(text)
    return text


def _shortened(entry: Entry, batches: int) -> Recipe:
    """The entry's recipe, with an epoch of `batches` batches."""
    recipe = load_recipe(entry.recipe, entry.overrides, check_arguments=False)
    task = recipe.task.model_copy(update={"train_samples": batches * recipe.batch_size})
    return recipe.model_copy(update={"task": task})


def _speed(row: dict[str, Any], batch: int, epochs: int) -> float | None:
    """Samples per second of the last epoch."""
    seconds = row.get("seconds") or []
    counted = seconds[len(seconds) * (epochs - 1) // epochs :]
    return batch * len(counted) / sum(counted) if counted else None
