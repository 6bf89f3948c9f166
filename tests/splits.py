"""What splits a batch into microbatches: Composer, and functions as users write them."""

from __future__ import annotations

import torch
from composer.core.data_spec import _default_split_batch

SPLITS = {
    "composer": _default_split_batch,
    "tensors": lambda batch, n: _rows({name: x.split(n) for name, x in batch.items()}),
    "rows": lambda batch, n: _rows({name: [x[i : i + n] for i in range(0, len(x), n)] for name, x in batch.items()}),
    "lists": lambda batch, n: _rows({name: _stacked(list(x), n) for name, x in batch.items()}),
    "named": lambda batch, n: _rows(
        {name: x.split(n) for name, x in batch.items() if not name.startswith("real_token")}
    ),
}


def _rows(parts: dict[str, list[torch.Tensor]]) -> list[dict[str, torch.Tensor]]:
    return [dict(zip(parts, part, strict=True)) for part in zip(*parts.values(), strict=True)]


def _stacked(rows: list[torch.Tensor], n: int) -> list[torch.Tensor]:
    return [torch.stack(rows[i : i + n]) for i in range(0, len(rows), n)]
