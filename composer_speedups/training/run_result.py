"""From a finished training to what it measured."""

from __future__ import annotations

import math

import torch
from composer import Trainer

from composer_speedups.compilation import compile_statistics
from composer_speedups.everyone import summed
from composer_speedups.measurement.flops import model_flops
from composer_speedups.measurement.measure import Measurement
from composer_speedups.measurement.results import WARMUP_STEPS, RunResult
from composer_speedups.recipes import Recipe
from composer_speedups.tasks import Task
from composer_speedups.training.metrics import record

__all__ = ["run_result"]


def run_result(recipe: Recipe, seed: int, trainer: Trainer, measurement: Measurement, task: Task) -> RunResult:
    """What `measurement` has of the training of `trainer`, which is over. For all ranks to call: sums are exchanged.

    Speeds are of the steps after the warm-up in which nothing was compiled; tokens and FLOPs are of all ranks, memory
    and compile time of this one.
    """
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
        losses=losses,
        step_seconds=seconds,
        evidence={a.key(): dict(a.evidence) for a in state.algorithms if hasattr(a, "evidence")},
    )
    result.pretrained, result.train_samples = task.pretrained, len(task.train)
    result.classes, result.loss_unit = task.classes, task.loss_unit
    result.data_notes = [note for note in task.notes if note != task.source.note]
    if measurement.gave_up:
        result.gave_up = True
        result.reason = f"unstable: ended after step {len(losses)}, the loss stayed without a finite value"
    if losses:
        result.final_loss = sum(losses[-(tail := max(1, len(losses) // 10)) :]) / tail
    result.kernels = sorted({str(e["kernel"]) for e in result.evidence.values() if e.get("kernel")})
    samples = measurement.samples
    if any(count != recipe.batch_size for count in samples):
        result.step_samples = samples
    counted = [
        i for i in range(len(seconds)) if i >= min(WARMUP_STEPS, len(seconds) // 2) and not measurement.compiling[i]
    ]
    result.warmup_steps = len(seconds) - len(counted)
    spent = sum(seconds[i] for i in counted)
    if spent > 0:
        result.samples_per_second = sum(samples[i] for i in counted) / spent
    if tokens:
        sums = [sum(tokens[i][part] for i in counted) for part in range(3)]
        # Ranks have other texts, and with lengths grouped the first one the longer ones.
        own = [*sums, sum(real for real, *_ in tokens), measurement.padded_tokens]
        everywhere = summed(torch.tensor(own, dtype=torch.float64)).tolist()
        real, squares, local, real_of_all, padded = everywhere
        if spent > 0:
            predicted = real * recipe.task.mlm_probability if task.objective == "mlm" else 0.0
            result.real_tokens_per_second = real / spent
            flops = model_flops(trainer._original_model.model, real, squares, predicted, local)
            result.model_flops_per_second = None if flops is None else flops / spent
        result.padding_share = 1 - real_of_all / padded if padded else None
    for metric in (state.eval_metrics.get("eval") or {}).values():
        if metric.update_called and not measurement.gave_up and not measurement.interrupted:  # else of an earlier step
            record(result, metric, task)
    return result
