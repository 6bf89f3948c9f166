"""`make bench`: everything interleaved, each run in a fresh process, medians with their spread.

    python -m benchmarks.run                    # chooses by hardware
    python -m benchmarks.run --repetitions 5 --batches 8 --out benchmarks/results/my_run

Each run trains two epochs of the same few batches' worth of samples. The first warms up, the second counts, whole:
every contender then has done the same samples, also one that sorts them by length.

Writes a folder under `benchmarks/results/` that is never edited afterwards: `environment.json`, `rows.jsonl` (one line
a run, with the seconds of every step), `table.md` and `speed.png`.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import sys
from pathlib import Path
from typing import Any

from composer_speedups.ablation.isolate import Isolation
from composer_speedups.ablation.jobs import PRELOAD
from composer_speedups.hardware import environment, hardware, summary
from composer_speedups.recipes import load_recipe

RESULTS = Path(__file__).parent / "results"

# name in the table -> (contender, recipe). The first is what all speed-ups are ratios to.
ENTRIES = {
    "cpu": {
        "ours: cpu/fp32": ("ours", "cpu/fp32"),
        "Composer, as most use it (fp32, DecoupledAdamW)": ("composer", "cpu/fp32"),
        "Hugging Face Trainer, as most use it (fp32, padded)": ("huggingface", "cpu/fp32"),
        "Hugging Face Trainer, best (bf16, fused AdamW, group by length)": ("huggingface_best", "cpu/fp32"),
        "ours: cpu/bf16 (padded)": ("ours", "cpu/bf16"),
        "ours: cpu/unpadding (bf16)": ("ours", "cpu/unpadding"),
        "ours: cpu/fastest": ("ours", "cpu/fastest"),
        "bare loop with the kernels of cpu/fastest": ("bare_loop", "cpu/fastest"),
    },
    "cuda": {
        "ours: finetune/fp32": ("ours", "finetune/fp32"),
        "Composer, as most use it (fp16 AMP, DecoupledAdamW)": ("composer", "finetune/fp32"),
        "Hugging Face Trainer, as most use it (fp32)": ("huggingface", "finetune/fp32"),
        "Hugging Face Trainer, best (bf16, fused AdamW, group by length)": ("huggingface_best", "finetune/fp32"),
        "ours: finetune/bf16": ("ours", "finetune/bf16"),
        "ours: finetune/fastest": ("ours", "finetune/fastest"),
        "bare loop with the kernels of finetune/fastest": ("bare_loop", "finetune/fastest"),
    },
}
# Equal hyper-parameters for all on a GPU: the peers get no other batch than ours.
OVERRIDES = {"cpu": (), "cuda": ("batch_size=64", "task.name=docstrings", "model.pretrained=false")}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=5, help="runs of each entry (default: 5)")
    parser.add_argument("--batches", type=int, default=6, help="batches of an epoch (default: 6)")
    parser.add_argument("--only", nargs="*", help="parts of the names of the entries to measure")
    parser.add_argument("--out", type=Path, help="folder of the results")
    options = parser.parse_args(arguments)
    if options.repetitions < 1 or options.batches < 1:
        parser.error("--repetitions and --batches must be positive")
    kind = hardware()
    entries = {
        name: entry
        for name, entry in ENTRIES[kind].items()
        if not options.only or any(part in name for part in options.only)
    }
    if not entries:
        parser.error(f"--only {' '.join(options.only)}: no such entry; there are: {', '.join(ENTRIES[kind])}")
    out = options.out or RESULTS / f"{datetime.date.today():%Y-%m-%d}_{kind}_peers"
    if (out / "rows.jsonl").exists():
        parser.error(f"{out} holds results already, and results are never edited: name another --out")
    out.mkdir(parents=True, exist_ok=True)
    rows = _measure(entries, options, kind, out)
    table = _table(entries, rows, options, kind)
    (out / "table.md").write_text(table)
    _plot(entries, rows, out / "speed.png")
    print("\n" + table)
    return 0


def _measure(entries: dict[str, tuple[str, str]], options: Any, kind: str, out: Path) -> list[dict[str, Any]]:
    # A run's interpreter does not look into the current folder.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(Path(__file__).parents[1]), os.getenv("PYTHONPATH")]))
    recipes = {}
    for _, name in entries.values():
        recipe = load_recipe(name, OVERRIDES[kind], check_arguments=False)
        task = recipe.task.model_copy(update={"train_samples": options.batches * recipe.batch_size})
        recipes[name] = recipe.model_copy(update={"task": task})
    rows, names = [], list(entries)
    with Isolation("benchmarks.contenders:measure", (*PRELOAD, "benchmarks.contenders")) as isolation:
        facts = None
        total = len(names) * options.repetitions
        for repetition in range(options.repetitions):
            # Rotated, so that no entry always follows the same other.
            for name in names[repetition % len(names) :] + names[: repetition % len(names)]:
                contender, recipe = entries[name]
                payload = {
                    "contender": contender,
                    "recipe": recipes[recipe].to_dict(),
                    "steps": 2 * options.batches,
                    "seed": 17 + repetition,
                }
                outcome = isolation.run(payload, timeout=1800)
                row = {"entry": name, "repetition": repetition, "status": outcome.status, "reason": outcome.reason}
                row |= outcome.value or {}
                rows.append(row)
                with (out / "rows.jsonl").open("a") as file:
                    file.write(json.dumps(row) + "\n")
                speed = _speed(row, recipes[recipe].batch_size)
                shown = f"{speed:.1f} samples/s" if speed else f"{outcome.status}: {outcome.reason}"
                print(f"[{len(rows)}/{total}] {name}: {shown}", file=sys.stderr, flush=True)
                if facts is None:
                    facts = environment() | {"batches": options.batches, "entries": entries}
                    (out / "environment.json").write_text(json.dumps(facts, indent=1, default=str))
    for row in rows:
        row["samples_per_second"] = _speed(row, recipes[entries[row["entry"]][1]].batch_size)
    return rows


def _speed(row: dict[str, Any], batch: int) -> float | None:
    """Samples per second of the second epoch."""
    seconds = row.get("seconds") or []
    counted = seconds[len(seconds) // 2 :]
    return batch * len(counted) / sum(counted) if counted else None


def _by_entry(entries: Any, rows: list[dict[str, Any]]) -> dict[str, list[float]]:
    return {
        name: [r["samples_per_second"] for r in rows if r["entry"] == name and r["samples_per_second"]]
        for name in entries
    }


def _table(entries: Any, rows: list[dict[str, Any]], options: Any, kind: str) -> str:
    speeds = _by_entry(entries, rows)
    first = next(iter(entries))
    lines = [
        f"{summary(environment())}. {options.repetitions} repetitions, interleaved, each run in a fresh process; "
        f"two epochs of {options.batches} batches, the second counts; median over the runs [lowest, highest]; ratios "
        "within each repetition.",
        "",
        f"| | samples/s | against {first} |",
        "|---|---:|---:|",
    ]
    for name, values in speeds.items():
        if not values:
            why = next((r["reason"] for r in rows if r["entry"] == name and r["reason"]), "no result")
            lines.append(f"| {name} | {why} | |")
            continue
        ratios = _ratios(rows, name, first)
        shown = f"{statistics.median(ratios):.2f}x [{min(ratios):.2f}, {max(ratios):.2f}]" if ratios else ""
        lines.append(f"| {name} | {statistics.median(values):.1f} [{min(values):.1f}, {max(values):.1f}] | {shown} |")
    return "\n".join(lines) + "\n"


def _ratios(rows: list[dict[str, Any]], name: str, base: str) -> list[float]:
    speed = {(r["entry"], r["repetition"]): r["samples_per_second"] for r in rows}
    pairs = ((speed.get((name, n)), speed.get((base, n))) for n in sorted({r["repetition"] for r in rows}))
    return [one / other for one, other in pairs if one and other]


def _plot(entries: Any, rows: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    speeds = {name: values for name, values in _by_entry(entries, rows).items() if values}
    figure, axes = pyplot.subplots(figsize=(9, 0.5 * len(speeds) + 1.2))
    medians = [statistics.median(v) for v in speeds.values()]
    spread = [
        [m - min(v) for m, v in zip(medians, speeds.values(), strict=True)],
        [max(v) - m for m, v in zip(medians, speeds.values(), strict=True)],
    ]
    axes.barh(list(speeds), medians, xerr=spread, color="#0072B2", ecolor="#555555")
    axes.invert_yaxis()
    axes.set_xlabel("samples/s (median, lowest and highest run)")
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


if __name__ == "__main__":
    sys.exit(main())
