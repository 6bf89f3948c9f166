"""The CUDA side of `packed_attention.py`: Triton kernels, one forward and two backward.

A program has some tokens of one head of one sequence; the loop goes over those at the other end of the scores.
Sequences of BERT's are short: a program's loop has few turns, so that what counts is that many programs are there at
once, and that none needs what another one computes. What a turn loads it loads at its beginning, to wait for it once.

Exponents are of two. What is dropped is told by a random word for each query and one for each key (`words`, drawn by
PyTorch): a score is dropped where the product of both, made odd, is below a bound modulo 2^32. That is one instruction
a score, and the same in whichever layout a kernel has it; see `packed_attention.kept_by_torch`.

By ptxas for sm_90 (Triton 3.6, bf16, heads of 64, dropout) the loops have, for each score, 17 instructions forward, 20
for the gradients of queries and 20 for those of keys and values.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from composer_speedups.kernels.launch import interpreted, on_device

__all__ = [
    "attention_kernel",
    "attention_keys_kernel",
    "attention_queries_kernel",
    "backward",
    "forward",
    "interpreted",
    "room_for",
]

# Tokens of a program, of which a warp has 16; those at the other end in a turn of its loop; turns that are under way;
# registers of a thread at most (`_bounded`). As `benchmarks/results/2026-11-27_h200_launches` found best.
_BLOCK, _TURN, _STAGES, _REGISTERS = 64, 64, 1, 128
_BLOCK_Q, _TURN_Q, _STAGES_Q, _REGISTERS_Q = 64, 32, 2, 96  # for the gradients of queries
_BLOCK_K, _TURN_K, _STAGES_K, _REGISTERS_K = 64, 32, 1, 128  # and of keys and values
_MOST = 128  # tokens of a tile
_LOG2_E = 1.4426950408889634
_LN_2: tl.constexpr = tl.constexpr(0.6931471805599453)


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
    BLOCK: tl.constexpr,
    TURN: tl.constexpr,
):
    begin_q, n_q = _sequence(queries_ptr)
    begin_k, n_k = _sequence(keys_ptr)
    start = tl.program_id(0) * BLOCK
    if start >= n_q:
        return
    head = tl.program_id(1).to(tl.int64)
    at = start + tl.arange(0, BLOCK)
    real = at < n_q
    q = _tile(q_ptr + head * q_head_stride, begin_q + at, real, q_stride, WIDTH)
    if DROPPED:
        of_queries = tl.load(_words(words_ptr, room, 0) + begin_q + at)
    largest = tl.full([BLOCK], float("-inf"), tl.float32)
    total_of = tl.zeros([BLOCK], tl.float32)
    out = tl.zeros([BLOCK, WIDTH], tl.float32)
    for first in range(0, n_k, TURN):
        key = first + tl.arange(0, TURN)
        k = _tile(k_ptr + head * k_head_stride, begin_k + key, key < n_k, k_stride, WIDTH)
        v = _tile(v_ptr + head * v_head_stride, begin_k + key, key < n_k, v_stride, WIDTH)
        if DROPPED:  # here, so that all of a turn's loads are waited for at once
            of_keys = tl.load(_words(words_ptr, room, 1) + begin_k + key)
        scores = tl.where((key < n_k)[None, :], tl.dot(q, tl.trans(k)), float("-inf"))
        larger = tl.maximum(largest, tl.max(scores, 1) * scale)
        p = tl.exp2(scores * scale - larger[:, None])
        before = tl.exp2(largest - larger)
        total_of = total_of * before + tl.sum(p, 1)
        if DROPPED:
            p = tl.where(_keep(of_queries, of_keys, DROPPED), p, 0.0)
        out = tl.dot(p.to(v.dtype), v, out * before[:, None])
        largest = larger
    kept: tl.constexpr = 65536.0 / (65536 - DROPPED)
    total_of = tl.where(total_of == 0, 1.0, total_of)  # a sequence without keys has zeros
    out = out * (kept / total_of)[:, None]
    _put(out_ptr + head * WIDTH, begin_q + at, real, tl.num_programs(1) * WIDTH, out, WIDTH)
    tl.store(sums_ptr + head * room + begin_q + at, largest + tl.log2(total_of), mask=real)


@triton.jit
def attention_queries_kernel(
    q_ptr,  # as forward
    k_ptr,
    v_ptr,
    out_ptr,
    dout_ptr,  # as out, strides as named
    sums_ptr,
    delta_ptr,  # [heads, room] float32, written: what each query's probabilities times their gradients add up to
    queries_ptr,
    keys_ptr,
    words_ptr,
    dq_ptr,  # as q, strides as named
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
    room,
    scale,
    DROPPED: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    TURN: tl.constexpr,
):
    begin_q, n_q = _sequence(queries_ptr)
    begin_k, n_k = _sequence(keys_ptr)
    start = tl.program_id(0) * BLOCK
    if start >= n_q:
        return
    head = tl.program_id(1).to(tl.int64)
    at = start + tl.arange(0, BLOCK)
    real = at < n_q
    q = _tile(q_ptr + head * q_head_stride, begin_q + at, real, q_stride, WIDTH)
    dout = _tile(dout_ptr + head * dout_head_stride, begin_q + at, real, dout_stride, WIDTH)
    out = _tile(out_ptr + head * WIDTH, begin_q + at, real, tl.num_programs(1) * WIDTH, WIDTH)
    sums = tl.load(sums_ptr + head * room + begin_q + at, mask=real, other=float("inf"))
    # By the scale of what is kept probabilities are multiplied last.
    kept: tl.constexpr = 65536.0 / (65536 - DROPPED)
    delta = tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1) / kept
    tl.store(delta_ptr + head * room + begin_q + at, delta, mask=real)
    if DROPPED:
        of_queries = tl.load(_words(words_ptr, room, 0) + begin_q + at)
    dq = tl.zeros([BLOCK, WIDTH], tl.float32)
    for first in range(0, n_k, TURN):
        key = first + tl.arange(0, TURN)
        k = _tile(k_ptr + head * k_head_stride, begin_k + key, key < n_k, k_stride, WIDTH)
        v = _tile(v_ptr + head * v_head_stride, begin_k + key, key < n_k, v_stride, WIDTH)
        if DROPPED:
            of_keys = tl.load(_words(words_ptr, room, 1) + begin_k + key)
        scores = tl.where((key < n_k)[None, :], tl.dot(q, tl.trans(k)), float("-inf"))
        p = tl.exp2(scores * scale - sums[:, None])
        dp = tl.dot(dout, tl.trans(v))
        if DROPPED:
            dp = tl.where(_keep(of_queries, of_keys, DROPPED), dp, 0.0)
        dq = tl.dot((p * (dp - delta[:, None])).to(k.dtype), k, dq)
    dq = dq * (scale * _LN_2 * kept)
    _put(dq_ptr + head * dq_head_stride, begin_q + at, real, dq_stride, dq, WIDTH)


@triton.jit
def attention_keys_kernel(
    q_ptr,  # as before
    k_ptr,
    v_ptr,
    dout_ptr,
    sums_ptr,
    delta_ptr,
    queries_ptr,
    keys_ptr,
    words_ptr,
    dk_ptr,  # as k, strides as named, as dv
    dv_ptr,
    q_stride,
    q_head_stride,
    k_stride,
    k_head_stride,
    v_stride,
    v_head_stride,
    dout_stride,
    dout_head_stride,
    dk_stride,
    dk_head_stride,
    dv_stride,
    dv_head_stride,
    room,
    scale,
    DROPPED: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    TURN: tl.constexpr,
):
    begin_q, n_q = _sequence(queries_ptr)
    begin_k, n_k = _sequence(keys_ptr)
    start = tl.program_id(0) * BLOCK
    if start >= n_k:
        return
    head = tl.program_id(1).to(tl.int64)
    key = start + tl.arange(0, BLOCK)
    real = key < n_k
    k = _tile(k_ptr + head * k_head_stride, begin_k + key, real, k_stride, WIDTH)
    v = _tile(v_ptr + head * v_head_stride, begin_k + key, real, v_stride, WIDTH)
    if DROPPED:
        of_keys = tl.load(_words(words_ptr, room, 1) + begin_k + key)
    dk = tl.zeros([BLOCK, WIDTH], tl.float32)
    dv = tl.zeros([BLOCK, WIDTH], tl.float32)
    for first in range(0, n_q, TURN):  # scores lie as [keys, queries]
        at = first + tl.arange(0, TURN)
        q = _tile(q_ptr + head * q_head_stride, begin_q + at, at < n_q, q_stride, WIDTH)
        dout = _tile(dout_ptr + head * dout_head_stride, begin_q + at, at < n_q, dout_stride, WIDTH)
        # Nothing of what is not there.
        sums = tl.load(sums_ptr + head * room + begin_q + at, mask=at < n_q, other=float("inf"))
        delta = tl.load(delta_ptr + head * room + begin_q + at, mask=at < n_q, other=0.0)
        if DROPPED:
            of_queries = tl.load(_words(words_ptr, room, 0) + begin_q + at)
        p = tl.exp2(tl.dot(k, tl.trans(q)) * scale - sums[None, :])
        dp = tl.dot(v, tl.trans(dout))
        held = p
        if DROPPED:
            keep = _keep(of_keys, of_queries, DROPPED)
            held = tl.where(keep, p, 0.0)
            dp = tl.where(keep, dp, 0.0)
        dv = tl.dot(held.to(dout.dtype), dout, dv)
        dk = tl.dot((p * (dp - delta[None, :])).to(q.dtype), q, dk)
    kept: tl.constexpr = 65536.0 / (65536 - DROPPED)
    dk = dk * (scale * _LN_2 * kept)
    _put(dk_ptr + head * dk_head_stride, begin_k + key, real, dk_stride, dk, WIDTH)
    _put(dv_ptr + head * dv_head_stride, begin_k + key, real, dv_stride, dv * kept, WIDTH)


def forward(q, k, v, queries, keys, words, dropped: int, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """[queries, heads, width], and of each query the logarithm of its sum to base 2, [heads, room] float32.

    `words`: [2, heads, room] int32, or None if nothing is dropped.
    """
    total, heads, width = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    sums = torch.empty((heads, room_for(total, len(k))), dtype=torch.float32, device=q.device)
    blocks = triton.cdiv(queries.longest, _BLOCK)
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
                BLOCK=_BLOCK,
                TURN=_TURN,
                num_warps=_BLOCK // 16,
                num_stages=_STAGES,
                **_bounded(q, _REGISTERS),
            )
    return out, sums


def backward(dout, q, k, v, out, sums, queries, keys, words, dropped: int, scale: float, into) -> None:
    """Write the gradients of q, k and v to the tensors `into`; `out` and `sums` are what `forward` returned."""
    heads, width, room = q.shape[1], q.shape[2], sums.shape[1]
    delta, scale = torch.empty_like(sums), scale * _LOG2_E
    words = sums if words is None else words
    dq, dk, dv = into
    at_queries, at_keys = triton.cdiv(queries.longest, _BLOCK_Q), triton.cdiv(keys.longest, _BLOCK_K)
    with on_device(q.device):
        if heads and at_queries:
            attention_queries_kernel[(at_queries, heads, len(queries.host))](
                q,
                k,
                v,
                out,
                dout,
                sums,
                delta,
                queries.cumulative,
                keys.cumulative,
                words,
                dq,
                *_strides(q, k, v, dout, dq),
                room,
                scale,
                DROPPED=dropped,
                WIDTH=width,
                BLOCK=_BLOCK_Q,
                TURN=_TURN_Q,
                num_warps=_BLOCK_Q // 16,
                num_stages=_STAGES_Q,
                **_bounded(q, _REGISTERS_Q),
            )
        if heads and at_keys:
            attention_keys_kernel[(at_keys, heads, len(keys.host))](
                q,
                k,
                v,
                dout,
                sums,
                delta,
                queries.cumulative,
                keys.cumulative,
                words,
                dk,
                dv,
                *_strides(q, k, v, dout, dk, dv),
                room,
                scale,
                DROPPED=dropped,
                WIDTH=width,
                BLOCK=_BLOCK_K,
                TURN=_TURN_K,
                num_warps=_BLOCK_K // 16,
                num_stages=_STAGES_K,
                **_bounded(q, _REGISTERS_K),
            )


def _bounded(q: torch.Tensor, registers: int) -> dict[str, int]:
    """At most so many `registers` of a thread, on Hopper with heads of 64: then four or five programs run at once.

    That was worth more than what then lies in memory, 24 bytes of a thread with keys (by Triton 3.6; 72 by 3.3). Heads
    of 32 need fewer without a bound. Tensor cores of other architectures take their numbers from registers: with these
    bounds 64 to 312 bytes of a thread would lie in memory, and nobody has measured that.
    """
    return {"maxnreg": registers} if registers and q.shape[-1] == 64 and _hopper(q.device) else {}


@cache
def _hopper(device: torch.device) -> bool:
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device)[0] == 9


def room_for(queries: int, keys: int) -> int:
    """For as many tokens, and for the largest tile after the last: words are read without asking whether they exist."""
    return triton.cdiv(max(queries, keys) + _MOST, 16) * 16


def _strides(*tensors: torch.Tensor) -> list[int]:
    """Of each, from a token and from a head to the next."""
    return [stride for x in tensors for stride in x.stride()[:2]]
