"""Attention over packed sequences: tokens [total, heads, width], each sequence sees only itself.

On CUDA in fp16 and bf16 it is flash attention with cumulative lengths: the package flash-attn where installed, else
the kernel that PyTorch carries for jagged tensors, `aten::_flash_attention_forward`, attention dropout included.
On the CPU each sequence goes by itself (`per_sequence.py`): its scores fit the cache, no padded score is ever computed,
and no mask is needed. For float32 on CUDA, which has no flash kernel, sequences are padded for
`scaled_dot_product_attention` and packed again. With a window, as of ModernBERT's local layers, flash attention and the
C kernels skip keys that no query of a block sees; the other ways compute all scores and hide those.

Numerics: that of attention over each sequence alone. On the CPU softmax and dropout are computed in float32 at
least and rounded once to the tensors' dtype. Dropout drops with a multiple of 1/65536, as `fast_dropout` does.
"""

from __future__ import annotations

from functools import cache
from itertools import accumulate
from typing import NamedTuple

import torch
import torch.nn.functional as F

from composer_speedups.kernels.fused_attention import band
from composer_speedups.kernels.per_sequence import per_sequence

__all__ = ["Lengths", "attention_kernel", "padded_rows", "real_keys", "varlen_attention"]

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
        return flash_attn_varlen_func(q, k, v, *ends, *longest, dropout_p, scale, window_size=(window, window))
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
    return _half_kernel(q.device)


# Dynamo would look into it, and break the graph of every layer at an import that fails: what it returns is a constant
# to it. The cache is one function further in, as Dynamo warns of `functools.cache` where it sees it.
@torch.compiler.assume_constant_result
def _half_kernel(device: torch.device) -> str:
    return _look(device)


@cache
def _look(device: torch.device) -> str:
    """Which kernel serves half precision on a CUDA device."""
    if torch.version.hip is not None or torch.cuda.get_device_capability(device) < (8, 0):
        return "padded sdpa"
    try:
        import flash_attn
    except ImportError:
        return "aten flash"
    return "flash-attn" if hasattr(flash_attn, "flash_attn_varlen_func") else "aten flash"


def padded_rows(x: torch.Tensor, lengths: Lengths) -> tuple[torch.Tensor, torch.Tensor]:
    """[total, heads, width] -> [sequences, heads, longest, width], zeros for padding, and where tokens are among rows.

    >>> padded, at = padded_rows(torch.ones(3, 1, 1), Lengths.of([1, 2]))
    >>> padded.flatten().tolist(), at.tolist()
    ([1.0, 0.0, 1.0, 1.0], [0, 2, 3])
    """
    rows, token = len(lengths.host), torch.arange(len(x), device=x.device)
    row = torch.bucketize(token, lengths.cumulative[1:], right=True)
    at = row * lengths.longest + token - lengths.cumulative[row]
    padded = x.new_zeros(rows * lengths.longest, *x.shape[1:]).index_copy(0, at, x)
    return padded.unflatten(0, (rows, lengths.longest)).transpose(1, 2), at


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
    (pq, at), (pk, _), (pv, _) = padded_rows(q, queries), padded_rows(k, keys), padded_rows(v, keys)
    real = real_keys(keys)
    if window >= 0:  # each sees itself: a padded query without any key would be NaN
        near = band(keys.longest, window, q.device)
        real = (real & near) | torch.eye(keys.longest, dtype=torch.bool, device=q.device)
    out = F.scaled_dot_product_attention(pq, pk, pv, real, dropout_p, scale=scale)
    return out.transpose(1, 2).flatten(0, 1).index_select(0, at)
