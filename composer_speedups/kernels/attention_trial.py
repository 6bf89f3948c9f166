"""Whether `packed_attention` takes the place of flash attention: where it was seen right and faster, on this device.

Which of the two is faster depends on the GPU, on how long sequences are and on how many there are. So before the first
such tensors are attended to, both have a go at them, forward and backward. Without dropout both must compute the same;
with it, what two of the sequences come to must be what the same mask makes of them in float64. Then the device's time
is taken, of some calls in a row that were all queued before the first began. It takes some tenths of a second, and what
Triton compiles once a machine. A verdict stands for tensors of about the same size, as long as the process lives.
"""

from __future__ import annotations

import logging
import statistics
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import torch
from torch.utils._python_dispatch import _disable_current_modes

from composer_speedups.errors import in_a_line
from composer_speedups.kernels.fast_dropout import realised
from composer_speedups.kernels.packed_attention import (
    MOST_SEQUENCES,
    draw_words,
    kept_by_torch,
    packed_attention,
    serves,
)
from composer_speedups.kernels.varlen_attention import Lengths, attention_kernel, varlen_attention

__all__ = ["Trials", "Verdict"]

log = logging.getLogger("composer_speedups")

_ROUNDS, _CALLS = 5, 4  # of both, one after the other; in each so many in a row
_PAUSE = 20_000_000  # cycles, some 12 ms, in which the host queues a round
_FASTER = 0.97  # of the other's time: a kernel that has been used for years is not left for less
_CLOSE = 4  # roundings of the dtype, of the largest number in a tensor, that it may be off by
_TRIES = 3  # in which nothing could be decided; then it stays with flash attention
_NAMES = ("output", "gradient of queries", "gradient of keys", "gradient of values")


class Verdict(NamedTuple):
    """Of one trial.

    Attributes:
        own: whether `packed_attention` is used.
        why: in words, with both times where there are some.
    """

    own: bool
    why: str


_VERDICTS: dict[tuple, Verdict] = {}
_UNDECIDED: Counter[tuple] = Counter()


class Trials:
    """The verdicts that one model has asked for."""

    def __init__(self) -> None:
        self._said: dict[tuple, str] = {}

    def said(self) -> str:
        """In words, in the order in which they were asked for."""
        return "; ".join(self._said.values())

    def prefer_packed(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: Lengths, dropout_p: float
    ) -> bool:
        """Whether `packed_attention` is to attend to such tensors; the first ones of about their size are tried.

        In a CUDA graph that is being recorded nothing can be tried, nor in inference mode, which knows no gradients:
        what has not been before is left to flash attention.
        """
        if not q.is_cuda or "flash" not in attention_kernel(q) or not serves(q, k, v) or realised(dropout_p) == 1:
            return False
        if len(lengths.host) > MOST_SEQUENCES:
            return False
        about = [n.bit_length() for n in (len(q), lengths.longest, len(lengths.host))]
        key = (q.device, q.dtype, *q.shape[1:], *about, dropout_p)
        verdict = _VERDICTS.get(key)
        if verdict is None:
            if torch.cuda.is_current_stream_capturing() or torch.is_inference_mode_enabled() or q.is_inference():
                return False
            verdict = _try(q, k, v, lengths, dropout_p)
            if verdict is None:
                _UNDECIDED[key] += 1
                if _UNDECIDED[key] < _TRIES:
                    return False
                verdict = Verdict(False, f"{attention_kernel(q)}: in {_TRIES} trials nothing could be decided")
            # Of two threads' trials the first counts: what is computed again in backward is so by the same kernel.
            verdict = _VERDICTS.setdefault(key, verdict)
        if key not in self._said:
            self._said[key] = f"{len(q):,} tokens, up to {lengths.longest} a sequence: {verdict.why}"
        return verdict.own


def _try(q, k, v, lengths: Lengths, dropout_p: float) -> Verdict | None:
    """None if these tensors cannot tell: numbers that are not finite, or no memory for a trial."""
    other = attention_kernel(q)
    try:
        # Whoever listens to what this thread does, as both ways of checkpointing and counters of flops do, hears
        # nothing of it. Detached, as an output that is kept by its own function would keep it in turn.
        quiet = torch.autograd.graph.saved_tensors_hooks(torch.Tensor.detach, torch.Tensor.detach)
        here, numbers = torch.cuda.device(q.device), torch.random.fork_rng([q.device])
        with here, numbers, torch.enable_grad(), _disable_current_modes(), quiet:
            trial = _Trial(q, k, v, lengths)
            if (fault := trial.fault(dropout_p)) is None:
                own, flash = trial.times(dropout_p)
    except (_Undecided, torch.OutOfMemoryError) as error:
        log.info("a trial of attention told nothing: %s", error)
        return None
    except Exception as error:  # a trial ends no training: a compiler that is not there, or refuses
        fault = in_a_line(error)
    if fault is not None:
        log.warning("attention stays with %s: %s", other, fault)
        return Verdict(False, f"{other}: {fault}")
    faster = own <= _FASTER * flash
    said = f"{own:.3f} ms by Triton, {flash:.3f} ms by {other}, forward and backward"
    return Verdict(faster, f"{'Triton' if faster else other}: {said}")


