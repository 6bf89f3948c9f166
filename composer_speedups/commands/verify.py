"""The command `verify`: what `verification/` finds of a recipe, and how it is printed."""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from composer_speedups.collector import importing
from composer_speedups.verification.findings import samples_for

if TYPE_CHECKING:
    from rich.console import Console

    from composer_speedups.recipes import Recipe
    from composer_speedups.verification.findings import Verification

__all__ = ["VERIFY_EXAMPLE", "verify"]

VERIFY_EXAMPLE = "Example: composer-speedups verify finetune/fastest model.name=./encoder --samples 16"


def verify(
    recipe: Annotated[str, typer.Argument(help="A recipe's name, or the path of its YAML file.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Changes, with dotted keys.")
    ] = None,
    samples: Annotated[
        int | None, typer.Option(help="Texts in the batch [default: 8, or two for each rank].", min=1, max=1024)
    ] = None,
    ranks: Annotated[
        int,
        typer.Option(help="Processes that compute it together (DDP): one for each GPU, or for some cores.", min=1),
    ] = 1,
    seed: Annotated[int | None, typer.Option(help="Instead of the recipe's.", min=0, max=2**32 - 1)] = None,
) -> None:
    """Check that a recipe computes here what its model computes without speed-ups; end with 1 if it does not.

    A few steps with the speed-ups, on a batch of the recipe's own texts: loss and gradients against the plain model's
    in float64, and updates against AdamW's. As near as the plain model is in the same precision is near enough.
    """
    from composer_speedups import hardware
    from composer_speedups.ablation.terminal import make_console
    from composer_speedups.isolation.ranks import together
    from composer_speedups.recipes import check_speedups, load_recipe

    loaded = load_recipe(recipe, overrides or (), check_arguments=False)
    started = int(os.environ.get("WORLD_SIZE", "1"))  # by composer -n or torchrun: this is one of them
    count = max(ranks, started)
    samples = samples_for(count) if samples is None else samples
    console = make_console()
    console.quiet = started > 1 and os.environ.get("RANK", "0") != "0"
    say = partial(console.print, style="dim", markup=False, emoji=False, highlight=False, soft_wrap=True)
    say("loading torch and Composer ...")
    tell = lambda text: say(f"{text} ...")  # noqa: E731
    if ranks > 1:
        from composer_speedups.verification.ranks import verify_in_ranks

        found, machine = verify_in_ranks(loaded, ranks, samples=samples, seed=seed, say=tell)
    else:
        with importing():
            from composer_speedups.everyone import leave_ranks
            from composer_speedups.verification.recipe import verify_recipe  # takes some seconds

            check_speedups(loaded)
        found = verify_recipe(loaded, samples=samples, seed=seed, say=tell)
        leave_ranks()
        machine = hardware.summary(hardware.environment())
    _show(found, loaded, samples, together(count, machine), console)
    if not found.holds:
        raise typer.Exit(1)


def _show(found: Verification, recipe: Recipe, samples: int, hardware: str, console: Console) -> None:
    from rich.markup import escape
    from rich.table import Table

    def say(text: str, **style: str) -> None:
        console.print(text, markup=False, highlight=False, emoji=False, soft_wrap=True, **style)

    tokens = "" if found.tokens is None else f", {found.tokens:,} tokens and {found.padding:.0%} padding"
    texts = f"{samples} text{'s' * (samples > 1)} of {recipe.task.name}"
    say(f"\n{recipe.name}: {recipe.model.name}, {texts}{tokens}, dropout off")
    say(f"On {hardware}\n", style="dim")
    say("Off from float64 by, and how much of what is allowed the furthest off takes:")
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("", no_wrap=True)
    for head in ("loss", "gradients", "plain's", "of allowed"):
        table.add_column(head, justify="right", no_wrap=True)
    table.add_column("furthest off", overflow="fold")
    for one in found.comparisons:
        table.add_row(
            escape(f"{one.precision}, step {one.step}"),
            f"{one.errors.loss:.1e}",
            f"{one.errors.gradients:.1e}",
            f"{one.plain.gradients:.1e}",
            f"{one.share:.0%}" if one.share < 100 else f"{one.share:.0e} x",
            escape(one.worst.removeprefix("model.")),
        )
    for one in found.evaluated:
        share = f"{one.share:.0%}" if one.share < 100 else f"{one.share:.0e} x"
        cells = "", f"{one.error:.1e}", f"{one.plain:.1e}", share, "(its outputs)"
        table.add_row(escape(f"{one.precision}, evaluating"), *cells)
    console.print(table)
    if found.updates is None:
        say("\nupdates: not compared, as the optimizer is no AdamW")
    else:
        allowed = found.updates.allowed
        near = "not judged: they are as small as rounding" if allowed is None else f"{allowed:.1e} allowed"
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
