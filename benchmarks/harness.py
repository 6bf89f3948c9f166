"""What all benchmarks share: interleaved runs in fresh processes, one line of JSON for each, a table and a plot.

A part (`peers.py` and the others) has `measure`, which fills a folder of results, and `table`, which reads it: so a
table can be made anew, or for the first time where the measurement was cut off. The folder holds `environment.json`,
`conditions.json`, `entries.json`, `rows.jsonl`, `table.md` and `plot.png`, and what those runs said that failed in
`failed.txt`. It is written once and never edited: a second run needs another folder.
"""

from __future__ import annotations

import datetime
import json
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from composer_speedups.ablation.jobs import PRELOAD
from composer_speedups.errors import UserError
from composer_speedups.hardware import environment, hardware, summary
from composer_speedups.isolation.isolate import Isolation, Outcome
from composer_speedups.recipes import Recipe, load_recipe

__all__ = [
    "Entry",
    "Part",
    "Results",
    "Rows",
    "begin",
    "interleaved",
    "keep_words",
    "large_enough",
    "markdown",
    "median",
    "new_folder",
    "plot",
    "ratios",
    "read",
    "refuse_results",
    "rows_in",
    "run",
    "shown",
    "spread",
    "times_run",
    "turns",
]

RESULTS = Path(__file__).parent / "results"
# Seconds of one run. On a GPU steps are milliseconds, and what takes longest is to compile with nothing in the caches:
# the Hugging Face Trainer compiles its model three times (one length, most lengths, short ones), which on 16 cores was
# not done after 205 s, beside other work (`results/2026-11-27_h200_peers_compiled`, method.txt). What takes longer
# hangs, on a machine lent for minutes.
TIMEOUT = {"cpu": 1800, "cuda": 300}
EARLY = 3  # repetitions of what decides before the rest has its first
GRACE = 25  # seconds that a run which has begun may take beyond the deadline

Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Entry:
    """One thing that is measured: a contender of `contenders.py`, doing what a recipe says.

    `overrides` are a recipe's, as on the command line; `arguments` are the contender's own. At most `batches` count,
    where steps are so slow that a few of them tell as much.
    """

    contender: str
    recipe: str
    overrides: tuple[str, ...] = ()
    arguments: Mapping[str, Any] = field(default_factory=dict)
    batches: int | None = None

    def counted(self, batches: int) -> int:
        """How many of its batches count, where `batches` of the others do."""
        return batches if self.batches is None else min(self.batches, batches)

    def steps(self, batches: int) -> int:
        """With those to warm up."""
        return self.counted(batches) + max(2, self.counted(batches) // 2)


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
    conditions = folder / "conditions.json"
    for path in (conditions, folder / "rows.jsonl"):
        if not path.is_file():
            raise UserError(f"{folder} has no {path.name}: it is no folder of these benchmarks, or an older one's")
    return Results(folder, json.loads(conditions.read_text()), rows_in(folder))


def rows_in(folder: Path) -> Rows:
    """What is in `rows.jsonl`, if that is there."""
    path = folder / "rows.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    if lines and not lines[-1].endswith("\n"):
        lines.pop()  # killed while it wrote
    return [json.loads(line) for line in lines]


def new_folder(what: str, out: Path | None) -> Path:
    """`out`, or today's folder for `what`; refused if it holds results already."""
    folder = out or RESULTS / f"{datetime.date.today():%Y-%m-%d}_{hardware()}_{what}"
    refuse_results(folder / "rows.jsonl")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "environment.json").write_text(json.dumps(environment(), indent=1, default=str))
    return folder


def refuse_results(path: Path) -> None:
    """End the command if there is `path` already."""
    if path.exists():
        where = path.parent
        raise SystemExit(f"error: {where} holds results already, and results are never edited. Name another --out")


def turns(names: Sequence[str], repetitions: int, urgent: int = 0) -> Iterator[tuple[int, str]]:
    """Who runs in which repetition, in the order of their runs: everybody once a repetition.

    Rotated, so that no entry always follows the same other. The first `urgent` entries have `EARLY` repetitions before
    the others have their first, and these as many before all go on together.

    >>> list(turns("abc", 2))
    [(0, 'a'), (0, 'b'), (0, 'c'), (1, 'b'), (1, 'c'), (1, 'a')]
    """
    first, others, early = names[:urgent], names[urgent:], min(EARLY, repetitions)
    early = early if first and others else 0
    for some, numbers in ((first, range(early)), (others, range(early)), (names, range(early, repetitions))):
        for n in numbers:
            start = n % len(some)
            yield from ((n, name) for name in [*some[start:], *some[:start]])


