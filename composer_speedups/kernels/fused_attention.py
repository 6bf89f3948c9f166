"""Attention over packed sequences on CPUs, whole: one pass of C each way, in bfloat16 and in float32.

`per_sequence.py` says what is computed and what serves elsewhere. Here scores never leave float32 nor the cache,
as in flash attention: products, softmax, dropout and their gradients follow each other over blocks of query rows, and
heads of sequences are shared among threads with no Python between them. Results do not depend on the number of threads.
As after all of PyTorch's own parallel operations, a process forked off later must not call it.

bfloat16 needs AMX (`fused_attention_amx.c`) or AVX512-BF16 (`fused_attention_bf16.c`); what both share, all but the
products, is `fused_attention_bf16.h`. Operands of products are rounded to it, sums are float32, results are rounded
once. Kept for backward are q, k, v, exp(score - largest) in bfloat16, signed by dropout, and a float for each row.
float32 needs AVX2 or AVX-512 (`fused_attention_float32.c`) and keeps q, k, v and the signed probabilities.
"""

from __future__ import annotations

import ctypes
import logging
import math
from functools import cache, partial

import torch

from composer_speedups.kernels.fast_dropout import Keys, dropped_of, keep_by_torch, least_of, moved_on, scale_of
from composer_speedups.kernels.native import load, without_modes
from composer_speedups.kernels.tensors import empty_beside, plain, shape_only

__all__ = ["FILES", "backward", "band", "filled", "forward", "native", "scores", "scores_of", "serves", "usable"]

log = logging.getLogger("composer_speedups")

Saved = tuple[torch.Tensor, ...]

_VECTOR = 16  # the width of a head is a multiple of it
_FILL = {torch.bfloat16: 32, torch.float32: 16}  # to a multiple of it rows of probabilities are filled up with zeros
FILES = {  # and the instructions they use; the first one that can be used serves
    torch.bfloat16: {"fused_attention_amx": "AMX", "fused_attention_bf16": "AVX512-BF16"},
    torch.float32: {"fused_attention_float32": "AVX"},
}


class _Call(ctypes.Structure):
    """`Call` of `fused_attention.h`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("q", "k", "v")),
        *((f"{name}_{step}", ctypes.c_int64) for name in "qkv" for step in ("token", "head")),
        *((name, ctypes.c_void_p) for name in ("queries", "keys")),
        *((name, ctypes.c_int64) for name in ("sequences", "heads", "width")),
        *((name, ctypes.c_void_p) for name in ("probabilities", "inverse")),
        *((name, ctypes.c_uint32) for name in ("k0", "k1")),
        *((name, ctypes.c_int32) for name in ("least", "threads")),
        ("window", ctypes.c_int64),
        *((name, ctypes.c_float) for name in ("scale", "keep")),
        ("out", ctypes.c_void_p),
        ("gradient", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("g_token", "g_head")),
        *((name, ctypes.c_void_p) for name in ("dq", "dk", "dv")),
        *((f"{name}_token", ctypes.c_int64) for name in ("dq", "dk", "dv")),
        *((name, ctypes.c_void_p) for name in ("bias", "dbias")),
    )


def serves(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether these may be given to `forward`: of one such dtype, a width that is a multiple of 16, on such a CPU."""
    wanted = q.dtype in FILES and all(x.is_cpu and x.dtype == q.dtype and plain(x) for x in (q, k, v))
    return wanted and q.shape[-1] % _VECTOR == 0 and q.numel() > 0 and native(q.dtype) is not None


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    queries: list[int],
    keys: list[int],
    seeds: Keys,
    dropout_p: float,
    scale: float,
    differentiable: bool = True,
    output: bool = True,
    window: int = -1,
    library: ctypes.CDLL | None = None,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor | None, Saved]:
    """The output, and what `backward` needs.

    Args:
        q: [total of `queries`, heads, width].
        k: [total of `keys`, heads, width].
        v: [total of `keys`, heads, width].
        queries: how many tokens of `q` each sequence has.
        keys: how many tokens of `k` and `v` each sequence has.
        seeds: two words of 32 bits that make the dropout mask.
        dropout_p: 0 outside of training.
        scale: of the scores.
        differentiable: False keeps nothing for `backward`.
        output: False computes only what `backward` needs, and returns None for the output.
        window: how many keys to each side a query sees; -1 is all.
        library: the C functions; None is `native`.
        bias: float32, added to the products of queries and keys before they are scaled: `filled` for each sequence;
            not together with a window.

    Returns:
        [total of `queries`, heads, width], and q, k, v, signed probabilities with rows filled up, and in float32 by
        what each row of them must be multiplied to sum to 1 (nothing for float32, whose rows do).
    """
    call, alive = _call(q, k, v, queries, keys, dropout_p, scale, window)
    call.k0, call.k1 = seeds
    out, saved = None, ()
    if output:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
    total = scores(q.dtype, q.shape[1], queries, keys)
    if bias is not None and (window >= 0 or bias.shape != (total,) or bias.dtype != torch.float32):
        raise ValueError(f"a bias must be ({total},) in float32, without a window, not {tuple(bias.shape)}")
    if differentiable:
        rows = q.shape[1] * sum(queries) if q.dtype == torch.bfloat16 else 0
        saved = (q, k, v, q.new_empty(total), q.new_empty(rows, dtype=torch.float32))
    if shape_only(q):
        return out, saved
    if output:
        call.out = out.data_ptr()
    if differentiable:
        call.probabilities, call.inverse = (x.data_ptr() for x in saved[3:])
    if bias is not None:
        bias = bias.contiguous()
        call.bias = bias.data_ptr()
    _run((library or native(q.dtype)).forward, call)
    del alive
    return out, saved


