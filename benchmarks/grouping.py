"""What do batches of like lengths cost in quality: ours, and those of the Hugging Face Trainer (`group_by_length`)?

One study of whole trainings of the small BERT, each seed with three orders of the same texts: shuffled; as
`LengthGroupedBatches` has them; and as transformers' `LengthGroupedSampler`, the best peer's, which leaves the batches
of a pool in the order of their lengths. All else is `cpu/fastest`, which computes on no padding: nothing but the order
differs. Of other models and texts, such as those whose lengths say nothing of their class (`balanced_texts.py`):

    python -m benchmarks.run grouping --batches 288 --set model.name=FOLDER model.pretrained=true model.config={} \
        task.name=text task.path=balanced.csv learning_rate=2e-4
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.harness import begin, markdown, read, spread
from composer_speedups.ablation.jobs import PRELOAD
from composer_speedups.ablation.study import Entries, Settings, Study, run_study
from composer_speedups.hardware import suite_section
from composer_speedups.recipes import load_recipe

__all__ = ["measure", "table", "train"]

_FIRST = 500  # of the seeds
_LENGTH = 128
_SHUFFLED, _OURS, _PEERS = "shuffled", "length_grouped_batches", "transformers_sampler"
_ENTRIES = Entries(train="benchmarks.grouping:train", preload=(*PRELOAD, "benchmarks.grouping"))


def train(payload: dict[str, Any], report: Callable[[Any], None]) -> Any:
    """A study's run, in a fresh process, with transformers' order where the recipe has that name."""
    from composer_speedups.ablation import jobs
    from composer_speedups.batches.plans import LengthGroupedSampler

    if payload["recipe"]["name"] == _PEERS:
        LengthGroupedSampler.__iter__ = _as_transformers  # type: ignore[method-assign]  # of this process alone
    return jobs.train(payload, report)


def _as_transformers(self: Any) -> Iterator[int]:
    import torch
    from transformers.trainer_pt_utils import LengthGroupedSampler

    generator = torch.Generator().manual_seed(self.seed + self.epoch)
    return iter(LengthGroupedSampler(self.batch_size, lengths=self.lengths.tolist(), generator=generator))


def measure(folder: Path, repetitions: int, batches: int, changes: Sequence[str] = ()) -> None:
    """Train with `repetitions` seeds. `batches` is the steps of a run; `changes` are made to the recipe of all."""
    name = "cpu/fastest_fp32" if suite_section() == "cpu_without_bf16" else "cpu/fastest"
    sizes = (f"task.max_length={_LENGTH}", f"duration={batches}ba", *changes)
    plain = load_recipe(name, sizes, check_arguments=False)
    begin(folder, "grouping", recipe=name, length=plain.task.max_length, steps=batches, changes=list(changes))
    grouped = load_recipe(name, (*sizes, "speedups.length_grouped_batches={}"), check_arguments=False)
    rows = {_SHUFFLED: plain, _OURS: grouped, _PEERS: grouped}
    recipes = [recipe.model_copy(update={"name": name}) for name, recipe in rows.items()]
    study = Study(recipes, tuple(range(_FIRST, _FIRST + repetitions)), folder / "study", "grouping")
    result = run_study(study, Settings(inspect=False, entries=_ENTRIES), console=Console(file=io.StringIO()))
    with (folder / "rows.jsonl").open("w") as file:
        for row in result.findings.rows:
            file.write(json.dumps({"entry": row["recipe"]} | row, default=str) + "\n")


def table(folder: Path) -> str:
    found = read(folder)
    of = found.conditions
    # The first study knew no changes: it was of the recipe's own model, which has random weights.
    changed = f". Every recipe with {', '.join(of['changes'])}" if of.get("changes") else ", from random weights"
    heading = (
        f"{of['recipe']}, {of['steps']} steps of texts cut at {of['length']} tokens{changed}; median "
        "[lowest, highest]; how much worse, seed by seed, in the median: of the accuracy in points."
    )
    head = ("batches", "seeds", "accuracy", "worse by", "final loss", "worse by", "quality")
    return markdown(folder, heading, head, [_line(row) for row in found.rows])


def _line(row: dict[str, Any]) -> tuple[str, ...]:
    runs = [run for run in row["runs"] if run["status"] == "ok"]
    cells = []
    for key, scale, digits in (("eval_accuracy", 100, 1), ("final_loss", 1, 3)):
        worse = row["worse_by"].get(key, {}).get("value")
        cells += [
            spread([run[key] for run in runs], ".3f"),
            "" if worse is None else f"{scale * worse:.{digits}f}",
        ]
    return (
        row["recipe"],
        str(len(runs)),
        *cells,
        row["quality_verdict"] if runs else f"{row['status']}: {row['reason']}",
    )
