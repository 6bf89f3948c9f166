"""How the Triton kernels are launched best on this device: warps, sizes of blocks, rows loaded ahead, programs.

    python -m benchmarks.gpu --parts launches --out sizes

`kernels/launch.py` and the kernels' own files choose by arithmetic. This tries what else could be chosen, with as many
tokens as a batch has and with as many as `limits` takes, forward and backward apart, interleaved. What is found better
goes into those files by hand, with this folder as the reason; nothing is tried on a user's time.
"""

from __future__ import annotations

import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from benchmarks import kernels
from benchmarks.harness import begin, markdown, read, spread, times_run
from benchmarks.limits import note, seconds_of
from composer_speedups.errors import UserError
from composer_speedups.hardware import hardware

__all__ = ["measure", "table"]

_SECONDS = 0.05  # spent on each way in each repetition, at least
_BATCH = 16_384  # tokens of one
_WIDTH = 768
_SHOWN = 4  # ways of each kernel in the table, beside the present one


@dataclass(frozen=True)
class Sweep:
    """`call` works as the constants of `choices` say, which are by what they are called here, and must move `bytes`."""

    name: str
    tokens: int  # rows that it has; 0 for what has none
    choices: Mapping[str, tuple[Any, str, tuple[int, ...]]]  # module, constant, values to try
    call: Callable[[], Any]
    bytes: int

    def ways(self) -> Iterator[dict[str, int]]:
        """The present one first."""
        present = {name: getattr(module, constant) for name, (module, constant, _) in self.choices.items()}
        yield present
        for values in itertools.product(*(values for _, _, values in self.choices.values())):
            way = dict(zip(self.choices, values, strict=True))
            if way != present:
                yield way

    def seconds(self, way: Mapping[str, int], device: Any) -> float:
        with ExitStack() as changed:
            for name, value in way.items():
                changed.enter_context(patch.object(*self.choices[name][:2], value))
            return seconds_of(self.call, device, _SECONDS)


def measure(folder: Path, repetitions: int, batches: int, deadline: float | None = None) -> None:
    """`batches` scales the larger number of tokens, as in `limits`."""
    if hardware() != "cuda":
        raise UserError("launches tries how Triton's kernels are launched, and there is no GPU here: measure limits")
    device, failed = _device(), {}
    # Both sizes of a kernel together: what is compiled for one is there for the other.
    sizes = zip(*(_sweeps(device, tokens) for tokens in (_BATCH, batches * 8192)), strict=True)
    ways = [(sweep, way) for both in ((_copy(device),), *sizes) for way in both[0].ways() for sweep in both]
    begin(folder, "launches", width=_WIDTH)
    for repetition in range(repetitions):
        for sweep, way in ways:
            entry = _words(way)
            if deadline is not None and time.monotonic() > deadline:
                return
            if f"{sweep.name}, {entry}" in failed:
                continue
            try:
                taken = sweep.seconds(way, device)
            except Exception as error:  # too much shared memory, for one
                note(failed, f"{sweep.name}, {entry}", error)
                continue
            row = {"repetition": repetition, "kernel": sweep.name, "tokens": sweep.tokens, "entry": entry, "way": way}
            row |= {"present": way == next(sweep.ways()), "seconds": taken, "bytes": sweep.bytes}
            with (folder / "rows.jsonl").open("a") as file:
                file.write(json.dumps(row) + "\n")


def table(folder: Path) -> str:
    found = read(folder)
    copies = [row for row in found.rows if not row["tokens"]]
    bandwidth = copies[0]["bytes"] / statistics.median(row["seconds"] for row in copies)
    body = []
    for name, tokens in dict.fromkeys((row["kernel"], row["tokens"]) for row in found.rows if row["tokens"]):
        rows = [row for row in found.rows if (row["kernel"], row["tokens"]) == (name, tokens)]
        taken = {entry: [r["seconds"] for r in rows if r["entry"] == entry] for entry in {r["entry"] for r in rows}}
        present = next(row["entry"] for row in rows if row["present"])
        best = sorted(taken, key=lambda entry: statistics.median(taken[entry]))[:_SHOWN]
        for entry in dict.fromkeys([present, *best]):
            share = rows[0]["bytes"] / statistics.median(taken[entry]) / bandwidth
            ratio = statistics.median(taken[present]) / statistics.median(taken[entry])
            label = f"{name}, {tokens:,} tokens: {entry}{' (present)' if entry == present else ''}"
            body.append((label, spread([1e3 * s for s in taken[entry]], ".4f"), f"{share:.0%}", f"{ratio:.2f}x"))
    heading = (
        f"Copy {bandwidth / 1e9:.3g} GB/s (read and written); {times_run(found.rows)} of each way; width "
        f"{found.conditions['width']}, bf16; of each kernel the present way and the {_SHOWN} fastest; milliseconds, "
        "median [lowest, highest]; share of the copy's bandwidth for the bytes that must be moved; speed against the "
        "present way."
    )
    return markdown(folder, heading, ("", "ms", "of bandwidth", "speed"), body)


def _device() -> Any:
    import torch

    return torch.device("cuda")


