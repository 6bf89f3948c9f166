"""The table of a study: its columns and cells, and the whole of it in markdown, csv and LaTeX."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from typing import Any

from composer_speedups.ablation.names import mark_names, marked_names
from composer_speedups.ablation.row import Row
from composer_speedups.ablation.words import failures, notes, quality_words, sentence
from composer_speedups.measurement.results import loss_text

__all__ = ["COLUMNS", "cell", "csv_table", "latex_table", "markdown_table"]

COLUMNS = (
    ("Recipe", "recipe"),
    ("Batch", "batch_size"),
    ("LR", "learning_rate"),
    ("Samples/s", "samples_per_second"),
    ("Real tokens/s", "real_tokens_per_second"),
    ("MFU", "mfu"),
    ("Speed-up", "speedup"),
    ("Published", "published"),
    ("Wall-clock s", "wallclock_seconds"),
    ("Compile s", "compile_seconds"),
    ("Peak MB", "peak_memory_bytes"),
    ("Final loss", "final_loss"),
    ("Accuracy", "eval_accuracy"),
    ("Stable", "stable"),
    ("Verdict", "verdict"),
)


def markdown_table(rows: Sequence[Row], lines: Sequence[str] = ()) -> str:
    """`table.md`: the conditions, the table, the notes."""
    out = [f"- {line}" for line in lines]
    out += ["", sentence(rows), ""]
    out.append("| " + " | ".join(head for head, _ in COLUMNS) + " |")
    out.append("|" + "|".join("---" if n in (0, len(COLUMNS) - 1) else "---:" for n in range(len(COLUMNS))) + "|")
    for row, name in zip(rows, mark_names([row["recipe"] for row in rows], rows), strict=True):
        cells = [name if key == "recipe" else cell(row, key) for _, key in COLUMNS]
        out.append("| " + " | ".join(text.replace("|", "\\|").replace("\n", " ") for text in cells) + " |")
    out += ["", *(f"- {note}" for note in notes(rows))]
    return "\n".join(out).rstrip() + "\n"


def latex_table(rows: Sequence[Row], caption: str = "") -> str:
    """`table.tex`: a table for a paper. It needs the package booktabs."""
    columns = [c for c in COLUMNS if c[1] != "verdict" and (c[1] == "recipe" or any(cell(row, c[1]) for row in rows))]
    out = [
        "% \\usepackage{booktabs}",
        "\\begin{table}",
        "\\centering\\small",
        f"\\begin{{tabular}}{{l{'r' * (len(columns) - 1)}}}",
        "\\toprule",
        " & ".join(_tex(head) for head, _ in columns) + r" \\",
        "\\midrule",
    ]
    for row, name in zip(rows, marked_names(rows), strict=True):
        cells = [_tex(name if key == "recipe" else cell(row, key)) for _, key in columns]
        out.append(" & ".join(cells) + r" \\")
    out += ["\\bottomrule", "\\end{tabular}", f"\\caption{{{_tex(caption)}}}", "\\end{table}"]
    return "\n".join(out) + "\n"


_TEX = {c: rf"\{c}" for c in "&%$#_{}"} | {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": "$<$",
    ">": "$>$",
    "†": r"$\dagger$",
    "\n": " ",
}


def _tex(text: str) -> str:
    return "".join(_TEX.get(c, c) for c in text)


def csv_table(rows: Sequence[Row]) -> str:
    """`table.csv`: plain numbers, one row a recipe; nested things are left to `results.json`."""
    buffer = io.StringIO()
    flat = [_flat(row) for row in rows]
    writer = csv.DictWriter(buffer, list(flat[0]) if flat else ["recipe"], lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return buffer.getvalue()


def _flat(row: Row) -> dict[str, Any]:
    published = row["published"] or {}
    speed_low, speed_high = row["speedup_interval"] or (None, None)
    return {
        "recipe": row["recipe"],
        "status": row["status"],
        "reason": row["reason"],
        "batch_size": row["batch_size"],
        "learning_rate": row["learning_rate"],
        "seeds": " ".join(map(str, row["seeds"])),
        "samples_per_second": row["samples_per_second"],
        **_bounds(row, "samples_per_second"),
        "real_tokens_per_second": row["real_tokens_per_second"],
        "mfu": row["mfu"],
        "speedup": row["speedup"],
        "speedup_low": speed_low,
        "speedup_high": speed_high,
        "speed_verdict": row["speed_verdict"],
        "wallclock_seconds": row["wallclock_seconds"],
        "compile_seconds": row["compile_seconds"],
        "compile_seconds_warm": row["compile_seconds_warm"],
        "break_even_steps": row["break_even_steps"],
        "break_even_samples": row["break_even_samples"],
        "peak_memory_bytes": row["peak_memory_bytes"],
        "final_loss": row["final_loss"],
        **_bounds(row, "final_loss"),
        "eval_loss": row["eval_loss"],
        "eval_accuracy": row["eval_accuracy"],
        **_bounds(row, "eval_accuracy"),
        "eval_r2": row["eval_r2"],
        **_bounds(row, "eval_r2"),
        "stable": row["stable"],
        "quality_verdict": row["quality_verdict"],
        "no_effect": " ".join(row["no_effect"]),
        "numerics_hold": row["numerics"].get("holds"),
        "overlapped": " ".join(map(str, row["overlapped"])),
        "kernels": " ".join(row["kernels"]),
        "published_samples_per_second": published.get("samples_per_second"),
        "published_speedup": published.get("speedup"),
        "published_wallclock_seconds": published.get("wallclock_seconds"),
        "published_memory_mb": published.get("memory_mb"),
        "published_stable": published.get("stable"),
    }


def _bounds(row: Row, key: str) -> dict[str, float | None]:
    low, high = row["intervals"].get(key) or (None, None)
    return {f"{key}_low": low, f"{key}_high": high}


def cell(row: Row, key: str) -> str:
    if key == "recipe":
        return str(row["recipe"])
    if key == "batch_size":
        return _integer(row["batch_size"])
    if key == "learning_rate":
        return _rate(row["learning_rate"])
    if key == "published":
        return _published(row)
    if not row["seeds"]:
        return f"{row['status']}: {row['reason']}" if key == "verdict" else ""
    if key == "samples_per_second":
        return _speed(row)
    if key == "speedup":
        interval = row["speedup_interval"]
        return _speedup(row) + (f" ({interval[0]:.2f} to {interval[1]:.2f})" if interval else "")
    if key == "stable":
        return _stable(row)
    if key == "verdict":
        quality = row["quality_verdict"] if row["speed_verdict"] == "not judged" else quality_words(row)
        words = [w for w in dict.fromkeys((row["speed_verdict"], quality)) if w]
        words += [f"{key} changed nothing" for key in row["no_effect"]]
        words += ["computes something else"] if row["numerics"].get("holds") is False else []
        words += [failures(row)] if row["failed"] else []
        return ", ".join(words)
    value = row[key]
    if key == "eval_accuracy" and value is None and row["eval_r2"] is not None:
        return f"R² {_fixed(row['eval_r2'], 3)}"
    if key == "final_loss":
        return "" if value is None else loss_text(value, 3)
    if key == "mfu":
        return "" if value is None else f"{value:.1%}"
    if key == "peak_memory_bytes":
        return _fixed(value, 0, 1e-6)
    if key == "compile_seconds":
        return _fixed(value or None, 1)
    return _fixed(value, 0 if key == "real_tokens_per_second" else 1 if key == "wallclock_seconds" else 3)


def _speed(row: Row) -> str:
    value = row["samples_per_second"]
    if value is None:
        return ""
    digits = 0 if value >= 1000 else 1 if value >= 10 else 2
    interval = row["intervals"].get("samples_per_second")
    if interval is None:
        return f"{value:.{digits}f}"
    low, high = interval
    return f"{value:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def _speedup(row: Row) -> str:
    if row["speedup"] is None:
        return "?"
    return "-" if row["baseline"] else f"{row['speedup']:.2f}x"


def _published(row: Row) -> str:
    published = row["published"] or {}
    parts = []
    if published.get("samples_per_second"):
        parts.append(f"{published['samples_per_second']:g}/s")
    if published.get("speedup"):
        parts.append(f"{published['speedup']:.2f}x")
    if published.get("wallclock_seconds"):
        parts.append(f"{published['wallclock_seconds']:g} s")
    if published.get("memory_mb"):
        parts.append(f"{published['memory_mb']:,.0f} MB")
    if published.get("stable") is False:
        parts.append("not stable")
    return ", ".join(parts)


def _stable(row: Row) -> str:
    return {True: "yes", False: "no", None: "?"}[row["stable"]]


def _integer(value: Any) -> str:
    return "" if value is None else str(value)


def _rate(value: Any) -> str:
    if not value:
        return ""
    mantissa, _, exponent = f"{value:.3e}".partition("e")
    return f"{float(mantissa):g}e{int(exponent)}"


def _fixed(value: float | None, digits: int, factor: float = 1.0) -> str:
    return "" if value is None else f"{value * factor:,.{digits}f}"
