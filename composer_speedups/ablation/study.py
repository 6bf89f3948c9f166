"""Make a study: plan it, run it in fresh processes, keep what is found, and show how far it is."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console
from rich.markup import escape

from composer_speedups import hardware
from composer_speedups.ablation.aside import STORE, copied_aside
from composer_speedups.ablation.estimate import duration, expected_seconds, remaining_seconds
from composer_speedups.ablation.isolate import Isolation, Outcome
from composer_speedups.ablation.jobs import PRELOAD
from composer_speedups.ablation.look import look
from composer_speedups.ablation.names import short_names
from composer_speedups.ablation.output import Findings, findings, write_all
from composer_speedups.ablation.plan import interleave
from composer_speedups.ablation.progress import Display
from composer_speedups.ablation.rows import precision
from composer_speedups.ablation.store import LEASE_SECONDS, OPEN, Run, Store, StoreError
from composer_speedups.ablation.terminal import make_console, terminal_table
from composer_speedups.ablation.words import notes
from composer_speedups.errors import UserError
from composer_speedups.tasks.inputs import marks, read_by

__all__ = ["TIMEOUT", "Entries", "Settings", "Study", "StudyResult", "plan_study", "run_study", "show_findings"]

TIMEOUT = 2 * 3600.0  # seconds that one run may take
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
        ranks: processes that train a recipe together (DDP). With more than one, nothing is inspected or verified.
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
) -> Iterator[_Work]:
    """The study's store in `place`, with all that is asked for in it, and what was said of it."""
    entries, console = settings.entries, console or make_console()
    with (
        nullcontext(isolation) if isolation else Isolation(entries.train, entries.preload) as isolation,
        Store(place / STORE) as store,
    ):
        _check_stored_ranks(settings.ranks, store)
        recipes = study.begin(store)
        if settings.retry:
            store.retry(seeds=study.seeds)
        work = _Work(store, isolation, study, settings, recipes, console)
        if work.left():
            work.look()
            work.announce()
        else:
            console.print(f"Nothing left to run: {escape(str(study.folder))} is complete.")
            work.announce_others()
        yield work


