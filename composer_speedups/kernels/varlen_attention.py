"""Attention over packed sequences: tokens [total, heads, width], each sequence sees only itself.

On CUDA in fp16 and bf16 it is flash attention with cumulative lengths: the package flash-attn where installed, else
the kernel that PyTorch carries for jagged tensors, `aten::_flash_attention_forward`, attention dropout included.
On the CPU each sequence goes by itself (`per_sequence.py`): its scores fit the cache, no padded score is ever computed,
and no mask is needed. For float32 on CUDA, which has no flash kernel, sequences are padded for
`scaled_dot_product_attention` and packed again. With a window, as of ModernBERT's local layers, flash attention and the
C kernels skip keys that no query of a block sees; the other ways compute all scores and hide those.

Numerics: that of attention over each sequence alone. On the CPU softmax and dropout are computed in float32 at
least and rounded once to the tensors' dtype. Dropout drops with a multiple of 1/65536 there, as `fast_dropout` does;
flash attention keeps with a multiple of 1/256 (0.1 drops 0.1016 of the probabilities) and scales by 1 / (1 - p).
"""

from __future__ import annotations

from functools import cache
from itertools import accumulate
from typing import NamedTuple

import torch

from composer_speedups.kernels.fused_attention import band
from composer_speedups.kernels.per_sequence import per_sequence
from composer_speedups.kernels.sdpa import padded_attention

__all__ = [
    "Lengths",
    "attention_kernel",
    "packed_rows",
    "padded_rows",
    "places_in_rows",
    "real_keys",
    "varlen_attention",
]

_ALIGNED = 8  # numbers: what the strides of a bias are multiples of


