"""Are a study's verdicts to be believed? Real trainings whose truth is known.

Each repetition is a study as users make them, of nine rows and three seeds against one baseline:

- The baseline itself under five other names. Whatever is claimed of these is false. It tests the speeds: equal seeds
  make equal losses, so there is no quality to be wrong about.
- Planted slow-downs: recipes that sleep for a tenth and for half of each step. Whether three seeds can show the first
  depends on the machine's noise (its interval says so); the second must be found.
- A planted loss of quality: a recipe whose learning rate is a hundred times what it should be.

The machine may do other things meanwhile: that is what a user's does.
"""

from __future__ import annotations

import io
import json
import statistics
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.harness import Rows, begin, markdown, read, spread
from composer_speedups.ablation.jobs import PRELOAD
from composer_speedups.ablation.study import Entries, Settings, Study, run_study
from composer_speedups.hardware import suite_section
from composer_speedups.recipes import Recipe, load_recipe

__all__ = ["measure", "table", "train"]

_SEEDS = (17, 18, 19)
_SAME = "the_same"  # begins the names of the baseline's copies
_COPIES = 5
_SLEEPS = {"slept_a_tenth": 0.1, "slept_half": 0.5}  # name of the recipe: share of a step
_WILD = "wild"
_WORDS = {_SAME: "the baseline under another name", _WILD: "a hundred times the learning rate"}
_WORDS |= {name: f"sleeps for {share:.0%} of a step" for name, share in _SLEEPS.items()}
_QUALITY_LOST = ("unstable", "quality not shown to hold")
# Small enough for two seconds a run; large enough to learn something in it.
_SMALL = (
    "model.config.num_hidden_layers=2", "model.config.hidden_size=128", "model.config.num_attention_heads=2",
    "model.config.intermediate_size=512", "task.train_samples=1600", "task.eval_samples=400",
)  # fmt: skip
_ENTRIES = Entries(train="benchmarks.verdicts:train", preload=(*PRELOAD, "benchmarks.verdicts"))


def train(payload: dict[str, Any], report: Callable[[Any], None]) -> Any:
    """A study's run, in a fresh process; the recipes named in `_SLEEPS` sleep in each step."""
    from composer_speedups.ablation import jobs
    from composer_speedups.measurement.measure import Measurement

    share = _SLEEPS.get(payload["recipe"]["name"], 0.0)
    if share:
        original = Measurement.batch_end

        def batch_end(self: Measurement, state: Any, logger: Any) -> None:
            began, self._slept_from = getattr(self, "_slept_from", None), time.perf_counter()
            if began is not None:
                time.sleep(share * (self._slept_from - began))
                self._slept_from = time.perf_counter()
            original(self, state, logger)

        Measurement.batch_end = batch_end  # type: ignore[method-assign]  # of this process alone
    return jobs.train(payload, report)


def measure(folder: Path, repetitions: int, batches: int) -> None:
    """Make `repetitions` studies. `batches` is the steps of a run."""
    begin(folder, "verdicts", steps=batches, seeds=len(_SEEDS))
    recipe = "demo/fp32" if suite_section() == "cpu_without_bf16" else "demo/bf16"
    base = load_recipe(recipe, (*_SMALL, f"duration={batches}ba"), check_arguments=False)
    others = [_named(base, f"{_SAME}_{number}") for number in range(1, _COPIES + 1)]
    others += [_named(base, name) for name in _SLEEPS]
    others.append(_named(base, _WILD).model_copy(update={"learning_rate": 100 * base.learning_rate}))
    for number in range(1, repetitions + 1):
        _study(folder, f"study_{number:02d}", [_named(base, "base"), *others])


def table(folder: Path) -> str:
    found = read(folder)
    kinds = {kind: [row for row in found.rows if _kind(row) == kind] for kind in (_SAME, *_SLEEPS, _WILD)}
    steps, seeds = found.conditions["steps"], found.conditions["seeds"]
    same = [row for row in kinds[_SAME] if row["speed_verdict"] != "not judged"]
    unjudged = len(kinds[_SAME]) - len(same)
    studies = len({row["study"] for row in found.rows})
    heading = (
        f"{studies} studies of nine rows and {seeds} seeds: a difference was claimed {sum(map(_claims, same))} times "
        f"in {len(same)} comparisons of a recipe with itself{f' ({unjudged} more were not judged)' * bool(unjudged)}. "
        f"Runs of {steps} steps of a small BERT."
    )
    head = ("row", "comparisons", "speed-up, median [lowest, highest]", "median interval", "speed", "quality")
    return markdown(folder, heading, head, [_line(kind, rows) for kind, rows in kinds.items()])


def _kind(row: dict[str, Any]) -> str:
    return _SAME if row["recipe"].startswith(_SAME) else row["recipe"]


def _claims(row: dict[str, Any]) -> bool:
    """Whether something is claimed, in speed or quality, that cannot be true of a recipe against itself."""
    return row["speed_verdict"] in ("faster", "slower") or row["quality_verdict"] in _QUALITY_LOST


def _named(recipe: Recipe, name: str) -> Recipe:
    return recipe.model_copy(update={"name": name})


def _study(folder: Path, name: str, recipes: list[Recipe]) -> None:
    """Write the rows of a study against the first of the recipes."""
    study = Study(recipes, _SEEDS, folder / "studies" / name, name)
    result = run_study(study, Settings(inspect=False, entries=_ENTRIES), console=Console(file=io.StringIO()))
    with (folder / "rows.jsonl").open("a") as file:
        for row in result.findings.rows[1:]:
            file.write(json.dumps({"study": name} | row, default=str) + "\n")
            print(name, row["recipe"], _ratio(row), row["speed_verdict"], row["quality_verdict"], sep=" | ", flush=True)


def _ratio(row: dict[str, Any]) -> str:
    if not row.get("speedup_interval"):
        return str(row["status"])
    low, high = row["speedup_interval"]
    return f"{row['speedup']:.3f}x [{low:.3f}, {high:.3f}]"


def _line(kind: str, rows: Rows) -> tuple[str, ...]:
    intervals = [row["speedup_interval"] for row in rows if row.get("speedup_interval")]
    low, high = (statistics.median(ends) for ends in zip(*intervals, strict=True)) if intervals else (None, None)
    return (
        _WORDS[kind],
        str(len(rows)),
        spread([row["speedup"] for row in rows if row.get("speedup")], unit="x"),
        "" if low is None else f"{low:.2f} to {high:.2f}",
        _counted(row["speed_verdict"] for row in rows),
        _counted(row["quality_verdict"] for row in rows),
    )


def _counted(verdicts: Any) -> str:
    return ", ".join(f"{verdict} ({count})" for verdict, count in Counter(verdicts).most_common())
