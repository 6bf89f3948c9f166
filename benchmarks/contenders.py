"""What is measured: the same work done by this package, by its peers, and by a bare loop.

Each contender trains one model from the same weights with batches of the same size, and returns the seconds of every
step (from the end of one step to the end of the next; CUDA events on a GPU, so that nobody is made to wait), the losses
and the peak of memory. All run in fresh processes, with as many workers and the same pinned memory on a GPU.

All do the same samples in the same order, but one: the Hugging Face Trainer that groups lengths. It sorts within 50
batches, and a measurement does fewer; so `_grouped` lays the batches of its whole epoch out by length and takes every
so-manieth: what is measured has an epoch's mean. The samples differ from the others' then, which is why speeds are
compared in real tokens.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from composer.core import Callback

from composer_speedups import registry
from composer_speedups.compilation import compile_statistics, use_cache
from composer_speedups.holds import Hold
from composer_speedups.measurement.flops import model_flops
from composer_speedups.measurement.measure import Measurement
from composer_speedups.measurement.peak_memory import PeakMemory
from composer_speedups.measurement.results import Progress
from composer_speedups.optim.optimizers import split_off_no_decay
from composer_speedups.packed.packing import count_on_host, hand_over
from composer_speedups.recipes import Recipe
from composer_speedups.speedup import Stage, algorithm_passes
from composer_speedups.tasks import build_model, build_task

__all__ = ["CONTENDERS", "Job", "apply_functions", "measure"]

Result = dict[str, Any]


@dataclass(frozen=True)
class Job:
    """`steps` steps of `recipe`, of which the last `counted` count."""

    recipe: Recipe
    steps: int
    counted: int
    seed: int


def measure(payload: dict[str, Any], report: Callable[[Any], None]) -> Result:
    """Run `payload["contender"]`; called in a fresh process. To its result are added the real tokens and the model
    FLOPs of each step, by one formula for all."""
    job = Job(Recipe.model_validate(payload["recipe"]), payload["steps"], payload["counted"], payload["seed"])
    torch.manual_seed(job.seed)
    result = CONTENDERS[payload["contender"]](job, **payload["arguments"])
    return result | _work(job, result.pop("order", None))


def _work(job: Job, order: list[int] | None) -> Result:
    """What each step had to do: its real tokens and its model FLOPs, with the mean length of the task's samples."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    from composer_speedups.tasks.models import build_empty_model

    recipe = job.recipe
    task = build_task(recipe.task, recipe.model, seed=job.seed)
    every = task.train.lengths
    lengths = every[list(_sampler(task, job) if order is None else order)[: job.steps * recipe.batch_size]]
    lengths = lengths.reshape(job.steps, recipe.batch_size).astype(np.float64)
    share = recipe.task.mlm_probability if task.objective == "mlm" else 0.0
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = build_empty_model(recipe.model, task)
    tokens, squares = lengths.sum(1).tolist(), (lengths**2).sum(1).tolist()
    flops = [model_flops(model, t, s, t * share) for t, s in zip(tokens, squares, strict=True)]
    return {"tokens": tokens, "flops": flops, "mean_length": float(every.mean())}


class _Meter:
    """Seconds of each step, without waiting for a GPU, and the peak of memory."""

    def __init__(self) -> None:
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._marks: list[Any] = []
        self._peak = PeakMemory(self._device)

    def start(self) -> None:
        self._peak.start()
        self._marks = []
        self.tick()

    def tick(self) -> None:
        if self._device.type == "cuda":
            mark = torch.cuda.Event(enable_timing=True)
            mark.record()
        else:
            mark = time.perf_counter()
        self._marks.append(mark)
        self._peak.look()

    def result(self) -> Result:
        pairs = list(itertools.pairwise(self._marks))
        if self._device.type == "cuda":
            torch.cuda.synchronize()
            seconds = [one.elapsed_time(other) / 1e3 for one, other in pairs]
        else:
            seconds = [other - one for one, other in pairs]
        return {"seconds": seconds, "peak_memory_bytes": self._peak.bytes()}


