"""Against what a user would pick instead: Hugging Face's Trainer and stock Composer, each as most use it and at its
best, and a bare loop with the same kernels, which shows what the training loop costs.

All do the same work: the same model from the same weights, batch, learning rate and, but for one (`contenders.py`),
the same samples. Peers have SDPA attention, which is what a user gets. Stock Composer refuses bf16 on a CPU.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.harness import (
    EARLY,
    Entry,
    Rows,
    begin,
    interleaved,
    markdown,
    plot,
    ratios,
    read,
    shown,
    spread,
    times_run,
)
from composer_speedups.hardware import hardware, matmul_peak, suite_section
from composer_speedups.isolation.isolate import Isolation

__all__ = ["DECIDING", "ENTRIES", "matmul_peak_of", "measure", "named", "table"]

# On a GPU nothing is downloaded; batch, learning rate and workers are the same for all. Lengths are drawn around 230
# with a spread of 90 and cut at 256: about as film reviews have them, of which the longer part is cut at 256.
_CUDA = ("batch_size=64", "learning_rate=1e-4", "workers=2", "model.pretrained=false")
_LENGTHS = "name: dummy, mean_length: 230, length_std: 90, max_length: 256"
_FINETUNE = (f"task={{{_LENGTHS}}}", *_CUDA)
_MLM = (f"task={{{_LENGTHS}, objective: mlm}}", *_CUDA)
_PEER = (*_FINETUNE, "model.attn_implementation=sdpa")
_FEW = 10  # batches, of a quarter of a second each, or whose memory is what is asked for
# Of what records nothing as it goes, and takes longer: more repetitions tell more than longer runs.
_ALIKE = 50
_PEAK = 60  # seconds that measuring it may take
_MEMORY = ("batch_size=4", "model.pretrained=false")

# On every CPU, name in the table -> what runs.
_CPU = {
    "ours: cpu/fp32": Entry("ours", "cpu/fp32"),
    "Composer, as most use it (fp32, DecoupledAdamW)": Entry("composer", "cpu/fp32"),
    "Composer, best (fp32, fused AdamW, compiled)": Entry("composer_best", "cpu/fp32"),
    "Hugging Face Trainer, as most use it (fp32, padded)": Entry("huggingface", "cpu/fp32"),
}

# name in the table -> what runs. Of each kind (`_kind`) the first is what speed-ups are ratios to. On a GPU, where time
# may run out, what decides about the targets comes first, and `DECIDING` says how many do.
DECIDING = {"cpu": 0, "cpu_without_bf16": 0, "cuda": 10}
ENTRIES = {
    "cpu": {
        **_CPU,
        "Hugging Face Trainer, best (bf16, fused AdamW, group by length)": Entry("huggingface_best", "cpu/fp32"),
        "Hugging Face Trainer, best, compiled": Entry("huggingface_best", "cpu/fp32", (), {"torch_compile": True}),
        "ours: cpu/bf16 (padded)": Entry("ours", "cpu/bf16"),
        "ours: cpu/unpadding (bf16)": Entry("ours", "cpu/unpadding"),
        "ours: cpu/fastest": Entry("ours", "cpu/fastest"),
        "bare loop with the kernels of cpu/fastest": Entry("bare_loop", "cpu/fastest"),
    },
    # As above, all in float32: bf16 would take longer.
    "cpu_without_bf16": {
        **_CPU,
        "Hugging Face Trainer, best (fp32, fused AdamW, group by length)": Entry(
            "huggingface_best", "cpu/fp32", (), {"bf16": False}
        ),
        "Hugging Face Trainer, best, compiled": Entry(
            "huggingface_best", "cpu/fp32", (), {"bf16": False, "torch_compile": True}
        ),
        "ours: cpu/unpadding in fp32": Entry("ours", "cpu/unpadding", ("speedups.mixed_precision=null",)),
        "ours: cpu/fastest_fp32": Entry("ours", "cpu/fastest_fp32"),
        "bare loop with the kernels of cpu/fastest_fp32": Entry("bare_loop", "cpu/fastest_fp32"),
    },
    "cuda": {
        "ours: finetune/fp32 (TF32 off)": Entry("ours", "finetune/fp32", _FINETUNE, batches=_FEW),
        "ours: finetune/fastest": Entry("ours", "finetune/fastest", _FINETUNE),
        "Hugging Face Trainer, as most use it (fp16 AMP)": Entry(
            "huggingface_amp", "finetune/fp32", _PEER, batches=_ALIKE
        ),
        "Hugging Face Trainer, best (bf16, fused AdamW, group by length)": Entry(
            "huggingface_best", "finetune/fp32", _PEER, batches=_ALIKE
        ),
        "ours: mlm/amp": Entry("ours", "mlm/amp", _MLM, batches=_ALIKE),
        "ours: mlm/fastest": Entry("ours", "mlm/fastest", _MLM),
        "ours: memory/fp32 (BERT-large)": Entry("ours", "memory/fp32", _MEMORY, batches=_FEW),
        "ours: memory/leanest (BERT-large)": Entry("ours", "memory/leanest", _MEMORY, batches=_FEW),
        # They take longest where nothing is in the caches.
        "Hugging Face Trainer, best, compiled": Entry(
            "huggingface_best", "finetune/fp32", _PEER, {"torch_compile": True}, batches=_ALIKE
        ),
        "Composer, best (bf16 AMP, fused AdamW, its LowPrecisionLayerNorm, compiled)": Entry(
            "composer_best", "finetune/fp32", _PEER, batches=_ALIKE
        ),
        # What each part of `fastest` brings: graphs, and of what they are.
        "ours: finetune/fastest_eager": Entry("ours", "finetune/fastest_eager", _FINETUNE),
        "ours: finetune/fastest, graphs of the layers alone": Entry(
            "ours", "finetune/fastest", (*_FINETUNE, "speedups.cuda_graphs={}")
        ),
        "ours: finetune/fastest_compiled": Entry("ours", "finetune/fastest_compiled", _FINETUNE),
        # What Inductor's kernels bring once the host is out of the way.
        "ours: finetune/fastest, compiled blocks in graphs": Entry(
            "ours",
            "finetune/fastest_compiled",
            (*_FINETUNE, "speedups.cuda_graphs={scope: model}", "speedups.unpadding={multiple_of: 512}"),
        ),
        "ours: mlm/fastest_compiled": Entry("ours", "mlm/fastest_compiled", _MLM),
        # Whether our kernels pay beside Inductor's.
        "ours: finetune/fastest_compiled, dropout + residual + norm by Inductor": Entry(
            "ours", "finetune/fastest_compiled", (*_FINETUNE, "speedups.fused_dropout_add_norm=null")
        ),
        "ours: finetune/fastest_compiled, bias + GELU by Inductor": Entry(
            "ours", "finetune/fastest_compiled", (*_FINETUNE, "speedups.fused_bias_gelu=null")
        ),
        # What its own kernels must beat, or not be recommended.
        "ours: finetune/fastest, LowPrecisionNorm in place of the fused norms": Entry(
            "ours",
            "finetune/fastest",
            (
                *_FINETUNE,
                "speedups.fused_dropout_add_norm=null",
                "speedups.fused_layer_norm=null",
                "speedups.low_precision_norm={}",
            ),
        ),
        "bare loop with the kernels of finetune/fastest": Entry("bare_loop", "finetune/fastest", _FINETUNE),
        "Composer, as most use it (fp16 AMP, DecoupledAdamW)": Entry(
            "composer", "finetune/fp32", _PEER, batches=_ALIKE
        ),
        "ours: finetune/bf16": Entry("ours", "finetune/bf16", _FINETUNE, batches=_ALIKE),
        # All batches padded to one length, and one CUDA graph for them: what else saves the host's launches.
        "ours: finetune/bf16, CUDA graphs": Entry(
            "ours", "finetune/bf16", (*_FINETUNE, "speedups.torch_compile={mode: reduce-overhead, dynamic: false}")
        ),
    },
}


def measure(
    folder: Path,
    repetitions: int,
    batches: int,
    deadline: float | None = None,
    only: tuple[str, ...] = (),
    changes: tuple[str, ...] = (),
    after_each: Callable[[], object] = lambda: None,
) -> None:
    """`only`: names of entries, or parts of names; `changes`: `KEY=VALUE`, in the recipe of every entry; `after_each`:
    called after each run."""
    section = suite_section()
    entries = ENTRIES[section]
    names = named(only, entries) if only else list(entries)
    chosen = {n: replace(entries[n], overrides=(*entries[n].overrides, *changes)) for n in names}
    precision = "fp32" if section == "cpu_without_bf16" else "bf16"
    urgent = len(chosen.keys() & set(list(entries)[: DECIDING[section]]))
    said = {"early": min(EARLY, repetitions), "urgent": urgent} if 0 < urgent < len(chosen) else {}
    said |= {"cache": _cache()} if section == "cuda" else {}
    begin(folder, "peers", batches=batches, precision=precision, peak=_peak(precision), changes=changes, **said)
    interleaved(
        *(chosen, folder),
        repetitions=repetitions,
        batches=batches,
        deadline=deadline,
        urgent=urgent,
        after_each=after_each,
    )


def named(only: Sequence[str], entries: Collection[str]) -> list[str]:
    """Those of `entries` that are meant: by a whole name that one alone, by a part of names all that have it.

    Raises:
        SystemExit: one of `only` is no part of any.

    >>> named(["ours: a", "cd"], ["ours: a", "ours: ab", "bcd", "cde"])
    ['ours: a', 'bcd', 'cde']
    """
    parts = [part for part in only if part not in entries]
    chosen = [name for name in entries if name in only or any(part in name for part in parts)]
    if lost := [word for word in only if not any(word in name for name in entries)]:
        raise SystemExit(f"error: --only {lost[0]!r}: no such name. There are: {', '.join(entries)}")
    return chosen


def _cache() -> str:
    """The folder in which all runs, each in a process of its own, find what others have compiled."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return cache_dir()


