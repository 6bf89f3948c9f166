"""What is measured: the same work done by this package, by its peers, and by a bare loop.

Each contender trains one model from the same weights on the same samples in batches of the same size, and returns the
seconds of every step (from the end of one step to the end of the next) and the losses. All run in fresh processes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from composer_speedups import registry
from composer_speedups.compilation import compile_statistics, use_cache
from composer_speedups.recipes import Recipe
from composer_speedups.speedup import algorithm_passes
from composer_speedups.tasks import build_model, build_task

__all__ = ["CONTENDERS", "measure"]

Result = dict[str, Any]


def measure(payload: dict[str, Any], report: Callable[[Any], None]) -> Result:
    """Run `payload["contender"]` for `payload["steps"]` steps of `payload["recipe"]`; called in a fresh process."""
    recipe = Recipe.model_validate(payload["recipe"])
    torch.manual_seed(payload["seed"])
    return CONTENDERS[payload["contender"]](recipe, payload["steps"], payload["seed"], **payload["arguments"])


class _Clock:
    """Seconds of each step."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._last: float | None = None

    def start(self) -> None:
        self._last = _now()

    def tick(self) -> None:
        now = _now()
        if self._last is not None:
            self.seconds.append(now - self._last)
        self._last = now


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def _make(recipe: Recipe, seed: int) -> tuple[Any, torch.nn.Module]:
    task = build_task(recipe.task, recipe.model, seed=seed)
    return task, build_model(recipe.model, task, seed=seed)


def _ours(recipe: Recipe, steps: int, seed: int) -> Result:
    """This package, as `composer-speedups train` runs it."""
    from composer_speedups.training import run

    short = recipe.model_copy(update={"duration": f"{steps}ba", "evaluate": False})
    result = run(short, seed=seed)
    return {
        "seconds": result.step_seconds,
        "losses": result.losses,
        "compile_seconds": result.compile_seconds,
        "peak_memory_bytes": result.peak_memory_bytes,
        "evidence": result.evidence,
    }


