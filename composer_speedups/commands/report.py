"""The command `report`."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from composer_speedups.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console

    from composer_speedups.ablation.store import Store

__all__ = ["REPORT_EXAMPLE", "report"]

REPORT_EXAMPLE = "Example: composer-speedups report runs/demo, or report runs/before runs/after"


def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a study, such as runs/demo.")],
    other: Annotated[
        Path | None, typer.Argument(metavar="[RUN2]", help="A second study, to compare row by row.")
    ] = None,
    write: Annotated[
        bool, typer.Option("--write/--no-write", help="Write table, plots and page anew, or leave the folder alone.")
    ] = True,
) -> None:
    """Print a study's table again, and write its files anew from the store; of two studies, compare them."""
    from composer_speedups.ablation.output import findings, write_all
    from composer_speedups.ablation.terminal import make_console, show_findings

    console = make_console()
    if other is not None:  # writes nothing
        _compare(_folder(run), _folder(other), console)
        return
    folder = _folder(run)
    with _opened(folder, write) as store:
        show_findings(write_all(store, folder) if write else findings(store), console)
    if write:
        console.print(f"Report: {folder / 'report.html'}", highlight=False, markup=False, soft_wrap=True)


def _folder(run: Path) -> Path:
    from composer_speedups.ablation.aside import STORE

    folder = run.parent if run.name == STORE else run
    try:
        if stat.S_ISDIR(os.stat(folder).st_mode):
            return folder
        reason = "it is a file: name the study's folder"
    except FileNotFoundError:
        reason = "there is no such folder"
    except OSError as error:
        reason = error.strerror or str(error)
    raise UserError(f"no study in {folder}: {reason}")


@contextlib.contextmanager
def _opened(folder: Path, write: bool = False) -> Iterator[Store]:
    """The study's store; unless it is to be written, a copy."""
    from composer_speedups.ablation.aside import STORE, copied_aside
    from composer_speedups.ablation.store import Store

    with (
        contextlib.nullcontext(folder) if write else copied_aside(folder) as place,
        Store(place / STORE, create=False) as store,
    ):
        if not store.recipes():
            raise UserError(f"no study in {folder}: its store is empty")
        yield store


def _compare(one: Path, other: Path, console: Console) -> None:
    from composer_speedups.ablation.compare import caption, compare, comparison_table, differences
    from composer_speedups.ablation.names import short_names
    from composer_speedups.ablation.output import findings

    found = []
    for folder in (one, other):
        with _opened(folder) as store:
            found.append(findings(store))
    names = (one.name, other.name) if one.name != other.name else ("first", "second")
    for name, folder, result in zip(names, (one, other), found, strict=True):
        console.print(f"{name}: {folder}", markup=False, highlight=False, soft_wrap=True)
        console.print(f"  {result.sentence}", markup=False, highlight=False)
    changed = differences(*found)
    console.print("\nIn what their environments differ:" if changed else "\nSame environment.")
    for line in changed:
        console.print(f"  {line}", markup=False, highlight=False, soft_wrap=True)
    console.print()
    rows = compare(*found)
    console.print(comparison_table(rows, names, console.width))
    for row, name in zip(rows, short_names([row["recipe"] for row in rows]), strict=True):
        if row["differs"]:
            text = f"{name} differs: {', '.join(row['differs'])}"
            console.print(text, style="yellow", markup=False, highlight=False, soft_wrap=True)
    console.print(caption(), style="dim")