def _make(job: Job) -> tuple[Any, torch.nn.Module]:
    task = build_task(job.recipe.task, job.recipe.model, seed=job.seed)
    return task, build_model(job.recipe.model, task, seed=job.seed)


def _sampler(task: Any, job: Job) -> Any:
    """The order of samples in this package's own training."""
    from torch.utils.data import DistributedSampler

    return DistributedSampler(task.train, 1, 0, seed=job.seed, drop_last=True)


def _loader(task: Any, job: Job) -> Any:
    from torch.utils.data import DataLoader

    return DataLoader(
        task.train,
        job.recipe.batch_size,
        sampler=_sampler(task, job),
        collate_fn=task.collate_train,
        drop_last=True,
        num_workers=job.recipe.workers,
        pin_memory=torch.cuda.is_available(),
    )


def _ours(job: Job, kernels: str | None = None) -> Result:
    """This package, as `composer-speedups train` runs it; with `kernels`, its C code is compiled into that folder."""
    from composer_speedups.kernels import native
    from composer_speedups.training.run import run

    if any(algorithm.slot == "batches" for algorithm in job.recipe.algorithms()):
        raise ValueError(f"{job.recipe.name} makes batches of its own: nobody else can do the same ones")
    short = job.recipe.model_copy(update={"duration": f"{job.steps}ba", "evaluate": False})
    folder = native._folder if kernels is None else lambda: Path(kernels)
    if kernels is not None:
        Path(kernels).mkdir(exist_ok=True)
    began, started = time.perf_counter(), []

    def report(progress: Progress) -> None:
        if progress.phase == "train" and progress.step and not started:
            started.append(time.perf_counter() - began)

    # A study leaves out what Composer does between two batches, as it may evaluate there. Here it does not, and the
    # others' steps are counted from end to end.
    with (
        patch.multiple(Measurement, before_dataloader=Callback.before_dataloader, epoch_start=Callback.epoch_start),
        patch.object(native, "_folder", folder),
    ):
        result = run(short, seed=job.seed, report=report)
    return {
        "seconds": result.step_seconds,
        "start_seconds": started[0] if started else None,  # until the first step is over, with what is compiled for it
        "losses": result.losses,
        "compile_seconds": result.compile_seconds,
        "peak_memory_bytes": result.peak_memory_bytes,
        "evidence": result.evidence,
    }


def _huggingface(job: Job, grouped: bool = False, **settings: Any) -> Result:
    """The Hugging Face Trainer, with the arguments in `settings`; `grouped` pads to the longest of like lengths."""
    import tempfile

    from transformers import Trainer, TrainerCallback, TrainingArguments

    task, model = _make(job)
    recipe, steps, meter, losses = job.recipe, job.steps, _Meter(), []
    collate, sampler = task.collate_train, _sampler(task, job)
    if grouped:
        if torch.cuda.is_available():
            # From torch 2.11 on cuDNN's attention comes first on Hopper and Blackwell, and plans for each new length
            # for up to a second (modelscope/FunASR#3704). Batches of 30 lengths would be little else.
            torch.backends.cuda.enable_cudnn_sdp(False)
        collate = type(collate)(pad_id=collate.pad_id, length=None, multiple_of=8)
        sampler = _grouped(task.train.lengths, job)

    class Watch(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            meter.start()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            meter.tick()

    class Ordered(Trainer):
        def _get_train_sampler(self, *_: Any, **__: Any) -> Any:
            return sampler

        def compute_loss(self, *arguments: Any, **more: Any) -> Any:
            loss = super().compute_loss(*arguments, **more)
            losses.append(loss.detach())  # read at the end: nobody waits for it
            return loss

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=recipe.batch_size,
            max_steps=steps,
            learning_rate=recipe.learning_rate,
            weight_decay=recipe.optimizer.weight_decay,
            lr_scheduler_type="cosine",
            warmup_steps=_warmup(job),
            max_grad_norm=0.0,  # none of the others clips
            logging_steps=steps,
            save_strategy="no",
            report_to=[],
            remove_unused_columns=False,
            disable_tqdm=True,
            use_cpu=not torch.cuda.is_available(),
            dataloader_pin_memory=torch.cuda.is_available(),
            dataloader_num_workers=recipe.workers,
            dataloader_drop_last=True,
            seed=job.seed,
            **settings,
        )
        trainer = Ordered(model, arguments, train_dataset=task.train, data_collator=collate, callbacks=[Watch()])
        trainer.train()
    order = {"order": sampler} if grouped else {}
    return {**meter.result(), "losses": [float(loss) for loss in losses], **order}


