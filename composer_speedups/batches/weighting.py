"""What a step's loss is a mean over, samples or tokens: as its labels tell, and as the Trainer weighs ranks."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from composer_speedups.calling_trainer import calling_trainer
from composer_speedups.ignored import IGNORED

__all__ = ["labelled", "of_tokens", "trainer_weighs_tokens", "weigh"]


def of_tokens(batch: object) -> bool:
    """Whether `batch` has one label a token, and not one a sample, which may be [rows, 1], or some a sample."""
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    if not isinstance(labels, torch.Tensor) or labels.dim() < 2 or labels.is_floating_point():
        return False
    tokens = [x for x in map(batch.get, ("input_ids", "attention_mask")) if isinstance(x, torch.Tensor)]
    return labels.shape[:2] == tokens[0].shape[:2] if tokens else labels.shape[1] > 1


def labelled(batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """How many labels of `batch` count, as a tensor where they are: nobody waits for the device."""
    return batch["labels"].ne(IGNORED).sum()


def weigh(loss: object, factor: float | torch.Tensor) -> None:
    """Multiply the gradients of `loss`, in whatever form a Composer model tells it, by `factor`. Its value stays."""
    losses = loss if isinstance(loss, tuple | list) else [loss]
    if isinstance(loss, Mapping):  # where there is a total, Composer's backward begins there, through all
        losses = [loss["total"]] if "total" in loss else loss.values()
    for one in losses:
        if isinstance(one, torch.Tensor) and one.requires_grad:
            one.register_hook(lambda gradient: (gradient * factor).to(gradient.dtype))


def trainer_weighs_tokens() -> bool:
    """Whether the Trainer that is calling us weighs by tokens: neither state nor events tell of it."""
    trainer = calling_trainer()
    return trainer is not None and trainer.accumulate_train_batch_on_tokens