class _Work:
    """One process's part in a study."""

    def __init__(
        self,
        store: Store,
        isolation: Isolation,
        study: Study,
        settings: Settings,
        recipes: dict[str, dict[str, Any]],
        console: Console,
    ) -> None:
        self.store, self.isolation, self.study, self.settings = store, isolation, study, settings
        self.recipes, self.seeds, self.console = recipes, study.seeds, console
        self.environment: int | None = None
        self.facts: dict[str, Any] = {}
        self.expected: dict[str, float | None] = {}
        self.short = dict(zip(recipes, short_names(list(recipes)), strict=True))

    def left(self) -> int:
        return sum(count for status, count in self.store.counts(self.seeds).items() if status in OPEN)

    def runs(self) -> list[Run]:
        """What is finished, and what is left to do: runs of seeds that only an earlier command asked for are not."""
        return [run for run in self.store.runs() if run.status not in OPEN or run.seed in self.seeds]

    def announce_others(self) -> None:
        """Say what an earlier command asked for, and this one does not."""
        count = sum(run.status in OPEN and run.seed not in self.seeds for run in self.store.runs())
        if count:
            left = f"{'are' if count > 1 else 'is'} left undone"
            self.console.print(f"{_counted(count, 'run')} of other seeds, asked for by an earlier command, {left}")

    def look(self) -> None:
        """Ask a fresh process about the machine and the recipes."""
        self.console.print("Looking at this machine ...", style="dim")
        known = self.store.study().get("peaks") or {}
        kind = hardware.hardware()
        wanted = {name: p for name, r in self.recipes.items() if (p := precision(r, kind)) not in known}
        ranks = self.settings.ranks
        payload = {
            "recipes": list(self.study.recipes),
            "peaks": wanted,
            "planned": self.study.planned,
            "ranks": ranks,
        }
        answer = look(self.isolation, payload, self.settings.entries.survey, 600)
        self.facts = answer["environment"]
        _check_ranks(ranks, self.facts)
        for before in self.store.environments().values():
            difference = hardware.same_machine(before, self.facts)
            if difference:
                raise StoreError(
                    f"{self.study.folder} was measured on another machine or installation ({difference}): "
                    f"its speeds cannot be compared with this one's. Choose another --out"
                )
        self.environment = self.store.add_environment(self.facts)
        peaks = known | answer["peaks"]
        if answer["peaks"]:
            self.store.note(peaks=peaks)
        for unmeasured, reason in answer["unmeasured"].items():
            self.console.print(f"No MFU in {unmeasured}: its matmul cannot be measured here ({escape(reason)})")
        for name, reason in answer["skip"].items():
            self.store.skip(name, reason)
        peaks = hardware.peaks_at_work(peaks, self.facts)
        self.expected = {n: self.settings.expected or expected_seconds(r, peaks, kind) for n, r in self.recipes.items()}

    def announce(self) -> None:
        """Say what will run, on what, and for about how long."""
        runs, seeds = self.runs(), self.seeds
        left = [run for run in runs if run.status in OPEN]
        skipped = {run.recipe: run.reason for run in runs if run.status == "skipped"}
        finished = sum(run.status not in (*OPEN, "skipped") for run in runs)
        say = self.console.print
        what = f"{_counted(len(self.recipes), 'recipe')}, {_counted(len(seeds), 'seed')}"
        say(f"[bold]{escape(self.study.name)}[/]: {what}")
        together = f", {self.settings.ranks} ranks" if self.settings.ranks > 1 else ""
        say(f"On {escape(hardware.summary(self.facts))}{together}")
        if finished:
            say(f"{_counted(finished, 'run')} {'are' if finished > 1 else 'is'} finished already, and kept")
        self.announce_others()
        for recipe, reason in skipped.items():
            say(f"  skipped [dim]{escape(self.short[recipe])}: {escape(reason)}[/]")
        if self.isolation.note:
            say(f"  [dim]{escape(self.isolation.note)}[/]")
        seconds = remaining_seconds(runs, self.expected)
        about = f", about {duration(seconds)}" if seconds is not None else ""
        which = ", ".join(dict.fromkeys(self.short[run.recipe] for run in left))
        say(f"To run: {_counted(len(left), 'run')}{about}: {escape(which)}")
        say(f"Results go to {escape(str(self.study.folder))}", soft_wrap=True)

    def show_plan(self) -> None:
        """The runs that are left, in the order in which they would be made."""
        runs = self.runs()
        done = [run for run in runs if run.status not in OPEN]
        for number, run in enumerate((run for run in runs if run.status in OPEN), start=1):
            alone = remaining_seconds([*done, run], self.expected)
            about = "" if alone is None else f", about {duration(alone)}"
            recipe = self.recipes[run.recipe]
            batch = f"batch {recipe.get('batch_size')}, LR {recipe.get('learning_rate'):g}"
            line = f"  {number}. {self.short[run.recipe]} seed {run.seed}: {batch}{about}"
            self.console.print(escape(line), highlight=False, no_wrap=True, overflow="ellipsis")
        self.console.print("Nothing was run: this was a --dry-run.")

    def work(self) -> None:
        """Take runs until none is left; write the outputs after each."""
        with Display(self.console, self.short) as display:
            while not self._too_late():
                run = self.store.claim(self.environment, self.seeds)
                if run is None:
                    if not self.left():
                        return
                    # Another process has the last runs; if it dies, its claim ends, and the run comes here.
                    display.waiting("another process is at the last runs of this study")
                    time.sleep(1.0)
                    continue
                self._one(run, display)
                self._write_up()

    def _write_up(self) -> None:
        """Write the outputs so far. What cannot be written now can be later: the runs are in the store."""
        try:
            write_all(self.store, Path(self.study.folder), pictures=False)
        except OSError as error:
            self.console.print(
                f"{self.study.folder} cannot be written to now ({error.strerror}); the runs go on into runs.sqlite",
                style="yellow",
                markup=False,
            )

    def _time_limit(self) -> float | None:
        """Seconds that the next run may take."""
        left = None if self.settings.until is None else max(0.0, self.settings.until - time.monotonic())
        return min((limit for limit in (self.settings.timeout, left) if limit is not None), default=None)

    def _too_late(self) -> bool:
        """Whether the time is over, or too short for the next run, judged by how long its like took."""
        if self.settings.until is None:
            return False
        runs = self.runs()
        waiting = [run for run in runs if run.status in ("pending", "interrupted")]
        done = [run for run in runs if run.status not in OPEN]
        alone = remaining_seconds([*done, waiting[0]], self.expected) if waiting and done else None
        return time.monotonic() + (alone or 0.0) >= self.settings.until

    def _one(self, run: Run, display: Display) -> None:
        runs = self.runs()
        display.start(run, runs, self.expected)
        renewed = time.monotonic()

        def tick() -> None:
            nonlocal renewed
            display.tick()
            if time.monotonic() - renewed > LEASE_SECONDS / 6:
                renewed = time.monotonic()
                self.store.renew(run)

        # Once a recipe is enough: neither where time and memory go nor what is computed depends on the seed.
        looked, verified = (
            any(r.recipe == run.recipe and r.result.get(key) for r in runs) for key in ("memory", "numerics")
        )
        recipe = self.recipes[run.recipe]
        known = self.store.inputs()
        ranks = self.settings.ranks
        alone = ranks == 1  # what looks inside is about one process
        payload = {
            "recipe": recipe,
            "seed": run.seed,
            "inspect": self.settings.inspect and alone and not looked,
            "verify": self.settings.verify and alone and not verified,
            "inputs": {path: known[path] for path in read_by(recipe) if path in known},
        }
        try:
            outcome = self.isolation.run(
                payload, timeout=self._time_limit(), report=display.progress, tick=tick, ranks=ranks
            )
        except BaseException as error:
            why = str(error) if isinstance(error, UserError) else "stopped by the user"
            self.store.finish(run, "interrupted", why, None, "")
            raise
        status, reason = _judged(outcome)
        if status == "timeout" and self.settings.until is not None and time.monotonic() >= self.settings.until:
            self.store.finish(run, "interrupted", "the time for the study was over", None, "")
            return
        if isinstance(outcome.value, dict):
            outcome.value |= {"overlapped": outcome.overlapped, "waited": outcome.waited}
        if not self.store.finish(run, status, reason, outcome.value, outcome.log):
            display.taken_over(run)
            return
        display.finished(run, status, reason, outcome)
        if status == "skipped":  # what this machine lacks, it lacks for every seed
            self.store.skip(run.recipe, reason)


