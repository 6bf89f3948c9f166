"""Each kernel against what this device can do at most: the measured matmul peak and the measured bandwidth of memory.

Kernels that wait for memory are compared with the bytes that they must move at least: each input read once, each output
written once. The bandwidth is a copy's, or, where that is faster, that of changing a tensor in place: a CPU reads a
line before it writes to it, which a copy does for nothing. What else has the same purpose (PyTorch's own operation;
Liger's LayerNorm and optimi's AdamW: `pip install .[bench]`) is measured beside it, interleaved, in one process. Of a
GPU it is the device's time, without the host's for launching. A kernel that fails is left out, and named at the end:
also by a process that goes on in the folder of one which that kernel has ended (`apart.py`).
"""

from __future__ import annotations

import importlib.util
import json
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks import fp8, kernels
from benchmarks.apart import Failures, failed_before
from benchmarks.harness import begin, markdown, plot, read, rows_in, spread, times_run
from benchmarks.kernels import Kernel
from composer_speedups.errors import UserError
from composer_speedups.hardware import hardware, matmul_peak, suite_section

__all__ = ["measure", "seconds_of", "table"]

_SECONDS = 0.15  # spent on each kernel in each repetition, at least
_CLOCK = 2e9  # a GPU's, or a little more: cycles a second
_RIVALS = {"liger-kernel": "liger_kernel", "torch-optimi": "optimi"}  # package -> module


def measure(folder: Path, repetitions: int, batches: int, deadline: float | None = None) -> None:
    """`batches` scales the number of tokens on which the kernels work."""
    import torch

    device = torch.device(hardware())
    if suite_section() == "cpu_without_bf16":
        raise UserError("limits measures kernels in bf16, and this CPU has no bf16 products: measure peers or growth")
    torch.manual_seed(0)
    tokens, width = batches * (8192 if device.type == "cuda" else 1024), 768 if device.type == "cuda" else 256
    if not (folder / "conditions.json").exists():
        precisions = ("tf32", "bf16") if device.type == "cuda" else ("fp32", "bf16")
        peaks = {precision: matmul_peak(device.type, precision) for precision in precisions}
        missing = [name for name, module in _RIVALS.items() if importlib.util.find_spec(module) is None]
        missing = missing if device.type == "cuda" else []
        begin(folder, "limits", peaks=peaks, tokens=tokens, width=width, missing=missing)
    failed = Failures(folder)
    made = list(_made(device, tokens, width, failed))
    measured = {(row["repetition"], row["entry"]) for row in rows_in(folder)}
    for repetition in range(repetitions):
        if deadline is not None and time.monotonic() > deadline and repetition:
            break
        for kernel in made[repetition % len(made) :] + made[: repetition % len(made)]:
            if kernel.name in failed or (repetition, kernel.name) in measured:
                continue
            with failed.attempt(kernel.name):  # one has never run on such a device: the others are worth as much
                taken = seconds_of(kernel.call, device, _SECONDS)
                row = {"repetition": repetition, "group": kernel.group, "entry": kernel.name, "seconds": taken}
                with (folder / "rows.jsonl").open("a") as file:
                    file.write(json.dumps(row | {"bytes": kernel.bytes, "flops": kernel.flops}) + "\n")
    failed.tell()


def _made(device: Any, tokens: int, width: int, failed: Failures) -> Iterator[Kernel]:
    """All kernels; of a group that cannot be made to its end, those before that, and the reason in `failed`."""
    groups = {
        "copies": kernels.copies(device),
        "optimizers": kernels.optimizers(device),
        "norms": kernels.norms(device, tokens, width),
        "activations": kernels.activations(device, tokens, width),
        "projections": kernels.projections(device, tokens, width),
        "embeddings": kernels.embeddings(device, tokens, width),
        "attention": kernels.attention(device, width),
        "losses": kernels.losses(device, tokens),
        "fp8": fp8.products(device, tokens, width),
    }
    for name, group in groups.items():
        made: Kernel | None = None
        while (rest := f"{name}, those after {made.name if made else 'none'}") not in failed:
            made = None
            with failed.attempt(rest):
                made = next(group, None)
            if made is None:
                break
            yield made


def table(folder: Path) -> str:
    found = read(folder)
    peaks, missing = found.conditions["peaks"], found.conditions["missing"]
    runs = {name: [row for row in found.rows if row["entry"] == name] for name in found.names}
    bandwidths = {
        name: rows[0]["bytes"] / statistics.median(row["seconds"] for row in rows)
        for name, rows in runs.items()
        if rows[0]["group"] == "copy"
    }
    bandwidth = max(bandwidths.values())
    shares = {name: [_share(row, bandwidth, peaks["bf16"]) for row in rows] for name, rows in runs.items()}
    body = [
        (
            name,
            spread([row["seconds"] * 1e3 for row in rows], ".3f"),
            f"{statistics.median(shares[name]):.0%} of {'matmul' if rows[0]['flops'] else 'bandwidth'}",
        )
        for name, rows in runs.items()
    ]
    shown = ", ".join(f"{name} {peak / 1e12:.3g} TFLOP/s" for name, peak in peaks.items())
    moved = ", ".join(f"{name} {rate / 1e9:.3g} GB/s" for name, rate in bandwidths.items())
    heading = (
        f"Measured here: matmul peak {shown}; {moved} (read and written). {times_run(found.rows)}, interleaved; "
        f"{found.conditions['tokens']:,} tokens of width {found.conditions['width']}; milliseconds, median [lowest, "
        "highest]; share of the higher bandwidth for the bytes that must be moved, or of the bf16 matmul peak."
    )
    percent = {name: [100 * share for share in each] for name, each in shares.items()}
    plot(folder, percent, "% of bandwidth, or of the bf16 matmul peak")
    notes = [f"not installed: {', '.join(missing)}"] if missing else []
    notes += [f"failed: {what}: {why}" for what, why in failed_before(folder).items()]
    return markdown(folder, heading, ("", "ms", "share of the limit"), body, notes)


def _share(row: dict[str, Any], bandwidth: float, peak: float) -> float:
    """What a kernel reached of the limit that it must meet."""
    return (row["flops"] / peak if row["flops"] else row["bytes"] / bandwidth) / row["seconds"]


def seconds_of(call: Callable[[], Any], device: Any, seconds: float, before: Callable[[], Any] = lambda: None) -> float:
    """The median time of one call, over as many as fill these `seconds`; of a GPU the device's time alone.

    `before`: done before each call, and not counted.
    """
    import torch

    call()
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    cycles = int(_CLOCK * max(0.002, 2 * (time.perf_counter() - start)))  # of a GPU, in which the host can launch it
    taken: list[float] = []
    end = time.perf_counter() + seconds
    while len(taken) < 5 or time.perf_counter() < end:
        if device.type == "cuda":
            begin, done = (torch.cuda.Event(enable_timing=True) for _ in "bd")
            before()
            torch.cuda._sleep(cycles)  # the device waits while the host launches all that is timed
            begin.record()
            call()
            done.record()
            done.synchronize()
            taken.append(begin.elapsed_time(done) / 1e3)
        else:
            before()
            start = time.perf_counter()
            call()
            taken.append(time.perf_counter() - start)
    return statistics.median(taken)
