"""Make a recommendation within a time budget: calibrate, screen, study, and write the recipe to use."""

from __future__ import annotations

import os
import shlex
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from composer_speedups.ablation.aside import STORE
from composer_speedups.ablation.estimate import duration
from composer_speedups.ablation.jobs import PRELOAD
from composer_speedups.ablation.output import Findings, findings
from composer_speedups.ablation.statistics import CONFIDENCE
from composer_speedups.ablation.store import Store
from composer_speedups.ablation.study import Entries, Settings, Study, run_study
from composer_speedups.errors import UserError
from composer_speedups.isolation.isolate import Isolation
from composer_speedups.isolation.look import look
from composer_speedups.recipes.schema import in_samples
from composer_speedups.recipes.written import check_writable
from composer_speedups.recommend.budget import LEAST, Budget
from composer_speedups.recommend.choice import (
    DISTURBED,
    PLAIN,
    Answer,
    answer,
    final_rows,
    made,
    screen,
    screening_rows,
)
from composer_speedups.recommend.stored import check_machine, plain_failed, planned_seeds, stored_rows
from composer_speedups.recommend.written import RECOMMENDED, write_plain, write_recommended

if TYPE_CHECKING:
    from composer_speedups.recipes import Recipe

__all__ = ["ENTRIES", "Recommendation", "recommend"]

ENTRIES = Entries(preload=(*PRELOAD, "composer_speedups.recommend.jobs"))
_CANDIDATES = "composer_speedups.recommend.jobs:candidates"
_SCREENING = 0.5  # of the time; the rest is for the study
_FEW = 7  # runs: if no more than these fit, they go into the study, and the doctor's choice is all that is studied
_SEEDS = (3, 7)  # repetitions: fewer tell nothing, more are for those who want to know a single per cent
_RESERVE = 8.0  # seconds for the outputs
_LONGEST = 100_000  # minutes; more are a slip of the finger
_SCREENED = "screening"  # the folder of the screening
_QUICK = "quick"  # the folder of a study made without a screening


@dataclass
class Recommendation:
    """What came of it."""

    answer: Answer
    recipe: Recipe
    path: Path | None
    findings: Findings | None
    interrupted: bool = False
    folder: Path | None = None  # of the report
    ranks: int = 1  # that it is for


def recommend(
    base: Recipe,
    *,
    minutes: float,
    out: Path,
    own_batch: bool = False,
    ranks: int = 1,
    command: str = "",
    console: Console | None = None,
    entries: Entries = ENTRIES,
    candidates: str = _CANDIDATES,
) -> Recommendation:
    """Find what speeds up `base` here, in about `minutes`; the same call again goes on where it was stopped.

    Args:
        base: the plain recipe: model, task, batch, no speed-ups but what holds it to true float32.
        minutes: that it may take.
        out: the folder of the study; the screening goes into a folder in it.
        own_batch: the batch size is the user's, and not to be made smaller to fit the time.
        ranks: processes of each run (DDP), which share its batches: one for each GPU.
        command: how this was asked for.
        console: where progress is shown.
        entries: what runs in the processes.
        candidates: the entry that lists the speed-ups.

    Raises:
        UserError: the task or the model is wrong, or `out` holds something else.
    """
    if not 0 < minutes <= _LONGEST:
        raise UserError(f"--minutes must be above 0 and at most {_LONGEST:,}, got {minutes:g}. Write e.g. --minutes 15")
    if own_batch and (why := base.unshared_by(ranks)):
        raise UserError(why)
    console = console or Console()
    end = time.monotonic() + minutes * 60
    if os.path.exists(out) and not os.path.isdir(out):
        raise UserError(f"--out {out} is no folder. Choose another --out")
    check_writable(out)
    with Isolation(entries.train, entries.preload) as isolation:
        work = _Work(base, out, end, own_batch, ranks, command, console, entries, isolation)
        try:
            return work.go(candidates, minutes)
        except KeyboardInterrupt:
            return Recommendation(Answer(None, "Stopped.", {}), base, None, None, interrupted=True)


