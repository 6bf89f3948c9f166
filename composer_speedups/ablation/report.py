"""The page of a study: `report.html`, one file that needs nothing else and no network."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from composer_speedups.ablation.tables import COLUMNS, cell, notes, short_names

if TYPE_CHECKING:
    from composer_speedups.ablation.output import Findings

__all__ = ["report_html"]

Row = Mapping[str, Any]


def report_html(found: Findings) -> str:
    """The whole page as text."""
    study = found.study
    parts = {
        "TITLE": escape(f"Speed-up study: {study.get('name', '')}"),
        "VERDICT": escape(found.sentence),
        "CONDITIONS": _items(found.conditions),
        "TABLE": _table(found.rows),
        "NOTES": _items(notes(found.rows)),
        "BASELINE": escape(str(study["baseline"])),
        "BARS": _bars(found.rows),
        "COMMAND": escape(study.get("command") or "from Python"),
        "ENVIRONMENT": escape(json.dumps(found.environment, indent=1)),
    }
    # One pass over the template: what a value contains is never taken for a placeholder.
    template = Path(__file__).with_name("report.html").read_text(encoding="utf-8")
    return re.sub("@([A-Z]+)@", lambda match: parts[match[1]], template)


def _items(lines: Sequence[str]) -> str:
    return "".join(f"<li>{escape(line)}</li>" for line in lines)


def _table(rows: Sequence[Row]) -> str:
    heads = "".join(f'<th scope="col"><button type="button">{escape(head)}</button></th>' for head, _ in COLUMNS)
    body = []
    for row in rows:
        cells = []
        for _, key in COLUMNS:
            text = escape(cell(row, key))
            style = ' class="reason"' if key == "verdict" else ""
            if key == "speedup" and row["speed_verdict"] in ("faster", "slower"):
                text = f'<span class="{row["speed_verdict"]}">{text}</span>'
            cells.append(f'<td data-value="{escape(_sort_key(row, key))}"{style}>{text}</td>')
        body.append(f"<tr{'' if row['seeds'] else ' class=out'}>{''.join(cells)}</tr>")
    return f"<table><thead><tr>{heads}</tr></thead><tbody>{''.join(body)}</tbody></table>"


def _sort_key(row: Row, key: str) -> str:
    if key == "verdict":
        return cell(row, key)
    value = (row.get("published") or {}).get("samples_per_second") if key == "published" else row.get(key)
    return "" if value is None else str(int(value) if isinstance(value, bool) else value)


def _bars(rows: Sequence[Row]) -> str:
    """Speed-ups as bars from 1, with their intervals and a mark for the published figure."""
    shown = [
        (row, name) for row, name in zip(rows, short_names([r["recipe"] for r in rows]), strict=True) if row["speedup"]
    ]
    if len(shown) < 2:
        return "<p>Nothing to compare yet.</p>"
    values = [1.0]
    for row, _ in shown:
        values += [row["speedup"], *(row["speedup_interval"] or [])]
        values += [v for v in [(row.get("published") or {}).get("speedup")] if v]
    low, high = min(values), min(max(values), 3 * max(row["speedup"] for row, _ in shown))
    pad = 0.05 * (high - low) or 0.1
    left, right, step = 230, 800, 28

    def x(value: float) -> float:
        return round(left + (min(value, high) - low + pad) / (high - low + 2 * pad) * (right - left), 1)

    height = step * len(shown) + 30
    out = [f'<svg viewBox="0 0 900 {height}" role="img" aria-label="Speed-up of every recipe">']
    out.append(f'<line x1="{x(1)}" x2="{x(1)}" y1="4" y2="{height - 24}" stroke="var(--soft)"/>')
    out.append(f'<text class="soft" x="{x(1)}" y="{height - 8}" text-anchor="middle">1.00x</text>')
    for n, (row, name) in enumerate(shown):
        y = step * n + 8
        colour = {"faster": "--fast", "slower": "--slow"}.get(row["speed_verdict"], "--same")
        start, end = sorted((x(1), x(row["speedup"])))
        label = name if len(name) <= 32 else name[:31] + "…"
        out.append(f'<text x="{left - 10}" y="{y + 13}" text-anchor="end">{escape(label)}</text>')
        out.append(f'<rect x="{start}" y="{y + 2}" width="{max(1.0, end - start)}" height="14" fill="var({colour})"/>')
        if row["speedup_interval"]:
            a, b = (x(max(low - pad / 2, v)) for v in row["speedup_interval"])
            out.append(f'<line x1="{a}" x2="{b}" y1="{y + 9}" y2="{y + 9}" stroke="var(--ink)" stroke-width="1.5"/>')
        published = (row.get("published") or {}).get("speedup")
        if published:
            p = x(published)
            out.append(f'<path d="M{p} {y - 1}l5 10l-5 10l-5-10z" fill="none" stroke="var(--ink)"/>')
        out.append(f'<text x="{right + 12}" y="{y + 13}">{row["speedup"]:.2f}x</text>')
    out.append("</svg>")
    legend = "Lines are 95 % intervals over the seeds; diamonds are the source's figures on its own hardware."
    return "".join(out) + f'<p class="notes">{legend}</p>'
