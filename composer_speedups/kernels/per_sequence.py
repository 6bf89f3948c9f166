"""Attention over packed sequences on the CPU: each sequence by itself, shared out among threads.

`varlen_attention.py` says what is computed. In float32 on x86 CPUs with AVX2, and in bfloat16 on those that multiply
it, all of it is C: `fused_attention.py`. For other dtypes and machines it is matrix product, softmax, matrix product;
what lies between the products (scale, softmax, dropout) is one pass of C (`per_sequence.c`), and `_softmax` and
`_softmax_backward` are its meaning in PyTorch operations, with the same dropout masks, where there is no compiler.

For backward probabilities are kept, which is quicker than to make them again, but for sequences of over 1024 keys:
their memory grows with the square.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch

from composer_speedups.kernels import fused_attention as fused
from composer_speedups.kernels.fast_dropout import (
    Keys,
    draw_keys,
    dropped_of,
    keep_by_torch,
    least_of,
    moved_on,
    scale_of,
)
from composer_speedups.kernels.native import checked
from composer_speedups.kernels.tensors import refuse_batched, shape_only
from composer_speedups.kernels.two_sides import NAMES

__all__ = ["native", "per_sequence", "served_by"]

_WORTHWHILE = 1 << 18  # scores below which one thread is as fast as several
_LONG = 1024  # keys of a sequence above which probabilities, their number squared, are made again and not kept
_P, _N, _W, _F, _I = ctypes.c_void_p, ctypes.c_int64, ctypes.c_uint32, ctypes.c_float, ctypes.c_int


def per_sequence(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    queries: torch.Tensor,
    keys: torch.Tensor,
    dropout_p: float,
    scale: float,
    window: int,
) -> torch.Tensor:
    """As `varlen_attention`, on the CPU; `queries` and `keys` are the sequences' lengths, [sequences] int32.

    >>> x, lengths = torch.ones(5, 1, 4), torch.tensor([2, 3], dtype=torch.int32)
    >>> bool(per_sequence(x, x, x, lengths, lengths, 0.0, 0.5, -1).allclose(x))
    True
    """
    if torch.compiler.is_compiling():
        seeds = (
            torch.randint(0, 1 << 32, (2,), device="cpu")
            if dropout_p
            else torch.zeros(2, dtype=torch.int64, device="cpu")
        )
        return _opaque(q, k, v, queries, keys, seeds, dropout_p, scale, window)
    seeds = draw_keys() if dropout_p else (0, 0)
    differentiable = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    lengths = queries.tolist(), keys.tolist()
    return _PerSequence.apply(q, k, v, *lengths, seeds, dropout_p, scale, window, differentiable)


def served_by(q: torch.Tensor) -> str:
    """What computes it for such queries, keys and values, in words."""
    if fused.serves(q, q, q):
        return f"C with {fused.FILES[q.dtype][fused.native(q.dtype).name]}"
    return "PyTorch's products, C between them" if native() is not None and q.dtype in NAMES else "PyTorch"


class _PerSequence(torch.autograd.Function):
    """`per_sequence`, where nothing compiles."""

    @staticmethod
    def forward(
        ctx,
        q,
        k,
        v,
        queries: list[int],
        keys: list[int],
        seeds: Keys,
        dropout_p: float,
        scale: float,
        window: int,
        differentiable: bool,
    ):
        ctx.arguments = (queries, keys, dropout_p, scale)
        ctx.window, ctx.seeds = window, seeds
        ctx.again = _long(keys)
        ctx.whole = fused.serves(q, k, v)
        if ctx.again:
            ctx.save_for_backward(q, k, v)
            return _output(q, k, v, queries, keys, seeds, dropout_p, scale, window)
        if ctx.whole:
            out, saved = fused.forward(q, k, v, queries, keys, seeds, dropout_p, scale, differentiable, window=window)
        else:
            out, blocks = _forward(q, k, v, queries, keys, seeds, dropout_p, scale, window, keep=differentiable)
            saved = [x for block in blocks for x in block]
        ctx.save_for_backward(*saved)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient: torch.Tensor):
        refuse_batched(gradient)
        if ctx.again:
            queries, keys, dropout_p, scale = ctx.arguments
            gradients = _again(gradient, *ctx.saved_tensors, queries, keys, ctx.seeds, dropout_p, scale, ctx.window)
        elif ctx.whole:
            gradients = fused.backward(gradient, ctx.saved_tensors, *ctx.arguments, ctx.window, together=True)
        else:
            saved = iter(ctx.saved_tensors)
            blocks = list(zip(saved, saved, saved, saved, strict=True))
            gradients = _backward(gradient, blocks, *ctx.arguments)
        return (*gradients, *[None] * 7)


def _output(q, k, v, queries: list[int], keys: list[int], seeds: Keys, dropout_p: float, scale: float, window: int):
    """The output alone, with nothing kept for a backward pass."""
    if fused.serves(q, k, v):
        return fused.forward(q, k, v, queries, keys, seeds, dropout_p, scale, differentiable=False, window=window)[0]
    return _forward(q, k, v, queries, keys, seeds, dropout_p, scale, window, keep=False)[0]


def _again(
    gradient, q, k, v, queries: list[int], keys: list[int], seeds: Keys, dropout_p: float, scale: float, window: int
):
    """The gradients of q, k and v from what they are. Long sequences come one after the other: one is in memory."""
    if len(keys) > 1 and _long(keys):
        found = tuple(torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
        for span in _spans(queries, keys, q.shape[1]):
            places = (span.q, span.k, span.k)
            parts = [x[at] for x, at in zip((q, k, v), places, strict=True)]
            lengths = [len(parts[0])], [len(parts[1])]
            own = moved_on(seeds, span.word)
            gradients = _again(gradient[span.q], *parts, *lengths, own, dropout_p, scale, window)
            for x, at, some in zip(found, places, gradients, strict=True):
                x[at] = some
        return found
    arguments = (queries, keys, seeds, dropout_p, scale)
    if fused.serves(q, k, v):
        saved = fused.forward(q, k, v, *arguments, output=False, window=window)[1]
        return fused.backward(gradient, saved, queries, keys, dropout_p, scale, window)
    blocks = _forward(q, k, v, *arguments, window)[1]
    return _backward(gradient, blocks, queries, keys, dropout_p, scale)


def _long(keys: list[int]) -> bool:
    """Whether probabilities would take too much memory to be kept."""
    return max(keys, default=0) > _LONG


Block = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def _forward(
    q,
    k,
    v,
    queries: list[int],
    keys: list[int],
    seeds: Keys,
    dropout_p: float,
    scale: float,
    window: int,
    keep: bool = True,
):
    """The output, and for each sequence, if to `keep`, its q, k, v [heads, length, width] and probabilities, signed."""
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    spans = _spans(queries, keys, q.shape[1])
    if shape_only(q):
        return out, [_shapes(q, spans)] if keep else []
    blocks: list[Block] = [()] * len(spans)

    def work(i: int, span: _Span, buffer: _Buffer) -> None:
        qi, ki, vi = (x[at].transpose(0, 1).contiguous() for x, at in ((q, span.q), (k, span.k), (v, span.k)))
        scores = torch.bmm(qi, ki.transpose(1, 2))
        if window >= 0:
            scores.masked_fill_(~fused.band(scores.shape[-1], window), -torch.inf if scale > 0 else torch.inf)
        kept = buffer.like(scores)
        probabilities = _softmax(scores, kept, moved_on(seeds, span.word), dropout_p, scale)
        out[span.q] = torch.bmm(kept, vi).transpose(0, 1)
        if keep:
            blocks[i] = (qi, ki, vi, probabilities)

    _share(work, spans, q)
    return out, blocks


def _shapes(like: torch.Tensor, spans: list[_Span]) -> Block:
    """As much as `_forward` keeps of all sequences, without the numbers: one by one, thousands would take minutes."""
    queries = sum(span.q.stop - span.q.start for span in spans)
    keys = sum(span.k.stop - span.k.start for span in spans)
    rest = like.shape[1:]
    sizes = (queries, *rest), (keys, *rest), (keys, *rest), (sum(span.scores for span in spans),)
    return tuple(like.new_empty(size) for size in sizes)


def _backward(gradient, blocks: list[Block], queries: list[int], keys: list[int], dropout_p: float, scale: float):
    if shape_only(gradient):
        sizes = (len(gradient), sum(keys), sum(keys))
        return tuple(gradient.new_empty(size, *gradient.shape[1:]) for size in sizes)
    like = dict(dtype=gradient.dtype, device=gradient.device)
    dq = torch.empty(gradient.shape, **like)
    dk, dv = (torch.zeros(sum(keys), *gradient.shape[1:], **like) for _ in "kv")

    def work(i: int, span: _Span, buffer: _Buffer) -> None:
        qi, ki, vi, probabilities = blocks[i]
        gi = gradient[span.q].transpose(0, 1).contiguous()
        ds = torch.bmm(gi, vi.transpose(1, 2))
        kept = buffer.like(ds)
        ds = _softmax_backward(ds, probabilities, kept, dropout_p, scale)
        dv[span.k] = torch.bmm(kept.transpose(1, 2), gi).transpose(0, 1)
        dq[span.q] = torch.bmm(ds, ki).transpose(0, 1)
        dk[span.k] = torch.bmm(ds.transpose(1, 2), qi).transpose(0, 1)

    _share(work, _spans(queries, keys, gradient.shape[1]), gradient)
    return dq, dk, dv


class _Span(NamedTuple):
    """Where one sequence lies among queries and keys, and at which word its dropout mask starts."""

    q: slice
    k: slice
    word: int
    scores: int


def _spans(queries: list[int], keys: list[int], heads: int) -> list[_Span]:
    """One for each sequence that has queries."""
    spans, word = [], 0
    ends = (pairwise(accumulate(lengths, initial=0)) for lengths in (queries, keys))
    for (a, b), (c, d) in zip(*ends, strict=True):
        scores = heads * (b - a) * (d - c)
        if scores:
            spans.append(_Span(slice(a, b), slice(c, d), word, scores))
            word += (scores + 1) // 2
    return spans


class _Buffer:
    """Memory for one sequence's probabilities, used again for the next so that it stays in the cache."""

    def __init__(self, like: torch.Tensor) -> None:
        self.memory = like.new_empty(0)

    def like(self, scores: torch.Tensor) -> torch.Tensor:
        if self.memory.numel() < scores.numel():
            self.memory = self.memory.new_empty(scores.numel())
        return self.memory[: scores.numel()].view(scores.shape)


