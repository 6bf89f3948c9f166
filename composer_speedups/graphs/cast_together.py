"""The weights of all linear layers in lower precision, by one kernel each way: for a forward pass under autocast.

Autocast casts each weight when it is used, and its gradient when that is there: of BERT-base 150 kernels, most so small
that they take ten times as long as their bytes. The same numbers: weights are rounded once, gradients widened.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from composer_speedups.surgery import known_code

__all__ = ["cast_together", "linear_weights"]


def linear_weights(modules: Sequence[torch.nn.Module]) -> list[torch.nn.Parameter]:
    """The float32 weights of linear layers among `modules`, without those that other modules use, too.

    And without those inside of somebody's own module, which may use them in float32 though autocast is on: by turning
    it off, as a router does, or by taking norms of them, as an adapter.

    >>> tied = torch.nn.Linear(2, 3)
    >>> table = torch.nn.Embedding(3, 2)
    >>> table.weight = tied.weight
    >>> len(linear_weights([tied, table])), len(linear_weights([tied]))
    (0, 1)
    """
    inside = {id(part) for m in modules if not known_code(type(m)) for part in m.modules()}
    # Of subclasses nobody knows what they do with it.
    linear = [m for m in modules if type(m) is torch.nn.Linear and id(m) not in inside]
    known = set(map(id, linear))
    others = {id(p) for m in modules if id(m) not in known for p in m._parameters.values()}
    weights = {id(m.weight): m.weight for m in linear}
    return [w for number, w in weights.items() if number not in others and w.dtype == torch.float32]


def cast_together(
    weights: Sequence[torch.Tensor], dtype: torch.dtype, places: Sequence[torch.Tensor | None] = ()
) -> tuple[torch.Tensor, ...]:
    """`weights`, cast; gradients flow back to them.

    Args:
        weights: of any dtype.
        dtype: of what is returned.
        places: for each weight, where its gradient is to be written, in float32; None, or none at all, where that has
            memory of its own.

    >>> [x.dtype for x in cast_together([torch.ones(2), torch.ones(3)], torch.bfloat16)]
    [torch.bfloat16, torch.bfloat16]
    """
    return _Cast.apply(dtype, places or [None] * len(weights), *weights)


class _Cast(torch.autograd.Function):
    @staticmethod
    def forward(ctx, dtype: torch.dtype, places: Sequence[torch.Tensor | None], *weights: torch.Tensor):
        cast = [torch.empty_like(w, dtype=dtype) for w in weights]
        torch._foreach_copy_(cast, list(weights))
        ctx.places = places
        ctx.set_materialize_grads(False)  # of a layer that was not called there is none
        ctx.mark_non_differentiable(*(c for c, w in zip(cast, weights, strict=True) if not w.requires_grad))
        return tuple(cast)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *gradients: torch.Tensor):
        there = [(g, place) for g, place in zip(gradients, ctx.places, strict=True) if g is not None]
        # The place itself: another tensor of its memory may still be held when its users are counted (`recording.py`).
        widened = [torch.empty_like(g, dtype=torch.float32) if place is None else place for g, place in there]
        if there:
            torch._foreach_copy_(widened, [g for g, _ in there])
        found = iter(widened)
        return None, None, *(None if g is None else next(found) for g in gradients)
