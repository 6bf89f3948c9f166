"""Collating without needless padding."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch

from composer_speedups.ignored import IGNORED

__all__ = ["TrimPadding"]

log = logging.getLogger("composer_speedups")

# What may be cut beside the attention mask. Another tensor as wide as it may mean anything: then nothing is cut.
_PER_TOKEN = {
    "attention_mask", "bbox", "input_ids", "inputs_embeds", "labels", "offset_mapping", "position_ids",
    "special_tokens_mask", "token_type_ids",
}  # fmt: skip


class TrimPadding:
    """A collator around another: cuts columns at the end in which all rows are padding.

    The width left is a multiple of `multiple_of`, if the batch was that wide. No token, and no label other than -100
    (of soft labels, [rows, columns, classes], other than 0), is cut. Batches without a two-dimensional
    `attention_mask` are passed on, and so are those with a tensor whose name does not say whether it is per token.
    """

    def __init__(self, collate: Callable[[list[Any]], Any], multiple_of: int = 8) -> None:
        self.collate, self.multiple_of = collate, multiple_of
        self._warned = False

    def __call__(self, samples: list[Any]) -> Any:
        batch = self.collate(samples)
        mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
        if not isinstance(mask, torch.Tensor) or mask.dim() != 2:
            return batch
        width = self._width(batch, mask)
        if width == mask.shape[1]:
            return batch
        wide = {
            name for name, value in batch.items()
            if isinstance(value, torch.Tensor) and value.dim() > 1 and value.shape[1] == mask.shape[1]
            and (len(value) == len(mask) or (len(value) == 1 and name in _PER_TOKEN))  # 1: the same for all rows
        }  # fmt: skip
        unknown = wide - _PER_TOKEN
        if "labels" in wide and batch["labels"].is_floating_point() and batch["labels"].dim() == 2:
            unknown |= {"labels"}  # a number each token, or several classes a sample, by chance as many as columns
        if unknown:
            if not self._warned:
                log.warning("padding is not trimmed: %s may be per token, or not", ", ".join(sorted(unknown)))
            self._warned = True
            return batch
        for name in wide:
            batch[name] = batch[name][:, :width].contiguous()
        return batch

    def _width(self, batch: Mapping[str, Any], mask: torch.Tensor) -> int:
        used = mask.ne(0).any(0)
        labels = batch.get("labels")
        if isinstance(labels, torch.Tensor) and labels.shape[:2] == mask.shape:
            if labels.dim() == 3:
                used = used | (labels.ne(0) & labels.ne(IGNORED)).any(-1).any(0)
            elif not labels.is_floating_point():
                used = used | labels.ne(IGNORED).any(0)
        places = used.nonzero()
        longest = int(places[-1]) + 1 if len(places) else 1
        return min(mask.shape[1], -(-longest // self.multiple_of) * self.multiple_of)
