"""Whether `packed_attention` takes the place of flash attention: where it was seen right and faster, on this device.

Which of the two is faster depends on the GPU, on how long sequences are and on how many there are. So before the first
such tensors are attended to, both have a go at them, forward and backward: what they compute is compared, and then the
device's time is taken, of some calls in a row that were all queued before the first began. It takes some tenths of a
second, and what Triton compiles once a machine. Results stand for tensors of about the same size.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Callable
from typing import NamedTuple

import torch

from composer_speedups.kernels.packed_attention import MOST_SEQUENCES, packed_attention, serves
from composer_speedups.kernels.varlen_attention import Lengths, attention_kernel, varlen_attention

__all__ = ["Verdict", "prefers_packed", "verdicts"]

log = logging.getLogger("composer_speedups")

_ROUNDS, _CALLS = 5, 4  # of both, one after the other; in each so many in a row
_PAUSE = 8_000_000  # cycles, some 5 ms, in which the host queues a round
_FASTER = 0.97  # of the other's time: a kernel that has been used for years is not left for less
_CLOSE = 4  # roundings of the dtype, of the largest number in a tensor, between both
_AGREES = 0.2  # of dropout_p, by which sums differ if masks have nothing to do with each other


class Verdict(NamedTuple):
    """Of one trial.

    Attributes:
        own: whether `packed_attention` is used.
        why: in words, with both times where there are some.
    """

    own: bool
    why: str


_VERDICTS: dict[tuple, Verdict] = {}


def verdicts() -> list[Verdict]:
    """All of this process, in the order of the trials."""
    return list(_VERDICTS.values())


def prefers_packed(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: Lengths, dropout_p: float, scale: float | None = None
) -> bool:
    """Whether `packed_attention` is to attend to such tensors; the first ones of about their size are tried.

    In a CUDA graph that is being recorded nothing can be tried, nor in inference mode, which knows no gradients: what
    has not been before is left to flash attention.
    """
    if not q.is_cuda or "flash" not in attention_kernel(q) or not serves(q, k, v):
        return False
    if len(lengths.host) > MOST_SEQUENCES:
        return False
    about = (len(q).bit_length(), lengths.longest.bit_length(), *q.shape[1:], dropout_p > 0)
    key = (q.device, q.dtype, *about)
    if key not in _VERDICTS:
        if torch.cuda.is_current_stream_capturing() or torch.is_inference_mode_enabled():
            return False
        _VERDICTS[key] = _try(q, k, v, lengths, dropout_p, scale)
        log.info("attention over some %d tokens: %s", len(q), _VERDICTS[key].why)
    return _VERDICTS[key].own


def _try(q, k, v, lengths: Lengths, dropout_p: float, scale: float | None) -> Verdict:
    other = attention_kernel(q)
    # Whoever listens to what this thread saves for backward, as gradient checkpointing does, hears nothing of this.
    quiet = torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)
    try:
        with torch.cuda.device(q.device), torch.random.fork_rng([q.device]), torch.enable_grad(), quiet:
            trial = _Trial(q, k, v, lengths, scale)
            if (fault := trial.fault(dropout_p)) is None:
                own, flash = trial.times(dropout_p)
    except Exception as error:  # a trial ends no training: a compiler that is not there, memory that has run out
        fault = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"
    if fault is not None:
        log.warning("attention stays with %s: %s", other, fault)
        return Verdict(False, f"{other}: {fault}")
    faster = own <= _FASTER * flash
    said = f"{own:.3f} ms by Triton, {flash:.3f} ms by {other}, forward and backward"
    return Verdict(faster, f"{'Triton' if faster else other}: {said}")


class _Trial:
    """Both kernels on tensors like those given, as leaves of their own."""

    def __init__(self, q, k, v, lengths: Lengths, scale: float | None) -> None:
        self._parts, self._arguments = [x.detach().requires_grad_() for x in (q, k, v)], (lengths, lengths)
        self._scale, self._gradient = scale, torch.randn_like(q)

    def _call(self, kernel: Callable[..., torch.Tensor], p: float, gradient: torch.Tensor | None = None):
        """The output and the gradients of queries, keys and values; `gradient` None is the output itself."""
        out = kernel(*self._parts, *self._arguments, p, self._scale)
        gradient = out.detach() if gradient is None else gradient
        return out.detach(), *torch.autograd.grad(out, self._parts, gradient)

    def fault(self, dropout_p: float) -> str | None:
        """What is wrong with `packed_attention` or with the device's clock; None if nothing is."""
        if _milliseconds(_pause) < 1:
            return "the device's clock does not go"
        found = self._call(packed_attention, 0.0, self._gradient)
        for name, a, b in zip(
            ("output", "gradient of queries", "gradient of keys", "gradient of values"),
            found,
            self._call(varlen_attention, 0.0, self._gradient),
            strict=True,
        ):
            error, allowed = (a.float() - b.float()).abs().max(), _CLOSE * torch.finfo(a.dtype).eps * b.abs().max()
            if not error <= allowed:  # nor a number
                return f"Triton's {name} is off by {error:.1e}, and {allowed:.1e} is allowed"
        if dropout_p:  # what is linear in the values has one product with them, forward and backward: if masks agree
            out, *_, of_values = self._call(packed_attention, dropout_p)
            forward, backward = (out.double() ** 2).sum(), (of_values.double() * self._parts[2].double()).sum()
            if not (forward - backward).abs() <= _AGREES * dropout_p * forward:
                return f"Triton's dropout is not the same forward and backward ({forward:.4g}, {backward:.4g})"
        return None

    def times(self, dropout_p: float) -> tuple[float, float]:
        """Milliseconds of `packed_attention` and of the other one, medians."""
        found: tuple[list[float], list[float]] = ([], [])
        for _ in range(_ROUNDS):
            for times, kernel in zip(found, (packed_attention, varlen_attention), strict=True):

                def several(kernel: Callable = kernel) -> None:
                    for _ in range(_CALLS):
                        self._call(kernel, dropout_p, self._gradient)

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
