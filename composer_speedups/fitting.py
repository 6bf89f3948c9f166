"""What to switch on where a recipe does not fit into memory: the cheapest that makes it fit, by prediction."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from composer_speedups import registry
from composer_speedups.measurement.memory import Memory
from composer_speedups.recipes import Recipe
from composer_speedups.speedup import conflict, contradicted

__all__ = ["Remedy", "what_fits"]

# From what costs nothing to what changes the update; together in this order. Of the first two one is for several
# ranks, and one for a process alone.
_LADDER = (
    ("gradient_as_bucket_view", "gradient_release"),
    ("gradient_checkpointing",),
    ("gradient_as_bucket_view", "gradient_release", "gradient_checkpointing"),
    ("gradient_as_bucket_view", "gradient_release", "gradient_checkpointing", "adamw_8bit"),
)
_PRICES = {
    "gradient_as_bucket_view": "the same gradients, once instead of twice",
    "gradient_release": "the same updates, gradients gone at once",
    "gradient_checkpointing": "the same gradients, a third more compute",
    "adamw_8bit": "moments in 8 bits",
}


@dataclass(frozen=True)
class Remedy:
    """Speed-ups to add to a recipe, and what then is held at once.

    Attributes:
        peak: bytes.
        fits: whether that is there.
    """

    speedups: tuple[str, ...]
    peak: int
    fits: bool

    @property
    def prices(self) -> tuple[str, ...]:
        """What each of `speedups` costs, in words."""
        return tuple(_PRICES[key] for key in self.speedups)


def what_fits(
    recipe: Recipe, peak: int, free: int, predicted: Callable[[Recipe], Memory], device: torch.device
) -> Remedy | None:
    """The first of some combinations that fits into `free` bytes, or else the leanest; None if none takes any away.

    Args:
        recipe: which does not fit as it is.
        peak: bytes that it would take.
        free: bytes that there are.
        predicted: the memory of a recipe like it.
        device: where it would train.
    """
    found: list[Remedy] = []
    for keys in _combinations(recipe, device):
        more = recipe.model_copy(update={"speedups": recipe.speedups | {key: {} for key in keys}})
        remedy = Remedy(keys, taken := predicted(more).peak, taken <= free)
        if remedy.fits:
            return remedy
        found.append(remedy)
    leanest = min(found, key=lambda remedy: remedy.peak, default=None)
    return leanest if leanest is not None and leanest.peak < peak else None


def _combinations(recipe: Recipe, device: torch.device) -> Iterator[tuple[str, ...]]:
    """Those of the ladder, without what the recipe has or cannot have, each once."""
    usable = {key for key in _PRICES if _can_have(recipe, key, device)}
    tried: set[tuple[str, ...]] = set()
    for keys in _LADDER:
        left = tuple(key for key in keys if key in usable)
        if left and left not in tried:
            tried.add(left)
            yield left


def _can_have(recipe: Recipe, key: str, device: torch.device) -> bool:
    if key in recipe.speedups:
        return False
    one = registry.build(key)
    together = [*recipe.algorithms(), one]
    refused = one.unavailable(device) or (one.at_once and recipe.accumulates)
    return not refused and conflict(together) is None and contradicted(together) is None
