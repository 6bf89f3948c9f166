"""Against what a user would pick instead: Hugging Face's Trainer and stock Composer, each as most use it and at its
best, and a bare loop with the same kernels, which shows what the training loop costs.

All do the same work: the same model from the same weights, the same samples, batch and learning rate.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from benchmarks.harness import Entry, Rows, interleaved, markdown, ratios, spread
from composer_speedups.hardware import hardware

__all__ = ["run"]

# On a GPU nothing is downloaded and the batch is the same for all. Lengths are drawn around 230 with a spread of 90 and
# cut at 256: about as film reviews have them, of which the longer part is cut at 256.
_CUDA = ("batch_size=64", "model.pretrained=false")
_IMDB = ("task={name: dummy, mean_length: 230, length_std: 90, max_length: 256}",)
_FINETUNE, _MLM = (*_IMDB, *_CUDA), ("task={name: dummy, objective: mlm, max_length: 256}", *_CUDA)

# name in the table -> what runs. The first is what all speed-ups are ratios to.
ENTRIES = {
    "cpu": {
        "ours: cpu/fp32": Entry("ours", "cpu/fp32"),
        "Composer, as most use it (fp32, DecoupledAdamW)": Entry("composer", "cpu/fp32"),
        "Hugging Face Trainer, as most use it (fp32, padded)": Entry("huggingface", "cpu/fp32"),
        "Hugging Face Trainer, best (bf16, fused AdamW, group by length)": Entry("huggingface_best", "cpu/fp32"),
        "ours: cpu/bf16 (padded)": Entry("ours", "cpu/bf16"),
        "ours: cpu/unpadding (bf16)": Entry("ours", "cpu/unpadding"),
        "ours: cpu/fastest": Entry("ours", "cpu/fastest"),
        "bare loop with the kernels of cpu/fastest": Entry("bare_loop", "cpu/fastest"),
    },
    "cuda": {
        "ours: finetune/fp32 (TF32 off)": Entry("ours", "finetune/fp32", _FINETUNE),
        "Composer, as most use it (fp16 AMP, DecoupledAdamW)": Entry("composer", "finetune/fp32", _FINETUNE),
        "Composer, best (bf16 AMP, its LowPrecisionLayerNorm, compiled)": Entry(
            "composer_best", "finetune/fp32", _FINETUNE
        ),
        "Hugging Face Trainer, as most use it (fp16 AMP)": Entry("huggingface_amp", "finetune/fp32", _FINETUNE),
        "Hugging Face Trainer, best (bf16, fused AdamW, group by length)": Entry(
            "huggingface_best", "finetune/fp32", _FINETUNE
        ),
        "Hugging Face Trainer, best, compiled": Entry(
            "huggingface_best", "finetune/fp32", _FINETUNE, {"torch_compile": True}
        ),
        "ours: finetune/bf16": Entry("ours", "finetune/bf16", _FINETUNE),
        "ours: finetune/fastest": Entry("ours", "finetune/fastest", _FINETUNE),
        "bare loop with the kernels of finetune/fastest": Entry("bare_loop", "finetune/fastest", _FINETUNE),
        "ours: mlm/amp": Entry("ours", "mlm/amp", _MLM),
        "ours: mlm/fastest": Entry("ours", "mlm/fastest", _MLM),
    },
}


def run(folder: Path, repetitions: int, batches: int, deadline: float | None = None, only: tuple[str, ...] = ()) -> str:
    """Measure into `folder`; return the table."""
    entries = ENTRIES[hardware()]
    chosen = {name: entry for name, entry in entries.items() if not only or any(part in name for part in only)}
    if not chosen:
        raise SystemExit(f"error: --only {' '.join(only)}: no such entry. There are: {', '.join(entries)}")
    rows = interleaved(chosen, folder, repetitions=repetitions, batches=batches, deadline=deadline)
    names = [name for name in chosen if any(row["entry"] == name for row in rows)]
    body = [_line(rows, name, names[0]) for name in names]
    done = 1 + max(row["repetition"] for row in rows)
    heading = (
        f"{done} repetitions, interleaved, each run in a fresh process; two epochs of {batches} batches, the second "
        "counts; median over the runs [lowest, highest]; ratios within each repetition."
    )
    _plot(rows, names, folder / "plot.png")
    return markdown(folder, heading, ("", "samples/s", f"against {names[0]}", "last loss"), body)


def _line(rows: Rows, name: str, base: str) -> tuple[str, ...]:
    speeds = [row["samples_per_second"] for row in rows if row["entry"] == name and row["samples_per_second"]]
    if not speeds:
        why = next((row["reason"] for row in rows if row["entry"] == name and row["reason"]), "no result")
        return (name, why, "", "")
    losses = [row["losses"][-1] for row in rows if row["entry"] == name and row.get("losses")]
    against = ratios(rows, name, base, _samples_per_second)
    loss = f"{statistics.median(losses):.3f}" if losses else ""
    return (name, spread(speeds, ".1f"), spread(against, unit="x"), loss)


def _samples_per_second(row: dict[str, Any]) -> float | None:
    return row["samples_per_second"]


def _plot(rows: Rows, names: list[str], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    speeds = {
        name: values
        for name in names
        if (values := [r["samples_per_second"] for r in rows if r["entry"] == name and r["samples_per_second"]])
    }
    figure, axes = pyplot.subplots(figsize=(9, 0.5 * len(speeds) + 1.2))
    medians = [statistics.median(values) for values in speeds.values()]
    low = [m - min(v) for m, v in zip(medians, speeds.values(), strict=True)]
    high = [max(v) - m for m, v in zip(medians, speeds.values(), strict=True)]
    colours = ["#0072B2" if name.startswith("ours") else "#999999" for name in speeds]
    axes.barh(list(speeds), medians, xerr=[low, high], color=colours, ecolor="#333333")
    axes.invert_yaxis()
    axes.set_xlabel("samples/s (median, lowest and highest run)")
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
