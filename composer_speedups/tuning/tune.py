"""Tune one recipe: the batch first, then the learning rate for it, every try in a fresh process."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape

from composer_speedups import hardware, registry
from composer_speedups.ablation.estimate import duration
from composer_speedups.ablation.study import Entries
from composer_speedups.errors import ConflictError, UserError
from composer_speedups.isolation.isolate import Isolation
from composer_speedups.recipes.schema import DESCRIPTIVE
from composer_speedups.recipes.written import check_output, write_recipe
from composer_speedups.tasks.inputs import marks, read_by
from composer_speedups.tuning.progress import Display
from composer_speedups.tuning.rate import optuna_or_error
from composer_speedups.tuning.record import Record
from composer_speedups.tuning.search import BATCH_TRIES, Search
from composer_speedups.tuning.settings import Settings
from composer_speedups.tuning.tries import ENTRIES, Tries
from composer_speedups.tuning.whole import MOST_TRAININGS

if TYPE_CHECKING:
    from composer_speedups.recipes import Recipe

__all__ = ["START", "Tuned", "record_path", "tune"]

START = 5.0  # seconds before the first step of a try, as a guess


@dataclass
class Tuned:
    """What came of it: the recipe that was written, or None if the search was stopped."""

    path: Path
    recipe: Recipe | None


def record_path(out: Path) -> Path:
    """Where the tries of the search for `out` are kept until it is over."""
    return out.with_suffix(".trials.jsonl")


def tune(
    recipe: Recipe,
    *,
    out: Path,
    base: Recipe | None = None,
    extends: str | None = None,
    settings: Settings | None = None,
    overwrite: bool = False,
    command: str = "",
    name: str | None = None,
    console: Console | None = None,
    entries: Entries = ENTRIES,
    isolation: Isolation | None = None,
) -> Tuned:
    """Search what `settings` say for `recipe` on this machine, and write the new recipe to `out`.

    The same call again goes on where the last one was stopped.

    Args:
        recipe: resolved, with the user's overrides.
        out: the new recipe's file.
        base: the recipe as `extends` loads; None writes out every value.
        extends: how `out` names it.
        settings: see `Settings`.
        overwrite: replace `out` if it is there.
        command: how this was asked for; goes into the comments.
        name: of the new recipe; None is the file's.
        console: where progress is shown.
        entries: what runs in the processes.
        isolation: what makes the processes, if the caller has one already.

    Raises:
        SpeedUpUnavailable: the recipe cannot run on this machine.
        UserError: the recipe is wrong, `out` is taken, the record beside it is damaged or of other data, or nothing
            fits.
    """
    settings, console = settings or Settings(), console or Console()
    check_output(out, overwrite)
    if settings.batch:
        _refuse_budget(recipe)
    if settings.constant:
        _refuse_microbatches(recipe)
    if settings.rate:
        optuna_or_error()
    own = isolation is None
    isolation = isolation or Isolation(entries.train, entries.preload)
    record = None
    try:
        console.print("Looking at this machine ...", style="dim")
        tries = Tries(recipe, settings, isolation, entries)
        search = Search(tries)
        plain = recipe.to_dict()
        inputs = marks(read_by(plain))
        what = {
            "recipe": {k: v for k, v in plain.items() if k not in DESCRIPTIVE},
            "settings": _asked(settings),
            "machine": hardware.identity(tries.facts),
        }
        record = Record(record_path(out), what, {path: mark.content for path, mark in inputs.items()})
        _check_again(out, overwrite, record)
        for line in _announcement(search, len(record.trials), out):
            console.print(line, highlight=False, markup=False, soft_wrap=True)
        with Display(console, search.budget) as display:
            tries.begin(record, display, inputs)
            found, evidence, reasons = search.run()
        day = time.strftime("%Y-%m-%d")
        head = [f"{day}: {command}" if command else f"{day}: tuned", f"On {tries.machine}"]
        write_recipe(
            out,
            found,
            base,
            extends,
            description=f"{recipe.description or recipe.name}, tuned"[:500],
            evidence=[*head, "Each try was a fresh process on that machine.", *evidence],
            reasons=reasons,
            overwrite=overwrite,
            name=name,
        )
        record.remove()
        return Tuned(out, found)
    except KeyboardInterrupt:
        if record is not None:
            count = len(record.trials)
            text = f"Stopped; {count} tries are kept in {escape(str(record.path))}"
            console.print(text, style="yellow", highlight=False)
        return Tuned(out, None)
    finally:
        if record is not None:
            record.close()
        if own:
            isolation.close()


def _refuse_microbatches(recipe: Recipe) -> None:
    for key in recipe.speedups:
        if registry.speedup_class(key).at_once:
            raise ConflictError(
                f"{key} takes the batch at once, so that there is no microbatch to search. Leave out "
                f"--constant-effective-batch, or add speedups.{key}=null"
            )


def _refuse_budget(recipe: Recipe) -> None:
    if (budget := recipe.speedups.get("token_budget_batches", {}).get("tokens_per_batch")) is not None:
        raise ConflictError(
            f"token_budget_batches takes {budget:,} tokens a batch, whatever batch_size is, so that there is no batch "
            "to search. Add --no-batch, or speedups.token_budget_batches.tokens_per_batch=null"
        )


def _asked(settings: Settings) -> dict[str, Any]:
    """What a search's tries depend on."""
    asked = settings.asked()
    return asked if settings.rate else asked | {"samples": settings.short}  # None says something of the rate only


def _check_again(out: Path, overwrite: bool, record: Record) -> None:
    """Another process may have ended the same search since `out` was looked at, and have let go of its record."""
    try:
        check_output(out, overwrite)
    except UserError:
        if not record.trials:
            record.remove()
        raise


def _announcement(search: Search, kept: int, out: Path) -> list[str]:
    """What will run, and for about how long."""
    tries, recipe, settings = search.tries, search.recipe, search.settings
    noun = "microbatch" if settings.constant else "batch"
    parts, seconds = [], 0.0
    if settings.batch:
        within = f" within {tries.limit / 1e9:.1f} GB" if tries.limit else ""
        parts.append(f"the {search.goal} {noun}{within}")
        seconds += BATCH_TRIES * START + search.batch_budget * tries.seconds_per_sample
    if settings.rate:
        parts.append(f"the learning rate, {settings.trials} tried in short runs at most")
        seconds += 2 * settings.trials * START + (search.budget - search.batch_budget) * tries.seconds_per_sample
    beside = ""
    if search.budget > settings.short:
        seconds += MOST_TRAININGS * (recipe.task.eval_samples or 0) / 3 * tries.seconds_per_sample  # forward only
        whole = f"{MOST_TRAININGS} whole trainings of {tries.own_samples():,}"
        beside = f" in short runs, and at most {whole} (--samples for less)"
    return [
        f"Tuning {recipe.name}: {'; then '.join(parts)}",
        f"On {tries.machine}",
        *([f"{kept} tries of an earlier start are kept"] if kept else []),
        f"Budget: {settings.short:,} samples{beside}, each try a fresh process, about {duration(seconds)}. Ctrl-C "
        f"keeps what was found",
        f"The recipe goes to {out}",
    ]
