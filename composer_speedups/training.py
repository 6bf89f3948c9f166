"""From a recipe to a trained model and what was measured on the way."""

from __future__ import annotations

import contextlib
import math
import re
import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from composer import Trainer
from composer.algorithms.warnings import NoEffectWarning
from composer.core import Callback, DataSpec
from composer.metrics import CrossEntropy, LanguageCrossEntropy, MaskedAccuracy
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
from composer.utils import dist, reproducibility
from torch.utils.data import DataLoader, DistributedSampler
from torchmetrics.classification import MulticlassAccuracy

from composer_speedups.algorithms.torch_compile import compile_statistics
from composer_speedups.checkpoints import Checkpoints, all_finite, exclusive
from composer_speedups.errors import OutOfMemory, RecipeError, SpeedUpUnavailable, TaskError, is_out_of_memory
from composer_speedups.flops import local_attention, model_flops
from composer_speedups.loggers import built_loggers
from composer_speedups.measure import Measurement
from composer_speedups.recipe_schema import count_and_unit
from composer_speedups.recipes import Recipe
from composer_speedups.results import Progress, RunResult
from composer_speedups.saved_model import save_model
from composer_speedups.tasks import Task, build_task
from composer_speedups.tasks.models import build_model

__all__ = ["build_composer_model", "build_optimizer", "run"]

# name -> with warm-up, without
_SCHEDULERS = {
    "cosine": (CosineAnnealingWithWarmupScheduler, CosineAnnealingScheduler),
    "linear": (LinearWithWarmupScheduler, LinearScheduler),
    "constant": (ConstantWithWarmupScheduler, ConstantScheduler),
}
_WARMUP_STEPS = 3  # caches, allocator and thread pools settle in the first steps


def run(
    recipe: Recipe,
    *,
    seed: int | None = None,
    report: Callable[[Progress], None] | None = None,
    save: str | Path | None = None,
    resume: bool = False,
    checkpoint_interval: str = "1ep",
    inspect: bool = False,
) -> RunResult:
    """Train what `recipe` says, once, in this process.

    Args:
        recipe: a resolved recipe.
        seed: of weights, order of samples and dropout; None takes the recipe's.
        report: called with progress a few times a second, on rank 0.
        save: a folder for the trained model (as Hugging Face's `from_pretrained` reads it) and, under
            `checkpoints/`, for Composer's checkpoints.
        resume: go on from the newest whole checkpoint under `save`; start anew if there is none.
        checkpoint_interval: how often to write one, as `1ep` or `200ba`.
        inspect: train a few steps more when all is measured, to see where time and memory go. Not with `save`.

    Returns:
        What was measured. A run ended by Ctrl-C or SIGTERM has the status `interrupted`; its checkpoint is written.
        A run that was given up, because its loss stayed NaN, has `gave_up`; no model is saved. So has one with `save`
        whose weights are not finite at its end.

    Raises:
        UserError: the recipe asks for what this machine or its data cannot give; raised before training.
        OutOfMemory: with the batch size that failed and the next one to try.
        CheckpointError: `save` is taken by another run or full, or its checkpoints are damaged or of another run.
    """
    seed = recipe.seed if seed is None else seed
    device = "gpu" if torch.cuda.is_available() else "cpu"
    algorithms = recipe.algorithms()
    torch_device = torch.device("cuda" if device == "gpu" else "cpu")
    for algorithm in algorithms:
        reason = algorithm.unavailable(torch_device)
        if reason is not None:
            raise SpeedUpUnavailable(f"{algorithm!r}: {reason}")
    if dist.get_world_size() > 1:  # alone, Composer would ask Gloo or NCCL five times a step for what it knows
        dist.initialize_dist(device)
    report = report if dist.get_global_rank() == 0 else None
    say = (lambda text: report(Progress("data", message=text))) if report else None

    with contextlib.ExitStack() as stack:
        loggers = stack.enter_context(built_loggers(recipe))
        checkpoints = None
        if save is not None:
            stack.enter_context(exclusive(Path(save)))
            checkpoints = Checkpoints(Path(save), recipe, seed)
            if resume:
                checkpoints.find()
        task = build_task(recipe.task, recipe.model, seed=seed, progress=say)
        reproducibility.seed_all(seed)
        with _explained_out_of_memory(recipe):
            composer_model = build_composer_model(recipe, task, seed)
        model = composer_model.model
        if checkpoints is not None:
            checkpoints.check(composer_model)
            checkpoints.begin()
        stack.enter_context(_without_what_is_normal())
        interrupted, caught = stack.enter_context(_stop_on_interrupt()), stack.enter_context(_collect_warnings())
        measurement = Measurement(
            report,
            lambda: compile_statistics()["compile_seconds"],
            interrupted.is_set,
            reach=local_attention(model.config)[1],
        )
        with _explained_out_of_memory(recipe):
            trainer = _trainer(
                recipe,
                seed,
                device,
                composer_model,
                task,
                algorithms,
                loggers,
                measurement,
                checkpoints,
                checkpoint_interval,
            )
        stack.callback(trainer.close)
        finished = _finished(trainer)
        with _explained_out_of_memory(recipe, measurement):
            if finished:
                if recipe.evaluate:
                    trainer.eval()
            else:
                if resume:
                    # Of a checkpoint written at the end of an epoch: that epoch has no batches left, as it should.
                    warnings.filterwarnings("ignore", message="No batches were trained for global rank")
                trainer.fit()
        result = _result(recipe, seed, trainer, measurement, task)
        if finished:
            result.reason = "the checkpoint was at the end of the training already"
        result.pretrained, result.train_samples = task.pretrained, len(task.train)
        result.data_notes = [note for note in task.notes if note != task.source.note]
        result.warnings = list(dict.fromkeys(caught))
        # Too few steps to be given up for their losses, or it began so.
        if result.status == "ok" and not result.gave_up and not all_finite(model):
            result.gave_up, result.reason = True, "the weights are not finite"
        good = result.status == "ok" and not result.gave_up
        if inspect and save is None and good:
            from composer_speedups.inspection import look_inside

            look_inside(trainer, recipe, task, result)
        if save is not None and good and dist.get_global_rank() == 0:
            save_model(model, task, Path(save))
    return result


