"""The table of a study: in the terminal, in markdown, csv and LaTeX."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Any

from composer_speedups import hardware
from composer_speedups.ablation.plans import WITHOUT
from composer_speedups.ablation.statistics import CONFIDENCE, METRICS, Drift

__all__ = [
    "COLUMNS",
    "cell",
    "conditions",
    "csv_table",
    "drift_lines",
    "flaw",
    "latex_table",
    "markdown_table",
    "marked_names",
    "notes",
    "sentence",
    "short_names",
]

Row = Mapping[str, Any]


def conditions(environment: Row, study: Row, rows: Sequence[Row], recipes: Mapping[str, Row]) -> list[str]:
    """The lines above a table, without which its numbers mean nothing."""
    first = recipes[study["baseline"]]
    task, model = first.get("task") or {}, first.get("model") or {}
    counted = [row for row in rows if row["seeds"]]
    seeds = sorted({seed for row in counted for seed in row["seeds"]})
    steps = sorted({row["steps"] for row in counted if row.get("steps")})
    what = [f"{task.get('name', '?')} ({task.get('objective', '?')})"]
    if task.get("train_samples"):
        what.append(f"{task['train_samples']:,} samples")
    if task.get("max_length"):
        what.append(f"{task['max_length']} tokens {'padded' if task.get('padding') == 'max_length' else 'at most'}")
    what.append(f"duration {first.get('duration', '?')}")
    changed = ", ".join(f"{k}={v}" for k, v in (model.get("config") or {}).items())
    weights = {True: "pretrained", False: "random weights"}.get(
        next((row["pretrained"] for row in counted if row.get("pretrained") is not None), None), ""
    )
    name = str(model.get("name", "?")) + (f" ({changed})" if changed else "")
    different = [row["recipe"] for row in rows if (recipes[row["recipe"]].get("model") or {}) != model]
    others = f"; not the same in {', '.join(different)}" if different else ""
    lines = [
        f"Hardware: {hardware.summary(environment)}",
        f"Task: {', '.join(what)}",
        f"Model: {name}" + (f", {weights}" if weights else "") + others,
    ]
    if counted:
        bootstrap = " [95 % bootstrap interval]" if len(seeds) > 1 else ""
        span = f"{steps[0]} to {steps[-1]}" if len(steps) > 1 else str(steps[0]) if steps else "?"
        lines.append(
            f"Runs: seeds {', '.join(map(str, seeds))}; {span} steps; interleaved, each in a fresh process; "
            f"medians over seeds{bootstrap}; baseline {study['baseline']}"
        )
    return lines


def drift_lines(trend: Drift | None, baseline: Sequence[float]) -> list[str]:
    """The baseline's speed each time it was measured, and what that and all other runs tell of the machine."""
    if not baseline:
        return []
    if len(baseline) == 1:
        return ["Baseline measured once: whether the machine drifted is not known; --seeds 3 measures it again"]
    line = f"Baseline re-measured: {', '.join(f'{speed:.4g}' for speed in baseline)} samples/s in order of time"
    if trend is not None:
        low, high = 100 * trend.low, 100 * trend.high
        interval = f"({CONFIDENCE * 100:.0f} % interval {low:+.1f} to {high:+.1f} %)"
        if trend.shown:
            word = "slower" if trend.change < 0 else "faster"
            line += f"; the machine became {abs(trend.change) * 100:.1f} % {word} from first run to last {interval}"
        elif trend.high > 1.0 or trend.low < -0.5:  # it may have doubled or halved
            line += "; too few runs to tell whether the machine drifted"
        else:
            line += f"; no drift of the machine shown {interval}"
    return [line]


