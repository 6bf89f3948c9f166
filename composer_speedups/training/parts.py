"""What a training is made of: a recipe's model, optimizer, schedule and data, as Composer's Trainer takes them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from composer.core import Callback, DataSpec
from composer.models import HuggingFaceModel, huggingface
from composer.optim import (
    ComposerScheduler,
    ConstantScheduler,
    ConstantWithWarmupScheduler,
    CosineAnnealingScheduler,
    CosineAnnealingWithWarmupScheduler,
    DecoupledAdamW,
    LinearScheduler,
    LinearWithWarmupScheduler,
)
from composer.utils import dist
from torch.utils.data import DataLoader, DistributedSampler

from composer_speedups.batches.weighting import labelled
from composer_speedups.errors import RecipeError, SpeedUpUnavailable, TaskError
from composer_speedups.recipes import Recipe
from composer_speedups.recipes.schema import count_and_unit
from composer_speedups.tasks import Task
from composer_speedups.tasks.models import build_model
from composer_speedups.tasks.objectives import OBJECTIVES
from composer_speedups.training.metrics import evaluation_metrics

__all__ = [
    "TellsEpoch",
    "Warmup",
    "available_algorithms",
    "build_composer_model",
    "build_loader",
    "build_optimizer",
    "build_scheduler",
    "counting_labels",
    "weighs_tokens",
]

# name -> with warm-up, without
_SCHEDULERS = {
    "cosine": (CosineAnnealingWithWarmupScheduler, CosineAnnealingScheduler),
    "linear": (LinearWithWarmupScheduler, LinearScheduler),
    "constant": (ConstantWithWarmupScheduler, ConstantScheduler),
}


def available_algorithms(recipe: Recipe) -> list[Any]:
    """The recipe's speed-ups, if this machine has what they need.

    Raises:
        SpeedUpUnavailable: with how to leave out all that cannot be used here.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    algorithms = recipe.algorithms()
    reasons = {one.key(): why for one in algorithms if (why := one.unavailable(device)) is not None}
    if reasons:
        key, why = next(iter(reasons.items()))
        rest = " ".join(f"speedups.{one}=null" for one in reasons)
        raise SpeedUpUnavailable(f"{key} cannot be used here: {why}; all but what this machine lacks: {rest}")
    return algorithms


def build_composer_model(recipe: Recipe, task: Task, seed: int) -> HuggingFaceModel:
    """The recipe's model as Composer takes it, before any speed-up."""
    model = build_model(recipe.model, task, seed=seed)
    with _no_search_for_causal_models():
        return HuggingFaceModel(
            model,
            tokenizer=task.tokenizer,
            use_logits=True,
            metrics=[],
            eval_metrics=evaluation_metrics(task, model.config.num_labels),
        )


def build_optimizer(recipe: Recipe, model: torch.nn.Module) -> torch.optim.Optimizer:
    """The recipe's optimizer for `model`, before any speed-up."""
    spec, rate = recipe.optimizer, recipe.learning_rate
    shared = {"lr": rate, "betas": spec.betas, "eps": spec.eps}
    if spec.name == "decoupled_adamw":
        return DecoupledAdamW(model.parameters(), weight_decay=spec.weight_decay * rate, **shared)
    # The plain for-loop, as the tables' baseline has it. On CUDA torch would choose foreach by itself.
    return torch.optim.AdamW(model.parameters(), weight_decay=spec.weight_decay, foreach=False, fused=False, **shared)


def build_scheduler(recipe: Recipe) -> ComposerScheduler:
    with_warmup, without = _SCHEDULERS[recipe.schedule.name]
    warmup = recipe.schedule.warmup
    share_or_count = float(warmup.removesuffix("dur")) if warmup.endswith("dur") else count_and_unit(warmup)[0]
    return with_warmup(t_warmup=warmup) if share_or_count else without()


def build_loader(recipe: Recipe, task: Task, seed: int, *, train: bool) -> DataLoader | DataSpec:
    world = dist.get_world_size()
    size = recipe.batch_size if train else (recipe.eval_batch_size or recipe.batch_size)
    dataset = task.train if train else task.evaluation
    if why := recipe.unshared_by(world):
        raise TaskError(why)
    if train and len(dataset) < size:
        raise TaskError(f"batch_size {size} exceeds the {len(dataset)} training samples: lower it")
    sampler = DistributedSampler(
        dataset,
        num_replicas=world,
        rank=dist.get_global_rank(),
        shuffle=train,
        seed=seed,
        drop_last=train,
    )
    return DataLoader(
        dataset,
        batch_size=size // world,
        sampler=sampler,
        collate_fn=task.collate_train if train else task.collate_eval,
        drop_last=train,
        num_workers=recipe.workers,
        persistent_workers=False,
        pin_memory=torch.cuda.is_available(),
    )


def weighs_tokens(recipe: Recipe) -> bool:
    """Whether parts of a batch, microbatches or ranks', are weighed by their labels, as the loss is a mean over those.

    Composer weighs them by samples, so that tokens of short texts would count for more. `token_budget_batches` has
    weights of its own; and a batch that is computed at once needs none.
    """
    in_parts = recipe.accumulates or dist.get_world_size() > 1
    return in_parts and OBJECTIVES[recipe.task.objective].of_tokens and "token_budget_batches" not in recipe.speedups


def counting_labels(loader: DataLoader) -> DataSpec:
    """`loader`, which tells Composer how many labels of a batch count."""

    def count(batch: dict[str, torch.Tensor]) -> dict[str, int]:
        return {"total": batch["input_ids"].numel(), "loss_generating": int(labelled(batch))}

    return DataSpec(loader, get_num_tokens_in_batch=count)


class Warmup(Callback):
    """Refuses a warm-up that outlasts the training: how many batches an epoch has is known only now."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe

    def fit_start(self, state: Any, logger: Any) -> None:
        warmup, duration = self._recipe.schedule.warmup, self._recipe.duration
        if warmup.endswith("dur"):  # a share of the duration, below 1
            return
        (count, unit), (total, whole) = count_and_unit(warmup), count_and_unit(duration)
        epoch = int(state.dataloader_len)
        if {unit, whole} == {"ba", "ep"} and (
            count * (epoch if unit == "ep" else 1) >= total * (epoch if whole == "ep" else 1)
        ):
            steps = f"an epoch is {epoch:,} batches of {self._recipe.batch_size}"
            raise RecipeError(f"schedule.warmup {warmup} leaves nothing of duration {duration} ({steps}): shorten it")


class TellsEpoch(Callback):
    """Tells the task which epoch it is, so that MLM masks anew, and the same on every machine."""

    def __init__(self, task: Task) -> None:
        self._task = task

    def epoch_start(self, state: Any, logger: Any) -> None:
        self._task.set_epoch(int(state.timestamp.epoch))

    def after_load(self, state: Any, logger: Any) -> None:
        self._task.set_epoch(int(state.timestamp.epoch))


@contextlib.contextmanager
def _no_search_for_causal_models() -> Iterator[None]:
    """Spare each run some seconds: HuggingFaceModel imports every model family there is, to see if ours is causal.

    None is: the tasks here are of encoders.
    """
    search = huggingface._is_registered_causal_lm
    huggingface._is_registered_causal_lm = lambda model: False
    try:
        yield
    finally:
        huggingface._is_registered_causal_lm = search
