"""The commands `ablate` and `report`. `cli.py` registers them."""

from __future__ import annotations

import shlex
import signal
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from composer_speedups.errors import RecipeError, UserError

if TYPE_CHECKING:
    from rich.console import Console

    from composer_speedups.ablation.store import Store
    from composer_speedups.recipes import Recipe

__all__ = ["ABLATE_EXAMPLE", "REPORT_EXAMPLE", "ablate", "report", "stop_on_termination"]

ABLATE_EXAMPLE = "Example: composer-speedups ablate demo --seeds 3 --out runs/demo task.max_length=64"
REPORT_EXAMPLE = "Example: composer-speedups report runs/demo, or report runs/before runs/after"


def ablate(
    what: Annotated[
        list[str],
        typer.Argument(metavar="SUITE|RECIPE... [KEY=VALUE]...", help="A suite, or recipes; changes with dotted keys."),
    ],
    seeds: Annotated[int, typer.Option(help="Repetitions, each with another seed.", min=1, max=1000)] = 1,
    out: Annotated[Path | None, typer.Option(help="Folder of the study [default: runs/NAME].")] = None,
    baseline: Annotated[
        str | None, typer.Option(help="Compare with this recipe [default: the suite's, or the first].")
    ] = None,
    timeout: Annotated[float, typer.Option(help="Minutes that one run may take.", min=0.01)] = 120.0,
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
        typer.Option("--equal-batch", help="Also measure each row at the baseline's batch size and learning rate."),
    ] = False,
    profile: Annotated[
        bool,
        typer.Option(help="After each recipe's first run, a few steps more to see where time and memory go."),
    ] = True,
    tune: Annotated[
        bool,
        typer.Option("--tune", help="First find each row's own batch and learning rate; they go to OUT/recipes."),
    ] = False,
    tune_samples: Annotated[int, typer.Option(help="With --tune: samples to train for each row.")] = 4000,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would run, be skipped, and for how long; run nothing.")
    ] = False,
) -> None:
    """Run recipes side by side, each run in a fresh process, and print what each one brings.

    The same command again goes on where it was stopped.
    """
    from composer_speedups.ablation.study import run_study, show_findings
    from composer_speedups.ablation.terminal import make_console

    console = make_console()
    name, recipes, default = _load(what)
    chosen = default
    if plan is not None or equal_batch:
        recipes, chosen = _planned(plan, equal_batch, recipes, baseline, default)
        name = f"{name}-{plan}" if plan else name
        name += "-equal-batch" if equal_batch else ""
    elif baseline:
        chosen = _baseline(baseline, [r.name for r in recipes])
    folder = out if out is not None else Path("runs") / name
    stop_on_termination()
    command = _command(what, seeds, out, baseline, plan, equal_batch, profile, tune_samples if tune else None)
    if tune and dry_run:
        console.print(f"Each row would be tuned first, with {tune_samples:,} samples; the plan shows them untuned.")
    elif tune:
        recipes, chosen = _tuned(recipes, chosen, folder, tune_samples, timeout, command, console)
    result = run_study(
        recipes,
        seeds=_seeds(recipes[0].seed, seeds),
        out=folder,
        name=name,
        baseline=chosen,
        command=command,
        timeout=timeout * 60,
        retry=retry,
        console=console,
        planned=plan is not None,
        dry_run=dry_run,
        inspect=profile,
    )
    if dry_run:
        return
    show_findings(result.findings, console)
    console.print(f"Report: {folder / 'report.html'}", highlight=False, markup=False, soft_wrap=True)
    if result.interrupted:
        console.print("Stopped. The same command goes on from here.", style="yellow")
        raise typer.Exit(130)
    if not any(row["seeds"] for row in result.findings.rows):
        raise typer.Exit(1)


def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a study, such as runs/demo.")],
    other: Annotated[
        Path | None, typer.Argument(metavar="[RUN2]", help="A second study, to compare row by row.")
    ] = None,
) -> None:
    """Print a study's table again, and write its files anew from the store; of two studies, compare them."""
    from composer_speedups.ablation.output import write_all
    from composer_speedups.ablation.study import show_findings
    from composer_speedups.ablation.terminal import make_console

    console = make_console()
    if other is not None:
        _compare(_folder(run), _folder(other), console)
        return
    folder = _folder(run)
    with _opened(folder) as store:
        show_findings(write_all(store, folder), console)
    console.print(f"Report: {folder / 'report.html'}", highlight=False, markup=False, soft_wrap=True)


def _folder(run: Path) -> Path:
    folder = run.parent if run.name == "runs.sqlite" else run
    if not folder.is_dir():
        raise UserError(f"no study in {folder}: there is no such folder")
    return folder


def _opened(folder: Path) -> Store:
    from composer_speedups.ablation.store import Store

    store = Store(folder / "runs.sqlite", create=False)
    if not store.recipes():
        store.close()
        raise UserError(f"no study in {folder}: its store is empty")
    return store


