"""Where a step's time goes, of entries of `peers`: on the GPU, and on the host that gives it work.

    python -m benchmarks.run profiles --only "finetune/fastest" --out /tmp/profiles
    python3 -m benchmarks.gpu --parts profiles --minutes 4 --out profiles
    python -m benchmarks.profiles some_trace.json.gz 5 # the sums of a trace of five steps, whoever has made it

Each entry is a process of its own, in which windows of steps follow each other: some with nothing beside them, which
tell how long a step takes and how much of it the host needs to give its work; some under PyTorch's profiler; some under
cProfile, which burdens the host and names who makes it slow. A row has the sums, `NAME.txt` the largest kernels and
functions, and `NAME.json.gz` is the trace, for chrome://tracing and Perfetto.

What a CUDA graph launches has no operator beside it, so kinds of work are told by the names of kernels. Nothing here
compares speeds: a profiler costs time, and each entry runs once.
"""

from __future__ import annotations

import cProfile
import gzip
import io
import json
import pstats
import re
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.profiler import ProfilerActivity, profile

from benchmarks import contenders
from benchmarks.harness import GRACE, TIMEOUT, begin, keep_words, large_enough, markdown, read
from benchmarks.peers import ENTRIES, named
from composer_speedups.ablation.jobs import PRELOAD
from composer_speedups.hardware import hardware, suite_section
from composer_speedups.isolation.isolate import Isolation

__all__ = [
    "Activity",
    "Windows",
    "activities_of",
    "busy_seconds",
    "by_kind",
    "kind_of",
    "measure",
    "profiled",
    "table",
    "usual",
]

# Of those that are looked at if nobody says which: ours, and who is to be beaten; some are a CPU's, some a GPU's.
_USUAL = ("ours: finetune/fastest", "ours: mlm/fastest", "ours: cpu/fastest", "Hugging Face Trainer, best (")
# Steps before the first window, in which everything is compiled and recorded; with nothing beside them; under cProfile.
_STEPS = {"cuda": (10, 14, 10), "cpu": (2, 2, 2)}
_LISTED = 45  # kernels and functions

# The first rule that is found in a kernel's name says what it is for. Ours are `forward_kernel` and `backward_kernel`
# of norms, dropout, GELU and the loss, and `attention_..._kernel`; cuBLAS's are nvjet on Hopper, and cutlass, whose
# name flash attention's kernels have in theirs.
_RULES = tuple(
    (re.compile(pattern, re.IGNORECASE), kind)
    for pattern, kind in (
        (r"flash|fmha|attention|sdpa", "attention"),
        (r"nvjet|gemm|cutlass|xmma|cublas|splitk", "products"),
        (r"triton_", "compiled"),
        (r"adam|FusedOptimizer|lpnorm", "optimizer"),
        (r"embedding|compute_grad_weight|sum_and_scatter|radix_?sort|segment|scatter_kernel|few_kernel|gather_kernel"
         r"|indexSelect|index_elementwise", "embeddings"),
        (r"softmax|nll_loss|cross_entropy", "loss"),
        (r"norm|gelu|dropout|GammaBeta|masked_scale|^_?(forward|backward)_kernel", "norms, dropout, GELU"),
        (r"reduce_kernel|sum_kernel|join_kernel|_sum\b", "sums"),
        (r"copy|CatArray|memcpy|memset|fill|multi_tensor", "copies, casts"),
        (r"elementwise", "elementwise"),
    )
)  # fmt: skip
KINDS = tuple(dict.fromkeys([kind for _, kind in _RULES] + ["other"]))


@dataclass(frozen=True)
class Activity:
    """A kernel, a copy or a memset, in seconds on the device's clock."""

    name: str
    start: float
    seconds: float


def kind_of(name: str) -> str:
    """What a kernel of this name is for.

    >>> kind_of("nvjet_sm90_tst_192x192_64x3_1x2_h_bz_coopB_splitK_NTN"), kind_of("Memset (Device)"), kind_of("mystery")
    ('products', 'copies, casts', 'other')
    """
    return next((kind for rule, kind in _RULES if rule.search(name)), "other")


def activities_of(trace: Path) -> list[Activity]:
    """What the device did, of a trace as PyTorch's profiler exports it: without ranges that only have a name."""
    read_text = gzip.open if trace.suffix == ".gz" else open
    with read_text(trace, "rt") as file:
        events = json.load(file)["traceEvents"]
    kinds = ("kernel", "gpu_memcpy", "gpu_memset")
    return [Activity(e["name"], e["ts"] / 1e6, e["dur"] / 1e6) for e in events if e.get("cat") in kinds]


def busy_seconds(activities: Iterable[Activity]) -> float:
    """The time in which the device did something; what ran side by side counts once.

    >>> busy_seconds([Activity("a", 0.0, 2.0), Activity("b", 1.0, 2.0), Activity("c", 5.0, 1.0)])
    4.0
    """
    busy, end = 0.0, float("-inf")
    for activity in sorted(activities, key=lambda a: a.start):
        until = activity.start + activity.seconds
        busy += max(0.0, until - max(activity.start, end))
        end = max(end, until)
    return busy


