"""DeBERTa's attention over packed sequences: scores also have products of content with relative positions.

Of a query i and a key j the score is `(q_i k_j + q_i key(i - j) + k_j query(i - j)) * scale`: `key` and `query` are
rows that the model makes of its embeddings of distances. Over padded batches PyTorch computes the second and third term
for every query with every distance, gathers them into two tensors of the scores' size, and scatters their gradients
back with one thread. Here tokens of all sequences are multiplied with the distances that occur, by one matrix product
each; a pass of C (`disentangled.c`) takes what belongs to a pair of tokens to its place, and the attention of
`fused_attention.py` adds it to its scores while those are in the cache.

Elsewhere, on CUDA, in other dtypes and without a compiler, sequences are padded again, and PyTorch gathers, for
`scaled_dot_product_attention` with a bias: the linear layers around it still work on packed tokens.

Numerics: products with distances are rounded to the tensors' dtype as PyTorch's are; their sum, and the score, are
float32 in C. The scale, which transformers rounds to that dtype, is not rounded. Probabilities are kept for backward,
however long a sequence is.

Source: DeBERTa, https://arxiv.org/abs/2006.03654.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch

from composer_speedups.kernels import fused_attention as fused
from composer_speedups.kernels.fast_dropout import Keys, draw_keys
from composer_speedups.kernels.native import checked
from composer_speedups.kernels.sdpa import padded_attention
from composer_speedups.kernels.tensors import plain, shape_only
from composer_speedups.kernels.two_sides import NAMES
from composer_speedups.kernels.varlen_attention import Lengths, packed_rows, padded_rows, places_in_rows, real_keys

__all__ = ["Places", "collect", "disentangled_attention", "in_c", "native", "spread"]


class Places(NamedTuple):
    """Which row of the positions' keys and queries stands for which distance.

    Attributes:
        rows: [2 reach + 1] int32: of the distances query - key from -reach to reach; on the tokens' device.
        reach: at least the longest sequence less one.
        used: the first of the model's embeddings of distances that `rows` counts, and the end of those.
    """

    rows: torch.Tensor
    reach: int
    used: tuple[int, int]

    def of_pairs(self, length: int) -> torch.Tensor:
        """[length, length] int64: of each query, with each key. Beyond `reach`, where padding is, they mean nothing."""
        at = torch.arange(length, device=self.rows.device)
        return self.rows[(at[:, None] - at).clamp(-self.reach, self.reach) + self.reach].long()


def disentangled_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    pos_key: torch.Tensor | None,
    pos_query: torch.Tensor | None,
    places: Places,
    lengths: Lengths,
    dropout_p: float,
    scale: float,
) -> torch.Tensor:
    """DeBERTa's attention within each sequence, with dropout on the probabilities.

    Args:
        q: [total of `lengths`, heads, width].
        k: the same shape.
        v: the same shape.
        pos_key: [positions, heads, width], with which queries are multiplied (content to position), or None.
        pos_query: [positions, heads, width], with which keys are multiplied (position to content), or None, not both.
        places: of distances among positions.
        lengths: how many tokens each sequence has.
        dropout_p: 0 outside of training.
        scale: of the scores.

    Returns:
        [total of `lengths`, heads, width].

    >>> x, lengths = torch.ones(5, 1, 16), Lengths.of([2, 3])
    >>> places = Places(torch.tensor([0, 0, 1, 2, 2], dtype=torch.int32), 2, (0, 3))
    >>> bool(disentangled_attention(x, x, x, x[:3], x[:3], places, lengths, 0.0, 0.25).allclose(x))
    True
    """
    if places.reach < lengths.longest - 1:
        raise ValueError(f"places reach {places.reach} tokens far, and a sequence has {lengths.longest}")
    wanted = (places.used[1] - places.used[0], *k.shape[1:])
    for name, position in (("pos_key", pos_key), ("pos_query", pos_query)):
        if position is not None and position.shape != wanted:
            raise ValueError(f"{name} must be {wanted}, one for each of the places, not {tuple(position.shape)}")
    if pos_key is not None and pos_query is not None and in_c(q, k, v, pos_key, pos_query):
        seeds = draw_keys() if dropout_p else (0, 0)
        tensors = (q, k, v, pos_key, pos_query)
        differentiable = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
        return _Disentangled.apply(*tensors, places, lengths.host.tolist(), seeds, dropout_p, scale, differentiable)
    return _padded(q, k, v, pos_key, pos_query, places, lengths, dropout_p, scale)


def in_c(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *positions: torch.Tensor) -> bool:
    """Whether C does it, if there are both kinds of positions: where the attention is C, and nothing compiles."""
    if torch.compiler.is_compiling() or not fused.serves(q, k, v):
        return False
    return all(x.dtype == q.dtype and plain(x) for x in positions) and native() is not None


class _Disentangled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, pos_key, pos_query, places: Places, lengths: list[int], seeds: Keys, dropout_p: float,
                scale: float, differentiable: bool):  # fmt: skip
        if sum(lengths) != len(q):
            raise ValueError(f"the lengths sum to {sum(lengths)}, and there are {len(q)} tokens")
        with torch.autocast("cpu", enabled=False):  # products have the type of their factors
            of_query = torch.bmm(q.transpose(0, 1), pos_key.permute(1, 2, 0))
            of_key = torch.bmm(k.transpose(0, 1), pos_query.permute(1, 2, 0))
        bias = spread(of_query, of_key, places, lengths, q.dtype)
        out, saved = fused.forward(
            q, k, v, lengths, lengths, seeds, dropout_p, scale, differentiable=differentiable, bias=bias
        )
        ctx.save_for_backward(pos_key, pos_query, *saved)
        ctx.arguments = places, lengths, dropout_p, scale
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient: torch.Tensor):
        pos_key, pos_query, *saved = ctx.saved_tensors
        places, lengths, dropout_p, scale = ctx.arguments
        q, k = saved[:2]
        dq, dk, dv, bias = fused.backward(
            gradient, saved, lengths, lengths, dropout_p, scale, together=True, of_bias=True
        )
        of_query, of_key = collect(bias, q.shape[1], pos_key.shape[0], places, lengths)
        with torch.autocast("cpu", enabled=False):
            dq += torch.bmm(of_query, pos_key.transpose(0, 1)).transpose(0, 1)
            dk += torch.bmm(of_key, pos_query.transpose(0, 1)).transpose(0, 1)
            of_pos_key = torch.bmm(of_query.mT, q.transpose(0, 1)).transpose(0, 1)
            of_pos_query = torch.bmm(of_key.mT, k.transpose(0, 1)).transpose(0, 1)
        return dq, dk, dv, of_pos_key, of_pos_query, *[None] * 6


class _Shape(ctypes.Structure):
    """`Shape` of `disentangled.c`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("place", "lengths")),
        *((name, ctypes.c_int64) for name in ("sequences", "heads", "tokens", "columns", "fill")),
        ("threads", ctypes.c_int32),
    )