def _words(way: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {value}" for name, value in way.items()) or "as it is"


def _sweeps(device: Any, tokens: int) -> Iterator[Sweep]:
    """Each kernel with `tokens` rows; what is sent through the loss are an eighth of them, as in `limits`."""
    yield from _layer_norm(device, tokens)
    yield from _dropout_add_norm(device, tokens)
    yield from _bias_gelu(device, tokens)
    yield from _cross_entropy(device, tokens // 8)


def _copy(device: Any) -> Sweep:
    copy = next(kernels.copies(device))
    return Sweep(copy.name, 0, {}, copy.call, copy.bytes)


def _of_norms() -> tuple[dict, dict]:
    """What a norm's forward and backward kernels have to choose."""
    from composer_speedups.kernels import launch

    forward = {"warps": (launch, "_WARPS", (2, 4, 8)), "held": (launch, "_HELD", (16, 32))}
    backward = {
        "warps": (launch, "_WARPS", (4, 8)),
        "held": (launch, "_HELD", (16, 32)),
        "together": (launch, "_TOGETHER", (4096, 8192, 16384)),
        "stages": (launch, "STAGES", (1, 2, 3)),
    }
    return forward, backward


def _layer_norm(device: Any, tokens: int) -> Iterator[Sweep]:
    import torch

    from composer_speedups.kernels import layer_norm

    x, dy = (torch.randn(tokens, _WIDTH, device=device).bfloat16() for _ in "xd")
    weight, bias = torch.ones(_WIDTH, device=device), torch.zeros(_WIDTH, device=device)
    _, mean, rstd = layer_norm._forward(x, weight, bias, 1e-12)
    size, (forward, backward) = 2 * x.numel(), _of_norms()
    yield Sweep("LayerNorm forward", tokens, forward, lambda: layer_norm._forward(x, weight, bias, 1e-12), 2 * size)
    back = lambda: layer_norm._backward(dy, x, weight, mean, rstd, True, True)  # noqa: E731
    yield Sweep("LayerNorm backward", tokens, backward, back, 3 * size)


def _dropout_add_norm(device: Any, tokens: int) -> Iterator[Sweep]:
    import torch

    from composer_speedups.kernels import dropout_add_norm_triton as triton

    x, residual, dy = (torch.randn(tokens, _WIDTH, device=device).bfloat16() for _ in "xrd")
    weight, bias, x_bias = (torch.ones(_WIDTH, device=device) for _ in "wbx")
    seeds, dropped = torch.tensor([123456789, 987654321], device=device), 6554
    forward = lambda: triton.forward(x, residual, weight, bias, seeds, dropped, 1e-12, x_bias)  # noqa: E731
    _, mean, rstd = forward()
    backward = lambda: triton.backward(dy, x, residual, weight, mean, rstd, seeds, dropped, x_bias)  # noqa: E731
    size, (of_forward, of_backward) = 2 * x.numel(), _of_norms()
    yield Sweep("bias + dropout + residual + LayerNorm forward", tokens, of_forward, forward, 3 * size)
    yield Sweep("bias + dropout + residual + LayerNorm backward", tokens, of_backward, backward, 5 * size)


def _bias_gelu(device: Any, tokens: int) -> Iterator[Sweep]:
    import torch

    from composer_speedups.kernels import bias_gelu_triton as triton
    from composer_speedups.kernels import launch

    x, dy = (torch.randn(tokens, 4 * _WIDTH, device=device).bfloat16() for _ in "xd")
    bias, size = torch.zeros(4 * _WIDTH, device=device).bfloat16(), 2 * x.numel()
    forward = {
        "rows": (triton, "_ROWS_FORWARD", (8, 16, 32)),
        "columns": (triton, "_COLS", (256, 512)),
        "warps": (triton, "_WARPS", (4, 8)),
    }
    backward = {
        "rows": (triton, "_ROWS_BACKWARD", (4, 8)),
        "warps": (triton, "_WARPS", (4, 8)),
        "programs": (triton, "_PROGRAMS", (8, 16, 32)),
        "stages": (launch, "STAGES", (1, 2, 3)),
    }
    yield Sweep("bias + GELU forward", tokens, forward, lambda: triton.forward(x, bias), 2 * size)
    yield Sweep("bias + GELU backward", tokens, backward, lambda: triton.backward(dy, x, bias), 3 * size)


def _cross_entropy(device: Any, rows: int) -> Iterator[Sweep]:
    import torch

    from composer_speedups.kernels import cross_entropy as triton

    logits = torch.randn(rows, 30528, device=device).bfloat16().requires_grad_()
    labels, size = torch.randint(0, 30528, (rows,), device=device), 2 * logits.numel()
    choices = {"held": (triton, "_MOST", (2048, 4096, 8192)), "warps": (triton, "_WARPS", (4, 8, 16))}
    loss = triton.cross_entropy(logits, labels)
    yield Sweep("cross-entropy forward", rows, choices, lambda: triton.cross_entropy(logits, labels), size)
    back = lambda: torch.autograd.grad(loss, logits, retain_graph=True)  # noqa: E731
    yield Sweep("cross-entropy backward", rows, choices, back, 2 * size)
