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

    from composer_speedups.ablation.output import Findings
    from composer_speedups.ablation.store import Store
    from composer_speedups.recipes import Recipe

__all__ = ["ABLATE_EXAMPLE", "REPORT_EXAMPLE", "ablate", "report", "stop_on_termination"]

ABLATE_EXAMPLE = "Example: composer-speedups ablate demo --seeds 3 --out runs/demo task.max_length=64"
REPORT_EXAMPLE = "Example: composer-speedups report runs/demo, or report runs/before runs/after"
_TIMEOUT = 120.0  # minutes


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
    timeout: Annotated[float, typer.Option(help="Minutes that one run may take.", min=0.01)] = _TIMEOUT,
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
    tune: Annotated[
        bool,
        typer.Option(
            "--tune",
            help="First find each row's own batch and learning rate, the baseline's too; they go to OUT/recipes.",
        ),
    ] = False,
    tune_samples: Annotated[int, typer.Option(help="With --tune: samples to train for each row.")] = 4000,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would run, be skipped, and for how long; run nothing.")
    ] = False,
) -> None:
    """Run recipes side by side, each run in a fresh process, and print what each one brings.

    The same command again goes on where it was stopped.
    """
    from composer_speedups.ablation.plans import equal_batch as with_equal_batch
    from composer_speedups.ablation.study import run_study, show_findings
    from composer_speedups.ablation.terminal import make_console

    console = make_console()
    name, recipes, default = _load(what)
    chosen = default
    if plan is not None or equal_batch:
        recipes, chosen = _planned(plan, recipes, baseline, default, _overrides(what))
        name = f"{name}-{plan}" if plan else name
        name += "-equal-batch" if equal_batch else ""
    elif baseline:
        chosen = _baseline(baseline, [r.name for r in recipes])
    _check_trainings(recipes, chosen, console)
    folder = out if out is not None else Path("runs") / name
    stop_on_termination()
    samples = tune_samples if tune else None
    command = _command(what, seeds, out, baseline, plan, equal_batch, profile, samples, timeout)
    untuned = recipes
    if tune and dry_run:
        console.print(f"Each row would be tuned first, with {tune_samples:,} samples; the plan shows them untuned.")
        if equal_batch:
            console.print("Rows whose batch or rate then differ from the baseline's would be measured at its own, too.")
    elif tune:
        recipes, chosen = _tuned(recipes, chosen, folder, tune_samples, timeout, command, console)
    if equal_batch:
        recipes = with_equal_batch(recipes, next(r for r in recipes if r.name == chosen), untuned)
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
        if tune:
            _say_tuning(untuned, folder, tune_samples, result.findings, console)
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

    overrides = _overrides(what)
    names = [word for word in what if "=" not in word]
    if not names:
        raise RecipeError("name a suite or a recipe: composer-speedups ablate demo")
    suites = [n for n in names if n in suite_names() or _is_suite_file(n)]
    if suites and len(names) > 1:
        raise RecipeError(f"{suites[0]} is a suite: name one suite, or recipes, not both")
    # The speed-ups' arguments are checked in the first fresh process: this one stays free of torch.
    if suites:
        suite = load_suite(suites[0], hardware.suite_section(), overrides, check_arguments=False)
        return suite.name, suite.recipes, suite.baseline
    recipes = load_recipes(names, overrides, check_arguments=False)
    return recipes[0].name.rpartition("/")[2] if len(recipes) == 1 else "study", recipes, recipes[0].name


def _overrides(what: list[str]) -> list[str]:
    return [word for word in what if "=" in word]


def _is_suite_file(name: str) -> bool:
    """Whether a YAML file is a suite: it lists recipes."""
    path = Path(name)
    if path.suffix not in (".yaml", ".yml") or not path.is_file():
        return False
    from composer_speedups.recipe_yaml import read_file
    from composer_speedups.recipes import SUITE_SECTIONS

    value = read_file(path, str(path)).value
    sections = [value, *(value[k].value for k in SUITE_SECTIONS if k in value)] if isinstance(value, dict) else []
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


# A row may differ from the baseline in these, as a user may want to see what they cost.
_PADDING = ("padding", "pad_to_multiple_of")