def spread(
    of_query: torch.Tensor,
    of_key: torch.Tensor | None,
    places: Places,
    lengths: list[int],
    dtype: torch.dtype,
    library: ctypes.CDLL | None = None,
) -> torch.Tensor:
    """From [heads, total, positions] of queries, and of keys, to a bias as `fused_attention.forward` in `dtype` takes
    it."""
    heads, columns = of_query.shape[0], of_query.shape[2]
    bias = of_query.new_empty(fused.scores(dtype, heads, lengths, lengths), dtype=torch.float32)
    if not shape_only(of_query):
        of_query, of_key = (None if x is None else x.contiguous() for x in (of_query, of_key))
        call = getattr(library or native(), f"spread_{NAMES[of_query.dtype]}")
        _run(call, heads, columns, dtype, places, lengths, of_query, of_key, bias)
    return bias


def collect(
    bias: torch.Tensor,
    heads: int,
    columns: int,
    places: Places,
    lengths: list[int],
    library: ctypes.CDLL | None = None,
    keys: bool = True,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The gradients of `spread`'s first two arguments, from that of its result; None instead of the keys' if not
    `keys`."""
    found = [bias.new_empty(heads, sum(lengths), columns) if asked else None for asked in (True, keys)]
    if not shape_only(bias):
        call = getattr(library or native(), f"collect_{NAMES[bias.dtype]}")
        _run(call, heads, columns, bias.dtype, places, lengths, *found, bias)
    return tuple(found)


def _run(
    call, heads: int, columns: int, dtype: torch.dtype, places: Places, lengths: list[int],
    *tensors: torch.Tensor | None,
) -> None:  # fmt: skip
    rows, counts = places.rows.contiguous(), (ctypes.c_int32 * len(lengths))(*lengths)
    place = rows.data_ptr() + places.reach * rows.element_size()
    sizes = len(lengths), heads, sum(lengths), columns, fused.filled(dtype, 1)
    shape = _Shape(place, ctypes.addressof(counts), *sizes, torch.get_num_threads())
    if call(ctypes.byref(shape), *(ctypes.c_void_p(x if x is None else x.data_ptr()) for x in tensors)):
        raise MemoryError("no memory for the products with positions")


def _bias_by_torch(of_query, of_key, places: Places) -> torch.Tensor:
    """What `spread` means for one sequence: [..., queries, keys] of [..., tokens, positions]; None is left out."""
    given = of_key if of_query is None else of_query
    pairs = places.of_pairs(given.shape[-2]).expand(*given.shape[:-1], -1)
    bias = 0 if of_query is None else of_query.gather(-1, pairs)
    return bias if of_key is None else bias + of_key.gather(-1, pairs.mT).mT


def _gradients_by_torch(bias: torch.Tensor, columns: int, places: Places) -> tuple[torch.Tensor, torch.Tensor]:
    """What `collect` means for one sequence: twice [..., tokens, positions] of [..., queries, keys]."""
    pairs, zeros = places.of_pairs(bias.shape[-1]).expand(bias.shape), bias.new_zeros(*bias.shape[:-1], columns)
    return zeros.scatter_add(-1, pairs, bias), zeros.scatter_add(-1, pairs.mT, bias.mT)


def _padded(
    q, k, v, pos_key, pos_query, places: Places, lengths: Lengths, dropout_p: float, scale: float
) -> torch.Tensor:
    """By PyTorch's operations over padded sequences."""
    lengths = lengths.for_bias()
    at = places_in_rows(lengths, len(q))
    pq, pk, pv = (padded_rows(x, lengths, at) for x in (q, k, v))
    of_query, of_key = (
        None if position is None else x @ position.permute(1, 2, 0) for x, position in ((pq, pos_key), (pk, pos_query))
    )
    # Scaled one by one, as the model does it: float16 has no room for their sum.
    scaled = (None if x is None else x * scale for x in (of_query, of_key))
    bias = _bias_by_torch(*scaled, places).to(q.dtype).masked_fill(~real_keys(lengths), -torch.inf)
    return packed_rows(padded_attention(pq, pk, pv, bias, dropout_p, scale), at)


@checked("disentangled")
def native(library: ctypes.CDLL) -> bool:
    """Whether the C passes agree with their meaning in PyTorch operations."""
    return all(_agrees(library, dtype) for dtype in NAMES)


def _agrees(library: ctypes.CDLL, dtype: torch.dtype) -> bool:
    """Whether `library` does what is meant, on few sequences; both ways it adds a few numbers, in the same order."""
    heads, columns, lengths = 2, 9, [5, 0, 37, 1]
    places = Places(torch.arange(-40, 41, device="cpu").div(9, rounding_mode="trunc").add(4).int(), 40, (0, 9))
    numbers = torch.arange(heads * sum(lengths) * columns, device="cpu", dtype=torch.float32)
    tensors = [(numbers * factor).sin().view(heads, -1, columns).to(dtype) for factor in (0.7, 1.9)]
    bias = spread(*tensors, places, lengths, dtype, library)
    gradient = (torch.arange(len(bias), device="cpu") * 0.37).sin().to(dtype)
    found, first, token = collect(gradient, heads, columns, places, lengths, library), 0, 0
    alone = spread(tensors[0], None, places, lengths, dtype, library)
    found_alone, _ = collect(gradient, heads, columns, places, lengths, library, keys=False)
    for n in lengths:
        own, shape = slice(token, token + n), (heads, n, n)
        expected = _bias_by_torch(*(x[:, own].float() for x in tensors), places)
        wanted = _gradients_by_torch(fused.scores_of(gradient, shape, first, dtype).float(), columns, places)
        # In float32 sums of at most 37 numbers up to 1; in bfloat16 one rounding of those.
        close = dict(rtol=torch.finfo(dtype).eps, atol=1e-5)
        fits = torch.equal(fused.scores_of(bias, shape, first, dtype), expected)
        of_queries = _bias_by_torch(tensors[0][:, own].float(), None, places)
        fits &= torch.equal(fused.scores_of(alone, shape, first, dtype), of_queries)
        fits &= torch.equal(found_alone[:, own], found[0][:, own])
        if not fits or not all(x[:, own].float().allclose(y, **close) for x, y in zip(found, wanted, strict=True)):
            return False
        token, first = token + n, first + heads * n * fused.filled(dtype, n)
    return True
