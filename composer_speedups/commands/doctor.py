"""The command `doctor`: prints what `doctor.py` finds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from composer_speedups.collector import importing
from composer_speedups.measurement.results import MOST_SAMPLES
from composer_speedups.recipes.yaml import inline

if TYPE_CHECKING:
    from rich.console import Console

    from composer_speedups.doctor import Finding, Need
    from composer_speedups.fitting import Remedy

__all__ = ["DOCTOR_EXAMPLE", "doctor"]

DOCTOR_EXAMPLE = "Example: composer-speedups doctor --model bert-base-uncased --batch 64 --recipe finetune/bf16"


def doctor(
    model: Annotated[
        str | None, typer.Option(metavar="PATH|NAME", help="Also look at this model's sizes (Hugging Face).")
    ] = None,
    batch: Annotated[
        int | None, typer.Option(help="Memory for so many samples a forward pass.", min=1, max=MOST_SAMPLES)
    ] = None,
    length: Annotated[int | None, typer.Option(help="Memory for samples of so many tokens.", min=8, max=32768)] = None,
    recipe: Annotated[str | None, typer.Option(metavar="NAME|PATH", help="Memory that this recipe needs.")] = None,
    ranks: Annotated[
        int,
        typer.Option(help="Memory of each of so many processes that train together (DDP): one for each GPU.", min=1),
    ] = 1,
) -> None:
    """Say what this machine supports, which sizes of a model miss its multiples, and what to switch on first.

    With a model, a batch, a length or a recipe: also the memory by kind that training needs, before anything runs.
    """
    from composer_speedups import hardware
    from composer_speedups.ablation.terminal import make_console
    from composer_speedups.isolation.ranks import check_ranks, look_for

    with importing():
        from composer_speedups.doctor import examine, memory_need

    console = make_console()
    look_for(ranks)
    found = examine(model)
    check_ranks(ranks, found.environment)
    asked = any(option is not None for option in (model, batch, length, recipe)) or ranks > 1
    # A mistake is told before anything else.
    need = memory_need(model, recipe, batch, length, _progress(console), ranks) if asked else None
    facts = found.environment
    console.print(f"On {hardware.summary(facts)}", markup=False, highlight=False)
    if facts.get("driver"):
        console.print(f"Driver {facts['driver']}, CUDA {facts.get('cuda')}, cuDNN {facts.get('cudnn')}")
    cpu = facts.get("cpu") or {}
    if cpu.get("flags"):
        console.print(f"CPU: {cpu.get('cores') or '?'} cores, {' '.join(cpu['flags'])}", highlight=False)
    _section(console, "Supported here", found.capabilities)
    _section(console, "Speed-ups", found.speedups)
    if found.model:
        _section(console, f"Sizes of {model}", found.model)
    if need is not None:
        _memory(console, need)
    console.print("\n[bold]Switch on first[/] (in a recipe)")
    console.print("speedups:", highlight=False)
    width = max((len(f"  {key}: {inline(arguments)}") for key, arguments in found.first.items()), default=0)
    for (key, arguments), reason in zip(found.first.items(), found.reasons, strict=True):
        line = f"  {key}: {inline(arguments)}"
        console.print(f"{line:<{width}}  # {reason}", markup=False, highlight=False, soft_wrap=True)
    console.print("What each brings here, measured: composer-speedups ablate demo --seeds 3", highlight=False)


def _progress(console: Console) -> Callable[[str], None]:
    return lambda line: console.print(line, style="dim", markup=False, emoji=False)


def _section(console: Console, title: str, findings: Sequence[Finding]) -> None:
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, show_header=False, padding=(0, 1, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in findings:
        mark = "[green]yes[/]" if finding.works else "[yellow]no[/]"
        table.add_row(escape(finding.name), mark, escape(finding.detail))
    console.print(f"\n[bold]{escape(title)}[/]")
    console.print(table)


def _memory(console: Console, need: Need) -> None:
    from rich.markup import escape
    from rich.table import Table

    whose = f" of each of {need.ranks} ranks:" if need.ranks > 1 else " of"
    console.print(f"\n[bold]Memory[/]{whose} {escape(need.what)}", highlight=False)
    table = Table(box=None, show_header=False, padding=(0, 1, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True, justify="right")
    table.add_column(overflow="fold")
    memory = need.memory
    buckets = [("buckets", memory.buckets, "DDP's, to exchange gradients")] if memory.buckets else []
    gradients = "they come as activations go"
    if memory.accumulated:
        gradients = "kept from one microbatch to the next"
    elif memory.released:
        gradients = "the most that is there at once"
    for name, size, text in (
        ("weights", memory.weights, ""),
        ("gradients", memory.gradients, gradients),
        *buckets,
        ("optimizer", memory.optimizer, ""),
        ("activations", memory.activations, "kept for the backward pass"),
        ("temporary", memory.temporary, "in the fullest moment"),
        ("at once", memory.peak, "the fullest moment, without Python, PyTorch and CUDA themselves"),
    ):
        table.add_row(name, _size(size), text)
    if need.free is not None:
        words = "fits" if need.fits else "does not fit"
        if need.largest == (most := MOST_SAMPLES * need.ranks):
            words += f"; so do {most:,} samples, and more were not tried"
        else:
            words += (
                f"; the largest batch that fits is {need.largest}" if need.largest else "; not even one sample does"
            )
        name = "free here" if need.ranks == 1 else "free for each"
        table.add_row(name, _size(need.free), f"{'[green]' if need.fits else '[yellow]'}{words}[/]")
    if need.remedy is not None:
        table.add_row("with", _size(need.remedy.peak), _remedy(need.remedy))
    console.print(table)
    for note in memory.notes:
        console.print(f"  {note}", style="dim", markup=False, highlight=False)


def _remedy(remedy: Remedy) -> str:
    costs = "; ".join(f"{key} ({price})" for key, price in zip(remedy.speedups, remedy.prices, strict=True))
    return f"{costs}: {'[green]fits[/]' if remedy.fits else '[yellow]does not fit either[/]'}"


def _size(size: int) -> str:
    return f"{size / 2**30:,.2f} GiB" if size >= 2**30 / 10 else f"{size / 2**20:,.1f} MiB"
