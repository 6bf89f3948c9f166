"""Are a study's verdicts to be believed? Real trainings whose truth is known.

- A/A: the same recipe under two names, twenty studies of three seeds. It may claim a difference in one of them.
  That tests the speeds: equal seeds make equal losses, so there is no quality to be wrong about.
- Planted slow-downs: recipes that sleep for a tenth and for half of each step, five seeds. Whether these can show the
  first depends on the machine's noise (its interval says so); the second must be found.
- A planted loss of quality: a recipe whose learning rate is a hundred times what it should be, five seeds.

The machine may do other things meanwhile: that is what a user's does.
"""

from __future__ import annotations

import io
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.harness import begin, markdown, read
from composer_speedups.ablation.jobs import PRELOAD
from composer_speedups.ablation.study import Entries, Settings, Study, run_study
from composer_speedups.hardware import suite_section
from composer_speedups.recipes import Recipe, load_recipe

__all__ = ["measure", "table", "train"]

_SEEDS = (17, 18, 19)
_PLANTED_SEEDS = (17, 18, 19, 20, 21)
_AA = "aa_"  # begins the names of studies of a recipe with itself
_SLEEPS = {"slept_a_tenth": 0.1, "slept_half": 0.5}  # name of the recipe: share of a step
# name of a study with a planted fault -> in the table
_WORDS = {name: f"sleeps for {share:.0%} of a step" for name, share in _SLEEPS.items()}
_WORDS["wild"] = "a hundred times the learning rate"
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
    from composer_speedups.measure import Measurement

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
    """Make `repetitions` A/A studies and the planted ones. `batches` is the steps of a run."""
    begin(folder, "verdicts", steps=batches)
    recipe = "demo/fp32" if suite_section() == "cpu_without_bf16" else "demo/bf16"
    base = load_recipe(recipe, (*_SMALL, f"duration={batches}ba"), check_arguments=False)
    for number in range(repetitions):
        _study(folder, f"{_AA}{number:02d}", base, _named(base, "the_same"))
    for name in _SLEEPS:
        _study(folder, name, base, _named(base, name), _PLANTED_SEEDS)
    wild = _named(base, "wild").model_copy(update={"learning_rate": 100 * base.learning_rate})
    _study(folder, "wild", base, wild, _PLANTED_SEEDS)


def table(folder: Path) -> str:
    found = read(folder)
    alike = [row for row in found.rows if row["study"].startswith(_AA)]
    planted = {row["study"]: row for row in found.rows if row not in alike}
    claims, steps = sum(_claims_a_difference(row) for row in alike), found.conditions["steps"]
    faults = f"{_planted(planted)} {len(_PLANTED_SEEDS)} seeds each." if planted else "No fault was planted."
    heading = (
        f"{len(alike)} A/A studies of {len(_SEEDS)} seeds claimed a difference {claims} times (in speed: equal seeds "
        f"make equal losses). {faults} Runs of {steps} steps of a small BERT."
    )
    return markdown(folder, heading, ("study", "speed-up", "interval", "speed", "quality"), map(_line, found.rows))


def _claims_a_difference(row: dict[str, Any]) -> bool:
    """Whether an A/A study's row says what cannot be true."""
    return row["speed_verdict"] != "no difference shown" or row["quality_verdict"] in _QUALITY_LOST


def _planted(rows: dict[str, dict[str, Any]]) -> str:
    """Which of the planted faults were found, by name."""
    found: list[str] = []
    missed: list[str] = []
    for name, row in rows.items():
        slept = name in _SLEEPS
        right = row["speed_verdict"] == "slower" if slept else row["quality_verdict"] in _QUALITY_LOST
        wrong = " (called faster)" if slept and row["speed_verdict"] == "faster" else ""
        (found if right else missed).append(name + wrong)
    parts = [f"{verb}: {', '.join(names)}" for verb, names in (("found", found), ("NOT found", missed)) if names]
    return f"Planted faults {'; '.join(parts)}."


def _named(recipe: Recipe, name: str) -> Recipe:
    return recipe.model_copy(update={"name": name})


def _study(folder: Path, name: str, base: Recipe, other: Recipe, seeds: tuple[int, ...] = _SEEDS) -> None:
    """Write the row of `other` in a study against `base`."""
    console = Console(file=io.StringIO())
    study = Study([_named(base, "base"), other], seeds, folder / "studies" / name, name)
    result = run_study(study, Settings(inspect=False, entries=_ENTRIES), console=console)
    row = {"study": name} | next(row for row in result.findings.rows if row["recipe"] == other.name)
    with (folder / "rows.jsonl").open("a") as file:
        file.write(json.dumps(row, default=str) + "\n")
    print(*_line(row), sep=" | ", flush=True)


def _line(row: dict[str, Any]) -> tuple[str, ...]:
    study = row["study"]
    name = f"A/A {int(study.removeprefix(_AA)) + 1}" if study.startswith(_AA) else _WORDS[study]
    interval = row.get("speedup_interval") or ()
    shown = f"{row['speedup']:.3f}x" if row.get("speedup") else row["status"]
    between = f"[{', '.join(f'{end:.3f}' for end in interval)}]" if interval else ""
    return (name, shown, between, row["speed_verdict"], row["quality_verdict"])