class Lengths(NamedTuple):
    """How many tokens each packed sequence has, where whoever asks can read it without waiting.

    Attributes:
        cumulative: [sequences + 1] int32 on the tokens' device: 0, and the end of each sequence.
        host: [sequences] int32 on the CPU.
        longest: the largest of `host`.
    """

    cumulative: torch.Tensor
    host: torch.Tensor
    longest: int

    @classmethod
    def of(cls, lengths: list[int], device: torch.device | str = "cpu") -> Lengths:
        """From a list of lengths, none below 0; the copy to a device is not waited for.

        >>> Lengths.of([2, 3]).cumulative
        tensor([0, 2, 5], dtype=torch.int32)
        """
        if min(lengths, default=0) < 0:
            raise ValueError(f"a length must be 0 or more, got {min(lengths)}")
        ends = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device="cpu")
        if torch.device(device).type == "cuda":
            ends = ends.pin_memory().to(device, non_blocking=True)
        return cls(ends.to(device), torch.tensor(lengths, dtype=torch.int32, device="cpu"), max(lengths, default=0))

    def for_bias(self) -> Lengths:
        """With `longest` filled up to a multiple of 8: `padded_rows` and `real_keys` give rows of that length then.

        PyTorch's memory-efficient attention makes, and keeps for backward, an aligned copy of any other bias.

        >>> Lengths.of([2, 3]).for_bias().longest
        8
        """
        return Lengths(self.cumulative, self.host, -(-self.longest // _ALIGNED) * _ALIGNED)


def varlen_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    queries: Lengths,
    keys: Lengths,
    dropout_p: float = 0.0,
    scale: float | None = None,
    window: int = -1,
) -> torch.Tensor:
    """softmax(q k^T scale) v within each sequence, with dropout on the probabilities.

    Args:
        q: [total of `queries`, heads, width].
        k: [total of `keys`, heads, width].
        v: [total of `keys`, heads, width].
        queries: how many tokens of `q` each sequence has.
        keys: how many tokens of `k` and `v` each sequence has.
        dropout_p: 0 outside of training.
        scale: of the scores; None is 1 / sqrt(width).
        window: how many keys to each side a query sees; -1 is all. It needs as many queries as keys.

    Returns:
        [total of `queries`, heads, width].

    >>> x, lengths = torch.ones(5, 1, 4), Lengths.of([2, 3])
    >>> bool(varlen_attention(x, x, x, lengths, lengths).allclose(x))
    True
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if window >= 0 and queries.longest != keys.longest:
        raise ValueError(f"a window needs as many queries as keys, got up to {queries.longest} and {keys.longest}")
    if not torch.compiler.is_compiling() and window >= keys.longest - 1:
        window = -1  # the same, and cheaper; compiled there would be a graph for each case
    kernel = attention_kernel(q)
    if kernel == "flash-attn":
        from flash_attn import flash_attn_varlen_func

        ends, longest = (queries.cumulative, keys.cumulative), (queries.longest, keys.longest)
        sides, same = (window, window), torch.are_deterministic_algorithms_enabled()
        return flash_attn_varlen_func(q, k, v, *ends, *longest, dropout_p, scale, window_size=sides, deterministic=same)
    if kernel == "aten flash":
        ends, longest = (queries.cumulative, keys.cumulative), (queries.longest, keys.longest)
        sides = {} if window < 0 else {"window_size_left": window, "window_size_right": window}
        arguments = (*ends, *longest, dropout_p, False, False)
        return torch.ops.aten._flash_attention_forward(q, k, v, *arguments, scale=scale, **sides)[0]
    if kernel == "padded sdpa":
        return _padded(q, k, v, queries, keys, dropout_p, scale, window)
    return per_sequence(q, k, v, queries.host, keys.host, dropout_p, scale, window)


def attention_kernel(q: torch.Tensor) -> str:
    """Which kernel serves `q`: "flash-attn", "aten flash", "padded sdpa" or "per sequence"."""
    if q.device.type == "cpu":
        return "per sequence"
    half = q.dtype in (torch.float16, torch.bfloat16)
    if q.device.type != "cuda" or not half or q.shape[-1] % 8 or q.shape[-1] > 256:
        return "padded sdpa"
    # Constants, where the width is a symbol, too: Dynamo takes nothing else there.
    return _half_kernel(q.device, True) if q.shape[-1] > 192 else _half_kernel(q.device, False)


# Dynamo would look into it, and break the graph of every layer at an import that fails: what it returns is a constant
# to it. The cache is one function further in, as Dynamo warns of `functools.cache` where it sees it.
@torch.compiler.assume_constant_result
def _half_kernel(device: torch.device, wide: bool) -> str:
    return _look(device, wide)


@cache
def _look(device: torch.device, wide: bool) -> str:
    """Which kernel serves half precision on a CUDA device; `wide`: heads of more than 192."""
    capability = torch.cuda.get_device_capability(device)
    flash = torch.version.hip is None and torch.backends.cuda.is_flash_attention_available()  # not in all builds
    if not flash or capability < (8, 0):
        return "padded sdpa"
    if wide and capability[0] in (8, 12) and capability != (8, 0):
        # Consumers' cards have too little shared memory for backward with dropout, which then writes nothing.
        return "padded sdpa"
    try:
        import flash_attn
    except ImportError:
        return "aten flash"
    return "flash-attn" if hasattr(flash_attn, "flash_attn_varlen_func") else "aten flash"


def places_in_rows(lengths: Lengths, total: int) -> torch.Tensor:
    """[total] int64: where packed tokens are among rows padded to the longest, one row after the other.

    >>> places_in_rows(Lengths.of([1, 2]), 3).tolist()
    [0, 2, 3]
    """
    token = torch.arange(total, device=lengths.cumulative.device)
    row = torch.bucketize(token, lengths.cumulative[1:], right=True)
    return row * lengths.longest + token - lengths.cumulative[row]


def padded_rows(x: torch.Tensor, lengths: Lengths, at: torch.Tensor) -> torch.Tensor:
    """[total, heads, width] -> [sequences, heads, longest, width], zeros for padding; `at` is of `places_in_rows`.

    >>> lengths = Lengths.of([1, 2])
    >>> padded_rows(torch.ones(3, 1, 1), lengths, places_in_rows(lengths, 3)).flatten().tolist()
    [1.0, 0.0, 1.0, 1.0]
    """
    rows = len(lengths.host)
    padded = x.new_zeros(rows * lengths.longest, *x.shape[1:]).index_copy_(0, at, x)  # in place: else it copies zeros
    return padded.unflatten(0, (rows, lengths.longest)).transpose(1, 2)


def packed_rows(x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """[sequences, heads, longest, width] -> [total, heads, width], what `padded_rows` made of it."""
    return x.transpose(1, 2).flatten(0, 1).index_select(0, at)


def real_keys(keys: Lengths) -> torch.Tensor:
    """[sequences, 1, 1, longest] bool: which keys of `padded_rows` are none of the padding.

    A sequence without tokens has no real key; letting it see its zeros keeps NaN out of the gradients.

    >>> real_keys(Lengths.of([1, 0, 2])).int().flatten(1).tolist()
    [[1, 0], [1, 1], [1, 1]]
    """
    sizes = keys.cumulative.diff()[:, None]
    return ((torch.arange(keys.longest, device=sizes.device) < sizes) | (sizes == 0))[:, None, None]


def _padded(q, k, v, queries: Lengths, keys: Lengths, dropout_p: float, scale: float, window: int) -> torch.Tensor:
    """By `scaled_dot_product_attention` over padded sequences."""
    at_q, at_k = places_in_rows(queries, len(q)), places_in_rows(keys, len(k))
    real = real_keys(keys)
    if window >= 0:  # each sees itself: a padded query without any key would be NaN
        near = band(keys.longest, window, q.device)
        real = (real & near) | torch.eye(keys.longest, dtype=torch.bool, device=q.device)
    pq, pk, pv = padded_rows(q, queries, at_q), padded_rows(k, keys, at_k), padded_rows(v, keys, at_k)
    return packed_rows(padded_attention(pq, pk, pv, real, dropout_p, scale), at_q)