class _Undecided(Exception):
    """These tensors do not tell."""


class _Trial:
    """Both kernels on tensors like those given, as leaves of their own."""

    def __init__(self, q, k, v, lengths: Lengths) -> None:
        self._parts, self._lengths = [x.detach().requires_grad_() for x in (q, k, v)], lengths
        self._gradient = torch.randn_like(q)
        self._eps, self._scale = torch.finfo(q.dtype).eps, q.shape[-1] ** -0.5

    def _call(self, kernel: Callable[..., torch.Tensor], p: float, **arguments: torch.Tensor) -> list[torch.Tensor]:
        """The output and the gradients of queries, keys and values."""
        out = kernel(*self._parts, self._lengths, self._lengths, p, **arguments)
        return [out.detach(), *torch.autograd.grad(out, self._parts, self._gradient)]

    def fault(self, dropout_p: float) -> str | None:
        """What is wrong with `packed_attention` or with the device's clock; None if nothing is."""
        if _milliseconds(_pause) < 1:
            return "the device's clock does not go"
        found, right = self._call(packed_attention, 0.0), self._call(varlen_attention, 0.0)
        if not found[0].numel() or not all(x.isfinite().all() for x in right):
            raise _Undecided("no tokens" if not found[0].numel() else "numbers that are not finite")
        fault = self._off(found, right, self._parts, self._gradient)
        if fault is None and dropout_p:
            fault = self._off_with_dropout(dropout_p)
        return fault

    def _off(self, found: list[torch.Tensor], right: list[torch.Tensor], parts: list[torch.Tensor], g) -> str | None:
        # What a query's probabilities times their gradients come to is taken off each of those, as rounded as its
        # output is: what is left may be next to nothing, and is no more exact than that.
        rounded = torch.linalg.vector_norm(g.float() * right[0].float(), dim=-1).amax() * self._scale
        for name, a, b, other in zip(_NAMES, found, right, (None, parts[1], parts[0], None), strict=True):
            left = 0 if other is None else rounded * other.abs().amax()
            allowed = self._eps * (_CLOSE * b.abs().amax() + left)
            if not (error := (a - b).abs().amax()) <= allowed:  # nor a number
                return f"Triton's {name} is off by {error:.1e}, and {allowed:.1e} is allowed"
        return None

    def _off_with_dropout(self, dropout_p: float) -> str | None:
        """Of the longest sequence and of the last one that has tokens, on the host, in float64."""
        words = draw_words(*self._parts[:2])
        found = self._call(packed_attention, dropout_p, words=words)
        if not all(x.isfinite().all() for x in found):
            return "with dropout, Triton's numbers are not finite"
        ends = self._lengths.cumulative.tolist()
        spans = [(a, b) for a, b in pairwise(ends) if b > a]
        for begin, end in {max(spans, key=lambda span: span[1] - span[0]), spans[-1]}:
            *parts, g = (x.detach()[begin:end].cpu().double() for x in (*self._parts, self._gradient))
            right = self._exactly([x.requires_grad_() for x in parts], g, words.cpu(), begin, dropout_p)
            fault = self._off([x[begin:end].cpu().double() for x in found], right, parts, g)
            if fault is not None:
                return f"with dropout, {fault}"
        return None

    def _exactly(self, parts: list[torch.Tensor], g, words: torch.Tensor, begin: int, p: float) -> list[torch.Tensor]:
        q, k, v = parts
        of = Lengths(torch.tensor([begin, begin + len(q)], device="cpu"), torch.tensor([len(q)], device="cpu"), len(q))
        kept = kept_by_torch(words, of, of, p)[0] / (1 - realised(p))
        with torch.autocast("cpu", enabled=False):
            probabilities = (torch.einsum("qhd,khd->hqk", q, k) * self._scale).softmax(-1) * kept
            out = torch.einsum("hqk,khd->qhd", probabilities, v)
        return [out.detach(), *torch.autograd.grad(out, parts, g)]

    def times(self, dropout_p: float) -> tuple[float, float]:
        """Milliseconds of `packed_attention` and of the other one, medians."""
        found: tuple[list[float], list[float]] = ([], [])
        for _ in range(_ROUNDS):
            for times, kernel in zip(found, (packed_attention, varlen_attention), strict=True):

                def several(kernel: Callable = kernel) -> None:
                    for _ in range(_CALLS):
                        self._call(kernel, dropout_p)

                _pause()
                times.append(_milliseconds(several) / _CALLS)
        return statistics.median(found[0]), statistics.median(found[1])


def _pause() -> None:
    torch.cuda._sleep(_PAUSE)


def _milliseconds(call: Callable[[], None]) -> float:
    """Of the device, from when it begins what `call` queues."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in "ab")
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)