def _peak(precision: str) -> float | None:
    """The matmul peak, from a process of its own: what may be wrong with the device then ends no training."""
    with Isolation("benchmarks.peers:matmul_peak_of") as isolation:
        outcome = isolation.run(precision, timeout=_PEAK)
    if outcome.value is None:
        print(f"no matmul peak, and no MFU: {outcome.reason}\n{outcome.log}", file=sys.stderr)
    return outcome.value


def matmul_peak_of(precision: str, report: Callable[[Any], None]) -> float:
    return matmul_peak(hardware(), precision)


def table(folder: Path) -> str:
    found = read(folder)
    rows, names = found.rows, found.names
    batches, precision, peak = (found.conditions[key] for key in ("batches", "precision", "peak"))
    heading = (
        f"{times_run(rows)}, interleaved, each run in a fresh process; {batches} batches count, after half "
        "as many; median over the runs [lowest, highest]; ratios of real tokens per second within each repetition, "
        "against the first line of its kind, and of the fastest of its kind against this. MFU: the whole model's "
        "mathematics on real tokens (also what last_layer_subset finds nobody to read, a part of one layer), of the "
        f"{precision} matmul peak measured here, {f'{peak / 1e12:.3g} TFLOP/s' if peak else 'which failed'}. Memory: "
        "the peak of the process or of the GPU's allocator."
    )
    fewer = {row["entry"]: row["counted"] for row in rows if row.get("counted", batches) < batches}
    for count in dict.fromkeys(fewer.values()):
        heading += f" Of {' and '.join(name for name in fewer if fewer[name] == count)} {count} batches count."
    if urgent := found.conditions.get("urgent"):
        heading += f" The first {urgent} lines have {found.conditions['early']} repetitions before the others begin."
    if found.conditions.get("cache"):
        heading += " Compiled code is kept: what is not new in a later repetition is found in PyTorch's cache."
    if changes := found.conditions.get("changes"):
        heading += f" Every recipe with {', '.join(changes)}."
    head = (
        "",
        "samples/s",
        "real tokens/s",
        "MFU",
        "against the first",
        "fastest against this",
        "peak MB",
        "last loss",
    )
    plot(folder, {name: _values(rows, name, "real_tokens_per_second") for name in names}, "real tokens/s")
    return markdown(folder, heading, head, [_line(rows, name, names, peak) for name in names])


