"""What all benchmarks share: interleaved runs in fresh processes, one line of JSON for each, a table and a plot.

A part (`peers.py` and the others) has `measure`, which fills a folder of results, and `table`, which reads it: so a
table can be made anew, or for the first time where the measurement was cut off. The folder holds `environment.json`,
`conditions.json`, `entries.json`, `rows.jsonl`, `table.md` and `plot.png`. It is written once and never edited:
a second run needs another folder.
"""

from __future__ import annotations

import datetime
import json
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from composer_speedups.ablation.isolate import Isolation
from composer_speedups.ablation.jobs import PRELOAD
from composer_speedups.errors import UserError
from composer_speedups.hardware import environment, hardware, summary
from composer_speedups.recipes import Recipe, load_recipe

__all__ = [
    "Entry",
    "Part",
    "Results",
    "Rows",
    "begin",
    "interleaved",
    "markdown",
    "median",
    "new_folder",
    "plot",
    "ratios",
    "read",
    "run",
    "shown",
    "spread",
    "times_run",
]

RESULTS = Path(__file__).parent / "results"
TIMEOUT = 1800  # seconds of one run
GRACE = 25  # seconds that a run which has begun may take beyond the deadline

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


class Part(Protocol):
    """One of the benchmarks: a module with these two functions."""

    def measure(self, folder: Path, repetitions: int, batches: int) -> None:
        """Note the conditions (`begin`), and write a row for all that is measured, as soon as it is."""

    def table(self, folder: Path) -> str:
        """The table of the rows that are there; `table.md` and `plot.png` if they are not."""


@dataclass(frozen=True)
class Results:
    """What `measure` has left in a folder."""

    folder: Path
    conditions: dict[str, Any]
    rows: Rows

    @property
    def names(self) -> list[str]:
        """Of the entries that have run, in the order in which they are written down, or else ran first."""
        written = self.folder / "entries.json"
        order = list(json.loads(written.read_text())) if written.exists() else []
        ran = dict.fromkeys(row["entry"] for row in self.rows)
        return [name for name in dict.fromkeys([*order, *ran]) if name in ran]


def run(part: Part, folder: Path, repetitions: int, batches: int, **more: Any) -> None:
    """Measure into `folder`, and print the table: also of what there is where it is stopped or fails."""
    try:
        part.measure(folder, repetitions, batches, **more)
    except BaseException as error:
        try:
            _show(part, folder)
        except Exception as another:
            error.add_note(f"nor could a table be made of what was measured: {another}")
        raise
    _show(part, folder)


def _show(part: Part, folder: Path) -> None:
    if (folder / "rows.jsonl").exists():
        print(f"\n{part.table(folder)}\n{folder}")
    else:
        print(f"{folder}: nothing was measured")


def begin(folder: Path, part: str, **conditions: Any) -> None:
    """Note what a table says or computes with beside the rows."""
    (folder / "conditions.json").write_text(json.dumps({"part": part, **conditions}, indent=1))