def backward(
    gradient: torch.Tensor,
    saved: Saved,
    queries: list[int],
    keys: list[int],
    dropout_p: float,
    scale: float,
    window: int = -1,
    library: ctypes.CDLL | None = None,
    together: bool = False,
    of_bias: bool = False,
) -> tuple[torch.Tensor, ...]:
    """The gradients of q, k and v, and `of_bias`, from that of the output and what `forward` saved.

    Where q, k and v are parts of one tensor their gradients are, too, if `together`: `tensors.beside` makes one of them
    without a copy. An operator's results must not share memory. What fills up the bias's rows has no gradient: it is
    not written.
    """
    q, k, v, probabilities, inverse = saved
    call, alive = _call(q, k, v, queries, keys, dropout_p, scale, window)
    gradients = empty_beside(q, k, v) if together else tuple(x.new_empty(x.shape) for x in (q, k, v))
    if of_bias:
        gradients = (*gradients, q.new_empty(scores(q.dtype, q.shape[1], queries, keys)))
    if shape_only(q):
        return gradients
    if gradient.shape != q.shape or gradient.dtype != q.dtype:
        found, wanted = ((tuple(x.shape), x.dtype) for x in (gradient, q))
        raise ValueError(f"the gradient is {found[0]} in {found[1]}, and must be as q: {wanted[0]} in {wanted[1]}")
    gradient = _place(call, "gradient", "g", gradient)
    call.probabilities, call.inverse = probabilities.data_ptr(), inverse.data_ptr()
    for name, x in zip(("dq", "dk", "dv"), gradients[:3], strict=True):
        setattr(call, name, x.data_ptr())
        setattr(call, f"{name}_token", x.stride(0))
    if of_bias:
        call.dbias = gradients[3].data_ptr()
    _run((library or native(q.dtype)).backward, call)
    del alive
    return gradients


def _call(
    q, k, v, queries: list[int], keys: list[int], dropout_p: float, scale: float, window: int
) -> tuple[_Call, object]:
    """What both functions are told, and what must live until they are done."""
    heads, width = q.shape[1:]
    expected = [(sum(queries), heads, width), *[(sum(keys), heads, width)] * 2]
    if [tuple(x.shape) for x in (q, k, v)] != expected or len(queries) != len(keys):
        found = ", ".join(str(tuple(x.shape)) for x in (q, k, v))
        raise ValueError(f"q, k, v must have the shapes {expected} for lengths of such sums, not {found}")
    if min((*queries, *keys), default=0) < 0:
        raise ValueError(f"a length is below 0: {min(*queries, *keys)}")
    if window >= 0 and queries != keys:
        raise ValueError(f"a window needs as many queries as keys, got {queries} and {keys}")
    call = _Call(sequences=len(keys), heads=heads, width=width, scale=scale, window=window)
    call.threads = torch.get_num_threads()
    dropped = dropped_of(dropout_p)
    call.least, call.keep = least_of(dropped), scale_of(dropped)
    lengths = [(ctypes.c_int32 * len(x))(*x) for x in (queries, keys)]
    call.queries, call.keys = (ctypes.addressof(x) for x in lengths)
    if shape_only(q):
        return call, lengths
    return call, (lengths, [_place(call, name, name, x) for name, x in zip("qkv", (q, k, v), strict=True)])


