"""Write what a study has found so far: `results.json`, tables, plots, and the page."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from composer_speedups.ablation import interactions
from composer_speedups.ablation.charts import charts
from composer_speedups.ablation.drift import drift
from composer_speedups.ablation.report import report_html
from composer_speedups.ablation.row import Row
from composer_speedups.ablation.rows import build_rows
from composer_speedups.ablation.statistics import CONFIDENCE
from composer_speedups.ablation.store import Run, Store
from composer_speedups.ablation.tables import csv_table, latex_table, markdown_table
from composer_speedups.ablation.words import conditions, drift_lines, sentence
from composer_speedups.files import whole
from composer_speedups.hardware import peaks_at_work, same_machine

__all__ = ["Findings", "findings", "write_all"]


@dataclass
class Findings:
    """A study as it stands: everything that tables, plots and the page show."""

    study: dict[str, Any]
    environment: dict[str, Any]
    recipes: dict[str, dict[str, Any]]
    runs: list[Run]
    rows: list[Row]
    conditions: list[str]
    sentence: str


def findings(store: Store) -> Findings:
    """Read the store and judge."""
    study, recipes, runs = store.study(), store.recipes(), store.runs()
    environments = store.environments()
    environment = next(iter(environments.values()), {})
    kind = environment.get("hardware", "cpu")
    peaks = peaks_at_work(study.get("peaks") or {}, environment)
    rows = build_rows(recipes, runs, study["baseline"], peaks, hardware=kind)
    by_name = {row["recipe"]: row for row in rows}
    for one in interactions.interactions(recipes, runs, study["baseline"]):
        by_name[one.pair]["interaction"] = asdict(one) | {"text": interactions.sentence(one)}
    lines = conditions(environment, study, rows, recipes)
    good = [run for run in runs if run.status == "ok" and run.started and run.result.get("samples_per_second")]
    good.sort(key=lambda run: run.started or 0.0)
    trend = drift((run.recipe, run.seed, run.started or 0.0, run.result["samples_per_second"]) for run in good)
    lines += _mixed(runs, environments)
    lines += drift_lines(trend, [r.result["samples_per_second"] for r in good if r.recipe == study["baseline"]])
    study = study | {"drift": None if trend is None else asdict(trend), "confidence": CONFIDENCE}
    return Findings(study, environment, recipes, runs, rows, lines, sentence(rows))


def _mixed(runs: Sequence[Run], environments: Mapping[int, dict[str, Any]]) -> list[str]:
    """What the runs that count do not have in common: a study may be gone on with elsewhere, or after a change."""
    used = [
        environments[n] for n in dict.fromkeys(r.environment for r in runs if r.status == "ok") if n in environments
    ]
    differences = [text for one in used[1:] if (text := same_machine(used[0], one))]
    commits = list(dict.fromkeys(str((facts.get("commit") or {}).get("id"))[:12] for facts in used))
    lines = [f"Not all runs were made on the same machine and stack: {differences[0]}"] if differences else []
    if len(commits) > 1:
        lines.append(f"Runs were made with {len(commits)} versions of this package: commits {', '.join(commits)}")
    return lines


def write_all(store: Store, folder: Path, pictures: bool = True) -> Findings:
    """Write every output into `folder`; each file is replaced as a whole, so none is ever half written.

    Args:
        store: of the study.
        folder: where the files go.
        pictures: the plots as files, too; they take a second, and the page has them anyway.
    """
    found = findings(store)
    results = {
        "environment": found.environment,
        "study": found.study | {"conditions": found.conditions, "verdict": found.sentence},
        "rows": found.rows,
    }
    replace(folder / "results.json", json.dumps(_finite(results), indent=1, allow_nan=False) + "\n")
    replace(
        folder / "table.md", f"# {found.study.get('name', 'study')}\n\n" + markdown_table(found.rows, found.conditions)
    )
    replace(folder / "table.csv", csv_table(found.rows))
    replace(folder / "table.tex", latex_table(found.rows, " ".join(f"{line}." for line in found.conditions)))
    drawings = charts(found.rows, found.runs)
    replace(folder / "report.html", report_html(found, drawings))
    if pictures:
        (folder / "plots").mkdir(exist_ok=True)
        for name, drawing in drawings.items():
            replace(folder / "plots" / f"{name}.svg", drawing.svg())
            replace(folder / "plots" / f"{name}.png", drawing.png())
    return found


def replace(path: Path, content: str | bytes) -> None:
    """Write a file so that a reader sees the old content or the new one, never a part."""
    with whole(path) as temporary:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)


def _finite(value: Any) -> Any:
    """JSON knows no NaN: what is not finite becomes null (`finite` and `stable` tell of it)."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