def build_composer_model(recipe: Recipe, task: Task, seed: int) -> HuggingFaceModel:
    """The recipe's model as Composer takes it, before any speed-up."""
    model = build_model(recipe.model, task, seed=seed)
    with _no_search_for_causal_models():
        return HuggingFaceModel(
            model, tokenizer=task.tokenizer, use_logits=True, metrics=[], eval_metrics=_metrics(task, model.config)
        )


def _finished(trainer: Trainer) -> bool:
    """Whether a checkpoint was loaded that leaves nothing to train; Composer's `fit` raises then."""
    duration = trainer.state.max_duration
    return duration is not None and trainer.state.timestamp.get(duration.unit) >= duration


def _trainer(
    recipe: Recipe,
    seed: int,
    device: str,
    model: HuggingFaceModel,
    task: Task,
    algorithms: list[Any],
    loggers: list[Any],
    measurement: Measurement,
    checkpoints: Checkpoints | None,
    checkpoint_interval: str,
) -> Trainer:
    saving = [] if checkpoints is None else [checkpoints.saver(checkpoint_interval)]
    evaluation: dict[str, Any] = {}
    if recipe.evaluate:
        evaluation = {
            "eval_dataloader": _loader(recipe, task, seed, train=False),
            "eval_interval": recipe.duration if recipe.evaluate is True else recipe.evaluate,
        }
    return Trainer(
        model=model,
        train_dataloader=_loader(recipe, task, seed, train=True),
        optimizers=build_optimizer(recipe, model),
        schedulers=_scheduler(recipe),
        step_schedulers_every_batch=True,
        max_duration=recipe.duration,
        device_train_microbatch_size=recipe.microbatch_size,
        algorithms=algorithms,
        callbacks=[_Warmup(recipe), measurement, _Epoch(task), *saving],
        load_path=checkpoints.load_path if checkpoints else None,
        load_progress_bar=False,
        run_name=recipe.name.replace("/", "-"),
        loggers=loggers,
        precision="fp32",  # on a GPU the Trainer's own default is fp16; MixedPrecision says what the recipe wants
        device=device,
        seed=seed,
        progress_bar=False,
        log_to_console=False,
        auto_log_hparams=False,
        **evaluation,
    )


def _scheduler(recipe: Recipe) -> ComposerScheduler:
    with_warmup, without = _SCHEDULERS[recipe.schedule.name]
    if float(recipe.schedule.warmup.rstrip("abdeprsu")) == 0:
        return without()
    return with_warmup(t_warmup=recipe.schedule.warmup)