def _share(work: Callable[[int, _Span, _Buffer], None], spans: list[_Span], like: torch.Tensor) -> None:
    """Do `work` for each span: whole sequences in parallel, each on one thread.

    One sequence is too little work to be cut up itself: threads would wait for each other after every small product.
    """
    threads = min(torch.get_num_threads(), len(spans))
    if sum(span.scores for span in spans) < _WORTHWHILE:
        threads = 1
    todo = deque(sorted(enumerate(spans), key=lambda item: -item[1].scores))  # longest first, taken when idle
    inference = torch.is_inference_mode_enabled()  # another thread's own: it may not write this one's tensors without

    def some() -> None:
        buffer = _Buffer(like)
        with torch.inference_mode(inference), torch.no_grad(), torch.autocast("cpu", enabled=False):
            while todo:
                try:
                    task = todo.popleft()
                except IndexError:  # another thread was quicker
                    return
                work(*task, buffer)

    if threads == 1:
        return some()
    for done in [_pool(os.getpid(), torch.get_num_threads()).submit(some) for _ in range(threads)]:
        done.result()


@cache
def _pool(process: int, threads: int) -> ThreadPoolExecutor:
    """Threads whose PyTorch operations use one thread each. A forked process makes its own."""
    pool = ThreadPoolExecutor(threads, "varlen_attention")
    together = threading.Barrier(threads)

    def settle() -> None:
        torch.set_num_threads(1)  # for this thread, but also the default of threads to come
        together.wait()

    for done in [pool.submit(settle) for _ in range(threads)]:
        done.result()
    torch.set_num_threads(threads)
    return pool


