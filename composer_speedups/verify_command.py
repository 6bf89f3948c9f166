"""The command `verify`: what `verification.py` finds of a recipe, and how it is printed. `cli.py` registers it."""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from composer_speedups.collector import importing

if TYPE_CHECKING:
    from rich.console import Console

    from composer_speedups.recipes import Recipe
    from composer_speedups.verification import Verification

__all__ = ["VERIFY_EXAMPLE", "verify", "verify_recipe"]

VERIFY_EXAMPLE = "Example: composer-speedups verify finetune/fastest model.name=./encoder --samples 16"


def verify(
    recipe: Annotated[str, typer.Argument(help="A recipe's name, or the path of its YAML file.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Changes, with dotted keys.")
    ] = None,
    samples: Annotated[int, typer.Option(help="Texts in the batch.", min=1, max=1024)] = 8,
    seed: Annotated[int | None, typer.Option(help="Instead of the recipe's.", min=0, max=2**32 - 1)] = None,
) -> None:
    """Check that a recipe computes here what its model computes without speed-ups; end with 1 if it does not.

    A few steps with the speed-ups, on a batch of the recipe's own texts: loss and gradients against the plain model's
    in float64, and updates against AdamW's. As near as the plain model is in the same precision is near enough.
    """
    from composer_speedups import hardware
    from composer_speedups.ablation.terminal import make_console
    from composer_speedups.errors import RecipeError
    from composer_speedups.recipes import check_speedups, load_recipe

    if "=" in recipe and not os.path.exists(recipe):
        raise RecipeError(f"name the recipe first: composer-speedups verify NAME {recipe}")
    loaded = load_recipe(recipe, overrides or (), check_arguments=False)
    console = make_console()
    say = partial(console.print, style="dim", markup=False, emoji=False, highlight=False, soft_wrap=True)
    say("loading torch and Composer ...")
    with importing():
        check_speedups(loaded)
    found = verify_recipe(loaded, samples=samples, seed=seed, say=lambda text: say(f"{text} ..."))
    _show(found, loaded, samples, hardware.summary(hardware.environment()), console)
    if not found.holds:
        raise typer.Exit(1)


def verify_recipe(recipe: Recipe, *, samples: int = 8, seed: int | None = None, say=lambda text: None) -> Verification:
    """What `verification.verify` finds of a recipe's model, data, optimizer and speed-ups."""
    from torch.utils.data import DataLoader

    from composer_speedups.errors import OutOfMemory, is_out_of_memory
    from composer_speedups.tasks import build_task
    from composer_speedups.training import build_composer_model, build_optimizer
    from composer_speedups.verification import verify as run

    seed = recipe.seed if seed is None else seed
    micro = None
    # Of texts; Composer weighs parts of a batch by them, and not by the tokens that MLM's loss is a mean over.
    if recipe.accumulates and recipe.task.objective == "classification":
        micro = max(1, samples * (recipe.microbatch_size or 1) // recipe.batch_size)
    task = build_task(recipe.task, recipe.model, seed=seed, progress=say)
    try:
        return run(
            build_composer_model(recipe, task, seed),
            DataLoader(task.train, collate_fn=task.collate_train, num_workers=recipe.workers),
            recipe.algorithms(),
            partial(build_optimizer, recipe),
            samples=samples,
            microbatch_size=micro,
            say=say,
        )
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        remedy = f"try --samples {samples // 2}" if samples > 1 else "try a shorter task.max_length"
        raise OutOfMemory(f"{recipe.name} ran out of memory with {samples} texts: {remedy}") from error


def _show(found: Verification, recipe: Recipe, samples: int, hardware: str, console: Console) -> None:
    from rich.table import Table

    def say(text: str, **style: str) -> None:
        console.print(text, markup=False, highlight=False, emoji=False, soft_wrap=True, **style)

    tokens = "" if found.tokens is None else f", {found.tokens:,} tokens and {found.padding:.0%} padding"
    say(f"\n{recipe.name}: {recipe.model.name}, {samples} texts of {recipe.task.name}{tokens}, dropout off")
    say(f"On {hardware}\n", style="dim")
    say("Off from float64 by, and how much of what is allowed the furthest off takes:")
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("")
    for head in ("loss", "gradients", "plain's", "of allowed"):
        table.add_column(head, justify="right", no_wrap=True)
    table.add_column("furthest off", overflow="fold")
    for one in found.comparisons:
        table.add_row(
            f"{one.precision}, step {one.step}",
            f"{one.errors.loss:.1e}",
            f"{one.errors.gradients:.1e}",
            f"{one.plain.gradients:.1e}",
            f"{one.share:.0%}" if one.share < 100 else f"{one.share:.0e} x",
            one.worst.removeprefix("model."),
        )
    console.print(table)
    if found.updates is None:
        say("\nupdates: not compared, as the optimizer is no AdamW")
    else:
        allowed = found.updates.allowed
        near = "not judged: its state has 8 bits" if allowed is None else f"{allowed:.1e} allowed"
        say(f"\nupdates of {found.updates.optimizer}: {found.updates.error:.1e} off AdamW's in float64 ({near})")
    for note in found.notes:
        say(f"note: {note}")
    say("")
    if found.holds:
        say(f"yes: {recipe.name} computes what its model does without speed-ups", style="bold green")
        return
    for line in found.wrong:
        say(line, style="red")
    say(f"no: {recipe.name} does not compute what its model does without speed-ups", style="bold red")
    say("Which one it is: leave out one after the other, as by speedups.unpadding=null")