def _check_stored_ranks(ranks: int, store: Store) -> None:
    """Before anything is changed: what other numbers of ranks have measured is no part of this study."""
    before = next((facts.get("ranks") or 1 for facts in store.environments().values()), ranks)
    if before != ranks:
        raise StoreError(
            f"{store.path.parent} was measured with {_counted(before, 'rank')}, and this is {ranks}: use "
            f"--ranks {before}, or another --out"
        )


def _check_ranks(ranks: int, facts: Mapping[str, Any]) -> None:
    """One GPU, or at least one core, for each."""
    gpus = len(facts.get("gpus") or [])
    have, what = (gpus, "GPU") if gpus else ((facts.get("cpu") or {}).get("usable") or ranks, "core")
    if ranks > have:
        raise UserError(f"{ranks} ranks need a {what} each, this machine has {have}: use --ranks {have}")


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _judged(outcome: Outcome) -> tuple[str, str]:
    """What the run says of itself goes before what its process did."""
    value = outcome.value
    if isinstance(value, dict) and "status" in value:
        return value["status"], value.get("reason", "")
    return outcome.status, outcome.reason


def show_findings(found: Findings, console: Console) -> None:
    """Print conditions, table, notes and verdict."""
    console.print()
    for line in found.conditions:
        console.print(line, style="dim", soft_wrap=False, markup=False, highlight=False)
    console.print()
    console.print(terminal_table(found.rows, console.width))
    console.print()
    for line in notes(found.rows):
        console.print(f"- {line}", markup=False, highlight=False)
    console.print(found.sentence, style="bold", markup=False, highlight=False)