def _kind(name: str) -> str:
    """Which lines are compared with each other."""
    return next((kind for kind in ("mlm/", "memory/") if kind in name), "")


def _line(rows: Rows, name: str, names: list[str], peak: float | None) -> tuple[str, ...]:
    speeds = _values(rows, name, "samples_per_second")
    if not speeds:
        why = next((row["reason"] for row in rows if row["entry"] == name and row["reason"]), "no result")
        return (shown(rows, name), why, *[""] * 6)
    like = [other for other in names if _kind(other) == _kind(name)]
    fastest = next((n for n in like if n.startswith("ours: ") and ("/fastest" in n or "/leanest" in n)), None)
    memory, losses = _values(rows, name, "peak_memory_bytes"), _values(rows, name, "losses")
    return (
        shown(rows, name),
        spread(speeds, ".1f"),
        spread(_values(rows, name, "real_tokens_per_second"), ",.0f"),
        spread([100 * rate / peak for rate in _values(rows, name, "flops_per_second") if peak], ".1f", " %"),
        spread(ratios(rows, name, like[0], _tokens), unit="x"),
        spread(ratios(rows, fastest, name, _tokens), unit="x") if fastest else "",
        f"{statistics.median(memory) / 1e6:,.0f}" if memory else "",
        f"{statistics.median([each[-1] for each in losses]):.3f}" if losses else "",
    )


def _values(rows: Rows, name: str, key: str) -> list[Any]:
    return [row[key] for row in rows if row["entry"] == name and row.get(key)]


def _tokens(row: dict[str, Any]) -> float | None:
    return row["real_tokens_per_second"]
