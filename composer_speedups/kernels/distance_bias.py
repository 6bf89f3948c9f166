"""MPNet's attention over packed sequences: scores also have a number for the distance of query and key.

Of a query i and a key j the score is `q_i k_j * scale + table[i - j]`, with a table for each head that all layers
share. Padded, PyTorch makes it a tensor [rows, heads, length, length], and adds that to the scores of every layer. Here
the table goes to the pairs of real tokens in a pass of C (`disentangled.c`), the attention of `fused_attention.py`
adds it to its scores while those are in the cache, and its gradient comes back the same way.

Elsewhere, on CUDA, compiled, in other dtypes and without a compiler, sequences are padded again, for
`scaled_dot_product_attention` with that tensor: the linear layers around it still work on packed tokens. Layers that
share a table share that tensor, too, if they are given it.

Numerics: in C the table is added to scores in float32; of its gradient a token's share is rounded to the tensors' dtype
before shares are summed up in float32.

Source: relative position biases of T5, https://arxiv.org/abs/1910.10683, as MPNet has them,
https://arxiv.org/abs/2004.09297.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from composer_speedups.kernels import fused_attention as fused
from composer_speedups.kernels.disentangled import Places, collect, in_c, spread
from composer_speedups.kernels.fast_dropout import Keys, draw_keys
from composer_speedups.kernels.sdpa import padded_attention
from composer_speedups.kernels.varlen_attention import Lengths, packed_rows, padded_rows, places_in_rows, real_keys

__all__ = ["distance_biased_attention", "padded_bias"]


def distance_biased_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    table: torch.Tensor,
    places: Places,
    lengths: Lengths,
    dropout_p: float,
    scale: float,
) -> torch.Tensor:
    """softmax(q k^T scale + bias) v within each sequence, with dropout on the probabilities.

    Args:
        q: [total of `lengths`, heads, width].
        k: the same shape.
        v: the same shape.
        table: [heads, columns]; what is added to a score, by head and by the column that `places` has for its distance.
            Or what `padded_bias` has made of that, for all layers: then sequences are padded.
        places: of distances among the columns.
        lengths: how many tokens each sequence has.
        dropout_p: 0 outside of training.
        scale: of the products of queries and keys.

    Returns:
        [total of `lengths`, heads, width].

    >>> x, lengths = torch.ones(5, 1, 16), Lengths.of([2, 3])
    >>> places = Places(torch.tensor([0, 0, 1, 2, 2], dtype=torch.int32), 2, (0, 3))
    >>> bool(distance_biased_attention(x, x, x, torch.zeros(1, 3), places, lengths, 0.0, 0.25).allclose(x))
    True
    """
    if table.dim() == 4:
        return _padded(q, k, v, table, lengths, dropout_p, scale)
    _check_table(table, q.shape[1], places, lengths)
    if not in_c(q, k, v):
        return _padded(q, k, v, padded_bias(table, places, lengths, q.dtype), lengths, dropout_p, scale)
    seeds = draw_keys() if dropout_p else (0, 0)
    differentiable = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v, table))
    return _Biased.apply(q, k, v, table, places, lengths.host.tolist(), seeds, dropout_p, scale, differentiable)


def padded_bias(table: torch.Tensor, places: Places, lengths: Lengths, dtype: torch.dtype) -> torch.Tensor:
    """[sequences, heads, length, length] of `dtype`: the table's number for each pair, -inf for keys of the padding.

    `length` is that of `lengths.for_bias()`. It takes as much memory as the scores of a layer. Arguments as of
    `distance_biased_attention`.

    >>> places = Places(torch.tensor([0, 1, 2], dtype=torch.int32), 1, (0, 3))
    >>> bias = padded_bias(torch.tensor([[1.0, 2.0, 3.0]]), places, Lengths.of([2, 1]), torch.float32)
    >>> bias[:, :, :2, :3].tolist()
    [[[[2.0, 1.0, -inf], [3.0, 2.0, -inf]]], [[[2.0, -inf, -inf], [3.0, -inf, -inf]]]]
    """
    _check_table(table, len(table), places, lengths)
    lengths = lengths.for_bias()
    # Not by indexing: its gradient on CUDA adds up one by one what is of one column, here a third of all pairs.
    bias = F.embedding(places.of_pairs(lengths.longest), table.T).permute(2, 0, 1)
    return bias.to(dtype, memory_format=torch.contiguous_format).masked_fill(~real_keys(lengths), -torch.inf)


def _check_table(table: torch.Tensor, heads: int, places: Places, lengths: Lengths) -> None:
    if places.reach < lengths.longest - 1:
        raise ValueError(f"places reach {places.reach} tokens far, and a sequence has {lengths.longest}")
    if table.shape != (wanted := (heads, places.used[1] - places.used[0])):
        raise ValueError(f"table must be {wanted}, heads and columns, not {tuple(table.shape)}")


class _Biased(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, table, places: Places, lengths: list[int], seeds: Keys, dropout_p: float, scale: float,
                differentiable: bool):  # fmt: skip
        if sum(lengths) != len(q):
            raise ValueError(f"the lengths sum to {sum(lengths)}, and there are {len(q)} tokens")
        # The attention scales what is added, too.
        of_query = (table.float() / scale)[:, None].expand(-1, len(q), -1)
        bias = spread(of_query, None, places, lengths, q.dtype)
        out, saved = fused.forward(
            q, k, v, lengths, lengths, seeds, dropout_p, scale, differentiable=differentiable, bias=bias
        )
        ctx.save_for_backward(*saved)
        ctx.arguments = table.shape, table.dtype, places, lengths, dropout_p, scale
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient: torch.Tensor):
        (heads, columns), dtype, places, lengths, dropout_p, scale = ctx.arguments
        asked = ctx.needs_input_grad[3]
        dq, dk, dv, *of_bias = fused.backward(
            gradient, ctx.saved_tensors, lengths, lengths, dropout_p, scale, together=True, of_bias=asked
        )
        of_table = None
        if asked:
            of_query, _ = collect(of_bias[0], heads, columns, places, lengths, keys=False)
            of_table = (of_query.sum(1, dtype=torch.float32) / scale).to(dtype)
        return dq, dk, dv, of_table, *[None] * 6


def _padded(q, k, v, bias: torch.Tensor, lengths: Lengths, dropout_p: float, scale: float) -> torch.Tensor:
    """By PyTorch's operations over padded sequences."""
    lengths = lengths.for_bias()
    if bias.shape != (wanted := (len(lengths.host), q.shape[1], lengths.longest, lengths.longest)):
        raise ValueError(f"the padded bias must be {wanted}, sequences, heads and lengths, not {tuple(bias.shape)}")
    at = places_in_rows(lengths, len(q))
    pq, pk, pv = (padded_rows(x, lengths, at) for x in (q, k, v))
    return packed_rows(padded_attention(pq, pk, pv, bias.to(q.dtype), dropout_p, scale), at)
