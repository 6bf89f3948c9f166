"""Two studies beside each other, row by row: two machines, two versions, before and after a change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from composer_speedups.ablation.names import short_names
from composer_speedups.ablation.pairs import speed_key
from composer_speedups.ablation.row import Row
from composer_speedups.ablation.statistics import CONFIDENCE, compare_speed
from composer_speedups.recipes.schema import DESCRIPTIVE, changes
from composer_speedups.recipes.yaml import inline

if TYPE_CHECKING:
    from rich.table import Table

    from composer_speedups.ablation.output import Findings

__all__ = ["caption", "compare", "comparison_table", "differences"]


def compare(one: Findings, other: Findings) -> list[dict[str, Any]]:
    """A row for each recipe of either study.

    `ratio` is the second's speed over the first's, over the seeds that both have, judged as rows are within a
    study. The two were not made in turns, so it tells of the machines and versions together, and of what the
    machines were busy with; the speed-ups, each against its own baseline, are free of that. Recipes that regroup
    samples by length are compared by their real tokens, if both studies have them.
    """
    first, second = ({row["recipe"]: row for row in found.rows} for found in (one, other))
    rows = []
    for name in dict.fromkeys([*first, *second]):
        a, b = first.get(name), second.get(name)
        recipes = [found.recipes[name] for found in (one, other) if name in found.recipes]
        key = speed_key(recipes, lambda key, rows=(a, b): all(_by_seed(row, key) for row in rows))
        ratio = compare_speed(_by_seed(b, key), _by_seed(a, key))
        rows.append(
            {
                "recipe": name,
                "first": a,
                "second": b,
                "differs": _differs(one.recipes[name], other.recipes[name]) if a and b else [],
                "ratio": ratio.value,
                "ratio_of": key,
                "ratio_interval": None if ratio.low is None or ratio.high is None else [ratio.low, ratio.high],
                "verdict": ratio.verdict if a and b and a["seeds"] and b["seeds"] else _absent(a, b),
            }
        )
    return rows


def differences(one: Findings, other: Findings) -> list[str]:
    """What differs between the environments, so that nobody takes it for a speed-up's doing."""
    lines = []
    for key in sorted(one.environment.keys() | other.environment.keys()):
        a, b = one.environment.get(key), other.environment.get(key)
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            lines += [
                f"{key} {name}: {_word(a.get(name))} / {_word(b.get(name))}"
                for name in sorted(a.keys() | b.keys())
                if a.get(name) != b.get(name)
            ]
        elif a != b:
            lines.append(f"{key}: {_word(a)} / {_word(b)}")
    return lines


def comparison_table(rows: Sequence[Row], names: tuple[str, str], width: int) -> Table:
    """For a terminal."""
    from rich.markup import escape
    from rich.table import Table

    a, b = (escape(name) for name in names)
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold")
    table.add_column("Recipe", overflow="fold")
    for head in (f"Samples/s {a}", b, f"{b} / {a}", f"Speed-up {a}", b, f"Accuracy {a}", b)[: 7 if width >= 90 else 5]:
        table.add_column(head, justify="right")
    for row, name in zip(rows, short_names([row["recipe"] for row in rows]), strict=True):
        sides = (row["first"], row["second"])
        ratio = "" if row["ratio"] is None else f"{row['ratio']:.2f}x"
        if row["ratio_interval"]:
            ratio += f" ({row['ratio_interval'][0]:.2f} to {row['ratio_interval'][1]:.2f})"
        colour = {"faster": "green", "slower": "red"}.get(row["verdict"], "dim")
        verdict = f"[{colour}]{escape(row['verdict'])}[/]"
        cells = [_value(side, "samples_per_second", ".4g") or _status(side) for side in sides]
        cells.append(f"{ratio} {verdict}".strip())
        cells += [_value(side, "speedup", ".2f", "x") for side in sides]
        cells += [_value(side, "eval_accuracy", ".3f") or _value(side, "eval_r2", ".3f") for side in sides]
        table.add_row(escape(name) + (" (differs)" if row["differs"] else ""), *cells[: len(table.columns) - 1])
    return table


def caption() -> str:
    return (
        f"Ratios with {CONFIDENCE * 100:.0f} % intervals over the seeds that both studies have; of real tokens/s where "
        "a recipe regroups samples by length. The studies were not made in turns: faster and slower say what both "
        "machines did then, whatever the cause. Speed-ups, each against its own baseline, are free of that."
    )


def _differs(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """In which settings two recipes of one name differ, in words."""
    a, b = ({key: value for key, value in x.items() if key not in DESCRIPTIVE} for x in (one, other))
    return [f"{key} {inline(before)} / {inline(now)}" for key, before, now in changes(a, b)]


def _by_seed(row: Row | None, key: str) -> dict[int, float]:
    runs = row["runs"] if row else []
    return {r["seed"]: r[key] for r in runs if r["status"] == "ok" and r[key]}


def _absent(a: Row | None, b: Row | None) -> str:
    where = [word for word, row in (("first", a), ("second", b)) if not row or not row["seeds"]]
    return f"not measured in the {' and the '.join(where)}"


def _status(row: Row | None) -> str:
    return row["status"] if row else "-"


def _value(row: Row | None, key: str, form: str, unit: str = "") -> str:
    value = row.get(key) if row else None
    return "" if value is None else f"{value:{form}}{unit}"


def _word(value: Any) -> str:
    return "none" if value in (None, [], {}) else str(value)
