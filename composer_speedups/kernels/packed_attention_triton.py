"""The CUDA side of `packed_attention.py`: Triton kernels, one forward and two backward.

A program has some tokens of one head of one sequence; the loop goes over those at the other end of the scores.
Sequences of BERT's are short: a program's loop has few turns, so that what counts is that many programs are there at
once, that none needs what another one computes, and that a score costs few instructions.

Exponents are of two. What is dropped is told by a random word for each query and one for each key (`words`, drawn by
PyTorch): a score is dropped where the product of both, made odd, is below a bound modulo 2^32. That is one instruction
a score, and the same in whichever layout a kernel has it; see `packed_attention.kept_by_torch`.

By ptxas for sm_90 (Triton 3.6, bf16, heads of 64, dropout) the loops have, for each score, 17 instructions forward, 23
for keys and 17 for queries backward, and an H100's processor room for four programs forward and two backward.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from composer_speedups.kernels.launch import interpreted, on_device

__all__ = [
    "attention_backward_kernel",
    "attention_delta_kernel",
    "attention_kernel",
    "backward",
    "forward",
    "interpreted",
    "room_for",
]

# Queries and keys at a time, warps, and turns of the loop that are under way to shared memory.
_QUERIES, _KEYS, _WARPS, _STAGES = 64, 64, 4, 1
_BACK_QUERIES, _BACK_KEYS, _BACK_WARPS, _BACK_STAGES = 64, 64, 4, 2
_DELTAS = 64  # tokens of one head that a program of `attention_delta_kernel` has
_MOST = 128  # tokens of a tile
_LOG2_E = 1.4426950408889634


@triton.jit
def _words(words_ptr, room, end: tl.constexpr):
    """Of the program's head, those of queries (`end` 0) or keys (1)."""
    return words_ptr + (end * tl.num_programs(1) + tl.program_id(1)).to(tl.int64) * room


@triton.jit
def _keep(one, other, DROPPED: tl.constexpr):
    """Of odd words; one instruction multiplies."""
    product = (one.to(tl.uint32) | 1)[:, None] * (other.to(tl.uint32) | 1)[None, :]
    return product >= DROPPED * 65536


@triton.jit
def _tile(ptr, token, inside, stride, WIDTH: tl.constexpr):
    """[tokens, WIDTH], zeros where not `inside`."""
    return tl.load(ptr + token[:, None] * stride + tl.arange(0, WIDTH)[None, :], mask=inside[:, None], other=0.0)


@triton.jit
def _put(ptr, token, inside, stride, value, WIDTH: tl.constexpr):
    place = ptr + token[:, None] * stride + tl.arange(0, WIDTH)[None, :]
    tl.store(place, value.to(ptr.dtype.element_ty), mask=inside[:, None])


@triton.jit
def _sequence(ends_ptr):
    """Where the program's sequence begins, in 64 bits, as tokens * stride may pass 2^31; and how many tokens it has."""
    begin = tl.load(ends_ptr + tl.program_id(2))
    return begin.to(tl.int64), tl.load(ends_ptr + tl.program_id(2) + 1) - begin


@triton.jit
def attention_kernel(
    q_ptr,  # [queries, heads, WIDTH], tokens and heads `stride` and `head_stride` apart, as k and v
    k_ptr,
    v_ptr,
    out_ptr,  # [queries, heads, WIDTH], contiguous
    sums_ptr,  # [heads, room] float32: the logarithm of each query's sum, to base 2
    queries_ptr,  # [sequences + 1] int32: where they end
    keys_ptr,
    words_ptr,  # [2, heads, room] int32: of queries and of keys, read if DROPPED
    q_stride,
    q_head_stride,
    k_stride,
    k_head_stride,
    v_stride,
    v_head_stride,
    room,  # for the tokens of a head, and for a tile more
    scale,  # of scores, times log2(e)
    DROPPED: tl.constexpr,  # of 65536
    WIDTH: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
):
    begin_q, n_q = _sequence(queries_ptr)
    begin_k, n_k = _sequence(keys_ptr)
    start = tl.program_id(0) * QUERIES
    if start >= n_q:
        return
    head = tl.program_id(1).to(tl.int64)
    at = start + tl.arange(0, QUERIES)
    real = at < n_q
    q = _tile(q_ptr + head * q_head_stride, begin_q + at, real, q_stride, WIDTH)
    if DROPPED:
        of_queries = tl.load(_words(words_ptr, room, 0) + begin_q + at)
    largest = tl.full([QUERIES], float("-inf"), tl.float32)
    total_of = tl.zeros([QUERIES], tl.float32)
    out = tl.zeros([QUERIES, WIDTH], tl.float32)
    for first in range(0, n_k, KEYS):
        key = first + tl.arange(0, KEYS)
        k = _tile(k_ptr + head * k_head_stride, begin_k + key, key < n_k, k_stride, WIDTH)
        v = _tile(v_ptr + head * v_head_stride, begin_k + key, key < n_k, v_stride, WIDTH)
        scores = tl.where((key < n_k)[None, :], tl.dot(q, tl.trans(k)), float("-inf"))
        larger = tl.maximum(largest, tl.max(scores, 1) * scale)
        p = tl.exp2(scores * scale - larger[:, None])
        before = tl.exp2(largest - larger)
        total_of = total_of * before + tl.sum(p, 1)
        if DROPPED:
            of_keys = tl.load(_words(words_ptr, room, 1) + begin_k + key)
            p = tl.where(_keep(of_queries, of_keys, DROPPED), p, 0.0)
        out = tl.dot(p.to(v.dtype), v, out * before[:, None])
        largest = larger
    kept: tl.constexpr = 65536.0 / (65536 - DROPPED)
    total_of = tl.where(total_of == 0, 1.0, total_of)  # a sequence without keys has zeros
    out = out * (kept / total_of)[:, None]
    _put(out_ptr + head * WIDTH, begin_q + at, real, tl.num_programs(1) * WIDTH, out, WIDTH)
    tl.store(sums_ptr + head * room + begin_q + at, largest + tl.log2(total_of), mask=real)


