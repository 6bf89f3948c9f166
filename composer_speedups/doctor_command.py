"""The command `doctor`: prints what `doctor.py` finds. `cli.py` registers it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from composer_speedups.doctor import Finding

__all__ = ["DOCTOR_EXAMPLE", "doctor"]

DOCTOR_EXAMPLE = "Example: composer-speedups doctor --model bert-base-uncased"


def doctor(
    model: Annotated[
        str | None, typer.Option(metavar="PATH|NAME", help="Also look at this model's sizes (Hugging Face).")
    ] = None,
) -> None:
    """Say what this machine supports, which sizes of a model miss its multiples, and what to switch on first."""
    from composer_speedups import hardware
    from composer_speedups.ablation.terminal import make_console
    from composer_speedups.doctor import examine

    console = make_console()
    found = examine(model)
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
    console.print("\n[bold]Switch on first[/] (in a recipe)")
    console.print("speedups:", highlight=False)
    width = max((len(f"  {key}: {_yaml(arguments)}") for key, arguments in found.first.items()), default=0)
    for (key, arguments), reason in zip(found.first.items(), found.reasons, strict=True):
        line = f"  {key}: {_yaml(arguments)}"
        console.print(f"{line:<{width}}  # {reason}", markup=False, highlight=False, soft_wrap=True)
    console.print("What each brings here, measured: composer-speedups ablate demo --seeds 3", highlight=False)


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


def _yaml(arguments: dict[str, object]) -> str:
    return "{" + ", ".join(f"{key}: {value}" for key, value in arguments.items()) + "}"
