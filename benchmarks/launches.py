"""How the Triton kernels are launched best on this device: warps, sizes of blocks, rows loaded ahead, programs.

    python3 -m benchmarks.gpu --parts launches --minutes 6 --out sizes

`kernels/launch.py` and the kernels' own files choose by arithmetic. This tries what else could be chosen, with as many
tokens as a batch has and with as many as `limits` takes, forward and backward apart, interleaved. What is found better
goes into those files by hand, with this folder as the reason; nothing is tried on a user's time. As in `limits`, what
fails is left out, also by a process that goes on in the folder of one which that has ended.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from benchmarks import kernels
from benchmarks.apart import Failures, failed_before
from benchmarks.harness import begin, markdown, read, rows_in, spread, times_run
from benchmarks.limits import seconds_of
from benchmarks.peers import named
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
    call: Callable[[], Any]  # returns tensors
    bytes: int

    def ways(self) -> Iterator[dict[str, int]]:
        """The present one first."""
        present = {name: getattr(module, constant) for name, (module, constant, _) in self.choices.items()}
        yield present
        for values in itertools.product(*(values for _, _, values in self.choices.values())):
            way = dict(zip(self.choices, values, strict=True))
            if way != present:
                yield way

    @contextmanager
    def set_to(self, way: Mapping[str, int]) -> Iterator[None]:
        with ExitStack() as changed:
            for name, value in way.items():
                changed.enter_context(patch.object(*self.choices[name][:2], value))
            yield


def measure(
    folder: Path, repetitions: int, batches: int, deadline: float | None = None, only: Sequence[str] = ()
) -> None:
    """`batches` scales the larger number of tokens, as in `limits`; `only`: parts of the names of kernels."""
    if hardware() != "cuda":
        raise UserError("launches tries how Triton's kernels are launched, and there is no GPU here: measure limits")
    device, failed = _device(), Failures(folder)
    begin(folder, "launches", width=_WIDTH)
    made = _made(device, tuple(dict.fromkeys((_BATCH, batches * 8192))), failed)  # a size counts once
    chosen = named(only, dict.fromkeys(sweep.name for sweep in made)) if only else ()
    sweeps = [_copy(device), *(sweep for sweep in made if not only or sweep.name in chosen)]
    # Both sizes of a kernel together: what is compiled for one is there for the other.
    by_name = {sweep.name: [other for other in sweeps if other.name == sweep.name] for sweep in sweeps}
    work = [(sweep, way) for both in by_name.values() for way in both[0].ways() for sweep in both]
    forget = _forgetting(device)
    measured = {(row["repetition"], row["kernel"], row["tokens"], row["entry"]) for row in rows_in(folder)}
    expected: dict[tuple[str, int], Any] = {}  # what the present way computes, of the kernel at hand
    for done, (repetition, (sweep, way)) in enumerate(itertools.product(range(repetitions), work)):
        if deadline is not None and time.monotonic() > deadline:
            print(f"out of time after {done} of {repetitions * len(work)} measurements", file=sys.stderr)
            break
        present, entry = way == next(sweep.ways()), _words(way)
        name = f"{sweep.name}, {sweep.tokens:,} tokens, {entry}"
        there = (repetition, sweep.name, sweep.tokens, entry) in measured
        if name in failed or (there and not (present and not repetition)):  # with that one the others are compared
            continue
        with failed.attempt(name, optional=not present), sweep.set_to(way):  # too much shared memory, for one
            if not repetition:
                found = sweep.call()
                if present:
                    expected = {key: x for key, x in expected.items() if key[0] == sweep.name}
                    expected[sweep.name, sweep.tokens] = found
                elif (right := expected.get((sweep.name, sweep.tokens))) is not None and not _same(found, right):
                    raise ArithmeticError("it computes something else than the present way")
                del found
            if there:
                continue
            taken = seconds_of(sweep.call, device, _SECONDS, forget)
            row = {"repetition": repetition, "kernel": sweep.name, "tokens": sweep.tokens, "entry": entry, "way": way}
            row |= {"present": present, "seconds": taken, "bytes": sweep.bytes}
            with (folder / "rows.jsonl").open("a") as file:
                file.write(json.dumps(row) + "\n")
    failed.tell()


def table(folder: Path) -> str:
    found = read(folder)
    copies = [row for row in found.rows if not row["tokens"]]
    bandwidth = copies[0]["bytes"] / statistics.median(row["seconds"] for row in copies) if copies else None
    body = []
    for name, tokens in dict.fromkeys((row["kernel"], row["tokens"]) for row in found.rows if row["tokens"]):
        rows = [row for row in found.rows if (row["kernel"], row["tokens"]) == (name, tokens)]
        taken = {entry: [r["seconds"] for r in rows if r["entry"] == entry] for entry in {r["entry"] for r in rows}}
        medians = {entry: statistics.median(seconds) for entry, seconds in taken.items()}
        present = next((row["entry"] for row in rows if row["present"]), None)
        best = sorted(medians, key=medians.get)[:_SHOWN]
        for entry in dict.fromkeys([*([] if present is None else [present]), *best]):
            label = f"{name}, {tokens:,} tokens: {entry}{' (present)' if entry == present else ''}"
            share = f"{rows[0]['bytes'] / medians[entry] / bandwidth:.0%}" if bandwidth else ""
            ratio = f"{medians[present] / medians[entry]:.2f}x" if present is not None else ""
            body.append((label, spread([1e3 * s for s in taken[entry]], ".4f"), share, ratio))
    # Kernels have ways of the same name.
    ways = [row | {"entry": (row["kernel"], row["tokens"], row["entry"])} for row in found.rows]
    copied = f"Copy {bandwidth / 1e9:.3g} GB/s (read and written); " if bandwidth else ""
    heading = (
        f"{copied}{times_run(ways)} of each way, nothing in the caches; width {found.conditions['width']}, "
        f"bf16; of each kernel the present way and the {_SHOWN} fastest; milliseconds, median [lowest, highest]; share "
        "of the copy's bandwidth for the bytes that must be moved; speed against the present way."
    )
    notes = [f"failed: {what}: {why}" for what, why in failed_before(folder).items()]
    return markdown(folder, heading, ("", "ms", "of bandwidth", "speed"), body, notes)


def _made(device: Any, sizes: tuple[int, ...], failed: Failures) -> list[Sweep]:
    """All kernels, each with every number of tokens; one that fails when it is prepared costs the others nothing."""
    found = []
    for make, tokens in itertools.product(
        (_layer_norm, _dropout_add_norm, _bias_gelu, _cross_entropy, _attention), sizes
    ):
        name = f"{make.__name__.strip('_')}, {tokens:,} tokens"
        if name not in failed:
            with failed.attempt(name):
                found += make(device, tokens)
    return found


def _same(found: Any, expected: Any) -> bool:
    """Whether two ways agree: sums in another order, rounded to bf16."""
    import torch

    if isinstance(found, torch.Tensor):
        found, expected = (found,), (expected,)
    return all(
        bool((x.float() - y.float()).norm() <= 0.01 * y.float().norm()) for x, y in zip(found, expected, strict=True)
    )


def _forgetting(device: Any) -> Callable[[], Any]:
    """What leaves nothing in the device's caches that a kernel could find there, and in training would not.

    It reads: what was written last would be written back to memory, 50 MB of it, while the kernel is timed.
    """
    import torch

    other = torch.zeros(1 << (26 if device.type == "cuda" else 8), device=device)  # 256 MB, five times the cache
    total = torch.empty((), device=device)
    return lambda: torch.sum(other, 0, out=total)


def _device() -> Any:
    import torch

    return torch.device("cuda")


def _words(way: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {value}" for name, value in way.items()) or "as it is"


def _copy(device: Any) -> Sweep:
    copy = next(kernels.copies(device))
    return Sweep(copy.name, 0, {}, copy.call, copy.bytes)


def _of_norms() -> tuple[dict, dict]:
    """What a norm's forward and backward kernels have to choose."""
    from composer_speedups.kernels import launch

    forward = {"held": (launch, "_HELD", (16, 32, 64))}  # two warps for a row of this width, one, one for two rows
    backward = {
        "held": (launch, "_HELD_BACKWARD", (16, 32)),
        "filled": (launch, "_FILLED", (50, 100)),
        "stages": (launch, "STAGES", (1, 3, 4)),
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
        "programs": (triton, "_PROGRAMS", (5, 8, 10)),
    }
    yield Sweep("bias + GELU forward", tokens, forward, lambda: triton.forward(x, bias), 2 * size)
    yield Sweep("bias + GELU backward", tokens, backward, lambda: triton.backward(dy, x, bias), 3 * size)