def read(folder: Path) -> Results:
    """What was measured into `folder`."""
    conditions, rows = folder / "conditions.json", folder / "rows.jsonl"
    for path in (conditions, rows):
        if not path.is_file():
            raise UserError(f"{folder} has no {path.name}: it is no folder of these benchmarks, or an older one's")
    lines = rows.read_text().splitlines(keepends=True)
    if lines and not lines[-1].endswith("\n"):
        lines.pop()  # killed while it wrote
    return Results(folder, json.loads(conditions.read_text()), [json.loads(line) for line in lines])


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
    first: int = 0,
) -> Rows:
    """Run every entry once a repetition, each in a fresh process; return one row a run.

    Args:
        entries: by their names in the table.
        folder: where `rows.jsonl` grows.
        repetitions: how often each is run.
        batches: that count. Half as many, at least two, warm up before them.
        deadline: on the clock of `time.monotonic`: no run is begun after it, one that has begun is stopped `GRACE`
            seconds later, and what has run is what there is.
        first: the number of the first repetition, where a benchmark does each by itself.

    A row's speeds: `samples_per_second` as it was; `real_tokens_per_second`, by which contenders are compared, as
    batches hold more of them or fewer; `flops_per_second` of the model's mathematics. A row is `overlapped` if other
    work shared the machine; `waited` is what that had of the time in which the run wanted a core.
    """
    # A run's interpreter does not look into the current folder.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(Path(__file__).parents[1]), os.getenv("PYTHONPATH")]))
    steps = batches + max(2, batches // 2)
    recipes = {name: _large_enough(entry, steps) for name, entry in entries.items()}
    if not first:
        _write_entries(entries, recipes, folder)
    rows, names = [], list(entries)
    with Isolation("benchmarks.contenders:measure", (*PRELOAD, "benchmarks.contenders")) as isolation:
        for turn in range(repetitions):
            repetition = first + turn
            # Rotated, so that no entry always follows the same other.
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                left = TIMEOUT if deadline is None else deadline - time.monotonic()
                if left <= 0:
                    print(f"out of time after {len(rows)} of {len(names) * repetitions} runs", file=sys.stderr)
                    return rows
                recipe = recipes[name]
                payload = {
                    "contender": entries[name].contender,
                    "recipe": recipe.to_dict(),
                    "steps": steps,
                    "counted": batches,
                    "seed": 17 + repetition,
                    "arguments": dict(entries[name].arguments),
                }
                outcome = isolation.run(payload, timeout=min(TIMEOUT, left + GRACE))
                row = {"entry": name, "repetition": repetition, "status": outcome.status, "reason": outcome.reason}
                row |= {"overlapped": not outcome.alone, "waited": outcome.waited, **(outcome.value or {})}
                row |= _speeds(row, recipe.batch_size, batches)
                rows.append(row)
                with (folder / "rows.jsonl").open("a") as file:
                    file.write(json.dumps(row) + "\n")
                speed = row["samples_per_second"]
                said = f"{speed:.1f} samples/s" if speed else f"{outcome.status}: {outcome.reason}"
                print(f"[{len(rows)}/{len(names) * repetitions}] {name}: {said}", file=sys.stderr, flush=True)
                if isolation.note and len(rows) == 1:
                    print(isolation.note, file=sys.stderr)
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


def times_run(rows: Rows) -> str:
    """How often each entry was run; where time ran out, some were run once less.

    >>> times_run([{"entry": "a"}, {"entry": "b"}, {"entry": "a"}])
    '1 to 2 repetitions'
    """
    counts = Counter(row["entry"] for row in rows).values()
    few, most = min(counts), max(counts)
    return f"{most} repetition{'s' * (most > 1)}" if few == most else f"{few} to {most} repetitions"


def spread(values: Sequence[float], form: str = ".2f", unit: str = "") -> str:
    """Median [lowest, highest]."""
    if not values:
        return ""
    low, high = min(values), max(values)
    return f"{statistics.median(values):{form}}{unit} [{low:{form}}, {high:{form}}]"


def shown(rows: Rows, entry: str) -> str:
    """The entry's name in a table, marked where other work shared the machine."""
    marked = any(row["entry"] == entry and row.get("overlapped") for row in rows)
    return f"{entry} (beside other work)" if marked else entry


def markdown(
    folder: Path, heading: str, head: Sequence[str], body: Sequence[Sequence[str]], notes: Sequence[str] = ()
) -> str:
    """What it ran on, the heading, the table, and notes below it: written to `table.md` if that is not there yet."""
    where = summary(json.loads((folder / "environment.json").read_text()))
    lines = [f"{where}. {heading}", "", "| " + " | ".join(head) + " |"]
    lines.append("|" + "|".join(["---", *["---:"] * (len(head) - 1)]) + "|")
    lines += ["| " + " | ".join(row) + " |" for row in body]
    text = "\n".join([*lines, *(line for note in notes for line in ("", note))]) + "\n"
    if not (folder / "table.md").exists():
        (folder / "table.md").write_text(text)
    return text


def plot(folder: Path, values: Mapping[str, Sequence[float]], unit: str) -> None:
    """Write `plot.png` if it is not there yet: for each name a bar, its values' median, and the lowest and highest."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    values = {name: found for name, found in values.items() if found}
    if not values or (folder / "plot.png").exists():
        return
    figure, axes = pyplot.subplots(figsize=(9, 0.5 * len(values) + 1.2))
    medians = [statistics.median(found) for found in values.values()]
    low = [m - min(found) for m, found in zip(medians, values.values(), strict=True)]
    high = [max(found) - m for m, found in zip(medians, values.values(), strict=True)]
    colours = ["#0072B2" if name.startswith("ours") else "#999999" for name in values]
    axes.barh(list(values), medians, xerr=[low, high], color=colours, ecolor="#333333")
    axes.invert_yaxis()
    axes.set_xlabel(f"{unit} (median, lowest and highest)")
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(folder / "plot.png", dpi=120)
    pyplot.close(figure)


def _large_enough(entry: Entry, steps: int) -> Recipe:
    """The entry's recipe, with as many samples as that many steps take, at least."""
    recipe = load_recipe(entry.recipe, entry.overrides, check_arguments=False)
    needed, there = steps * recipe.batch_size, recipe.task.train_samples
    if there is None or there >= needed:
        return recipe
    return recipe.model_copy(update={"task": recipe.task.model_copy(update={"train_samples": needed})})


def _speeds(row: dict[str, Any], batch: int, batches: int) -> dict[str, float | None]:
    """What was done in each second of the steps that count."""
    spent = sum((row.get("seconds") or [])[-batches:])
    done = {"samples": batch * batches, "real_tokens": sum((row.get("tokens") or [])[-batches:])}
    done["flops"] = sum((row.get("flops") or [])[-batches:])
    return {f"{name}_per_second": count / spent if spent and count else None for name, count in done.items()}
