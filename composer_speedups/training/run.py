"""From a recipe to a trained model and what was measured on the way."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from composer import Trainer
from composer.models import HuggingFaceModel
from composer.utils import dist, reproducibility

from composer_speedups.compilation import compile_statistics
from composer_speedups.everyone import start_ranks
from composer_speedups.measurement.flops import local_attention
from composer_speedups.measurement.measure import Measurement
from composer_speedups.measurement.results import Progress, RunResult
from composer_speedups.recipes import Recipe
from composer_speedups.tasks import Task, build_task
from composer_speedups.training.around import (
    close_trainer,
    collected_warnings,
    explained_out_of_memory,
    stop_on_interrupt,
    without_what_is_normal,
)
from composer_speedups.training.checkpoints import Checkpoints, all_finite, exclusive
from composer_speedups.training.loggers import built_loggers
from composer_speedups.training.parts import (
    TellsEpoch,
    Warmup,
    available_algorithms,
    build_composer_model,
    build_loader,
    build_optimizer,
    build_scheduler,
    counting_labels,
    weighs_tokens,
)
from composer_speedups.training.run_result import run_result
from composer_speedups.training.saved_model import save_model

__all__ = ["run"]


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
    algorithms = available_algorithms(recipe)
    start_ranks()
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
        with explained_out_of_memory(recipe):
            composer_model = build_composer_model(recipe, task, seed)
        model = composer_model.model
        if checkpoints is not None:
            checkpoints.check(composer_model)
            checkpoints.begin()
        stack.enter_context(without_what_is_normal())
        interrupted, caught = stack.enter_context(stop_on_interrupt()), stack.enter_context(collected_warnings())
        measurement = Measurement(
            report,
            lambda: compile_statistics()["compile_seconds"],
            interrupted.is_set,
            reach=local_attention(model.config)[1],
        )
        with explained_out_of_memory(recipe):
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
        stack.push(partial(close_trainer, trainer))
        with explained_out_of_memory(recipe, measurement):
            nothing_left = _fit(trainer, recipe, resume)
        result = run_result(recipe, seed, trainer, measurement, task)
        if nothing_left:
            result.reason = "the checkpoint was at the end of the training already"
        result.warnings = list(dict.fromkeys(caught))
        # Too few steps to be given up for their losses, or it began so.
        if result.status == "ok" and not result.gave_up and not all_finite(model):
            result.gave_up, result.reason = True, "the weights are not finite"
        good = result.status == "ok" and not result.gave_up
        if inspect and save is None and good:
            from composer_speedups.measurement.inspection import look_inside

            look_inside(trainer, recipe, task, result)
        if save is not None and good and dist.get_global_rank() == 0:
            save_model(model, task, Path(save))
    return result


def _fit(trainer: Trainer, recipe: Recipe, resume: bool) -> bool:
    """Train; or, where a checkpoint was loaded that leaves nothing to train, and Composer's `fit` raises, evaluate and
    return True."""
    duration = trainer.state.max_duration
    if duration is not None and trainer.state.timestamp.get(duration.unit) >= duration:
        if recipe.evaluate:
            trainer.eval()
        return True
    if resume:
        # Of a checkpoint written at the end of an epoch: that epoch has no batches left, as it should.
        warnings.filterwarnings("ignore", message="No batches were trained for global rank")
    trainer.fit()
    return False


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
            "eval_dataloader": build_loader(recipe, task, seed, train=False),
            "eval_interval": recipe.duration if recipe.evaluate is True else recipe.evaluate,
        }
    training, by_tokens = build_loader(recipe, task, seed, train=True), weighs_tokens(recipe)
    return Trainer(
        model=model,
        train_dataloader=counting_labels(training) if by_tokens else training,
        accumulate_train_batch_on_tokens=by_tokens,
        optimizers=build_optimizer(recipe, model),
        schedulers=build_scheduler(recipe),
        step_schedulers_every_batch=True,
        max_duration=recipe.duration,
        device_train_microbatch_size=recipe.microbatch_size,
        algorithms=algorithms,
        callbacks=[Warmup(recipe), measurement, TellsEpoch(task), *saving],
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