def by_kind(activities: Iterable[Activity]) -> dict[str, float]:
    """Seconds, the most first."""
    seconds = Counter[str]()
    for activity in activities:
        seconds[kind_of(activity.name)] += activity.seconds
    return dict(seconds.most_common())


def usual(entries: Collection[str]) -> list[str]:
    """Names, or parts of names, of those of `entries` that are looked at if nobody says which."""
    return [word for word in _USUAL if any(word in name for name in entries)]


def measure(
    folder: Path, repetitions: int, batches: int, deadline: float | None = None, only: Sequence[str] = ()
) -> None:
    """`batches` are under the profiler; `only`: names of entries, or parts of names. `repetitions` is 1: nothing is
    compared."""
    entries, device = ENTRIES[suite_section()], hardware()
    begin(folder, "profiles", batches=batches)
    with Isolation("benchmarks.profiles:profiled", (*PRELOAD, "benchmarks.contenders")) as isolation:
        for name in named(only or usual(entries), entries):
            left = TIMEOUT[device] if deadline is None else deadline - time.monotonic()
            if left <= 0:
                print(f"out of time before {name}", file=sys.stderr)
                return
            entry, windows = entries[name], Windows(*_STEPS[device], batches)
            payload = {
                "contender": entry.contender,
                "recipe": large_enough(entry, windows.steps).to_dict(),
                "steps": windows.steps,
                "counted": windows.steps - _STEPS[device][0],
                "seed": 17,
                "arguments": dict(entry.arguments),
                "windows": [*_STEPS[device], batches],
                "trace": str(folder / f"{re.sub(r'[^a-zA-Z0-9]+', '_', name).strip('_')}.json.gz"),
            }
            outcome = isolation.run(payload, timeout=min(TIMEOUT[device], left + GRACE))
            facts = outcome.value or {}
            row = {"entry": name, "status": outcome.status, "reason": outcome.reason, **facts}
            with (folder / "rows.jsonl").open("a") as file:
                file.write(json.dumps(row) + "\n")
            if outcome.status != "ok":
                keep_words(folder, name, outcome)
            said = f"{1e3 * facts['step_seconds']:.1f} ms a step" if facts else f"{outcome.status}: {outcome.reason}"
            print(f"{name}: {said}", file=sys.stderr, flush=True)


def profiled(payload: dict[str, Any], report: Callable[[Any], None]) -> dict[str, Any]:
    """Train as `contenders.measure` does, and look at some steps; called in a fresh process."""
    windows, trace = Windows(*payload["windows"]), Path(payload["trace"])
    hook = register_optimizer_step_post_hook(windows.after_a_step)
    try:
        result = contenders.measure(payload, report)
    finally:
        hook.remove()
    windows.profiler.export_chrome_trace(str(trace))
    activities, steps = activities_of(trace), payload["windows"][-1]
    facts = {
        **windows.seconds,
        "busy_seconds": busy_seconds(activities) / steps,
        "activities": len(activities) / steps,
        "kinds": {kind: taken / steps for kind, taken in by_kind(activities).items()},
        "tokens": statistics.mean(result["tokens"]),
        "peak_memory_bytes": result["peak_memory_bytes"],
        "every_step": result["seconds"],
        "evidence": result.get("evidence"),
    }
    words = [json.dumps(facts, default=str), "", *_largest(activities, steps), "", windows.functions()]
    trace.with_suffix("").with_suffix(".txt").write_text("\n".join(words))
    return facts


class Windows:
    """Steps that are looked at in one way or another, as an optimizer makes them.

    Args:
        before: steps before the first window.
        plain: steps with nothing beside them.
        under_cprofile: steps whose functions of Python are timed.
        traced: steps under PyTorch's profiler.

    Attributes:
        steps: that a training needs at least.
        seconds: of a plain step: `step_seconds`, and `host_seconds` until the host had given the GPU its work.
        profiler: PyTorch's, with the trace.
    """

    def __init__(self, before: int, plain: int, under_cprofile: int, traced: int) -> None:
        self._plain = (before, before + plain)
        # The step between two windows has what the end of one, or the beginning of the next, takes.
        self._traced = (self._plain[1] + 1, self._plain[1] + 1 + traced)
        self._watched = (self._traced[1] + 1, self._traced[1] + 1 + under_cprofile)
        self.steps = self._watched[1] + 1
        self.seconds: dict[str, float] = {}
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
        self.profiler = profile(activities=activities)
        self._host = cProfile.Profile()
        self._done = 0
        self._began = 0.0

    def after_a_step(self, *_: Any) -> None:
        """To be called after each."""
        self._done += 1
        if self._done == self._plain[0]:
            self._began = _now()
        elif self._done == self._plain[1]:
            given, steps = time.perf_counter(), self._plain[1] - self._plain[0]
            self.seconds["host_seconds"] = (given - self._began) / steps
            self.seconds["step_seconds"] = (_now() - self._began) / steps
        elif self._done == self._traced[0]:
            _now()
            self.profiler.__enter__()
        elif self._done == self._traced[1]:
            _now()
            self.profiler.__exit__(None, None, None)
        elif self._done == self._watched[0]:
            self._host.enable()
        elif self._done == self._watched[1]:
            self._host.disable()

    def functions(self) -> str:
        """Those of Python that take most of the host's time: by themselves, and with what they call."""
        text = io.StringIO()
        stats = pstats.Stats(self._host, stream=text)
        for order in ("tottime", "cumtime"):
            stats.sort_stats(order).print_stats(_LISTED)
        return re.sub(r"/\S*/site(-packages)?/", "", text.getvalue())


