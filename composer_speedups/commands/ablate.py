"""The command `ablate`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from composer_speedups.ablation.plan import TIMEOUT
from composer_speedups.commands.typed import typed
from composer_speedups.termination import stop_on_termination
from composer_speedups.verification.findings import NOT_VERIFIED

if TYPE_CHECKING:
    from rich.console import Console

    from composer_speedups.ablation.output import Findings
    from composer_speedups.recipes import Recipe

__all__ = ["ABLATE_EXAMPLE", "ablate"]

ABLATE_EXAMPLE = "Example: composer-speedups ablate demo --seeds 3 --out runs/demo task.max_length=64"


def ablate(
    context: typer.Context,
    what: Annotated[
        list[str],
        typer.Argument(metavar="SUITE|RECIPE... [KEY=VALUE]...", help="A suite, or recipes; changes with dotted keys."),
    ],
    seeds: Annotated[int, typer.Option(help="Repetitions, each with another seed.", min=1, max=1000)] = 1,
    out: Annotated[Path | None, typer.Option(help="Folder of the study [default: runs/NAME].")] = None,
    baseline: Annotated[
        str | None, typer.Option(help="Compare with this recipe [default: the suite's, or the first].")
    ] = None,
    timeout: Annotated[float, typer.Option(help="Minutes that one run may take.", min=0.01)] = TIMEOUT / 60,
    retry: Annotated[bool, typer.Option("--retry", help="Make failed and skipped runs again.")] = False,
    plan: Annotated[
        str | None,
        typer.Option(
            metavar="ladder|leave-one-out|one-at-a-time|pairs",
            help="Make the rows out of the speed-ups of a recipe or suite: each added to those before; "
            "the fullest recipe without each; the baseline with each alone; and with every two.",
        ),
    ] = None,
    equal_batch: Annotated[
        bool,
        typer.Option(
            "--equal-batch",
            help="Also measure each row at the baseline's batch size and learning rate; with --tune, at those found "
            "for the baseline.",
        ),
    ] = False,
    profile: Annotated[
        bool,
        typer.Option(help="After each recipe's first run, a few steps more to see where time and memory go."),
    ] = True,
    verify: Annotated[
        bool,
        typer.Option("--verify", help="After each recipe's first run, compare its numbers with float64, too."),
    ] = False,
    ranks: Annotated[
        int,
        typer.Option(help="Processes that train a recipe together (DDP): one for each GPU, or for some cores.", min=1),
    ] = 1,
    tune: Annotated[
        bool,
        typer.Option(
            "--tune",
            help="First find each row's own batch and learning rate, the baseline's too; they go to OUT/recipes.",
        ),
    ] = False,
    tune_samples: Annotated[int, typer.Option(help="With --tune: samples to train for each row.", min=1)] = 4000,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would run, be skipped, and for how long; run nothing.")
    ] = False,
) -> None:
    """Run recipes side by side, each run in a fresh process, and print what each one brings.

    The same command again goes on where it was stopped.
    """
    from composer_speedups.ablation.plans import equal_batch as with_equal_batch
    from composer_speedups.ablation.selection import check_trainings, find_baseline, load_rows, overrides_in, plan_rows
    from composer_speedups.ablation.study import Settings, Study, plan_study, run_study
    from composer_speedups.ablation.terminal import make_console, show_findings

    console = make_console()
    name, recipes, default = load_rows(what)
    if out is not None and sum("=" not in word for word in what) > 1:
        name = out.resolve().name  # recipes have no name in common
    chosen = default
    if plan is not None or equal_batch:
        recipes, chosen = plan_rows(plan, recipes, baseline, default, overrides_in(what))
        name = f"{name}-{plan}" if plan else name
        name += "-equal-batch" if equal_batch else ""
    elif baseline:
        chosen = find_baseline(baseline, recipes, overrides_in(what))
    check_trainings(recipes, chosen, console)
    folder = out if out is not None else Path("runs") / name
    stop_on_termination()
    settled = {"--seeds": seeds} | ({"--tune-samples": tune_samples} if tune else {})
    command = typed(context, settled, without=("--retry", "--dry-run"))
    untuned = recipes
    if tune and dry_run:
        console.print(f"Each row would be tuned first, with {tune_samples:,} samples; the plan shows them untuned.")
        if equal_batch:
            console.print("Rows whose batch or rate then differ from the baseline's would be measured at its own, too.")
    elif tune:
        recipes, chosen = _tuned(recipes, chosen, folder, tune_samples, timeout, ranks, command, console)
    if equal_batch:
        recipes = with_equal_batch(recipes, next(r for r in recipes if r.name == chosen), untuned)
    wanted = _seeds(recipes[0].seed, seeds)
    study = Study(recipes, wanted, folder, name, chosen, command, planned=plan is not None)
    settings = Settings(timeout=timeout * 60, retry=retry, inspect=profile, verify=verify, ranks=ranks)
    if dry_run:
        found = plan_study(study, settings, console=console)
        if tune:
            _say_tuning(untuned, folder, tune_samples, ranks, found, console)
        return
    result = run_study(study, settings, console=console)
    show_findings(result.findings, console)
    # What cannot run on this machine would be skipped again.
    if any({*wanted} & {*row["failed"]} for row in result.findings.rows if row["status"] != "skipped"):
        console.print("The same command with --retry makes failed runs again.")
    if verify:
        _say_not_compared(result.findings, console)
    console.print(f"Report: {folder / 'report.html'}", highlight=False, markup=False, soft_wrap=True)
    if result.interrupted:
        console.print("Stopped. The same command goes on from here.", style="yellow")
        raise typer.Exit(130)
    if not any(row["seeds"] for row in result.findings.rows):
        raise typer.Exit(1)


def _say_not_compared(findings: Findings, console: Console) -> None:
    """Which rows have no comparison with float64 though one was asked for, and why."""
    say = partial(console.print, markup=False, highlight=False, soft_wrap=True)
    rows = [row for row in findings.rows if row["seeds"] and not row["numerics"]]
    failed = {row["recipe"]: w for row in rows for w in row["warnings"] if w.startswith(NOT_VERIFIED)}
    for name, why in failed.items():
        say(f"{name}: {why}")
    if late := [row["recipe"] for row in rows if row["recipe"] not in failed]:
        say(f"No numbers were compared yet of {', '.join(late)}")


def _seeds(first: int, count: int) -> list[int]:
    """The recipe's own seed and those after it."""
    return [(first + n) % 2**32 for n in range(count)]