class _Warmup(Callback):
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


class _Epoch(Callback):
    """Tells the task which epoch it is, so that MLM masks anew, and the same on every machine."""

    def __init__(self, task: Task) -> None:
        self._task = task

    def epoch_start(self, state: Any, logger: Any) -> None:
        self._task.set_epoch(int(state.timestamp.epoch))

    def after_load(self, state: Any, logger: Any) -> None:
        self._task.set_epoch(int(state.timestamp.epoch))


def _loader(recipe: Recipe, task: Task, seed: int, *, train: bool) -> DataLoader | DataSpec:
    world = dist.get_world_size()
    size = recipe.batch_size if train else (recipe.eval_batch_size or recipe.batch_size)
    dataset = task.train if train else task.evaluation
    if size % world:
        raise TaskError(f"batch size {size} cannot be shared by {world} ranks: choose a multiple of {world}")
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


def build_optimizer(recipe: Recipe, model: torch.nn.Module) -> torch.optim.Optimizer:
    """The recipe's optimizer for `model`, before any speed-up."""
    spec, rate = recipe.optimizer, recipe.learning_rate
    shared = {"lr": rate, "betas": spec.betas, "eps": spec.eps}
    if spec.name == "decoupled_adamw":
        return DecoupledAdamW(model.parameters(), weight_decay=spec.weight_decay * rate, **shared)
    # The plain for-loop, as the tables' baseline has it. On CUDA torch would choose foreach by itself.
    return torch.optim.AdamW(model.parameters(), weight_decay=spec.weight_decay, foreach=False, fused=False, **shared)


def _metrics(task: Task, config: Any) -> list[Any]:
    if task.objective == "mlm":
        return [LanguageCrossEntropy(), MaskedAccuracy(ignore_index=-100)]
    return [CrossEntropy(), MulticlassAccuracy(num_classes=config.num_labels, average="micro")]


