"""Is a recipe's quality that of a baseline in another study? For baselines whose trainings take hours.

    python -m benchmarks.quality benchmarks/results/2026-11-23_cpu_quality_256_ten_seeds my_study
    python -m benchmarks.quality BASELINE MEASURED ANOTHER --confidence 0.975

Folders hold the `runs.sqlite` of `composer-speedups ablate`. The first recipe of BASELINE is compared with each of
MEASURED, seed by seed, as a study does it: worse by less than the margins, with that confidence? Speeds are not: the
machine need not be the same. Model, task and length of the training must be.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from composer_speedups.ablation.quality import QUALITY_CONFIDENCE, compare_quality
from composer_speedups.ablation.store import Store
from composer_speedups.errors import UserError
from composer_speedups.recipes.schema import count_and_unit

__all__ = ["compare"]

Results = dict[int, dict[str, Any]]  # by seed
Trained = dict[str, Any]  # what was trained on what, by its key in a recipe

_FOR_SPEED = {"model.attn_implementation", "task.padding", "task.pad_to_multiple_of"}  # they change no sample


def compare(baseline: Sequence[Path], measured: Sequence[Path], confidence: float = QUALITY_CONFIDENCE) -> str:
    """A table of medians and bounds, and the verdict on each recipe: of all its seeds, in whichever folder they are."""
    (reference, (there, expected)), *_ = _together(baseline).items()
    head = [
        "recipe",
        "seeds",
        "accuracy",
        "final loss",
        "accuracy worse by at most",
        "loss worse by at most",
        "verdict",
    ]
    rows = [head, ["---"] * len(head)]
    for recipe, (trained, results) in _together(measured).items():
        quality = compare_quality(results, expected, confidence=confidence)
        both = sorted(results.keys() & expected.keys())
        if not both:
            have = [", ".join(map(str, sorted(x))) or "none" for x in (results, expected)]
            raise UserError(f"{recipe} has no run with a seed of the baseline: {have[0]}, and there {have[1]}")
        # What only one of them knows was added by a version in between.
        if other := next((key for key in there if key in trained and trained[key] != there[key]), None):
            raise UserError(
                f"{recipe} cannot be compared with the baseline, {reference}: its {other} is {trained[other]}, "
                f"and there {there[other]}"
            )
        _refuse_other_texts(recipe, results, expected)
        if len(rows) == 2:
            rows.append([reference, str(len(both)), *_medians(expected, both), "", "", "baseline"])
        if recipe == reference and results == expected:  # the same trainings
            continue
        bounds = [
            f"{bound['high']:.4f} ({bound['margin']:.3f})"
            if (bound := quality.worse_by.get(key)) and bound["high"] is not None
            else "-"
            for key in ("eval_accuracy", "final_loss")
        ]
        rows.append([recipe, str(len(both)), *_medians(results, both), *bounds, quality.verdict])
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    return f"Medians over seeds; bounds with {confidence:.1%} confidence, in brackets the margins.\n\n{table}"


def _results(folder: Path) -> dict[str, tuple[Trained, Results]]:
    with Store(folder / "runs.sqlite", create=False) as store:
        contents = {path: mark.content for path, mark in store.inputs().items()}
        found: dict[str, tuple[Trained, Results]] = {
            name: (_trained(recipe, contents), {}) for name, recipe in store.recipes().items()
        }
        filled = {name for name, recipe in store.recipes().items() if recipe["task"]["padding"] == "max_length"}
        for run in store.runs():
            if run.status == "ok":
                # Of batches with lengths of their own the share tells how they were made.
                share = run.result.get("padding_share") if run.recipe in filled else None
                found[run.recipe][1][run.seed] = run.result | {"padding_share": share, "study": str(folder.resolve())}
    if not any(results for _, results in found.values()):
        raise UserError(f"{folder} has no run that ended well")
    return found


def _refuse_other_texts(recipe: str, results: Results, expected: Results) -> None:
    """Texts collected from installed packages (the task docstrings) are others under another Python.

    They are kept nowhere; but where all rows are filled up to one length, the share of padding tells. In one study they
    are the same, and batches of other sizes may leave other texts over.
    """
    for seed in sorted(results.keys() & expected.keys()):
        if results[seed].get("study") == expected[seed].get("study"):
            continue
        shares = [x[seed].get("padding_share") for x in (results, expected)]
        if None not in shares and shares[0] != shares[1]:
            raise UserError(
                f"{recipe} was trained on other texts than the baseline: {shares[0]:.4%} of its tokens were padding, "
                f"and there {shares[1]:.4%}. Train both where the same packages are installed"
            )


def _together(folders: Sequence[Path]) -> dict[str, tuple[Trained, Results]]:
    found: dict[str, tuple[Trained, Results]] = {}
    for folder in folders:
        for recipe, (trained, results) in _results(folder).items():
            before, seeds = found.setdefault(recipe, (trained, {}))
            if trained != before:
                raise UserError(f"{recipe} was trained in another way in {folder} than in {folders[0]}")
            if both := sorted(results.keys() & seeds.keys()):
                raise UserError(f"{recipe} has the seed {both[0]} twice: also in {folder}")
            seeds |= results
    return found


def _trained(recipe: dict[str, Any], contents: dict[str, str]) -> Trained:
    """What decides what is learnt: model, task and duration, not speed-ups, batch and learning rate.

    Args:
        recipe: resolved.
        contents: of files and folders, by their path: another machine may have them elsewhere.
    """
    found: Trained = {"model.name": None, "task.name": None}  # the first difference is told
    for part in ("model", "task"):
        found |= {f"{part}.{key}": value for key, value in recipe[part].items() if f"{part}.{key}" not in _FOR_SPEED}
    for key in ("model.name", "task.path", "task.eval_path"):
        found[key] = contents.get(found.get(key), found.get(key))
    found["duration"] = recipe["duration"]
    if recipe["duration"].endswith("ba"):
        found["duration"] = f"{count_and_unit(recipe['duration'])[0] * recipe['batch_size']:g}sp"
    return found


def _medians(results: Results, seeds: list[int]) -> list[str]:
    return [f"{statistics.median(results[s][key] for s in seeds):.4f}" for key in ("eval_accuracy", "final_loss")]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("baseline", type=Path, metavar="BASELINE", help="folder of the study with the baseline")
    parser.add_argument("measured", type=Path, nargs="+", metavar="MEASURED", help="folders of studies of the recipes")
    parser.add_argument(
        "--confidence", type=float, default=QUALITY_CONFIDENCE, help="of not being worse (default: %(default)s)"
    )
    given = parser.parse_args(arguments)
    if not 0.5 < given.confidence < 1:
        raise UserError(f"--confidence {given.confidence:g} must lie between 0.5 and 1, such as 0.95")
    print(compare([given.baseline], given.measured, given.confidence))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        sys.exit(f"error: {error}")
