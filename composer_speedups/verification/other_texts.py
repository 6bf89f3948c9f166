"""Whether the batches of a training have what their samples have: what is compared with float64 is computed of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader

from composer_speedups.batches.weighting import of_tokens
from composer_speedups.everyone import everyones
from composer_speedups.verification.trained_steps import Watch

__all__ = ["other_texts"]


def other_texts(loader: DataLoader, watch: Watch) -> list[str]:
    """What is to be said of batches with other contents than their samples have, if that can be seen.

    Rows may have been regrouped, and padding trimmed. What the collator draws by chance, as masked tokens, is not
    compared. For all ranks to call.
    """
    texts: Any = loader.dataset
    samples = [[texts.dataset[i] for i in choice] for choice in (texts.first, texts.second)]
    batches = [loader.collate_fn(chosen) for chosen in samples]
    again = loader.collate_fn(samples[0][::-1])
    if not all(everyones(_readable(batches[0]) and all(_readable(step.batch) for step in watch.kept))):
        return []
    steady = [name for name in _names(batches[0]) if _rows(batches[0], [name]) == _rows(again, [name])]
    found = everyones(steady)  # the same on all ranks
    steady = [name for name in steady if all(name in others for others in found)]
    wrong = []
    for step in watch.kept:
        missing = [name for name in steady if name not in step.batch]
        if any(everyones(bool(missing))):
            wrong.append(f"step {step.number}: its batch has no {', '.join(missing or steady)}, which its samples have")
            continue
        if _gathered(step.batch, steady) not in [_rows(batch, steady) for batch in batches]:
            named = [n for n in steady if _gathered(step.batch, [n]) not in [_rows(b, [n]) for b in batches]]
            what = ", ".join(named) or "rows"  # of one thing and another
            wrong.append(f"step {step.number}: its batch has other {what} than its samples")
    return wrong[:1]


def _readable(batch: Any) -> bool:
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    return isinstance(mask, torch.Tensor) and mask.dim() == 2


def _names(batch: Mapping[str, Any]) -> list[str]:
    """What a batch has for each row but the mask, which tells what of a row is read."""
    rows = len(batch["attention_mask"])
    return [
        name
        for name, value in batch.items()
        if name != "attention_mask" and isinstance(value, torch.Tensor) and value.dim() and len(value) == rows
    ]


def _rows(batch: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    """Of each row how many tokens it has, and what it has by these `names`, at real tokens; in any order."""
    masks = batch["attention_mask"].bool()
    rows: list[list[Any]] = [[int(mask.sum())] for mask in masks]
    for name in names:
        value = batch[name]
        by_token = value.shape[:2] == masks.shape and (name != "labels" or of_tokens(batch))
        for row, own, mask in zip(rows, value, masks, strict=True):
            row.append((own[mask] if by_token else own).tolist())
    return sorted(map(repr, rows))


def _gathered(batch: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    """The rows of all ranks' parts."""
    return sorted(row for part in everyones(_rows(batch, names)) for row in part)