def _compare(one: Path, other: Path, console: Console) -> None:
    from composer_speedups.ablation.compare import caption, compare, comparison_table, differences
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
    console.print(comparison_table(compare(*found), names, console.width))
    console.print(caption(), style="dim")


def _load(what: list[str]) -> tuple[str, list[Recipe], str]:
    """Name, recipes and baseline of what was asked for: one suite, or recipes."""
    from composer_speedups import hardware
    from composer_speedups.recipes import load_recipes, load_suite, suite_names

    overrides = [word for word in what if "=" in word]
    names = [word for word in what if "=" not in word]
    if not names:
        raise RecipeError("name a suite or a recipe: composer-speedups ablate demo")
    suites = [n for n in names if n in suite_names() or _is_suite_file(n)]
    if suites and len(names) > 1:
        raise RecipeError(f"{suites[0]} is a suite: name one suite, or recipes, not both")
    # The speed-ups' arguments are checked in the first fresh process: this one stays free of torch.
    if suites:
        suite = load_suite(suites[0], hardware.hardware(), overrides, check_arguments=False)
        return suite.name, suite.recipes, suite.baseline
    recipes = load_recipes(names, overrides, check_arguments=False)
    return recipes[0].name.rpartition("/")[2] if len(recipes) == 1 else "study", recipes, recipes[0].name


def _is_suite_file(name: str) -> bool:
    """Whether a YAML file is a suite: it lists recipes."""
    path = Path(name)
    if path.suffix not in (".yaml", ".yml") or not path.is_file():
        return False
    from composer_speedups.recipe_yaml import read_file

    value = read_file(path, str(path)).value
    sections = [value, *(value[k].value for k in ("cpu", "cuda") if k in value)] if isinstance(value, dict) else []
    return any(isinstance(section, dict) and "recipes" in section for section in sections)


def _baseline(asked: str, names: list[str]) -> str:
    if asked in names:
        return asked
    ends = [n for n in names if n.rpartition("/")[2] == asked]
    if len(ends) != 1:
        raise RecipeError(f"the baseline {asked!r} is none of the recipes: {', '.join(names)}")
    return ends[0]


def _seeds(first: int, count: int) -> list[int]:
    """The recipe's own seed and those after it."""
    return [(first + n) % 2**32 for n in range(count)]


def _planned(
    plan: str | None, equal: bool, recipes: list[Recipe], baseline: str | None, default: str
) -> tuple[list[Recipe], str]:
    """The rows that a plan makes of the recipes, and their baseline."""
    from composer_speedups.ablation.plans import equal_batch, expand, root
    from composer_speedups.recipes import load_recipe

    names = [recipe.name for recipe in recipes]
    if baseline and baseline not in names and not any(n.endswith(f"/{baseline}") for n in names):
        base = load_recipe(baseline, check_arguments=False)
    elif baseline or len(recipes) > 1:
        wanted = _baseline(baseline, names) if baseline else default
        base = recipes[names.index(wanted)]
    else:
        base = root(recipes[0])
    chosen = base.name
    if plan is not None:
        recipes, chosen = expand(plan, recipes, base)
    elif base.name not in names:
        recipes = [base, *recipes]
    return equal_batch(recipes, base) if equal else recipes, chosen


def _tuned(
    recipes: list[Recipe],
    baseline: str,
    folder: Path,
    samples: int,
    timeout: float,
    command: str,
    console: Console,
) -> tuple[list[Recipe], str]:
    """The rows with a batch and a learning rate of their own; what was tuned before is taken from its file."""
    from composer_speedups.tuning import rows
    from composer_speedups.tuning.tune import Settings

    settings = Settings(samples=samples, timeout=timeout * 60)
    found = rows.tune_rows(recipes, baseline, folder / "recipes", settings, command=command, console=console)
    if found is None:
        console.print("Stopped. The same command goes on from here.", style="yellow")
        raise typer.Exit(130)
    return found


def _command(
    what: list[str],
    seeds: int,
    out: Path | None,
    baseline: str | None,
    plan: str | None = None,
    equal: bool = False,
    profile: bool = True,
    tune: int | None = None,
) -> str:
    words: list[Any] = ["composer-speedups", "ablate", *what, "--seeds", seeds]
    words += ["--out", out] if out is not None else []
    words += ["--baseline", baseline] if baseline is not None else []
    words += ["--plan", plan] if plan is not None else []
    words += ["--equal-batch"] if equal else []
    words += [] if profile else ["--no-profile"]
    words += [] if tune is None else ["--tune", "--tune-samples", tune]
    return shlex.join(map(str, words))


def stop_on_termination() -> None:
    """`kill` ends a study as Ctrl-C does: with everything written that is done."""
    if threading.current_thread() is not threading.main_thread() or sys.platform == "win32":
        return

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, stop)