def _now() -> float:
    """When the GPU has done all that it was given."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def _largest(activities: Sequence[Activity], steps: int) -> list[str]:
    """A line for each of the kernels that take most of a step."""
    seconds, counts = Counter[str](), Counter(activity.name for activity in activities)
    for activity in activities:
        seconds[activity.name] += activity.seconds
    return [
        f"{1e3 * taken / steps:8.3f} ms {counts[name] / steps:7.1f}x {1e6 * taken / counts[name]:8.1f} us "
        f"[{kind_of(name)}] {name[:150]}"
        for name, taken in seconds.most_common(_LISTED)
    ]


def table(folder: Path) -> str:
    """Milliseconds of a step, by entry."""
    found = read(folder)
    rows = [row for row in found.rows if row["status"] == "ok"]
    lines = {
        "a step": [row["step_seconds"] for row in rows],
        "until the host has given its work": [row["host_seconds"] for row in rows],
    }
    if any(row["activities"] for row in rows):
        lines["the GPU is busy"] = [row["busy_seconds"] for row in rows]
        for kind in KINDS:
            if any(kind in row["kinds"] for row in rows):
                lines[f"- {kind}"] = [row["kinds"].get(kind, 0.0) for row in rows]
    body = [[what, *(f"{1e3 * value:.2f}" for value in values)] for what, values in lines.items()]
    body.append(["kernels, copies and memsets", *(f"{row['activities']:.0f}" for row in rows)])
    body.append(["real tokens", *(f"{row['tokens']:,.0f}" for row in rows)])
    heading = (
        "Milliseconds, one run each: the first two lines with nothing beside the training, all others of "
        f"{found.conditions['batches']} steps under PyTorch's profiler."
    )
    failed = [f"{row['entry']}: {row['reason']}" for row in found.rows if row["status"] != "ok"]
    _picture(folder, [row for row in rows if row["activities"]])
    return markdown(folder, heading, ["", *(row["entry"] for row in rows)], body, failed)


def _picture(folder: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write `plot.png` if it is not there yet: of each entry a bar of what the GPU does in a step, by kind of work."""
    if not rows or (folder / "plot.png").exists():
        return
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names, reached = [row["entry"] for row in rows], [0.0] * len(rows)
    readable = 0.035 * max(1e3 * sum(row["kinds"].values()) for row in rows)  # as long as its number is wide
    figure, axes = pyplot.subplots(figsize=(9, 0.7 * len(rows) + 1.6))
    for kind in (kind for kind in KINDS if any(kind in row["kinds"] for row in rows)):
        taken = [1e3 * row["kinds"].get(kind, 0.0) for row in rows]
        bars = axes.barh(names, taken, left=reached, label=kind)
        labels = [f"{value:.1f}" if value > readable else "" for value in taken]
        axes.bar_label(bars, labels, label_type="center", color="white", fontsize=8)
        reached = [a + b for a, b in zip(reached, taken, strict=True)]
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds of a step, of the GPU's kernels")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(ncols=5, loc="upper center", frameon=False, fontsize=8)
    figure.tight_layout(rect=(0, 0, 1, 0.82))
    figure.savefig(folder / "plot.png", dpi=120)
    pyplot.close(figure)


def main(arguments: Sequence[str]) -> int:
    if len(arguments) not in (1, 2) or not Path(arguments[0]).is_file() or not "".join(arguments[1:] or "1").isdigit():
        print("usage: python -m benchmarks.profiles TRACE.json[.gz] [STEPS]", file=sys.stderr)
        return 2
    steps = int(arguments[1]) if len(arguments) == 2 else 1
    activities = activities_of(Path(arguments[0]))
    print(
        f"{1e3 * busy_seconds(activities) / steps:8.3f} ms busy, {len(activities) / steps:.0f} kernels, copies, memsets"
    )
    for kind, taken in by_kind(activities).items():
        print(f"{1e3 * taken / steps:8.3f} ms  {kind}")
    print("\n".join(_largest(activities, steps)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