def sentence(rows: Sequence[Row]) -> str:
    """The verdict in a sentence or two."""
    base = next((row for row in rows if row.get("baseline")), None)
    if base is None or not base["seeds"]:
        why = f": {base['reason']}" if base and base["reason"] else ""
        return f"No verdict: the baseline has no finished run{why}."
    measured = [row for row in rows if row["seeds"] and not row.get("baseline") and row["speedup"] is not None]
    others = [row for row in rows if row["seeds"] and row is not base]
    if others and not any({*row["seeds"]} & {*base["seeds"]} for row in others):
        return "No verdict: no other recipe has a finished run with a seed of the baseline's."
    if not measured:
        return "No verdict: only the baseline has been measured."
    names = dict(zip((row["recipe"] for row in rows), short_names([row["recipe"] for row in rows]), strict=True))
    left_out = _left_out(rows, base)
    if left_out:
        return _without(names[base["recipe"]], [(left_out[r["recipe"]], r) for r in measured])
    if all(row["speed_verdict"] == "not judged" for row in measured):
        if base.get("failed"):
            mend = "Mend what they say, then the same command with --retry."
            return f"No verdict: {_failures(base)} of the baseline. {mend}"
        best = max(measured, key=lambda row: row["speedup"])
        return (
            f"Too few seeds to judge: {names[best['recipe']]} measured highest, {best['speedup']:.2f} times "
            f"the baseline's speed; run 3 seeds or more (--seeds 3) to tell what is real."
        ) + _beside_others(best, base)
    faster = [row for row in measured if row["speed_verdict"] == "faster"]
    # What did nothing, or did not always end well, is not to be recommended, however fast the rest of it was.
    fast = [row for row in faster if not flaw(row)]
    kept = [row for row in fast if row["quality_verdict"] == "quality holds"]
    if kept:
        best = max(kept, key=lambda row: row["speedup"])
        low, high = best["speedup_interval"]
        return (
            f"{names[best['recipe']]} is the fastest whose quality holds: {best['speedup']:.2f} times the "
            f"baseline's speed ({CONFIDENCE * 100:.0f} % interval {low:.2f} to {high:.2f})."
        ) + _beside_others(best, base)
    if fast:
        best = max(fast, key=lambda row: row["speedup"])
        return (
            f"{names[best['recipe']]} is faster, {best['speedup']:.2f} times the baseline's speed, but "
            f"{_quality_words(best).replace('unstable', 'it is unstable')}: {best['quality_note']}."
        ) + _beside_others(best, base)
    if faster:
        best = max(faster, key=lambda row: row["speedup"])
        return (
            f"No recipe without a flaw was shown to be faster than the baseline: {names[best['recipe']]} is, "
            f"{best['speedup']:.2f} times its speed, but {flaw(best)}."
        ) + _beside_others(best, base)
    return "No recipe was shown to be faster than the baseline."


def flaw(row: Row) -> str:
    """Why the numbers of a measured row are not those of its recipe, in words; empty where they are."""
    if row.get("failed"):
        return _failures(row)
    return f"{', '.join(row['no_effect'])} changed nothing in it" if row.get("no_effect") else ""


def _failures(row: Row) -> str:
    failed = len(row["failed"])
    return f"{failed} of {failed + len(row['seeds'])} seeds failed"


def _beside_others(row: Row, base: Row) -> str:
    """What takes away from a verdict: runs that were slowed by others on the same machine."""
    if not row.get("overlapped") and not base.get("overlapped"):
        return ""
    return " Some of these runs shared the machine with others (†)."


def _quality_words(row: Row) -> str:
    return row["quality_verdict"].replace("not judged", "quality not judged")


def _left_out(rows: Sequence[Row], base: Row) -> dict[str, str]:
    """What each row leaves out of the baseline, if that is what the study is about; else empty."""
    others = [row["recipe"] for row in rows if row is not base]
    start = base["recipe"] + WITHOUT
    return {name: name.removeprefix(start) for name in others} if all(n.startswith(start) for n in others) else {}


def _without(full: str, measured: Sequence[tuple[str, Row]]) -> str:
    """The verdict on a recipe from which one speed-up after the other was taken away."""
    ordered = sorted(measured, key=lambda item: item[1]["speedup"])
    first, worst = ordered[0]
    if all(row["speed_verdict"] == "not judged" for _, row in ordered):
        return (
            f"Too few seeds to judge: without {first}, {full} measured slowest, at {worst['speedup']:.2f} of its full "
            f"speed; run 3 seeds or more (--seeds 3) to tell what is real."
        )
    by_verdict: dict[str, list[tuple[str, Row]]] = {}
    for key, row in ordered:
        by_verdict.setdefault(row["speed_verdict"], []).append((key, row))
    out = []
    if slower := by_verdict.get("slower"):
        (key, row), *rest = slower
        low, high = row["speedup_interval"]
        out.append(
            f"{key} matters most in {full}: taken away, it leaves {row['speedup']:.2f} of the speed "
            f"({CONFIDENCE * 100:.0f} % interval {low:.2f} to {high:.2f}), so it brings a factor of "
            f"{1 / row['speedup']:.2f} on top of the others."
        )
        if rest:
            factors = ", ".join(f"{key} {1 / row['speedup']:.2f}" for key, row in rest)
            out.append(f"Then come {factors}." if len(rest) > 1 else f"Then comes {factors}.")
    else:
        out.append(f"No speed-up of {full} was shown to matter when it alone is taken away.")
    if faster := by_verdict.get("faster"):
        words = ", ".join(f"{key} ({row['speedup']:.2f} times the speed)" for key, row in faster)
        out.append(f"It is faster without {words}.")
    if slower and (idle := by_verdict.get("no difference shown")):
        out.append(f"Not shown to matter: {', '.join(key for key, _ in idle)}.")
    return " ".join(out)