def _warmup(job: Job) -> int:
    """The steps of the recipe's warm-up, which is a share of the training in every recipe that is measured here."""
    return max(1, int(job.steps * float(job.recipe.schedule.warmup.removesuffix("dur"))))


def _grouped(lengths: np.ndarray, job: Job) -> list[int]:
    """Samples in the batches that transformers' own sampler makes of the whole training set, an epoch's in miniature.

    Of all batches in the order of their tokens, as many as count are taken at equal distances, from the middle of the
    first share to the middle of the last; those to warm up likewise. The longest come first, as transformers has them.
    Nobody trains on the batch after those: accelerate looks one ahead, and where it finds the end, it shuts down the
    workers of the DataLoader, for which the last step that counts would wait.
    """
    from transformers.trainer_pt_utils import LengthGroupedSampler

    size = job.recipe.batch_size
    generator = torch.Generator().manual_seed(job.seed)
    order = list(LengthGroupedSampler(size, lengths=lengths.tolist(), generator=generator))
    batches = [order[start : start + size] for start in range(0, len(order) - size + 1, size)]
    batches.sort(key=lambda batch: -int(lengths[batch].sum()))

    def spread_over(count: int) -> list[list[int]]:
        return [batches[(2 * i + 1) * len(batches) // (2 * count)] for i in range(count)]

    trained = spread_over(job.steps - job.counted) + spread_over(job.counted)
    return [i for batch in [*trained, trained[-1]] for i in batch]


def _huggingface_best(job: Job, torch_compile: bool = False, bf16: bool = True) -> Result:
    """bf16 unless told otherwise, fused AdamW, dynamic padding with lengths grouped, SDPA, no look at the loss for NaN
    (which would wait for the GPU at each step); compiled if asked for."""
    best = {"bf16": bf16, "optim": "adamw_torch_fused", "torch_compile": torch_compile, "logging_nan_inf_filter": False}
    return _huggingface(job, grouped=True, **best)


def _composer(job: Job, algorithms: tuple[Any, ...] = (), fused: bool = False, **settings: Any) -> Result:
    """Stock Composer with its own optimizer, or PyTorch's fused AdamW: its own goes through the parameters one by one,
    and on a GPU waits for each one's count of steps."""
    from composer import Callback, Trainer
    from composer.models import HuggingFaceModel
    from composer.optim import CosineAnnealingWithWarmupScheduler, DecoupledAdamW

    task, model = _make(job)
    recipe, meter, losses = job.recipe, _Meter(), []

    class Watch(Callback):
        def fit_start(self, state: Any, logger: Any) -> None:
            meter.start()

        def batch_end(self, state: Any, logger: Any) -> None:
            meter.tick()
            losses.append(state.total_loss_dict["loss/train/total"])

    composer_model = HuggingFaceModel(model, tokenizer=task.tokenizer, metrics=[])
    rate, decay = recipe.learning_rate, recipe.optimizer.weight_decay
    if fused:
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=decay, fused=True)
    else:
        optimizer = DecoupledAdamW(model.parameters(), lr=rate, weight_decay=decay * rate)
    trainer = Trainer(
        model=composer_model,
        train_dataloader=_loader(task, job),
        optimizers=optimizer,
        schedulers=CosineAnnealingWithWarmupScheduler(t_warmup=recipe.schedule.warmup),
        max_duration=f"{job.steps}ba",
        algorithms=list(algorithms),
        callbacks=[Watch()],
        progress_bar=False,
        log_to_console=False,
        loggers=[],
        seed=job.seed,
        device="gpu" if torch.cuda.is_available() else "cpu",
        **settings,
    )
    trainer.fit()
    trainer.close()
    return {**meter.result(), "losses": losses}


def _composer_stock(job: Job) -> Result:
    return _composer(job, precision="amp_fp16" if torch.cuda.is_available() else "fp32")


def _composer_best(job: Job) -> Result:
    """Its compile_config, PyTorch's fused AdamW, and on a GPU bf16 AMP and its LowPrecisionLayerNorm: it refuses AMP
    elsewhere, and the norm does nothing without."""
    from composer.algorithms import LowPrecisionLayerNorm

    best = {"compile_config": {}, "fused": True}
    if torch.cuda.is_available():
        return _composer(job, (LowPrecisionLayerNorm(),), precision="amp_bf16", **best)
    return _composer(job, precision="fp32", **best)


def _bare(job: Job, compile_cache: str | None = None) -> Result:
    """A loop of ten lines with the kernels of the recipe's speed-ups: what remains is what the training loop costs.

    With `compile_cache` the whole model is compiled, as PyTorch does it by itself, with the cache in that folder.
    """
    task, model = _make(job)
    recipe, steps = job.recipe, job.steps
    model.train()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model.to(device)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=recipe.learning_rate, weight_decay=recipe.optimizer.weight_decay, foreach=False
    )
    loader = _loader(task, job)
    kept = apply_functions(recipe, model, optimizer, loader, device)
    if compile_cache is not None:
        use_cache(compile_cache)
        model.compile()
    warmup = _warmup(job)

    def factor(step: int) -> float:  # linear warm-up, then cosine, as the others have it
        if step < warmup:
            return step / warmup
        return 0.5 * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup)))

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    meter, losses = _Meter(), []
    meter.start()
    with ExitStack() as ends:
        for done in kept:
            if isinstance(done, Hold):  # of the whole process: who comes after in it has what was there before
                ends.callback(done.restore)
        for batch in itertools.islice(loader, steps):
            count_on_host(batch)  # as `Unpadding` does in a Trainer
            for name, value in batch.items():
                if isinstance(value, torch.Tensor):
                    batch[name] = value.to(device, non_blocking=True)
            hand_over(batch)
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
            meter.tick()
    seconds = compile_statistics()["compile_seconds"] if compile_cache is not None else None
    return {**meter.result(), "losses": [float(loss) for loss in losses], "compile_seconds": seconds}