def _tuned(
    recipes: list[Recipe],
    baseline: str,
    folder: Path,
    samples: int,
    timeout: float,
    ranks: int,
    command: str,
    console: Console,
) -> tuple[list[Recipe], str]:
    """The rows with a batch and a learning rate of their own; what was tuned before is taken from its file."""
    from composer_speedups.tuning import rows
    from composer_speedups.tuning.settings import Settings

    settings = Settings(samples=samples, timeout=timeout * 60, ranks=ranks)
    found = rows.tune_rows(recipes, baseline, folder / "recipes", settings, command=command, console=console)
    if found is None:
        console.print("Stopped. The same command goes on from here.", style="yellow")
        raise typer.Exit(130)
    return found


def _say_tuning(
    recipes: list[Recipe], folder: Path, samples: int, ranks: int, found: Findings, console: Console
) -> None:
    """How long the tuning would take that a dry run leaves out."""
    from composer_speedups import hardware
    from composer_speedups.ablation.estimate import duration
    from composer_speedups.tuning.rows import expected_tuning
    from composer_speedups.tuning.settings import Settings

    skipped = {run.recipe for run in found.runs if run.status == "skipped"}
    rows = [recipe for recipe in recipes if recipe.name not in skipped]
    peaks = hardware.peaks_at_work(found.study.get("peaks") or {}, found.environment)
    settings = Settings(samples=samples, ranks=ranks)
    count, seconds = expected_tuning(rows, folder / "recipes", settings, peaks, hardware.hardware())
    about = f", about {duration(seconds)}" if count and seconds is not None else ""
    console.print(f"To tune before that: {count} rows, {samples:,} samples each{about}", highlight=False)