def short_names(names: Sequence[str]) -> list[str]:
    """Names without the folder that all of them share, and what a plan made of one of them without its name.

    >>> short_names(["finetune/fp32", "finetune/fp16"])
    ['fp32', 'fp16']
    >>> short_names(["cpu/fp32", "cpu/fp32+unpadding", "cpu/fp32+unpadding+fused_adamw"])
    ['fp32', '+unpadding', '+unpadding+fused_adamw']
    """
    folders = {name.rpartition("/")[0] for name in names}
    cut = len(folders.pop()) + 1 if len(folders) == 1 and "/" in names[0] else 0
    short = [name[cut:] for name in names]
    made_of = {name: base for base in sorted(short, key=len, reverse=True) for name in short if _made(name, base)}
    return [name.removeprefix(made_of[name]).lstrip(".") if name in made_of else name for name in short]


def _made(name: str, base: str) -> bool:
    """Whether a plan made the row `name` of the row `base`."""
    return name.startswith((f"{base}+", f"{base}{WITHOUT}"))


def marked_names(rows: Sequence[Row]) -> list[str]:
    """Short names; a star marks a row of which a switch did nothing, a dagger one with runs that were not alone."""
    return _marked(short_names([row["recipe"] for row in rows]), rows)


def _marked(names: Sequence[str], rows: Sequence[Row]) -> list[str]:
    marks = (("*" if row.get("no_effect") else "") + ("†" if row.get("overlapped") else "") for row in rows)
    return [f"{name} {mark}" if mark else name for name, mark in zip(names, marks, strict=True)]


def notes(rows: Sequence[Row]) -> list[str]:
    """What belongs under a table: why rows were skipped or failed, and what the marks mean."""
    names = short_names([row["recipe"] for row in rows])
    reasons: dict[str, list[str]] = {}
    for row, name in zip(rows, names, strict=True):
        if row["reason"]:
            label = f"{row['status']}: " if not row["seeds"] else "partly failed: " if row["failed"] else ""
            reasons.setdefault(f"{label}{row['reason'].removeprefix(f'{name}: ')}", []).append(name)
    lines = [f"{', '.join(who)} {reason}" for reason, who in reasons.items()]
    judged = [row for row in rows if row["seeds"] and not row.get("baseline")]
    verdicts: dict[str, list[str]] = {}
    for row, name in zip(rows, names, strict=True):
        for text in _verdict_notes(row):
            verdicts.setdefault(text, []).append(name)
    for text, who in verdicts.items():
        everybody = len(who) == len(judged) > 2
        lines.append(f"{'all but the baseline' if everybody else ', '.join(who)}: {text}")
    for row, name in zip(rows, names, strict=True):
        if row.get("interaction"):
            lines.append(row["interaction"]["text"])
        if row.get("no_effect"):
            lines.append(f"* {name}: {', '.join(row['no_effect'])} changed nothing, so this row does not show it")
        if row.get("compile_seconds") and row["seeds"]:
            lines.append(_break_even(row, name))
    if held := [
        (name, row) for row, name in zip(rows, names, strict=True) if row["quality_verdict"] == "quality holds"
    ]:
        lines.append(_held(held))
    if shared := [(name, row) for row, name in zip(rows, names, strict=True) if row.get("overlapped")]:
        which = "; ".join(_overlaps(row, name) for name, row in shared)
        if all(row["overlapped"] == row["seeds"] for row in rows if row["seeds"]):
            which = "all there are"
        count = sum(len(row["overlapped"]) for _, row in shared)
        lines.append(
            f"† {count} run{'s' * (count > 1)} shared this machine with other work{_waiting(rows)}: {which}. "
            f"Such speeds are not the recipe's own; measure them again, into another --out"
        )
    if any(row["speed_verdict"] == "not judged" and len(row["seeds"]) == 1 for row in judged):
        lines.append("Stable ?, speed not judged: one seed tells nothing about the spread; run 3 or more (--seeds 3)")
    return lines