def interleaved(
    entries: Mapping[str, Entry],
    folder: Path,
    *,
    repetitions: int,
    batches: int,
    deadline: float | None = None,
    first: int = 0,
    urgent: int = 0,
    after_each: Callable[[], object] = lambda: None,
) -> Rows:
    """Run every entry once a repetition, each in a fresh process; return one row a run.

    Args:
        entries: by their names in the table.
        folder: where `rows.jsonl` grows.
        repetitions: how often each is run.
        batches: that count, or fewer where an entry says so. Half as many, at least two, warm up before them.
        deadline: on the clock of `time.monotonic`: no run is begun after it, one that has begun is stopped `GRACE`
            seconds later, and what has run is what there is.
        first: the number of the first repetition, where a benchmark does each by itself.
        urgent: so many of the entries, the first ones, come before the others (`turns`).
        after_each: called after each run.

    A row's speeds: `samples_per_second` as it was; `real_tokens_per_second`, by which contenders are compared, as
    batches hold more of them or fewer; `flops_per_second` of the model's mathematics. A row is `overlapped` if other
    work shared the machine; `waited` is what that had of the time in which the run wanted a core.
    """
    # A run's interpreter does not look into the current folder.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(Path(__file__).parents[1]), os.getenv("PYTHONPATH")]))
    recipes = {name: large_enough(entry, entry.steps(batches)) for name, entry in entries.items()}
    if not first:
        _write_entries(entries, recipes, folder)
    rows, names = [], list(entries)
    with Isolation("benchmarks.contenders:measure", (*PRELOAD, "benchmarks.contenders")) as isolation:
        for turn, name in turns(names, repetitions, urgent):
            repetition, limit = first + turn, TIMEOUT[hardware()]
            left = limit if deadline is None else deadline - time.monotonic()
            if left <= 0:
                print(f"out of time after {len(rows)} of {len(names) * repetitions} runs", file=sys.stderr)
                return rows
            entry, recipe = entries[name], recipes[name]
            steps, counted = entry.steps(batches), entry.counted(batches)
            payload = {
                "contender": entry.contender,
                "recipe": recipe.to_dict(),
                "steps": steps,
                "counted": counted,
                "seed": 17 + repetition,
                "arguments": dict(entry.arguments),
            }
            outcome = isolation.run(payload, timeout=min(limit, left + GRACE))
            made = len((outcome.value or {}).get("seconds") or [])
            if outcome.status == "ok" and made < counted:
                outcome = replace(outcome, status="failed", reason=f"only {made} of {steps} steps were made")
            row = {"entry": name, "repetition": repetition, "status": outcome.status, "reason": outcome.reason}
            row |= {"overlapped": not outcome.alone, "waited": outcome.waited, **(outcome.value or {})}
            row |= {"counted": counted} | _speeds(row, recipe.batch_size, counted)
            rows.append(row)
            with (folder / "rows.jsonl").open("a") as file:
                file.write(json.dumps(row) + "\n")
            if outcome.status != "ok":
                keep_words(folder, f"{name}, repetition {repetition}", outcome)
            speed = row["samples_per_second"]
            said = f"{speed:.1f} samples/s" if speed else f"{outcome.status}: {outcome.reason}"
            print(f"[{len(rows)}/{len(names) * repetitions}] {name}: {said}", file=sys.stderr, flush=True)
            if isolation.note and len(rows) == 1:
                print(isolation.note, file=sys.stderr)
            after_each()
    return rows


def keep_words(folder: Path, what: str, outcome: Outcome) -> None:
    """Append to `failed.txt` what a run that failed has printed, with its traceback: a lent machine cannot be asked."""
    with (folder / "failed.txt").open("a") as file:
        file.write(f"=== {what}: {outcome.status}: {outcome.reason}\n{outcome.log}\n")


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


def large_enough(entry: Entry, steps: int) -> Recipe:
    """The entry's recipe, with a batch more than that many steps take, at least.

    Whoever looks a batch ahead would otherwise find the end, and shut its workers down, before the last step is over.
    """
    recipe = load_recipe(entry.recipe, entry.overrides, check_arguments=False)
    needed, there = (steps + 1) * recipe.batch_size, recipe.task.train_samples
    if there is None or there >= needed:
        return recipe
    return recipe.model_copy(update={"task": recipe.task.model_copy(update={"train_samples": needed})})


def _speeds(row: dict[str, Any], batch: int, batches: int) -> dict[str, float | None]:
    """What was done in each second of the steps that count; None if there were not as many."""
    seconds = (row.get("seconds") or [])[-batches:]
    spent = sum(seconds) if len(seconds) == batches else 0
    done = {"samples": batch * batches, "real_tokens": sum((row.get("tokens") or [])[-batches:])}
    done["flops"] = sum((row.get("flops") or [])[-batches:])
    return {f"{name}_per_second": count / spent if spent and count else None for name, count in done.items()}