def _check_trainings(recipes: list[Recipe], baseline: str, console: Console) -> None:
    """Refuse a row with another task than the baseline's; warn of one that pads otherwise or trains another length."""
    base = next(recipe for recipe in recipes if recipe.name == baseline)
    wanted = base.task.model_dump()
    warnings: dict[str, list[str]] = {}
    for recipe in recipes:
        for key, value in recipe.task.model_dump().items():
            if value == wanted[key]:
                continue
            words, remedy = f"task.{key} {value}", f"add task.{key}={_yaml(wanted[key])}"
            if key not in _PADDING:
                raise UserError(
                    f"{recipe.name} has {words}, the baseline {baseline} {wanted[key]}: their speeds cannot be "
                    f"compared. Name another baseline, or {remedy}"
                )
            text = f"{words}, the baseline {wanted[key]}: speeds differ by that, too. To compare the rest, {remedy}"
            warnings.setdefault(text, []).append(recipe.name)
        if not _as_long(recipe, base):
            text = (
                f"duration {recipe.duration}, the baseline {base.duration}: wall-clock and quality cannot be "
                f"compared. For one length, add duration={base.duration}"
            )
            warnings.setdefault(text, []).append(recipe.name)
    for text, names in warnings.items():
        console.print(f"{', '.join(names)}: {text}", style="yellow", highlight=False, markup=False, soft_wrap=True)


def _as_long(recipe: Recipe, base: Recipe) -> bool:
    """Whether both train for the same duration, or as many samples, as far as whole batches allow."""
    from composer_speedups.recipe_schema import in_samples

    if recipe.duration == base.duration:
        return True
    if "ep" in (recipe.duration[-2:], base.duration[-2:]):  # how many samples an epoch has is not known here
        return False
    one, other = (in_samples(r.duration, 0, r.batch_size) for r in (recipe, base))
    return abs(one - other) <= max(recipe.batch_size, base.batch_size) / 2


def _yaml(value: Any) -> str:
    return "null" if value is None else str(value)


def _planned(
    plan: str | None, recipes: list[Recipe], baseline: str | None, default: str, overrides: list[str]
) -> tuple[list[Recipe], str]:
    """The rows that a plan makes of the recipes, and their baseline."""
    from composer_speedups.ablation.plans import expand, root

    names = [recipe.name for recipe in recipes]
    if baseline and baseline not in names and not any(n.endswith(f"/{baseline}") for n in names):
        base = _outside(baseline, overrides)
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
    return recipes, chosen


def _outside(baseline: str, overrides: list[str]) -> Recipe:
    """A baseline that is none of the recipes, with the overrides that hold for them.

    Those of a speed-up's arguments, and its removal, are for the recipes that have it.
    """
    from composer_speedups.recipe_merge import COMMAND_LINE, SECTIONS
    from composer_speedups.recipe_yaml import read_text
    from composer_speedups.recipes import load_recipe

    plain = load_recipe(baseline, check_arguments=False)

    def meant(override: str) -> bool:
        key, _, value = override.partition("=")
        section, *path = key.strip().split(".")
        if section not in SECTIONS or not path or path[0] in getattr(plain, section):
            return True
        return len(path) == 1 and read_text(value, COMMAND_LINE, lines=False).value not in (None, False)

    return load_recipe(baseline, [o for o in overrides if meant(o)], check_arguments=False)


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


def _say_tuning(recipes: list[Recipe], folder: Path, samples: int, found: Findings, console: Console) -> None:
    """How long the tuning would take that a dry run leaves out."""
    from composer_speedups import hardware
    from composer_speedups.ablation.estimate import duration
    from composer_speedups.tuning.rows import expected_tuning
    from composer_speedups.tuning.tune import Settings

    skipped = {run.recipe for run in found.runs if run.status == "skipped"}
    rows = [recipe for recipe in recipes if recipe.name not in skipped]
    peaks = found.study.get("peaks") or {}
    count, seconds = expected_tuning(rows, folder / "recipes", Settings(samples=samples), peaks, hardware.hardware())
    about = f", about {duration(seconds)}" if count and seconds is not None else ""
    console.print(f"To tune before that: {count} rows, {samples:,} samples each{about}", highlight=False)


def _command(
    what: list[str],
    seeds: int,
    out: Path | None,
    baseline: str | None,
    plan: str | None = None,
    equal: bool = False,
    profile: bool = True,
    tune: int | None = None,
    timeout: float = _TIMEOUT,
) -> str:
    words: list[Any] = ["composer-speedups", "ablate", *what, "--seeds", seeds]
    words += ["--out", out] if out is not None else []
    words += ["--baseline", baseline] if baseline is not None else []
    words += ["--plan", plan] if plan is not None else []
    words += ["--equal-batch"] if equal else []
    words += [] if profile else ["--no-profile"]
    words += [] if tune is None else ["--tune", "--tune-samples", tune]
    words += [] if timeout == _TIMEOUT else ["--timeout", f"{timeout:g}"]
    return shlex.join(map(str, words))


def stop_on_termination() -> None:
    """`kill` ends a study as Ctrl-C does: with everything written that is done."""
    if threading.current_thread() is not threading.main_thread() or sys.platform == "win32":
        return

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, stop)
