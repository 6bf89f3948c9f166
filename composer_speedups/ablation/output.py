"""Write what a study has found so far: `results.json`, `table.md`, `table.csv`, `report.html`."""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from composer_speedups.ablation.report import report_html
from composer_speedups.ablation.rows import build_rows
from composer_speedups.ablation.store import Run, Store
from composer_speedups.ablation.tables import conditions, csv_table, markdown_table, sentence

__all__ = ["Findings", "findings", "write_all"]


@dataclass
class Findings:
    """A study as it stands: everything that tables, plots and the page show."""

    study: dict[str, Any]
    environment: dict[str, Any]
    recipes: dict[str, dict[str, Any]]
    runs: list[Run]
    rows: list[dict[str, Any]]
    conditions: list[str]
    sentence: str


def findings(store: Store) -> Findings:
    """Read the store and judge."""
    study, recipes, runs = store.study(), store.recipes(), store.runs()
    environments = store.environments()
    environment = next(iter(environments.values()), {})
    rows = build_rows(recipes, runs, study["baseline"], study.get("peaks"), hardware=environment.get("hardware", "cpu"))
    lines = conditions(environment, study, rows, recipes)
    return Findings(study, environment, recipes, runs, rows, lines, sentence(rows))


def write_all(store: Store, folder: Path) -> Findings:
    """Write every output into `folder`; each file is replaced as a whole, so none is ever half written."""
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
    replace(folder / "report.html", report_html(found))
    return found


def replace(path: Path, text: str) -> None:
    """Write a file so that a reader sees the old text or the new one, never a part."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def _finite(value: Any) -> Any:
    """JSON knows no NaN: what is not finite becomes null (`finite` and `stable` tell of it)."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