class _Work:
    """One recommendation in the making."""

    def __init__(
        self,
        base: Recipe,
        out: Path,
        end: float,
        own_batch: bool,
        ranks: int,
        command: str,
        console: Console,
        entries: Entries,
        isolation: Isolation,
    ) -> None:
        self.base, self.out, self.own_batch, self.ranks = base, out, own_batch, ranks
        self.command, self.console, self.entries, self.isolation = command, console, entries, isolation
        self.budget = Budget(end, ranks)
        self.order: list[str] = []
        self.dataset = 0  # samples of an epoch
        self.told = False  # whether the screening told anything
        self.disturbed = False  # and whether other work ran beside it

    def go(self, candidates: str, minutes: float) -> Recommendation:
        say = self.console.print
        what = f"{self.base.model.name} on {self.base.task.name}"
        say(f"Up to {duration(minutes * 60)} for {what}", highlight=False, markup=False)
        say("Looking at this machine, and at the data ...", style="dim")
        facts = look(self.isolation, {"recipe": self.base, "ranks": self.ranks}, candidates, 1200)
        self.order = [*self.base.speedups, *(one["key"] for one in facts["candidates"])]
        rejected = {name: f"unavailable: {reason}" for name, reason in facts["unavailable"].items()} | facts["left_out"]
        self.dataset = facts["samples"]
        check_machine([self.out, self.out / _SCREENED, self.out / _QUICK], facts["environment"])
        chosen = self._stored(self.out)
        screening = self._stored(self.out / _SCREENED)
        if before := chosen or screening:
            self._take_batch(before[0].batch_size)
        else:
            self._take_batch(self.budget.calibrate(self.isolation, self.base, self.dataset, self.own_batch, say))
            if self.budget.affordable() < len(facts["candidates"]) / 2 + _FEW:
                return self._quick(facts, rejected)
        if not chosen:
            chosen, more = self._choose(facts, screening)
            rejected |= more
        elif screening:  # only the reasons are wanted
            settled = "The study's rows are settled: choose another --out to look again"
            rejected |= self._screened(screening, facts, settled)[1]
        return self._study(chosen, rejected, self.out)

    def _take_batch(self, size: int) -> None:
        self.base = self.base.model_copy(update={"batch_size": size})

    # --- What is studied ---

    def _quick(self, facts: dict[str, Any], rejected: dict[str, str]) -> Recommendation:
        """Too little time for a screening: what the doctor would switch on, against the plain recipe.

        In a folder of its own, so that the same command with more time begins with the screening.
        """
        candidates = facts["candidates"]
        kept = {k: v for k, v in facts["first"].items() if k != "torch_compile"}
        fitting = f"about {self.budget.affordable():.0f} runs fit into the time"
        words = f"{fitting}: too few to look at {len(candidates)} speed-ups"
        self.console.print(f"{words}, so the doctor's choice is measured. Give more --minutes", style="yellow")
        if not kept:
            raise UserError("no speed-up is available here")
        base = self.base.short(LEAST)
        rows = [base, made(base, "together", self.base.speedups | kept, ", ".join(kept))]
        untried = {c["name"]: "not tried: too little time" for c in candidates if c["key"] not in kept}
        stored = self._stored(self.out / _QUICK)
        if stored:
            self._take_batch(stored[0].batch_size)
        return self._study(stored or rows, rejected | untried, self.out / _QUICK)

    def _choose(self, facts: dict[str, Any], stored: list[Recipe]) -> tuple[list[Recipe], dict[str, str]]:
        """The rows of the study, by a screening if the time allows one."""
        candidates, first = facts["candidates"], facts["first"]
        folder, left = self.out / _SCREENED, self.budget.left()
        rows = stored
        if not rows:
            count = len(screening_rows(self.base, candidates, first))
            base = self.base.short(self.budget.steps(left * _SCREENING / count))
            rows = screening_rows(base, candidates, first)
        until = time.monotonic() + left * _SCREENING
        limit = float(round(max(20.0, left * _SCREENING / 3)))
        self.console.print("\n[bold]Screening[/]: one run of each")
        again = bool(stored) and plain_failed(folder)
        study = Study(rows, [self.base.seed], folder, _SCREENED, PLAIN, self.command, planned=True)
        expected = self.budget.seconds(rows[0])
        settings = Settings(
            limit, again, inspect=False, ranks=self.ranks, until=until, expected=expected, entries=self.entries
        )
        result = run_study(study, settings, console=self.console, isolation=self.isolation)
        if result.interrupted:
            raise KeyboardInterrupt
        plain = next(run for run in result.findings.runs if run.recipe == PLAIN)
        if plain.status != "ok":
            why = plain.reason or "the time was over"
            if plain.status == "timeout" and self.budget.step:
                why += (
                    f", though its steps took {self.budget.step:.2f} s before (is something else using this machine?)"
                )
            raise UserError(
                f"the plain recipe did not end: {why}. The same command tries again; or give more --minutes"
            )
        self.budget.learn(plain.result, (plain.finished or 0.0) - (plain.started or 0.0))
        return self._screened(rows, facts)

    def _screened(
        self, rows: list[Recipe], facts: dict[str, Any], remedy: str = "Give more --minutes"
    ) -> tuple[list[Recipe], dict[str, str]]:
        """What the screening's store says: the rows worth a study, and why the others are not.

        Args:
            rows: of the screening.
            facts: of this machine, the candidates among them.
            remedy: for those that the time was too short for.
        """
        with Store(self.out / _SCREENED / STORE, create=False) as store:
            found = findings(store)
        names = [recipe.name for recipe in rows]
        dtype = (facts["first"].get("mixed_precision") or {}).get("dtype")
        ground = dtype if dtype in names else PLAIN
        screened = screen(found.rows, facts["candidates"], ground)
        base = next(recipe for recipe in rows if recipe.name == PLAIN)
        self.told = screened.told
        self.disturbed = any(row["overlapped"] for row in found.rows)
        chosen, more = final_rows(base, screened)
        unfinished = {name: f"{why}. {remedy}" for name, why in screened.unfinished.items()}
        return chosen, screened.rejected | unfinished | more

    # --- The study ---

    def _study(self, rows: list[Recipe], rejected: dict[str, str], folder: Path) -> Recommendation:
        if len(rows) == 1:
            text = "No speed-up helped in the screening (one run of each, not judged): use the plain recipe."
            if self.disturbed:
                text = DISTURBED
            if not self.told:
                text = "No recommendation: no speed-up could be looked at; the reasons are above."
            return self._finished(Answer(None, text, {}), rejected, None, folder)
        left = self.budget.left() - _RESERVE
        stored = self._stored(folder)
        if not stored and self.budget.step:
            steps = self.budget.steps(left / (len(rows) * (_SEEDS[0] + 1)))
            rows = [row.short(steps) for row in rows]
        run = self.budget.seconds(rows[0])
        count = max(_SEEDS[0], min(_SEEDS[1], int(left / (run * len(rows))))) if run else _SEEDS[0]
        # What was stopped goes on as it was begun.
        seeds = planned_seeds(folder) if stored else []  # none, if it was killed before it had planned them
        seeds = seeds or [(self.base.seed + n) % 2**32 for n in range(count)]
        self.console.print("\n[bold]Study[/]: the best of them together, repeated and interleaved")
        for row in rows:
            if row.description != row.name:
                self.console.print(f"{row.name}: {row.description}", markup=False, highlight=False)
        study = Study(rows, seeds, folder, self.out.name, PLAIN, self.command, planned=True)
        until = self.budget.end - _RESERVE / 2
        settings = Settings(inspect=False, ranks=self.ranks, until=until, expected=run, entries=self.entries)
        result = run_study(study, settings, console=self.console, isolation=self.isolation)
        if result.interrupted:
            raise KeyboardInterrupt
        # Only now: a duration in batches is more samples or fewer with the batch that was measured.
        samples = in_samples(self.base.duration, self.dataset, self.base.batch_size)
        filled = self.base.task.padding == "max_length"
        found = answer(result.findings.rows, CONFIDENCE, samples, self._compare(), filled)
        return self._finished(found, rejected, result.findings, folder)

    def _compare(self) -> str:
        """The command that trains the plain recipe and the recommended one to their end."""
        files = [self.out / f"{PLAIN}.yaml", self.out / RECOMMENDED]
        words = ["composer-speedups", "ablate", *files, "--seeds", _SEEDS[0], "--out", self.out / "quality"]
        words += ["--ranks", self.ranks] if self.ranks > 1 else []
        return shlex.join(map(str, words))

    def _finished(
        self, found: Answer, rejected: dict[str, str], result: Findings | None, folder: Path
    ) -> Recommendation:
        speedups = dict(self.base.speedups)
        if found.row is not None and result is not None:
            speedups = result.recipes[found.row["recipe"]]["speedups"]
            speedups = {key: speedups[key] for key in dict.fromkeys([*self.order, *speedups]) if key in speedups}
        batch = self.base.batch_size if result is None else result.recipes[PLAIN]["batch_size"]
        recipe = self.base.model_copy(update={"speedups": speedups, "batch_size": batch})
        reasons = rejected | found.rejected
        path = write_recommended(self.out, recipe, self.base, found.sentence, reasons, self.command)
        if found.row is not None:
            write_plain(self.out, self.base.model_copy(update={"batch_size": batch}))
        return Recommendation(
            Answer(found.row, found.sentence, reasons), recipe, path, result, folder=folder, ranks=self.ranks
        )

    def _stored(self, folder: Path) -> list[Recipe]:
        return stored_rows(folder, self.base, self.own_batch)