def _cross_entropy(device: Any, tokens: int) -> Iterator[Sweep]:
    """Of an eighth of the tokens, as in `limits`."""
    import torch

    from composer_speedups.kernels import cross_entropy as triton

    logits = torch.randn(tokens // 8, 30528, device=device).bfloat16()
    labels, size = torch.randint(0, 30528, (len(logits),), device=device), 2 * logits.numel()
    choices = {"held": (triton, "_MOST", (2048, 4096, 8192)), "warps": (triton, "_WARPS", (4, 8, 16))}
    _, lse = triton.forward(logits, labels, -100)
    scale = torch.ones(1, device=device)
    yield Sweep("cross-entropy forward", tokens, choices, lambda: triton.forward(logits, labels, -100), size)
    back = lambda: triton.backward(logits, labels, lse, scale, -100, torch.empty_like(logits))  # noqa: E731
    yield Sweep("cross-entropy backward", tokens, choices, back, 2 * size)


def _attention(device: Any, tokens: int) -> Iterator[Sweep]:
    """Over texts as long as `peers` has them, longer ones cut at 256 tokens: about `tokens` in all; dropout 0.1."""
    import torch

    from composer_speedups.kernels import packed_attention
    from composer_speedups.kernels import packed_attention_triton as triton
    from composer_speedups.kernels.varlen_attention import Lengths

    drawn = torch.randn(max(2, tokens // 203), generator=torch.Generator().manual_seed(1)) * 90 + 230
    lengths = drawn.round().clamp(3, 256).int().tolist()
    tokens = sum(lengths)
    of, heads, scale, dropped = Lengths.of(lengths, device), _WIDTH // 64, 0.125, 6554
    joint = torch.randn(tokens, 3, heads, 64, device=device).bfloat16()
    q, k, v = joint.unbind(1)
    dout = torch.randn(q.shape, device=device).bfloat16()
    words = packed_attention.draw_words(q, k)
    forward = lambda: triton.forward(q, k, v, of, of, words, dropped, scale)[0]  # noqa: E731
    out, sums = triton.forward(q, k, v, of, of, words, dropped, scale)

    def backward() -> Sequence[torch.Tensor]:
        into = torch.empty_like(joint).unbind(1)
        triton.backward(dout, q, k, v, out, sums, of, of, words, dropped, scale, into)
        return into

    def choices(end: str) -> dict[str, tuple[Any, str, tuple[int, ...]]]:
        ways = {"block": (64, 128), "turn": (32, 64, 128), "stages": (1, 2), "registers": (0, 96, 128, 168)}
        return {name: (triton, f"_{name.upper()}{end}", values) for name, values in ways.items()}

    size = 2 * q.numel()
    yield Sweep("attention forward", tokens, choices(""), forward, 4 * size)
    yield Sweep("attention backward, keys varied", tokens, choices("_K"), backward, 8 * size)
    yield Sweep("attention backward, queries varied", tokens, choices("_Q"), backward, 8 * size)
