"""`composer-speedups train`: one recipe, with a live line and a summary."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from composer_speedups.collector import importing
from composer_speedups.measurement.results import loss_text
from composer_speedups.termination import end_on_termination, stop_on_termination

if TYPE_CHECKING:
    from composer_speedups.measurement import results
    from composer_speedups.recipes import Recipe

__all__ = ["train"]

_CLASSES = 10  # that are listed


def train(recipe: Recipe, *, seed: int | None, save: Path | None, resume: bool, checkpoint_interval: str) -> int:
    """Train `recipe` and print what was measured; return the exit code (130 after Ctrl-C, 1 if it was given up)."""
    first = os.environ.get("RANK", "0") == "0"
    # No markup, no emoji: descriptions, paths and labels hold brackets and colons that are not meant so.
    plain: dict[str, bool] = {"highlight": False, "markup": False, "emoji": False}
    console = Console(stderr=True, quiet=not first, **plain)
    console.print(Text.assemble((recipe.name, "bold"), "  ", recipe.description))
    console.print(_plan(recipe), style="dim")
    console.print("loading torch and Composer ...", style="dim")

    with end_on_termination(), importing():
        from composer_speedups.everyone import leave_ranks
        from composer_speedups.recipes import check_speedups
        from composer_speedups.training.run import run  # takes some seconds
    stop_on_termination()
    check_speedups(recipe)

    with _LiveLine(console) as line:
        result = run(
            recipe,
            seed=seed,
            report=line.show,
            save=save,
            resume=resume,
            checkpoint_interval=checkpoint_interval,
        )
    leave_ranks()
    if first:
        Console(**plain).print(_summary(result))
        if result.gave_up:
            console.print(_not_saved(recipe, result, save), soft_wrap=True)
        elif save is not None:
            what = "Checkpoint" if result.status == "interrupted" else "Model"
            where = save / "checkpoints" if result.status == "interrupted" else save
            console.print(f"{what} in {where}", soft_wrap=True)
            if result.status == "interrupted":
                console.print("Go on with the same command and --resume.")
        elif result.status == "interrupted":
            console.print("Nothing was kept: use --save DIR for checkpoints.")
        elif recipe.task.name != "dummy":
            console.print("The model was not kept: --save DIR keeps it.")
    return 130 if result.status == "interrupted" else int(result.gave_up)


def _not_saved(recipe: Recipe, result: results.RunResult, save: Path | None) -> str:
    """Why there is no model that is worth its name, what to change, and what there is instead."""
    remedy = f"lower learning_rate {recipe.learning_rate:g}, or lengthen schedule.warmup {recipe.schedule.warmup}"
    if result.losses and not math.isfinite(result.losses[0]):
        remedy = f"the first loss was not finite already, so look at the weights of {recipe.model.name}"
    if save is None:
        return f"{result.reason}: {remedy}"
    folder = save / "checkpoints"
    kept = f"; checkpoints are in {folder}" if any(folder.glob("ep*.pt")) else ""
    return f"No model was saved: {result.reason}: {remedy}{kept}"


def _plan(recipe: Recipe) -> str:
    rate = f"{recipe.learning_rate:g}"
    micro = f" in microbatches of {recipe.microbatch_size}" if recipe.microbatch_size else ""
    speedups = ", ".join(recipe.speedups) or "none"
    # What begins at random weights, and at which size, is no fine-tuning: said before it has taken its time.
    sizes = [f"{key}={value}" for key, value in recipe.model.config.items()]
    made = ", ".join((["random weights"] if recipe.model.pretrained is False else []) + sizes)
    model = recipe.model.name + (f" ({made})" if made else "")
    return (
        f"{model} on {recipe.task.name} ({recipe.task.objective}), {recipe.task.max_length} tokens, "
        f"batch {recipe.batch_size}{micro}, learning rate {rate}, {recipe.duration}; speed-ups: {speedups}"
    )


class _LiveLine:
    """One line that says where the run is. Without a terminal: a plain line every tenth of the way."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._printed = -1
        self._phase = self._message = ""
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[facts]}", markup=False),
            TimeElapsedColumn(),
            console=console,
            transient=True,
        )
        self._task = self._progress.add_task("preparing", total=None, facts="")

    def __enter__(self) -> _LiveLine:
        if self._console.is_terminal:
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def show(self, progress: results.Progress) -> None:
        facts = progress.message or _facts(progress)
        if self._console.is_terminal:
            self._progress.update(
                self._task,
                description=progress.phase,
                completed=progress.step,
                total=progress.steps or None,
                facts=facts,
            )
            return
        tenth = progress.step * 10 // progress.steps if progress.steps else -1
        if progress.phase != self._phase or tenth > self._printed or progress.message not in ("", self._message):
            self._phase, self._printed, self._message = progress.phase, tenth, progress.message
            self._console.print(f"{progress.phase} {facts}", soft_wrap=True)


def _facts(progress: results.Progress) -> str:
    facts = [f"{progress.step}/{progress.steps}"]
    if progress.loss is not None:
        facts.append(f"loss {loss_text(progress.loss, 3)}")
    if progress.accuracy is not None:
        facts.append(f"accuracy {progress.accuracy:.2f}")
    if progress.samples_per_second is not None:
        facts.append(f"{progress.samples_per_second:.1f} samples/s")
    if progress.seconds_left is not None:
        minutes, seconds = divmod(round(progress.seconds_left), 60)
        facts.append(f"{minutes}:{seconds:02d} left")
    return "  ".join(facts)


def _classes(shares: Mapping[str, float]) -> str:
    """What the data's labels were taken for: a stray "nan" or half a star shows.

    >>> _classes({"neg": 0.25, "pos": 0.75})
    '2: neg (25 %), pos (75 %)'
    """
    shown = [f"{name} ({share:.0%})".replace("%", " %") for name, share in list(shares.items())[:_CLASSES]]
    more = f" and {len(shares) - _CLASSES} more" if len(shares) > _CLASSES else ""
    return f"{len(shares)}: {', '.join(shown)}{more}"


def _summary(result: results.RunResult) -> Table:
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))

    def row(name: str, value: float | None, form: str, factor: float = 1.0) -> None:
        if value is not None:
            table.add_row(name, form.format(value * factor))

    row("samples/s", result.samples_per_second, "{:.1f}")
    row("real tokens/s", result.real_tokens_per_second, "{:,.0f}")
    row("padding", result.padding_share, "{:.0f} %", 100)
    for name, loss in (("final loss", result.final_loss), ("eval loss", result.eval_loss)):
        if loss is not None:
            table.add_row(name, loss_text(loss, 4))
    row("eval accuracy", result.eval_accuracy, "{:.2f} %", 100)
    row("most frequent answer", result.eval_majority, "{:.2f} % would be right", 100)
    row("eval R²", result.eval_r2, "{:.4f}")
    row("steps", result.steps, "{:.0f}")
    row("training", result.train_seconds, "{:.1f} s")
    if result.compile_seconds:
        row("of it compiling", result.compile_seconds, "{:.1f} s")
    row("peak memory", result.peak_memory_bytes, "{:,.0f} MiB", 1 / 2**20)
    for key, evidence in result.evidence.items():
        table.add_row(key, ", ".join(f"{name}={value}" for name, value in evidence.items()))
    if result.classes:
        table.add_row("classes", _classes(result.classes))
    if result.pretrained is False:
        table.add_row("note", "the weights began at random: no pretrained ones were asked for or to be had")
    for note in [*result.data_notes, result.reason]:
        if note:
            table.add_row("note", note)
    return table