def filled(dtype: torch.dtype, keys: int) -> int:
    """How many columns a row of scores has where they are kept, of bias and probabilities: [heads, queries, these]."""
    return -(-keys // _FILL[dtype]) * _FILL[dtype]


def scores_of(x: torch.Tensor, shape: tuple[int, int, int], first: int, dtype: torch.dtype) -> torch.Tensor:
    """Of a bias, or of what is kept for backward, a sequence's [heads, queries, keys], from number `first` on."""
    heads, queries, keys = shape
    rows = (heads, queries, filled(dtype, keys))
    return x[first : first + math.prod(rows)].view(rows)[..., :keys]


def scores(dtype: torch.dtype, heads: int, queries: list[int], keys: list[int]) -> int:
    """How many scores are kept of all sequences: as `scores_of` finds them."""
    return heads * sum(n * filled(dtype, m) for n, m in zip(queries, keys, strict=True))


def _place(call: _Call, name: str, short: str, x: torch.Tensor) -> torch.Tensor:
    """Put address and strides of `x`, or of a copy whose last dimension is contiguous, into `call`; return which."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    setattr(call, name, x.data_ptr())
    setattr(call, f"{short}_token", x.stride(0))
    setattr(call, f"{short}_head", x.stride(1))
    return x


def _run(function, call: _Call) -> None:
    if function(ctypes.byref(call)):
        lengths = ctypes.cast(call.keys, ctypes.POINTER(ctypes.c_int32))
        longest = max(lengths[i] for i in range(call.sequences))
        raise MemoryError(f"no memory for attention: the longest sequence has {longest} tokens; cut texts shorter")


@cache
def native(dtype: torch.dtype) -> ctypes.CDLL | None:
    """The C functions, if this CPU has them and they agree with their meaning in PyTorch operations; None if not."""
    return next((library for name in FILES[dtype] if (library := usable(name, dtype)) is not None), None)


def usable(name: str, dtype: torch.dtype) -> ctypes.CDLL | None:
    """The C functions of the file `name`, if this CPU has them and they agree; None, with the reason in the log."""
    library = load(name)
    if library is None:
        return None
    if library.forward(ctypes.byref(_Call(threads=1))):  # nothing to do: 0 where it may run
        log.info("kernel %s is not for this CPU, or the compiler or the system lacks what it needs", name)
        return None
    if not library.threaded and torch.get_num_threads() > 1:
        log.info("kernel %s has one thread only: the separate passes, with more, serve instead", name)
        return None
    with without_modes():
        if agrees(library, dtype):
            return library
    log.info("kernel %s does not agree with PyTorch: another, or the separate passes, serve instead", name)
    return None


def agrees(library: ctypes.CDLL, dtype: torch.dtype) -> bool:
    """Whether `library` does what is meant, on few sequences with all kinds of remainders, also with window or bias."""
    return all(_agrees(library, dtype, *case) for case in ((-1, False), (9, False), (-1, True)))


def _agrees(library: ctypes.CDLL, dtype: torch.dtype, window: int, biased: bool) -> bool:
    heads, width, p, seeds, scale = 2, 48, 0.1, (7, 9), 0.2
    keys = [37, 4, 19, 66] if window < 0 else [37, 4, 9, 150]
    queries = [37, 0, 101, 1] if window < 0 else keys
    sizes = sum(queries), sum(keys), sum(keys), sum(queries)
    q, k, v, g = (
        ((torch.arange(n * heads * width, device="cpu") * (0.7 + i)).sin() * 1.5).view(n, heads, width).to(dtype)
        for i, n in enumerate(sizes)
    )
    total = scores(dtype, heads, queries, keys)
    bias = (torch.arange(total, device="cpu", dtype=torch.float32) * 0.3).sin() * 4 if biased else None
    library.litter()
    out, saved = forward(q, k, v, queries, keys, seeds, p, scale, window=window, library=library, bias=bias)
    library.litter()
    gradients = backward(g, saved, queries, keys, p, scale, window, library, of_bias=biased)
    found, expected, of_bias = (out, *gradients[:3]), [[] for _ in range(4)], []
    row = element = 0
    lengths = (queries, keys, keys, queries)
    for qi, ki, vi, gi in zip(*(x.double().split(n) for x, n in zip((q, k, v, g), lengths, strict=True)), strict=True):
        shape = (heads, len(qi), len(ki))
        own_scores = partial(scores_of, shape=shape, first=row, dtype=dtype)
        stays = keep_by_torch(math.prod(shape), moved_on(seeds, element), dropped_of(p)).view(shape)
        element += (math.prod(shape) + 1) // 2
        row += heads * len(qi) * filled(dtype, len(ki))
        seen = torch.ones(shape, dtype=torch.bool, device="cpu") if window < 0 else band(len(ki), window).expand(shape)
        if not torch.equal(own_scores(saved[3]).signbit()[seen], ~stays[seen]):
            return False
        qi, ki, vi, gi = (x.transpose(0, 1) for x in (qi, ki, vi, gi))
        probabilities = (
            ((qi @ ki.mT + (own_scores(bias) if biased else 0)) * scale).masked_fill(~seen, -math.inf).softmax(-1)
        )
        factor = stays * scale_of(dropped_of(p))
        through = gi @ vi.mT * factor
        ds = probabilities * (through - (probabilities * through).sum(-1, keepdim=True)) * scale
        kept = probabilities * factor
        for parts, x in zip(expected, (kept @ vi, ds @ ki, ds.mT @ qi, kept.mT @ gi), strict=True):
            parts.append(x.transpose(0, 1))
        if biased:
            of_bias.append((own_scores(gradients[3]), ds))
    pairs = [*zip(found, map(torch.cat, expected), strict=True), *of_bias]
    # To bfloat16 three roundings on the way to a result, of terms that are no larger than a few times the largest; in
    # float32 at most 101 terms of such a size.
    allowed = 0.02 if dtype == torch.bfloat16 else 1e-5
    return all((x - y).abs().max() <= allowed * y.abs().max() for x, y in pairs if y.numel())


def band(length: int, window: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """[length, length]: which keys a query sees, those at most `window` away.

    >>> band(3, 1).int().tolist()
    [[1, 1, 0], [1, 1, 1], [0, 1, 1]]
    """
    at = torch.arange(length, device=device)
    return (at[:, None] - at).abs() <= window