def _huggingface(recipe: Recipe, steps: int, seed: int, **best: Any) -> Result:
    """The Hugging Face Trainer, with the arguments in `best`."""
    import tempfile

    from transformers import Trainer, TrainerCallback, TrainingArguments

    task, model = _make(recipe, seed)
    clock, losses = _Clock(), []

    class Watch(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            clock.start()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            clock.tick()

    grouped = best.get("group_by_length") or best.get("train_sampling_strategy") == "group_by_length"
    collate = task.collate_train
    if grouped:
        collate = type(collate)(pad_id=collate.pad_id, length=None, multiple_of=8)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=recipe.batch_size,
            max_steps=steps,
            learning_rate=recipe.learning_rate,
            weight_decay=recipe.optimizer.weight_decay,
            lr_scheduler_type="cosine",
            warmup_steps=max(1, steps // 10),
            max_grad_norm=0.0,  # none of the others clips
            logging_steps=steps,
            save_strategy="no",
            report_to=[],
            remove_unused_columns=False,
            disable_tqdm=True,
            use_cpu=not torch.cuda.is_available(),
            dataloader_pin_memory=False,
            seed=seed,
            **best,
        )
        dataset = _Columns(task.train) if grouped else task.train
        trainer = Trainer(model, arguments, train_dataset=dataset, data_collator=collate, callbacks=[Watch()])
        trainer.train()
        losses.extend(entry["train_loss"] for entry in trainer.state.log_history if "train_loss" in entry)
    return {"seconds": clock.seconds, "losses": losses}


class _Columns(torch.utils.data.Dataset):
    """A data set that answers `dataset[0]["input_ids"]` as the Trainer's sampler by length wants it."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]


def _huggingface_best(recipe: Recipe, steps: int, seed: int, torch_compile: bool = False) -> Result:
    """bf16, fused AdamW, dynamic padding with lengths grouped, SDPA; compiled if asked for."""
    import dataclasses

    from transformers import TrainingArguments

    fields = {field.name for field in dataclasses.fields(TrainingArguments)}
    # transformers 5 renamed the flag.
    group = {"group_by_length": True} if "group_by_length" in fields else {"train_sampling_strategy": "group_by_length"}
    best = {"bf16": True, "optim": "adamw_torch_fused", "torch_compile": torch_compile, **group}
    return _huggingface(recipe, steps, seed, **best)


def _composer(recipe: Recipe, steps: int, seed: int, algorithms: tuple[Any, ...] = (), **settings: Any) -> Result:
    """Stock Composer with its own optimizer."""
    from composer import Callback, Trainer
    from composer.models import HuggingFaceModel
    from composer.optim import CosineAnnealingWithWarmupScheduler, DecoupledAdamW
    from torch.utils.data import DataLoader, DistributedSampler

    task, model = _make(recipe, seed)
    clock, losses = _Clock(), []

    class Watch(Callback):
        def fit_start(self, state: Any, logger: Any) -> None:
            clock.start()

        def batch_end(self, state: Any, logger: Any) -> None:
            clock.tick()
            losses.append(state.total_loss_dict["loss/train/total"])

    composer_model = HuggingFaceModel(model, tokenizer=task.tokenizer, metrics=[])
    trainer = Trainer(
        model=composer_model,
        train_dataloader=DataLoader(
            task.train,
            recipe.batch_size,
            sampler=DistributedSampler(task.train, 1, 0, seed=seed, drop_last=True),
            collate_fn=task.collate_train,
        ),
        optimizers=DecoupledAdamW(
            model.parameters(),
            lr=recipe.learning_rate,
            weight_decay=recipe.optimizer.weight_decay * recipe.learning_rate,
        ),
        schedulers=CosineAnnealingWithWarmupScheduler(t_warmup="0.1dur"),
        max_duration=f"{steps}ba",
        algorithms=list(algorithms),
        callbacks=[Watch()],
        progress_bar=False,
        log_to_console=False,
        loggers=[],
        seed=seed,
        **settings,
    )
    trainer.fit()
    trainer.close()
    return {"seconds": clock.seconds, "losses": losses}


def _bare(recipe: Recipe, steps: int, seed: int, compile_cache: str | None = None) -> Result:
    """A loop of ten lines with the kernels of the recipe's speed-ups: what remains is what the training loop costs.

    With `compile_cache` the whole model is compiled, as PyTorch does it by itself, with the cache in that folder.
    """
    from composer.core import Event
    from torch.utils.data import DataLoader, DistributedSampler

    task, model = _make(recipe, seed)
    model.train()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=recipe.learning_rate, weight_decay=recipe.optimizer.weight_decay, foreach=False
    )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model.to(device)
    for algorithm in algorithm_passes(recipe.algorithms(), Event.INIT):
        key, kwargs = algorithm.key(), dict(recipe.speedups[algorithm.key()])
        apply = registry.function(key)
        if "adamw" in key:
            apply(optimizer, **({"model": model} if key == "adamw_8bit" else {}), **kwargs)
        elif key in ("matmul_precision", "reuse_host_memory"):
            apply(**kwargs)
        else:
            apply(model, **kwargs)
    if compile_cache is not None:
        use_cache(compile_cache)
        model.compile()
    warmup = max(1, steps // 10)

    def factor(step: int) -> float:  # linear warm-up, then cosine, as the others have it
        if step < warmup:
            return step / warmup
        return 0.5 * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup)))

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    sampler = DistributedSampler(task.train, 1, 0, seed=seed, drop_last=True)
    loader = DataLoader(task.train, recipe.batch_size, sampler=sampler, collate_fn=task.collate_train)
    clock, losses = _Clock(), []
    clock.start()
    for batch in _forever(loader, steps):
        loss = model(**{name: value.to(device) for name, value in batch.items()}).loss
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        clock.tick()
    seconds = compile_statistics()["compile_seconds"] if compile_cache is not None else None
    return {"seconds": clock.seconds, "losses": losses, "compile_seconds": seconds}


def _forever(loader: Any, steps: int) -> Iterator[Any]:
    done = 0
    while True:
        for batch in loader:
            yield batch
            done += 1
            if done == steps:
                return


def _composer_stock(recipe: Recipe, steps: int, seed: int) -> Result:
    if torch.cuda.is_available():
        return _composer(recipe, steps, seed, device="gpu", precision="amp_fp16")
    return _composer(recipe, steps, seed, device="cpu", precision="fp32")


def _composer_best(recipe: Recipe, steps: int, seed: int) -> Result:
    """bf16 AMP (on a GPU: it refuses bf16 elsewhere), its own LowPrecisionLayerNorm, and its compile_config."""
    from composer.algorithms import LowPrecisionLayerNorm

    norms = (LowPrecisionLayerNorm(),)
    return _composer(recipe, steps, seed, norms, device="gpu", precision="amp_bf16", compile_config={})


CONTENDERS: dict[str, Callable[..., Result]] = {
    "ours": _ours,
    "huggingface": _huggingface,
    "huggingface_best": _huggingface_best,
    "huggingface_amp": lambda recipe, steps, seed: _huggingface(recipe, steps, seed, fp16=True),
    "composer": _composer_stock,
    "composer_best": _composer_best,
    "bare_loop": _bare,
}