@triton.jit
def attention_delta_kernel(
    out_ptr,  # [tokens, heads, WIDTH], contiguous
    dout_ptr,  # as out, strides as named
    delta_ptr,  # [heads, room] float32: what each query's probabilities times their gradients add up to
    stride,
    head_stride,
    total,
    room,
    DROPPED: tl.constexpr,
    WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
):
    head = tl.program_id(1).to(tl.int64)
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    out = _tile(out_ptr + head * WIDTH, token, token < total, tl.num_programs(1) * WIDTH, WIDTH)
    dout = _tile(dout_ptr + head * head_stride, token, token < total, stride, WIDTH)
    kept: tl.constexpr = (65536.0 - DROPPED) / 65536
    delta = tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1) * kept
    tl.store(delta_ptr + head * room + token, delta, mask=token < total)


@triton.jit
def attention_backward_kernel(
    q_ptr,  # as forward
    k_ptr,
    v_ptr,
    dout_ptr,
    sums_ptr,
    delta_ptr,
    queries_ptr,
    keys_ptr,
    words_ptr,
    dq_ptr,  # as q, strides as named, as dk and dv
    dk_ptr,
    dv_ptr,
    q_stride,
    q_head_stride,
    k_stride,
    k_head_stride,
    v_stride,
    v_head_stride,
    dout_stride,
    dout_head_stride,
    dq_stride,
    dq_head_stride,
    dk_stride,
    dk_head_stride,
    dv_stride,
    dv_head_stride,
    room,
    scale,
    blocks,  # of keys: so many programs have keys, and those after them queries
    DROPPED: tl.constexpr,
    WIDTH: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
):
    begin_q, n_q = _sequence(queries_ptr)
    begin_k, n_k = _sequence(keys_ptr)
    head = tl.program_id(1).to(tl.int64)
    block = tl.program_id(0)
    # By the scale of what is kept probabilities are multiplied last.
    kept: tl.constexpr = 65536.0 / (65536 - DROPPED)
    of_exponent: tl.constexpr = 0.6931471805599453  # what `scale` has more than that of the scores
    q_ptr += head * q_head_stride
    k_ptr += head * k_head_stride
    v_ptr += head * v_head_stride
    dout_ptr += head * dout_head_stride
    sums_ptr += head * room
    delta_ptr += head * room
    if block < blocks:  # scores lie as [keys, queries]
        key = block * KEYS + tl.arange(0, KEYS)
        if block * KEYS >= n_k:
            return
        k = _tile(k_ptr, begin_k + key, key < n_k, k_stride, WIDTH)
        v = _tile(v_ptr, begin_k + key, key < n_k, v_stride, WIDTH)
        if DROPPED:
            of_keys = tl.load(_words(words_ptr, room, 1) + begin_k + key)
        dk = tl.zeros([KEYS, WIDTH], tl.float32)
        dv = tl.zeros([KEYS, WIDTH], tl.float32)
        for first in range(0, n_q, QUERIES):
            at = first + tl.arange(0, QUERIES)
            real = at < n_q
            q = _tile(q_ptr, begin_q + at, real, q_stride, WIDTH)
            dout = _tile(dout_ptr, begin_q + at, real, dout_stride, WIDTH)
            sums = tl.load(sums_ptr + begin_q + at, mask=real, other=float("inf"))  # nothing of what is not there
            delta = tl.load(delta_ptr + begin_q + at, mask=real, other=0.0)
            p = tl.exp2(tl.dot(k, tl.trans(q)) * scale - sums[None, :])
            dp = tl.dot(v, tl.trans(dout))
            held = p
            if DROPPED:
                of_queries = tl.load(_words(words_ptr, room, 0) + begin_q + at)
                keep = _keep(of_keys, of_queries, DROPPED)
                held = tl.where(keep, p, 0.0)
                dp = tl.where(keep, dp, 0.0)
            dv = tl.dot(held.to(dout.dtype), dout, dv)
            dk = tl.dot((p * (dp - delta[None, :])).to(q.dtype), q, dk)
        dk_ptr += head * dk_head_stride
        dv_ptr += head * dv_head_stride
        _put(dk_ptr, begin_k + key, key < n_k, dk_stride, dk * (scale * of_exponent * kept), WIDTH)
        _put(dv_ptr, begin_k + key, key < n_k, dv_stride, dv * kept, WIDTH)
    else:
        start = (block - blocks) * QUERIES
        if start >= n_q:
            return
        at = start + tl.arange(0, QUERIES)
        real = at < n_q
        q = _tile(q_ptr, begin_q + at, real, q_stride, WIDTH)
        dout = _tile(dout_ptr, begin_q + at, real, dout_stride, WIDTH)
        sums = tl.load(sums_ptr + begin_q + at, mask=real, other=float("inf"))
        delta = tl.load(delta_ptr + begin_q + at, mask=real, other=0.0)
        if DROPPED:
            of_queries = tl.load(_words(words_ptr, room, 0) + begin_q + at)
        dq = tl.zeros([QUERIES, WIDTH], tl.float32)
        for first in range(0, n_k, KEYS):
            key = first + tl.arange(0, KEYS)
            k = _tile(k_ptr, begin_k + key, key < n_k, k_stride, WIDTH)
            v = _tile(v_ptr, begin_k + key, key < n_k, v_stride, WIDTH)
            scores = tl.where((key < n_k)[None, :], tl.dot(q, tl.trans(k)), float("-inf"))
            p = tl.exp2(scores * scale - sums[:, None])
            dp = tl.dot(dout, tl.trans(v))
            if DROPPED:
                of_keys = tl.load(_words(words_ptr, room, 1) + begin_k + key)
                dp = tl.where(_keep(of_queries, of_keys, DROPPED), dp, 0.0)
            dq = tl.dot((p * (dp - delta[:, None])).to(k.dtype), k, dq)
        dq_ptr += head * dq_head_stride
        _put(dq_ptr, begin_q + at, real, dq_stride, dq * (scale * of_exponent * kept), WIDTH)