def _verdict_notes(row: Row) -> list[str]:
    """What is to be said of a row's speed and quality beyond the verdicts' names."""
    found = []
    if row["speed_verdict"] == "no difference shown":
        found.append("no difference in speed shown" + (f"; {row['speed_note']}" if row["speed_note"] else ""))
    if row["quality_verdict"] in ("unstable", "quality not shown to hold"):
        found.append(f"{row['quality_verdict']}: {row['quality_note']}")
    elif row["quality_verdict"] == "not judged" and row["quality_note"] and len(row["seeds"]) > 1:
        found.append(f"quality not judged: {row['quality_note']}")
    return found


def _held(rows: Sequence[tuple[str, Row]]) -> str:
    """The numbers behind "quality holds": how much worse each row may be at most, and what was allowed."""
    parts = []
    for metric, word in METRICS.items():
        found = [(name, row["worse_by"][metric]) for name, row in rows if metric in row["worse_by"]]
        if found:
            bounds = ", ".join(f"{name} {max(0.0, facts['high'] or 0.0):.2g}" for name, facts in found)
            parts.append(f"{word} worse by at most (margin {found[0][1]['margin']:.2g}) {bounds}")
    return f"Quality holds: {'; '.join(parts)}"


def _overlaps(row: Row, name: str) -> str:
    seeds = row["overlapped"]
    if seeds == row["seeds"] and len(seeds) > 1:
        return f"{name}, all seeds"
    return f"{name} seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}"


def _waiting(rows: Sequence[Row]) -> str:
    """What the other work did to the runs that had to wait for it."""
    shares = [share for row in rows for share in (row.get("waited") or {}).values()]
    return f", which had a core for up to {max(shares):.0%} of the time that a run wanted it" if shares else ""


def _break_even(row: Row, name: str) -> str:
    against = short_names([row["recipe"], row["break_even_against"]])[1] if row.get("break_even_against") else ""
    seconds = f"{name}: compile took {row['compile_seconds']:.1f} s"
    if row.get("compile_cached"):
        seconds += " with a cache that held its graphs (a first run may take longer)"
    elif row.get("compile_seconds_warm"):
        seconds += f" the first time, and {row['compile_seconds_warm']:.1f} s with the cache that left"
    if row.get("break_even_steps") is not None:
        return (
            f"{seconds}, paid for after {row['break_even_steps']:,} steps ({row['break_even_samples']:,} samples) "
            f"against {against}"
        )
    if not against:
        return seconds
    if row.get("break_even_verdict") == "no difference shown":
        return f"{seconds}, not shown to pay: no difference in speed from {against} shown"
    return f"{seconds}, never paid for: no faster than {against}"


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
    for row, name in zip(rows, _marked([row["recipe"] for row in rows], rows), strict=True):
        cells = [name if key == "recipe" else cell(row, key) for _, key in COLUMNS]
        out.append("| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |")
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
    published = row.get("published") or {}
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
        "stable": row["stable"],
        "quality_verdict": row["quality_verdict"],
        "no_effect": " ".join(row["no_effect"]),
        "overlapped": " ".join(map(str, row["overlapped"] or ())),
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
    value = row.get(key)
    if key == "samples_per_second":
        return _speed(row)
    if key == "speedup":
        interval = row["speedup_interval"]
        return _speedup(row) + (f" ({interval[0]:.2f} to {interval[1]:.2f})" if interval else "")
    if key == "stable":
        return _stable(row)
    if key == "verdict":
        quality = row["quality_verdict"] if row["speed_verdict"] == "not judged" else _quality_words(row)
        words = [w for w in dict.fromkeys((row["speed_verdict"], quality)) if w]
        words += [f"{key} changed nothing" for key in row.get("no_effect") or []]
        words += [_failures(row)] if row.get("failed") else []
        return ", ".join(words)
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
    return "-" if row.get("baseline") else f"{row['speedup']:.2f}x"


def _published(row: Row) -> str:
    published = row.get("published") or {}
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
