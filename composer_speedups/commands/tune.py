"""The command `tune`."""

from __future__ import annotations

import math
import re
import shlex
from pathlib import Path
from typing import Annotated

import typer

from composer_speedups.commands.typed import typed
from composer_speedups.errors import UserError
from composer_speedups.recipes.yaml import show
from composer_speedups.tuning.settings import SAMPLES, Settings

__all__ = ["TUNE_EXAMPLE", "memory_bytes", "tune"]

TUNE_EXAMPLE = "Example: composer-speedups tune cpu/fastest --samples 4000 --memory-limit 8GB --out mine.yaml"
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?(B|[KMGT]i?B)", re.ASCII | re.IGNORECASE)


def tune(
    context: typer.Context,
    recipe: Annotated[str, typer.Argument(help="A recipe's name, or the path of its YAML file.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Changes, which the new recipe keeps.")
    ] = None,
    batch: Annotated[bool, typer.Option("--batch/--no-batch", help="Find the batch.")] = True,
    lr: Annotated[bool, typer.Option("--lr/--no-lr", help="Find the learning rate; else the scaling rule's.")] = True,
    constant: Annotated[
        bool,
        typer.Option("--constant-effective-batch", help="Keep the batch, and find the microbatch to accumulate."),
    ] = False,
    goal: Annotated[
        str | None,
        typer.Option(metavar="largest|fastest", help="Of the batch [default: largest on a GPU, fastest on a CPU]."),
    ] = None,
    samples: Annotated[
        int | None,
        typer.Option(
            help=f"Samples to train in all [default: {SAMPLES}, and up to four whole trainings for the rate]."
        ),
    ] = None,
    trials: Annotated[int, typer.Option(help="Learning rates to try in short runs, at most.")] = Settings.trials,
    memory_limit: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Of each rank, such as 8GB [default: most of what there is].")
    ] = None,
    timeout: Annotated[float, typer.Option(help="Minutes that one try may take.")] = Settings.timeout / 60,
    ranks: Annotated[
        int, typer.Option(help="Processes that train together (DDP), which share each batch: one for each GPU.", min=1)
    ] = 1,
    out: Annotated[Path | None, typer.Option(help="The new recipe [default: NAME_tuned.yaml, here].")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the new recipe if it is there.")] = False,
) -> None:
    """Find the batch for this machine, then the learning rate for that batch, and write a recipe with the evidence.

    Each try is a fresh process. The same command again goes on where it was stopped.
    """
    from composer_speedups.ablation.terminal import make_console
    from composer_speedups.isolation.ranks import train_words
    from composer_speedups.recipes import load_recipe
    from composer_speedups.recipes.written import extends_as
    from composer_speedups.termination import stop_on_termination
    from composer_speedups.tuning.tune import tune as run

    limit = None if memory_limit is None else memory_bytes(memory_limit)
    settings = Settings(batch, lr, constant, samples, trials, limit, goal, timeout * 60, ranks)
    base = load_recipe(recipe, check_arguments=False)
    loaded = load_recipe(recipe, overrides or (), check_arguments=False)
    target = out if out is not None else Path(f"{base.name.rpartition('/')[2]}_tuned.yaml")
    stop_on_termination()
    console = make_console()
    tuned = run(
        loaded,
        out=target,
        base=base,
        extends=extends_as(recipe, target),
        settings=settings,
        overwrite=overwrite,
        command=typed(context, {"--trials": trials}, without=("--overwrite",)),
        console=console,
    )
    if tuned.recipe is None:
        console.print("The same command goes on from here.", style="yellow")
        raise typer.Exit(130)
    found = tuned.recipe
    micro = f" in microbatches of {found.microbatch_size}" if found.microbatch_size else ""
    console.print(
        f"{target}: batch {found.batch_size}{micro}, learning rate {found.learning_rate:g}; the tries are in its "
        f"comments. Use it: {train_words(ranks)} {shlex.quote(str(target))}",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )


def memory_bytes(text: str) -> int:
    """Bytes of a size such as `8GB`, `512MB` or `7.5GiB`.

    >>> memory_bytes("8GB"), memory_bytes("1.5 GiB")
    (8000000000, 1610612736)
    """
    match = _SIZE.fullmatch(text.strip())
    size = 0
    if match:
        unit = match[2].lower()
        base = 1024 if "i" in unit else 1000
        wanted = float(match[1]) * base ** " kmgt".index(unit[0] if unit != "b" else " ")
        size = round(wanted) if math.isfinite(wanted) else 0  # more digits than a number can have
    if size <= 0:
        raise UserError(f"--memory-limit {show(text)} is no size. Write e.g. --memory-limit 8GB")
    return size