def forward(q, k, v, queries, keys, words, dropped: int, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """[queries, heads, width], and of each query the logarithm of its sum to base 2, [heads, room] float32.

    `words`: [2, heads, room] int32, or None if nothing is dropped.
    """
    total, heads, width = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    sums = torch.empty((heads, room_for(total, len(k))), dtype=torch.float32, device=q.device)
    blocks = triton.cdiv(queries.longest, _QUERIES)
    if blocks and heads:
        with on_device(q.device):
            attention_kernel[(blocks, heads, len(queries.host))](
                q,
                k,
                v,
                out,
                sums,
                queries.cumulative,
                keys.cumulative,
                sums if words is None else words,
                *_strides(q, k, v),
                sums.shape[1],
                scale * _LOG2_E,
                DROPPED=dropped,
                WIDTH=width,
                QUERIES=_QUERIES,
                KEYS=_KEYS,
                num_warps=_WARPS,
                num_stages=_STAGES,
            )
    return out, sums


def backward(dout, q, k, v, out, sums, queries, keys, words, dropped: int, scale: float, into) -> None:
    """Write the gradients of q, k and v to the tensors `into`; `out` and `sums` are what `forward` returned."""
    total, heads, width = q.shape
    delta, room = torch.empty_like(sums), sums.shape[1]
    at_keys = triton.cdiv(keys.longest, _BACK_KEYS)
    at_queries = triton.cdiv(queries.longest, _BACK_QUERIES)
    if not (heads and at_keys + at_queries):
        return
    with on_device(q.device):
        if total:
            attention_delta_kernel[(triton.cdiv(total, _DELTAS), heads)](
                out,
                dout,
                delta,
                *_strides(dout),
                total,
                room,
                DROPPED=dropped,
                WIDTH=width,
                TOKENS=_DELTAS,
                num_warps=_WARPS,
            )
        attention_backward_kernel[(at_keys + at_queries, heads, len(queries.host))](
            q,
            k,
            v,
            dout,
            sums,
            delta,
            queries.cumulative,
            keys.cumulative,
            sums if words is None else words,
            *into,
            *_strides(q, k, v, dout, *into),
            room,
            scale * _LOG2_E,
            at_keys,
            DROPPED=dropped,
            WIDTH=width,
            QUERIES=_BACK_QUERIES,
            KEYS=_BACK_KEYS,
            num_warps=_BACK_WARPS,
            num_stages=_BACK_STAGES,
        )


def room_for(queries: int, keys: int) -> int:
    """For as many tokens, and for the largest tile after the last: words are read without asking whether they exist."""
    return triton.cdiv(max(queries, keys) + _MOST, 16) * 16


def _strides(*tensors: torch.Tensor) -> list[int]:
    """Of each, from a token and from a head to the next."""
    return [stride for x in tensors for stride in x.stride()[:2]]
