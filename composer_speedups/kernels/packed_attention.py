"""Attention over packed sequences by kernels of our own, on CUDA in fp16 and bf16, for sequences as short as BERT's.

Flash attention is made for long sequences: on an H200 it takes 73 us forward and 220 us backward for a layer of
BERT-base, 64 texts of some 200 tokens and dropout (`benchmarks/results/2026-11-26_h200_profiles`), a multiple of what
their products take there. Backward is three kernels, one of which adds to the queries' gradients in float32, by
atomics, and one that copies them.

Here backward computes the scores twice, once for queries and once for keys: no gradient is added up between programs,
so that a run repeats bit for bit; probabilities go to the tensor cores from registers. Queries', keys' and values'
gradients are written beside each other where they came so: nothing is copied for the product that made them. A
probability is kept with 1 - p to a multiple of 1/65536 (flash attention: 1/256), by one multiplication. Both ways it
took 211 us there where flash attention took 304 (13,312 tokens, the trial of `2026-11-27_h200_peers`).

Numerics: products in the tensors' dtype with sums in float32, softmax in float32, probabilities rounded to the tensors'
dtype before they meet the values, as flash attention does.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import torch
from torch.autograd.function import once_differentiable

from composer_speedups.compilation import missing_kernel
from composer_speedups.kernels.fast_dropout import STEPS, dropped_of
from composer_speedups.kernels.tensors import empty_beside, plain, shape_only
from composer_speedups.kernels.two_sides import cuda_side

if TYPE_CHECKING:
    from composer_speedups.kernels.varlen_attention import Lengths

__all__ = ["MOST_SEQUENCES", "draw_words", "kept_by_torch", "packed_attention", "serves"]

MOST_SEQUENCES = 65535  # programs of a grid along its third axis
_DTYPES = (torch.float16, torch.bfloat16)
_WIDTHS = (32, 64)  # of heads: with 128 a thread has too few registers


def serves(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether `packed_attention` takes them, [tokens, heads, width]."""
    if torch.compiler.is_compiling() or q.dtype not in _DTYPES or q.shape[-1] not in _WIDTHS:
        return False
    if any((x.dtype, x.device, x.shape[1:]) != (q.dtype, q.device, q.shape[1:]) for x in (k, v)):
        return False
    if not all(plain(x) and not shape_only(x) and x.stride(-1) == 1 for x in (q, k, v)):
        return False
    return _available(q.device) and cuda_side("packed_attention", q) is not None


@cache
def _available(device: torch.device) -> bool:
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        return False
    return missing_kernel(device) is None


def packed_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    queries: Lengths,
    keys: Lengths,
    dropout_p: float = 0.0,
    scale: float | None = None,
    words: torch.Tensor | None = None,
) -> torch.Tensor:
    """As `varlen_attention`, for what `serves`. No second derivatives, and no gradients in batches of them.

    Args:
        words: of `draw_words`, to make the same mask again; None draws new ones.

    Raises:
        ValueError: `dropout_p` of 1, a scale that is not above 0, or more than 65,535 sequences.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    dropped = dropped_of(dropout_p)
    if dropped == STEPS:
        raise ValueError(f"dropout_p is a probability from 0 to below 1, got {dropout_p}")
    if not scale > 0:
        raise ValueError(f"scale must be above 0, got {scale}")
    if len(queries.host) > MOST_SEQUENCES:
        raise ValueError(f"at most {MOST_SEQUENCES:,} sequences fit in a launch, got {len(queries.host):,}")
    if not dropped:
        words = None
    elif words is None:
        words = draw_words(q, k)
    return _PackedAttention.apply(q, k, v, queries, keys, words, dropped, scale)


def draw_words(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """[2, heads, room] int32: of each query and of each key, from PyTorch's generator of their device.

    They stay there, so that nothing is waited for, and a CUDA graph draws new ones.
    """
    room = cuda_side("packed_attention", q).room_for(len(q), len(k))
    return torch.randint(-(1 << 31), 1 << 31, (2, q.shape[1], room), dtype=torch.int32, device=q.device)


class _PackedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, queries: Lengths, keys: Lengths, words, dropped: int, scale: float):
        out, sums = cuda_side("packed_attention", q).forward(q, k, v, queries, keys, words, dropped, scale)
        ctx.save_for_backward(q, k, v, out, sums, words)
        ctx.arguments = queries, keys, dropped, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, dout: torch.Tensor):
        if not plain(dout):
            raise NotImplementedError(
                "our attention kernel has no gradients in batches of them: use Unpadding(timed_attention=False)"
            )
        # As the kernels read them, also where somebody else has kept them.
        q, k, v, *others = ctx.saved_tensors
        *parts, dout = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v, dout))
        out, sums, words = (None if x is None else x.contiguous() for x in others)
        queries, keys, dropped, scale = ctx.arguments
        into = empty_beside(*parts) if len(q) == len(k) else tuple(map(torch.empty_like, parts))
        kernels = cuda_side("packed_attention", q)
        kernels.backward(dout, *parts, out, sums, queries, keys, words, dropped, scale, into)
        return *into, *[None] * 5


def kept_by_torch(words: torch.Tensor, queries: Lengths, keys: Lengths, dropout_p: float) -> torch.Tensor:
    """The mask's meaning: bool [sequences, heads, longest of queries, longest of keys], True where a score is kept.

    Odd numbers have inverses modulo 2^32: for any word of a query, the product is as uniform over the odd numbers as
    the word of the key, and the products of two keys with one query, or of two queries with one key, are independent.
    """

    def of(lengths: Lengths, end: int) -> torch.Tensor:
        token = lengths.cumulative[:-1, None] + torch.arange(lengths.longest, device=words.device)
        token = token.clamp(max=words.shape[-1] - 1)  # beyond the last sequence
        return words[end].T[token].transpose(1, 2).long() | 1  # [sequences, heads, longest]

    product = of(queries, 0)[..., None] * of(keys, 1)[..., None, :]  # modulo 2^64, of which 2^32 is a part
    return product & 0xFFFFFFFF >= dropped_of(dropout_p) * STEPS
