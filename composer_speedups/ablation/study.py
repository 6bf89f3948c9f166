"""Make a study: plan it, run it in fresh processes, keep what is found, and show how far it is."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console
from rich.markup import escape

from composer_speedups.ablation.aside import STORE, copied_aside
from composer_speedups.ablation.jobs import PRELOAD
from composer_speedups.ablation.output import Findings, findings, write_all
from composer_speedups.ablation.plan import TIMEOUT, interleave
from composer_speedups.ablation.store import Store
from composer_speedups.ablation.terminal import make_console
from composer_speedups.ablation.work import Work, check_stored_ranks
from composer_speedups.errors import UserError
from composer_speedups.isolation.isolate import Isolation
from composer_speedups.tasks.inputs import marks, read_by

__all__ = ["Entries", "Settings", "Study", "StudyResult", "plan_study", "run_study"]

_JOBS = "composer_speedups.ablation.jobs"


class _Recipe(Protocol):
    @property
    def name(self) -> str: ...

    def to_dict(self) -> dict[str, Any]: ...


@dataclass(frozen=True)
class Entries:
    """What runs in the fresh processes. Tests put something quicker in its place."""

    train: str = f"{_JOBS}:train"
    survey: str = f"{_JOBS}:survey"
    verify: str = f"{_JOBS}:verify"
    look_inside: str = f"{_JOBS}:look_inside"
    preload: tuple[str, ...] = PRELOAD


@dataclass(frozen=True)
class Study:
    """What is compared.

    Attributes:
        recipes: in the order of the table.
        seeds: of the repetitions.
        folder: where the results are.
        name: shown above the table.
        baseline: the recipe that the others are compared with; "" is the first.
        command: how to make this study again; goes into the report.
        planned: the recipes were put together by a plan; those that contradict themselves are skipped.

    Raises:
        UserError: there is nothing to study, two recipes have one name, or the baseline is none of them.
    """

    recipes: Sequence[_Recipe]
    seeds: Sequence[int]
    folder: Path
    name: str = "study"
    baseline: str = ""
    command: str = ""
    planned: bool = False

    def __post_init__(self) -> None:
        if not self.recipes:
            raise UserError("nothing to study: name a suite or a recipe")
        if not self.seeds:
            raise UserError("nothing to study: no seeds. Write --seeds 1 or more")
        names = [recipe.name for recipe in self.recipes]
        twice = sorted({n for n in names if names.count(n) > 1})
        if twice:
            raise UserError(
                f"more than one recipe is called {', '.join(twice)}. Keep one, or give files a name: of their own"
            )
        if self.baseline and self.baseline not in names:
            raise UserError(f"the baseline {self.baseline} is none of the recipes: {', '.join(names)}")

    def begin(self, store: Store) -> dict[str, dict[str, Any]]:
        """Write into `store` what is to be run, as far as it is not there; the recipes, plain, by their names."""
        recipes = {recipe.name: recipe.to_dict() for recipe in self.recipes}
        baseline = self.baseline or next(iter(recipes))
        about = {"name": self.name, "baseline": baseline, "command": self.command, "created": time.time()}
        read = {path: kind for r in recipes.values() for path, kind in read_by(r).items()}
        store.begin(about, list(recipes.items()), marks(read))
        if self.command:
            store.note(command=self.command)  # the latest: it may ask for more seeds than the first did
        # The order of the baseline comes first: everything is compared with it.
        store.plan(interleave([baseline, *(name for name in recipes if name != baseline)], self.seeds))
        return recipes


@dataclass(frozen=True)
class Settings:
    """How runs are made.

    Attributes:
        timeout: seconds after which a run is stopped; None is never.
        retry: make runs again that had failed or were skipped.
        inspect: after the first run of each recipe, look where a step's time and the memory go.
        verify: then compare the numbers of each recipe with float64, too.
        ranks: processes that train a recipe together (DDP).
        until: a time of `time.monotonic`, after which no run starts; one that is not over by then is left for the next
            call, and so is one that would not be.
        expected: seconds of one run, where the caller knows better than the guess from the recipe.
        entries: what runs in the processes.
    """

    timeout: float | None = TIMEOUT
    retry: bool = False
    inspect: bool = True
    verify: bool = False
    ranks: int = 1
    until: float | None = None
    expected: float | None = None
    entries: Entries = field(default_factory=lambda: Entries())  # by name, when made: tests put others in its place


@dataclass
class StudyResult:
    """What came of it."""

    folder: Path
    findings: Findings
    interrupted: bool = False


def run_study(
    study: Study,
    settings: Settings | None = None,
    *,
    console: Console | None = None,
    isolation: Isolation | None = None,
) -> StudyResult:
    """Run every recipe with every seed, each in a fresh process, and write the results into the study's folder.

    The same call again goes on where the last one stopped, however it was stopped. Two calls at once share
    the work.

    Args:
        study: what is compared.
        settings: how; None is the usual.
        console: where progress is shown.
        isolation: what makes the processes, if the caller has one already.

    Raises:
        UserError: a recipe is wrong, or the folder cannot be used.
    """
    settings = settings or Settings()
    folder = Path(study.folder)
    with _opened(study, settings, folder, console, isolation) as work:
        interrupted = False
        try:
            work.work()
        except KeyboardInterrupt:
            interrupted = True
        try:
            found = write_all(work.store, folder)
        except OSError as error:
            raise UserError(
                f"cannot write into {folder}: {error.strerror}. All runs are in its runs.sqlite: mend that, then "
                f"composer-speedups report {folder}"
            ) from error
    return StudyResult(folder, found, interrupted)


def plan_study(study: Study, settings: Settings | None = None, *, console: Console | None = None) -> Findings:
    """Say what would run, what would be skipped and why, and how long it would take; run and write nothing.

    Args:
        study: what would be compared.
        settings: how it would be run; None is the usual.
        console: where it is said.

    Returns:
        What is known so far.
    """
    folder = Path(study.folder)
    with (
        copied_aside(folder) as copy,
        _opened(study, settings or Settings(), copy, console, None) as work,
    ):
        work.show_plan()
        return findings(work.store)


@contextmanager
def _opened(
    study: Study, settings: Settings, place: Path, console: Console | None, isolation: Isolation | None
) -> Iterator[Work]:
    """The study's store in `place`, with all that is asked for in it, and what was said of it."""
    entries, console = settings.entries, console or make_console()
    with (
        nullcontext(isolation) if isolation else Isolation(entries.train, entries.preload) as isolation,
        Store(place / STORE) as store,
    ):
        check_stored_ranks(settings.ranks, store)
        recipes = study.begin(store)
        if settings.retry:
            store.retry(seeds=study.seeds)
        work = Work(store, isolation, study, settings, recipes, console)
        if work.left():
            work.look()
            work.announce()
        else:
            console.print(f"Nothing left to run: {escape(str(study.folder))} is complete.")
            work.announce_others()
            if work.afterwards.left():
                work.look()  # for what is answered must be of the machine that the runs were made on
        yield work
