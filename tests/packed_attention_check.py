"""Attention over packed sequences against float64, on whichever device the tensors are."""

from __future__ import annotations

from collections.abc import Callable

import torch

from composer_speedups.kernels import packed_attention as module
from composer_speedups.kernels.varlen_attention import Lengths

__all__ = ["check", "far_apart", "tensors"]


def tensors(
    lengths: Lengths, heads: int, width: int, dtype: torch.dtype, number: int = 3, device: str = "cpu"
) -> list[torch.Tensor]:
    """Parts of one tensor, as of stacked weights."""
    joint = torch.randn(int(lengths.host.sum()), number * heads * width).to(device, dtype)
    return [x.unflatten(-1, (heads, width)).requires_grad_() for x in joint.split(heads * width, -1)]


def far_apart(lengths: Lengths, device: str = "cpu") -> list[torch.Tensor]:
    """Queries and keys whose scores are all so low that a score of 0 beside them, as padding has, would be infinite."""
    q, k, v = (x.detach() for x in tensors(lengths, 1, 32, torch.float16, device=device))
    q, k = q.clone(), k.clone()
    q[..., 0], k[..., 0] = -600, 1
    return [x.requires_grad_() for x in (q, k, v)]


def _exact(q, k, v, queries: Lengths, keys: Lengths, keep, p: float, scale: float) -> torch.Tensor:
    """In float64, each sequence by itself."""
    found, at_q, at_k = [], 0, 0
    for i, (n, m) in enumerate(zip(queries.host.tolist(), keys.host.tolist(), strict=True)):
        qs, ks, vs = (x[at : at + n] for x, at, n in ((q, at_q, n), (k, at_k, m), (v, at_k, m)))
        probabilities = (torch.einsum("qhd,khd->hqk", qs, ks) * scale).softmax(-1)
        if keep is not None:
            probabilities = probabilities * keep[i, :, :n, :m] / (1 - p)
        found.append(torch.einsum("hqk,khd->qhd", probabilities, vs))
        at_q, at_k = at_q + n, at_k + m
    return torch.cat(found) if found else q + k + v


def check(
    attend: Callable[..., torch.Tensor],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    queries: Lengths,
    keys: Lengths | None = None,
    p: float = 0.0,
    scale: float | None = None,
) -> None:
    """Output and gradients against float64 with the same mask: to some roundings of the dtype."""
    keys = queries if keys is None else keys
    arguments = (queries, keys, p) if scale is None else (queries, keys, p, scale)
    torch.manual_seed(5)
    out = attend(q, k, v, *arguments)
    g = torch.randn(out.shape).to(q)
    found = torch.autograd.grad(out, [q, k, v], g)
    keep = None
    if p:
        torch.manual_seed(5)
        here = [Lengths.of(lengths.host.tolist()) for lengths in (queries, keys)]
        keep = module.kept_by_torch(module.draw_words(q, k).cpu(), *here, p).to(q.device)
        p = round(p * 65536) / 65536
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    wanted = _exact(*wide, queries, keys, keep, p, q.shape[-1] ** -0.5 if scale is None else scale)
    references = torch.autograd.grad(wanted, wide, g.double())
    allowed = 6 * torch.finfo(q.dtype).eps
    for name, a, b in zip(("out", "dq", "dk", "dv"), (out, *found), (wanted, *references), strict=True):
        assert a.dtype == q.dtype and a.shape == b.shape, name
        error = (a.double() - b).abs().max() / b.abs().max().clamp(min=0.5) if b.numel() else torch.tensor(0.0)
        assert error <= allowed, f"{name}: {error:.2e}, allowed {allowed:.2e}"  # NaN fails, too
