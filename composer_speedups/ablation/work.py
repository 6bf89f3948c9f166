"""One process's part in a study: look at the machine, make the runs that are left, and show how far it is."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape

from composer_speedups import hardware
from composer_speedups.ablation.afterwards import Afterwards
from composer_speedups.ablation.estimate import duration, expected_seconds, remaining_seconds
from composer_speedups.ablation.names import short_names
from composer_speedups.ablation.output import write_all
from composer_speedups.ablation.progress import Display
from composer_speedups.ablation.rows import precision
from composer_speedups.ablation.store import LEASE_SECONDS, OPEN, WAITING, Run, Store, StoreError
from composer_speedups.errors import UserError
from composer_speedups.isolation.isolate import Isolation
from composer_speedups.isolation.look import look
from composer_speedups.tasks.inputs import read_by

if TYPE_CHECKING:
    from composer_speedups.ablation.study import Settings, Study

__all__ = ["Work", "check_stored_ranks"]

_TWO = (
    "Another process of this machine makes runs of this study, too. They share the work, slow each other, and are "
    "marked (†): for speeds to compare, stop one of the two commands."
)


class Work:
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
        self.afterwards = Afterwards(self)

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
        told = False
        with Display(self.console, self.short) as display:
            while not self._too_late():
                self.afterwards.ask(display)
                run = self.store.claim(self.environment, self.seeds)
                if run is not None and not told and self.store.shared():
                    told = True
                    self.console.print(_TWO, style="yellow", soft_wrap=True)
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

    def time_limit(self) -> float | None:
        """Seconds that the next run may take."""
        left = None if self.settings.until is None else max(0.0, self.settings.until - time.monotonic())
        return min((limit for limit in (self.settings.timeout, left) if limit is not None), default=None)

    def _too_late(self) -> bool:
        """Whether the time is over, or too short for the next run, judged by how long its like took."""
        if self.settings.until is None:
            return False
        runs = self.runs()
        waiting = [run for run in runs if run.status in WAITING]
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

        # Once a recipe is enough: where time and memory go does not depend on the seed. Of several ranks one may fail
        # there while others wait for it, which would cost the run: they look inside afterwards.
        looked = any(r.recipe == run.recipe and r.result.get("memory") for r in runs)
        ranks = self.settings.ranks
        payload = self.payload(run) | {"inspect": self.settings.inspect and ranks == 1 and not looked}
        try:
            outcome = self.isolation.run(
                payload, timeout=self.time_limit(), report=display.progress, tick=tick, ranks=ranks
            )
        except BaseException as error:
            why = str(error) if isinstance(error, UserError) else "stopped by the user"
            self.store.finish(run, "interrupted", why, None, "")
            raise
        status, reason = outcome.verdict
        if status == "timeout" and self.settings.until is not None and time.monotonic() >= self.settings.until:
            self.store.finish(run, "interrupted", "the time for the study was over", None, "")
            return
        if outcome.facts:
            outcome.value |= {"overlapped": outcome.overlapped, "waited": outcome.waited}
        if not self.store.finish(run, status, reason, outcome.value, outcome.log):
            display.taken_over(run)
            return
        display.finished(run, status, reason, outcome)
        if status == "skipped":  # what this machine lacks, it lacks for every seed
            self.store.skip(run.recipe, reason)

    def payload(self, run: Run) -> dict[str, Any]:
        """What a process is told of `run`, with the marks of what it reads, as the study has them."""
        recipe, known = self.recipes[run.recipe], self.store.inputs()
        return {
            "recipe": recipe,
            "seed": run.seed,
            "inputs": {path: known[path] for path in read_by(recipe) if path in known},
        }


def check_stored_ranks(ranks: int, store: Store) -> None:
    """Before anything is changed: what other numbers of ranks have measured is no part of this study."""
    before = next((facts.get("ranks") or 1 for facts in store.environments().values()), ranks)
    if before != ranks:
        raise StoreError(
            f"{store.path.parent} was measured with {_counted(before, 'rank')}, and this is {ranks}: use "
            f"--ranks {before}, or another --out"
        )


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
