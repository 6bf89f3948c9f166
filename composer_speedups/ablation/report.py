"""The page of a study: `report.html`, one file that needs nothing else and no network."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from composer_speedups.ablation.charts import shares
from composer_speedups.ablation.drawing import Drawing
from composer_speedups.ablation.names import marked_names, short_names
from composer_speedups.ablation.row import Row
from composer_speedups.ablation.statistics import CONFIDENCE
from composer_speedups.ablation.tables import COLUMNS, cell
from composer_speedups.ablation.words import notes
from composer_speedups.measurement.results import MEMORY_KINDS

if TYPE_CHECKING:
    from composer_speedups.ablation.output import Findings

__all__ = ["report_html"]

_FIRST = ("recipe", "speedup", "published", "samples_per_second")
_CAPTIONS = {
    "speedups": "Blue is shown to be faster, orange slower, grey neither.",
    "speed_memory": "Up and left is better.",
    "step_time": "Of a few profiled steps after the measured ones; a bar is as long as a sample takes in the table. "
    "The backward pass counts with what caused it. Copies are copies, casts and views; the loop is Python and waiting. "
    "Exchange, of several ranks, is what the first does and waits for to have all ranks' gradients.",
    "memory": "Thick bars were measured in a step, thin ones predicted without running anything. Each kind at its "
    "most: gradients come as activations go. What Python, PyTorch and CUDA need comes on top. Of several ranks it is "
    "the first one's; buckets are DDP's.",
    "loss_steps": "Medians over the seeds. What learns as well a step lies on one line.",
    "loss_seconds": "Medians over the seeds, compiling included: what the user waits for.",
    "throughput_steps": "Warm-up and compiling are the slow first steps; they are not counted in the table's speeds.",
    "throughput_seconds": "The same, over the time that has passed.",
}


# What else these pictures have, in some studies.
_INTERVALS = f" Lines are {CONFIDENCE * 100:.0f} % intervals over the seeds; one that ends in an arrow goes on."
_DIAMONDS = " Diamonds are the source's figures on its own hardware."
_STAIRS = " The dashed line joins the recipes that no other one beats in both."


def report_html(found: Findings, drawings: Mapping[str, Drawing]) -> str:
    """The whole page as text."""
    study = found.study
    parts = {
        "TITLE": escape(f"Speed-up study: {study.get('name', '')}"),
        "VERDICT": escape(found.sentence),
        "CONDITIONS": _items(found.conditions),
        "TABLE": _table(found.rows),
        "NOTES": _items(notes(found.rows)),
        "CHARTS": _charts(drawings, str(study["baseline"]), found.rows),
        "EVIDENCE": _evidence(found.rows),
        "COMMAND": escape(study.get("command") or "made from Python: composer_speedups.ablation.study.run_study"),
        "ENVIRONMENT": _facts(found.environment),
    }
    # One pass over the template: what a value contains is never taken for a placeholder.
    template = Path(__file__).with_name("report.html").read_text(encoding="utf-8")
    return re.sub("@([A-Z]+)@", lambda match: parts[match[1]], template)


def _items(lines: Sequence[str]) -> str:
    return "".join(f"<li>{escape(line)}</li>" for line in lines)


def _table(rows: Sequence[Row]) -> str:
    # On a phone the first columns are all that is seen at once.
    ordered = sorted(COLUMNS, key=lambda c: _FIRST.index(c[1]) if c[1] in _FIRST else len(_FIRST))
    columns = [c for c in ordered if c[1] in ("recipe", "verdict") or any(cell(row, c[1]) for row in rows)]
    heads = []
    for head, key in columns:
        words = ' class="words"' if key == "verdict" else ""
        heads.append(f'<th scope="col"{words}><button type="button">{escape(head)}</button></th>')
    body = []
    for row, name in zip(rows, marked_names(rows), strict=True):
        cells = []
        for _, key in columns:
            words = ' class="words"' if key == "verdict" else ""
            cells.append(f'<td data-value="{escape(_sort_key(row, key))}"{words}>{_cell(row, key, name)}</td>')
        kind = "base" if row["baseline"] else "" if row["seeds"] else "out"
        body.append(f'<tr data-recipe="{escape(row["recipe"])}" class="{kind}">{"".join(cells)}</tr>')
    return f"<table><thead><tr>{''.join(heads)}</tr></thead><tbody>{''.join(body)}</tbody></table>"


def _cell(row: Row, key: str, name: str) -> str:
    if key == "recipe":
        description = row["description"]
        more = f"<small>{escape(description)}</small>" if description and description != name else ""
        # Where a long name may be broken: between its words.
        parts = re.sub("([_/+])", r"\1<wbr>", escape(name))
        return f'<span title="{escape(row["recipe"])}">{parts}</span>{more}'
    text = cell(row, key)
    if key == "speedup" and row["seeds"]:
        value, _, interval = text.partition(" ")
        colour = f' class="{row["speed_verdict"]}"' if row["speed_verdict"] in ("faster", "slower") else ""
        return f"<span{colour}>{escape(value)}</span>" + (
            f"<small>{escape(interval.strip('()'))}</small>" if interval else ""
        )
    if key == "speedup" and not row["seeds"]:
        return escape(row["status"])
    if key == "verdict" and not row["seeds"]:
        return f"<b>{escape(row['status'])}</b> {escape(row['reason'].removeprefix(f'{name}: '))}"
    if key == "published":
        first, *rest = text.split(", ")
        return escape(first) + "".join(f"<small>{escape(part)}</small>" for part in rest)
    return escape(text)


def _sort_key(row: Row, key: str) -> str:
    if key == "verdict":
        return cell(row, key)
    value = (row["published"] or {}).get("samples_per_second") if key == "published" else row[key]
    return "" if value is None else str(int(value) if isinstance(value, bool) else value)


def _charts(drawings: Mapping[str, Drawing], baseline: str, rows: Sequence[Row]) -> str:
    if not drawings:
        return ""
    captions = dict(_CAPTIONS)
    captions["speedups"] += _INTERVALS if any(row["speedup_interval"] for row in rows) else ""
    captions["speedups"] += _DIAMONDS if any((row["published"] or {}).get("speedup") for row in rows) else ""
    captions["speed_memory"] += _STAIRS if "speed_memory" in drawings and drawings["speed_memory"].dashed else ""
    figures = []
    for name, drawing in drawings.items():
        title = f"{drawing.title}, against {baseline}" if name == "speedups" else drawing.title
        caption = escape(captions.get(name, ""))
        figures.append(
            f"<figure><h3>{escape(title)}</h3>{drawing.svg(themed=True)}<figcaption>{caption}</figcaption></figure>"
        )
    return f'<h2>Pictures</h2><div class="charts">{"".join(figures)}</div>'


def _evidence(rows: Sequence[Row]) -> str:
    out = []
    for row, name in zip(rows, short_names([row["recipe"] for row in rows]), strict=True):
        if not row["seeds"]:
            continue
        facts = dict(row["evidence"])
        idle = row["no_effect"]
        marked = [f"{key}{': CHANGED NOTHING' if key in idle else ''}" for key in facts]
        summary = f"<summary><b>{escape(name)}</b> {escape(', '.join(marked) or 'no speed-up')}</summary>"
        items: dict[str, str] = {key: ", ".join(f"{k} {v}" for k, v in value.items()) for key, value in facts.items()}
        if as_it_ran := row["as_it_ran"]:
            items["as it ran"] = ", ".join(f"{key} {value}" for key, value in as_it_ran.items())
        if parts := shares(row):
            items["time of a step"] = ", ".join(f"{kind} {share:.1%}" for kind, share in parts.items())
        if sizes := row["memory"]:
            predicted = row["memory_predicted"]
            items["memory"] = ", ".join(
                f"{kind} {sizes[kind] / 1e6:,.1f} MB"
                + (f" (predicted {predicted.get(kind, 0) / 1e6:,.1f})" if predicted else "")
                for kind in MEMORY_KINDS
                if kind in sizes
            )
        if numerics := row["numerics"]:
            errors = f"gradients {numerics['gradients']:.1e} off float64, the plain model's {numerics['plain']:.1e}"
            items["numbers"] = f"{errors} in {numerics['precision']}" + "".join(f"; {w}" for w in numerics["wrong"])
        if row["kernels"]:
            items["kernels that ran"] = ", ".join(row["kernels"])
        if row["warnings"]:
            items["warnings"] = " | ".join(row["warnings"])
        inner = "".join(f"<dt>{escape(key)}</dt><dd>{escape(str(value))}</dd>" for key, value in items.items())
        out.append(f"<details>{summary}<dl>{inner}</dl></details>")
    return "".join(out) or "<p>No run has finished yet.</p>"


def _facts(environment: Mapping[str, Any]) -> str:
    flat = {}
    for key, value in environment.items():
        if value in (None, [], {}):
            continue
        if key == "memory_bytes":
            key, value = "memory", f"{value / 2**30:.1f} GiB"
        elif key == "commit":
            value = f"{value.get('id')}{'' if value.get('clean') else ', with changes that are in no commit'}"
        flat[key.replace("_", " ")] = _words(value)
    return "".join(f"<dt>{escape(key)}</dt><dd>{escape(value)}</dd>" for key, value in flat.items())


def _words(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{k} {_words(v)}" for k, v in value.items() if v not in (None, [], {}))
    if isinstance(value, (list, tuple)):
        return "; ".join(map(_words, value)) if value and isinstance(value[0], Mapping) else " ".join(map(str, value))
    return str(value)