def apply_functions(recipe: Recipe, model: Any, optimizer: Any, loader: Any, device: torch.device) -> list[Any]:
    """Apply the recipe's speed-ups by their functions, without Composer; hold on to what is returned.

    What is about Composer's own loop (`sync_free_loop`) is left out.
    """
    from composer.core import Event

    kept = []
    for algorithm in algorithm_passes(recipe.algorithms(), Event.INIT):
        key, kwargs = algorithm.key(), dict(recipe.speedups[algorithm.key()])
        if key == "sync_free_loop":
            continue
        apply = registry.function(key)
        if algorithm.stage is Stage.DATA:
            raise ValueError(f"{key}: the batches of the bare loop are those of all others. Choose a recipe without it")
        if key == "prefetch_batches":
            if device.type == "cuda" and loader.num_workers:
                kept.append(apply(loader, device))
        elif algorithm.stage is Stage.OPTIMIZER or key == "gradient_release":
            if kwargs.pop("no_decay_on_bias_and_norm", False):  # the class's: its function takes the groups as they are
                split_off_no_decay(optimizer)
            kept.append(apply(optimizer, **({"model": model} if key == "adamw_8bit" else {}), **kwargs))
        elif algorithm.stage is Stage.LOOP or key == "matmul_precision":
            kept.append(apply(**kwargs))
        else:
            kept.append(apply(model, **kwargs))
    return kept


CONTENDERS: dict[str, Callable[..., Result]] = {
    "ours": _ours,
    "huggingface": _huggingface,
    "huggingface_best": _huggingface_best,
    "huggingface_amp": lambda job: _huggingface(job, fp16=True),
    "composer": _composer_stock,
    "composer_best": _composer_best,
    "bare_loop": _bare,
}