def _softmax(scores, kept, seeds: Keys, dropout_p: float, scale: float) -> torch.Tensor:
    """Probabilities of `scores` (overwritten), negative where dropped; `kept` gets those after dropout."""
    keep = scale_of(dropped_of(dropout_p))
    library = native() if scores.dtype in NAMES else None
    if library is not None:
        n, least = scores.shape[-1], least_of(dropped_of(dropout_p))
        pointers, threads = (scores.data_ptr(), kept.data_ptr()), torch.get_num_threads()
        call = getattr(library, f"forward_{NAMES[scores.dtype]}")
        call(*pointers, scores.numel() // n, n, *seeds, least, scale, keep, threads)
        return scores
    wide = torch.promote_types(scores.dtype, torch.float32)
    p = torch.softmax(scores.to(wide) * scale, -1)
    if dropout_p:
        stays = keep_by_torch(p.numel(), seeds, dropped_of(dropout_p)).view(p.shape)
        p = torch.where(stays, p, -p)
    kept.copy_(p.relu() * keep)
    return p.to(scores.dtype)


def _softmax_backward(gradient, probabilities, kept, dropout_p: float, scale: float) -> torch.Tensor:
    """From the gradient of `kept` (overwritten) that of the scores; `kept` is filled as in forward."""
    keep = scale_of(dropped_of(dropout_p))
    library = native() if gradient.dtype in NAMES else None
    if library is not None:
        n, threads = gradient.shape[-1], torch.get_num_threads()
        pointers = (x.data_ptr() for x in (gradient, probabilities, kept))
        call = getattr(library, f"backward_{NAMES[gradient.dtype]}")
        call(*pointers, gradient.numel() // n, n, scale, keep, threads)
        return gradient
    wide = torch.promote_types(gradient.dtype, torch.float32)
    p, g = probabilities.to(wide), gradient.to(wide)
    through = torch.where(p > 0, g * keep, 0)
    kept.copy_(p.relu() * keep)
    return (p.abs() * (through - (p.abs() * through).sum(-1, keepdim=True)) * scale).to(gradient.dtype)


@checked("per_sequence")
def native(library: ctypes.CDLL) -> bool:
    """Whether the C passes agree with their meaning in PyTorch operations."""
    for name in NAMES.values():
        forward, backward = getattr(library, f"forward_{name}"), getattr(library, f"backward_{name}")
        forward.argtypes, forward.restype = (_P, _P, _N, _N, _W, _W, ctypes.c_int32, _F, _F, _I), None
        backward.argtypes, backward.restype = (_P, _P, _P, _N, _N, _F, _F, _I), None
    scores = torch.linspace(-9, 9, 37 * 3, dtype=torch.float32, device="cpu").view(3, 37)
    p, kept = scores.clone(), torch.empty_like(scores)
    library.forward_float32(p.data_ptr(), kept.data_ptr(), 3, 37, 7, 9, least_of(6554), 1.0, 1.0, 1)
    stays = keep_by_torch(scores.numel(), (7, 9), 6554).view(scores.shape)
    return torch.equal(stays, p > 0) and p.abs().allclose(scores.softmax(-1), rtol=1e-5)


# Under torch.compile the loop over sequences is one opaque operation: no graph breaks, and no new graph when lengths
# change. It keeps no probabilities, whose number depends on the lengths' values; backward makes them again.


@torch.library.custom_op("composer_speedups::varlen_attention", mutates_args=())
def _opaque(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    queries: torch.Tensor,
    keys: torch.Tensor,
    seeds: torch.Tensor,
    dropout_p: float,
    scale: float,
    window: int,
) -> torch.Tensor:
    return _output(q, k, v, queries.tolist(), keys.tolist(), tuple(seeds.tolist()), dropout_p, scale, window)


@_opaque.register_fake
def _(q, k, v, queries, keys, seeds, dropout_p, scale, window):
    return torch.empty_like(q, memory_format=torch.contiguous_format)


@torch.library.custom_op("composer_speedups::varlen_attention_backward", mutates_args=())
def _opaque_backward(
    gradient: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    queries: torch.Tensor,
    keys: torch.Tensor,
    seeds: torch.Tensor,
    dropout_p: float,
    scale: float,
    window: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    lengths = (queries.tolist(), keys.tolist())
    return _again(gradient, q, k, v, *lengths, tuple(seeds.tolist()), dropout_p, scale, window)


@_opaque_backward.register_fake
def _(gradient, q, k, v, queries, keys, seeds, dropout_p, scale, window):
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))


def _remember(ctx, inputs, output) -> None:
    *tensors, ctx.dropout_p, ctx.scale, ctx.window = inputs
    ctx.save_for_backward(*tensors)


def _differentiate(ctx, gradient):
    gradients = _opaque_backward(gradient, *ctx.saved_tensors, ctx.dropout_p, ctx.scale, ctx.window)
    return (*gradients, None, None, None, None, None, None)


_opaque.register_autograd(_differentiate, setup_context=_remember)
