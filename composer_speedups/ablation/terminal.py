"""What a study shows in a terminal: its console, its table, which breaks no word, and what was found."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from composer_speedups.ablation.names import marked_names
from composer_speedups.ablation.row import Row
from composer_speedups.ablation.statistics import CONFIDENCE
from composer_speedups.ablation.tables import cell
from composer_speedups.ablation.words import notes

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from composer_speedups.ablation.output import Findings

__all__ = ["WIDTH", "make_console", "show_findings", "terminal_table"]

WIDTH = 100  # of a pipe or a log file, which have none of their own

# Head of the column, its field, and its rank: in a narrow terminal the highest ranks go first.
_COLUMNS = (
    ("Batch", "batch_size", 5),
    ("LR", "learning_rate", 7),
    ("Samples/s", "samples_per_second", 0),
    ("Speed-up", "speedup", 0),
    (f"{CONFIDENCE * 100:.0f} %", "speedup_interval", 3),
    ("Publ.", "published", 1),
    ("Wall s", "wallclock_seconds", 4),
    ("Compile", "compile_seconds", 9),
    ("MB", "peak_memory_bytes", 2),
    ("Loss", "final_loss", 6),
    ("Acc.", "eval_accuracy", 8),
    ("Stable", "stable", 1),
)


def make_console() -> Console:
    """A console as wide as the terminal; 100 columns where there is none, as rich's own 80 would break names."""
    from rich.console import Console

    console = Console()
    if not console.is_terminal and not os.environ.get("COLUMNS"):
        console = Console(width=WIDTH)
    return console


def terminal_table(rows: Sequence[Row], width: int) -> Table:
    """The table for a terminal of `width` columns; reasons and notes are in `words.notes`.

    Columns that are empty in every row are left out, then as many as it takes for the names to keep their words.
    """
    from rich.markup import escape
    from rich.table import Table

    names = marked_names(rows)
    texts = {key: [_text(row, key) for row in rows] for _, key, _ in _COLUMNS}
    shown = [column for column in _COLUMNS if any(texts[column[1]])]
    for rank in range(max(rank for *_, rank in _COLUMNS), 0, -1):
        wide = [max(map(len, [head, *texts[key]])) for head, key, _ in shown]
        if max(map(len, names)) + 1 + sum(wide) + len(wide) <= width:
            break
        shown = [column for column in shown if column[2] != rank]
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold", expand=False)
    table.add_column("Recipe", overflow="fold")
    for head, *_ in shown:
        table.add_column(head, justify="right", no_wrap=True)
    for n, (row, name) in enumerate(zip(rows, names, strict=True)):
        style = {"faster": "green", "slower": "red"}.get(row["speed_verdict"], "")
        cells = [escape(texts[key][n]) for _, key, _ in shown]
        if style:
            cells = [f"[{style}]{c}[/]" if key == "speedup" else c for c, (_, key, _) in zip(cells, shown, strict=True)]
        table.add_row(escape(name), *cells, style=None if row["seeds"] else "dim")
    return table


def _text(row: Row, key: str) -> str:
    if key == "samples_per_second":
        return cell(row, key).partition(" ")[0] if row["seeds"] else row["status"]
    if key == "speedup" and row["seeds"]:
        return cell(row, key).partition(" ")[0]  # the interval has a column of its own
    if key == "speedup_interval":
        interval = row["speedup_interval"]
        return f"{interval[0]:.2f} to {interval[1]:.2f}" if interval else ""
    if key == "published":
        value = (row["published"] or {}).get("speedup")
        return f"{value:.2f}x" if value else ""
    return cell(row, key)


def show_findings(found: Findings, console: Console) -> None:
    """Print conditions, table, notes and verdict."""
    console.print()
    for line in found.conditions:
        console.print(line, style="dim", soft_wrap=False, markup=False, highlight=False)
    console.print()
    console.print(terminal_table(found.rows, console.width))
    console.print()
    for line in notes(found.rows):
        console.print(f"- {line}", markup=False, highlight=False)
    console.print(found.sentence, style="bold", markup=False, highlight=False)