def _result(recipe: Recipe, seed: int, trainer: Trainer, measurement: Measurement, task: Task) -> RunResult:
    state = trainer.state
    seconds, tokens = measurement.step_seconds(), measurement.tokens()
    losses = measurement.losses
    result = RunResult(
        recipe=recipe.name,
        seed=seed,
        batch_size=recipe.batch_size,
        learning_rate=recipe.learning_rate,
        status="interrupted" if measurement.interrupted else "ok",
        reason="stopped by Ctrl-C or SIGTERM" if measurement.interrupted else "",
        wallclock_seconds=measurement.fit_seconds,
        train_seconds=measurement.fit_seconds - measurement.eval_seconds,
        compile_seconds=compile_statistics()["compile_seconds"],
        peak_memory_bytes=measurement.peak.bytes(),
        finite=all(map(math.isfinite, losses)),
        steps=len(losses),
        padding_share=measurement.padding_share(),
        losses=losses,
        step_seconds=seconds,
        evidence={a.key(): dict(a.evidence) for a in state.algorithms if hasattr(a, "evidence")},
    )
    if measurement.gave_up:
        result.gave_up = True
        result.reason = f"unstable: ended after step {len(losses)}, the loss stayed without a finite value"
    if losses:
        result.final_loss = sum(losses[-(tail := max(1, len(losses) // 10)) :]) / tail
    result.kernels = sorted({str(e["kernel"]) for e in result.evidence.values() if e.get("kernel")})
    world, samples = dist.get_world_size(), measurement.samples
    if any(count != recipe.batch_size for count in samples):
        result.step_samples = samples
    counted = [
        i for i in range(len(seconds)) if i >= min(_WARMUP_STEPS, len(seconds) // 2) and not measurement.compiling[i]
    ]
    result.warmup_steps = len(seconds) - len(counted)
    spent = sum(seconds[i] for i in counted)
    if spent > 0:
        result.samples_per_second = sum(samples[i] for i in counted) / spent
    if spent > 0 and tokens:
        real = sum(tokens[i][0] for i in counted)
        squares, local = (sum(tokens[i][part] for i in counted) for part in (1, 2))
        predicted = real * recipe.task.mlm_probability if task.objective == "mlm" else 0.0
        result.real_tokens_per_second = world * real / spent
        flops = model_flops(trainer._original_model.model, real, squares, predicted, local)
        result.model_flops_per_second = world * flops / spent
    for name, metric in (state.eval_metrics.get("eval") or {}).items():
        if not metric.update_called or measurement.gave_up or measurement.interrupted:  # of an earlier step, if any
            continue
        value = float(metric.compute())
        if "Accuracy" in name:
            result.eval_accuracy = value
            if task.objective == "classification":
                result.eval_majority = float(np.bincount(task.evaluation.labels).max()) / len(task.evaluation)
        elif "CrossEntropy" in name:
            result.eval_loss = value
    return result


@contextlib.contextmanager
def _no_search_for_causal_models() -> Iterator[None]:
    """Spare each run some seconds: HuggingFaceModel imports every model family there is, to see if ours is causal.

    None is: the tasks here are classification and masked tokens.
    """
    search = huggingface._is_registered_causal_lm
    huggingface._is_registered_causal_lm = lambda model: False
    try:
        yield
    finally:
        huggingface._is_registered_causal_lm = search


@contextlib.contextmanager
def _explained_out_of_memory(recipe: Recipe, measurement: Measurement | None = None) -> Iterator[None]:
    """Say in one line what did not fit; without `measurement`, the model was being built."""
    try:
        yield
    except OutOfMemory:  # it has been said in one line already
        raise
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        asked = re.search(r"allocate ([\d.]+ [KMG]iB)|allocate (\d+) bytes", str(error))
        amount = f" (it asked for {asked[1] or f'{int(asked[2]) / 2**20:,.0f} MiB'})" if asked else ""
        if measurement is None:
            raise OutOfMemory(
                f"{recipe.name} ran out of memory before its first batch: the model {recipe.model.name} and "
                f"its optimizer do not fit{amount}; try a smaller model"
            ) from error
        evaluating, ranks = measurement.evaluating, dist.get_world_size()
        # Batches are of all ranks together, a microbatch is one rank's.
        size = ((evaluating and recipe.eval_batch_size) or recipe.batch_size) // ranks
        if not evaluating:
            size = min(recipe.microbatch_size or size, size)
        smaller = max(1, size // 2 // 8 * 8 or size // 2)
        advice = f"try microbatch_size={smaller}, which keeps the batch at {recipe.batch_size}"
        if evaluating:
            advice = f"try eval_batch_size={smaller * ranks}"
        if size == 1:
            advice = "one sample does not fit: try a shorter task.max_length or a smaller model"
        what = "an evaluation pass" if evaluating else "a forward pass"
        raise OutOfMemory(f"{recipe.name} ran out of memory with {size} samples {what}: {advice}{amount}") from error


@contextlib.contextmanager
def _stop_on_interrupt() -> Iterator[threading.Event]:
    """The first Ctrl-C ends the training after its batch, so that what is done is kept; the second ends it now.

    SIGTERM counts as a first one: a cluster sends it before it takes the machine away, and the `composer` launcher
    after a Ctrl-C, which the ranks may have heard already.
    """
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return

    def handle(number: int, frame: Any) -> None:
        if number == signal.SIGINT and asked.is_set():
            raise KeyboardInterrupt
        asked.set()

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _without_what_is_normal() -> Iterator[None]:
    """Show no warning of Composer's about a last batch that is smaller, nor that few steps have no warm-up."""
    with warnings.catch_warnings():
        for start in ("Cannot split tensor of length", "The warmup duration is 0"):
            warnings.filterwarnings("ignore", message=start, category=UserWarning)
        yield


@contextlib.contextmanager
def _collect_warnings() -> Iterator[list[str]]:
    """Keep the texts of all warnings, and show them as always; a speed-up's without a line, as nobody's is to blame."""
    texts: list[str] = []
    show, layout = warnings.showwarning, warnings.formatwarning

    def showwarning(message: Any, category: Any, *args: Any, **kwargs: Any) -> None:
        texts.append(f"{category.__name__}: {message}")
        show(message, category, *args, **kwargs)

    def formatwarning(message: Any, category: Any, *args: Any, **kwargs: Any) -> str:
        if issubclass(category, NoEffectWarning):
            return f"{category.__name__}: {message}\n"
        return layout(message, category, *args, **kwargs)

    warnings.showwarning, warnings.formatwarning = showwarning, formatwarning
    try:
        yield texts
    finally:
        warnings.showwarning, warnings.formatwarning = show, layout
