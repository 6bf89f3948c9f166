"""Make a recommendation within a time budget: calibrate, screen, study, and write the recipe to use."""

from __future__ import annotations

import os
import shlex
import textwrap
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError
from rich.console import Console

from composer_speedups import hardware
from composer_speedups.ablation.aside import STORE
from composer_speedups.ablation.estimate import duration
from composer_speedups.ablation.isolate import Isolation
from composer_speedups.ablation.jobs import PRELOAD
from composer_speedups.ablation.output import Findings, findings
from composer_speedups.ablation.statistics import CONFIDENCE
from composer_speedups.ablation.store import Store
from composer_speedups.ablation.study import Entries, Settings, Study, run_study
from composer_speedups.errors import UserError
from composer_speedups.recipe_schema import count_and_unit, explain, in_samples
from composer_speedups.recommend.choice import PLAIN, Answer, answer, final_rows, made, screen, screening_rows
from composer_speedups.tuning.written import check_writable, write_recipe

if TYPE_CHECKING:
    from composer_speedups.recipes import Recipe

__all__ = ["ENTRIES", "Recommendation", "recommend"]

ENTRIES = Entries(preload=(*PRELOAD, "composer_speedups.recommend.jobs"))
_CANDIDATES = "composer_speedups.recommend.jobs:candidates"
_CALIBRATION = 4  # steps
_LEAST, _MOST = 6, 60  # steps of a run: the first three are warm-up
_SCREENING = 0.5  # of the time; the rest is for the study
_FEW = 7  # runs: if no more than these fit, they go into the study, and the doctor's choice is all that is studied
_SEEDS = (3, 7)  # repetitions: fewer tell nothing, more are for those who want to know a single per cent
_BATCHES = (32, 16, 8)
_RESERVE = 8.0  # seconds for the outputs
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


def recommend(
    base: Recipe,
    *,
    minutes: float,
    out: Path,
    own_batch: bool = False,
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
        command: how this was asked for.
        console: where progress is shown.
        entries: what runs in the processes.
        candidates: the entry that lists the speed-ups.

    Raises:
        UserError: the task or the model is wrong, or `out` holds something else.
    """
    if not minutes > 0 or minutes > 100_000:
        raise UserError(f"--minutes must be positive, got {minutes:g}. Write e.g. --minutes 15")
    console = console or Console()
    end = time.monotonic() + minutes * 60
    if os.path.exists(out) and not os.path.isdir(out):
        raise UserError(f"--out {out} is no folder. Choose another --out")
    check_writable(out)
    with Isolation(entries.train, entries.preload) as isolation:
        work = _Work(base, out, end, own_batch, command, console, entries, isolation)
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
        command: str,
        console: Console,
        entries: Entries,
        isolation: Isolation,
    ) -> None:
        self.base, self.out, self.end, self.own_batch = base, out, end, own_batch
        self.command, self.console, self.entries, self.isolation = command, console, entries, isolation
        self.overhead = self.step = 0.0
        self.order: list[str] = []
        self.dataset = 0  # samples of an epoch
        self.told = False  # whether the screening told anything

    def go(self, candidates: str, minutes: float) -> Recommendation:
        say = self.console.print
        what = f"{self.base.model.name} on {self.base.task.name}"
        say(f"Up to {duration(minutes * 60)} for {what}", highlight=False, markup=False)
        say("Looking at this machine, and at the data ...", style="dim")
        outcome = self.isolation.run({"recipe": self.base}, timeout=1200, entry=candidates)
        if outcome.value is None:
            raise UserError(f"cannot look at this machine: {outcome.reason}\n{outcome.log}".strip())
        facts = outcome.value
        if facts["error"]:
            raise UserError(facts["error"])
        self.order = [*self.base.speedups, *(one["key"] for one in facts["candidates"])]
        rejected = {name: f"unavailable: {reason}" for name, reason in facts["unavailable"].items()} | facts["left_out"]
        self.dataset = facts["samples"]
        self._same_machine(facts["environment"])
        chosen = self._stored(self.out)
        screening = self._stored(self.out / "screening")
        if not chosen and not screening:
            self._calibrate(facts["samples"])
            if self._affordable() < len(facts["candidates"]) / 2 + _FEW:
                return self._quick(facts, rejected)
        if not chosen:
            chosen, more = self._choose(facts, screening)
            rejected |= more
        elif screening:  # only the reasons are wanted
            settled = "The study's rows are settled: choose another --out to look again"
            rejected |= self._screened(screening, facts, settled)[1]
        return self._study(chosen, rejected, self.out)

    def _same_machine(self, here: dict[str, Any]) -> None:
        """What was measured on another machine is no answer for this one."""
        for folder in (self.out, self.out / "screening", self.out / _QUICK):
            if os.path.isfile(folder / STORE):
                with Store(folder / STORE, create=False) as store:
                    stored = list(store.environments().values())
                difference = next((text for there in stored if (text := hardware.same_machine(there, here))), "")
                if difference:
                    raise UserError(
                        f"{folder} was measured on another machine or stack ({difference}). Choose another --out"
                    )

    # --- How long a run takes ---

    def _calibrate(self, samples: int) -> None:
        """Train the plain recipe for a few steps, with a small batch unless the user gave one."""
        least = self.base.microbatch_size or 1
        sizes = [b for b in _BATCHES if least <= b <= max(samples, _BATCHES[-1])]
        if self.own_batch or not sizes:
            sizes = [self.base.batch_size]
        size = sizes[-1]
        recipe = self._short(self.base.model_copy(update={"batch_size": size}), _CALIBRATION)
        self.console.print(f"Calibrating: {_CALIBRATION} steps of the plain recipe, batch {size} ...", style="dim")
        limit = max(10.0, self.end - time.monotonic())
        payload = {"recipe": recipe.to_dict(), "seed": recipe.seed, "inspect": False}
        outcome = self.isolation.run(payload, timeout=limit)
        value = outcome.value if isinstance(outcome.value, dict) else {}
        status, reason = value.get("status", outcome.status), value.get("reason") or outcome.reason
        if status == "timeout":
            raise UserError(
                f"{_CALIBRATION} steps of batch {size} take longer than the whole time. Give more --minutes"
            )
        if status != "ok":
            raise UserError(f"the plain recipe does not run: {reason}")
        steps = [seconds for seconds in value.get("step_seconds") or [] if seconds] or [outcome.seconds / _CALIBRATION]
        # The fastest: whatever else the machine was doing meanwhile is no part of the step.
        per_sample = min(steps) / size
        self.overhead = max(0.5, outcome.seconds - sum(steps))
        left = max(0.0, self.end - time.monotonic())
        # The largest batch with which a dozen runs fit; where none does, the smallest.
        fitting = [b for b in sizes if 12 * (self.overhead + _LEAST * per_sample * b) <= left]
        batch = fitting[0] if fitting else sizes[-1]
        self.step = per_sample * batch
        self.base = self.base.model_copy(update={"batch_size": batch})
        note = "" if batch == sizes[0] else f", as a step of {sizes[0]} would take {per_sample * sizes[0]:.1f} s"
        self.console.print(
            f"A step of batch {batch} takes {self.step:.2f} s, a run's start {self.overhead:.1f} s{note}",
            highlight=False,
        )

    def _short(self, recipe: Recipe, steps: int) -> Recipe:
        schedule = recipe.schedule.model_copy(update={"warmup": "0.1dur"})
        changes = {"duration": f"{steps}ba", "evaluate": False, "loggers": {}, "schedule": schedule}
        return recipe.model_copy(update=changes)

    def _seconds(self, recipe: Recipe) -> float | None:
        """Seconds of one run, by what was measured; None before that."""
        return self.overhead + count_and_unit(recipe.duration)[0] * self.step if self.step else None

    def _steps(self, seconds: float) -> int:
        """Steps of a run of the plain recipe that takes so long."""
        return max(_LEAST, min(_MOST, int((seconds - self.overhead) / max(self.step, 1e-6))))

    # --- What is studied ---

    def _affordable(self) -> float:
        """How many of the shortest runs fit into what is left of the time."""
        left = self.end - time.monotonic()
        return left / (self.overhead + _LEAST * self.step) if self.step else 0.0

    def _quick(self, facts: dict[str, Any], rejected: dict[str, str]) -> Recommendation:
        """Too little time for a screening: what the doctor would switch on, against the plain recipe.

        In a folder of its own, so that the same command with more time begins with the screening.
        """
        candidates = facts["candidates"]
        kept = {k: v for k, v in facts["first"].items() if k != "torch_compile"}
        words = f"about {self._affordable():.0f} runs fit into the time: too few to look at {len(candidates)} speed-ups"
        self.console.print(f"{words}, so the doctor's choice is measured. Give more --minutes", style="yellow")
        if not kept:
            raise UserError("no speed-up is available here")
        base = self._short(self.base, _LEAST)
        rows = [base, made(base, "together", self.base.speedups | kept, ", ".join(kept))]
        untried = {c["name"]: "not tried: too little time" for c in candidates if c["key"] not in kept}
        return self._study(self._stored(self.out / _QUICK) or rows, rejected | untried, self.out / _QUICK)

    def _choose(self, facts: dict[str, Any], stored: list[Recipe]) -> tuple[list[Recipe], dict[str, str]]:
        """The rows of the study, by a screening if the time allows one."""
        candidates, first = facts["candidates"], facts["first"]
        left = self.end - time.monotonic()
        rows = stored
        if not rows:
            count = len(screening_rows(self.base, candidates, first))
            base = self._short(self.base, self._steps(left * _SCREENING / count))
            rows = screening_rows(base, candidates, first)
        until = time.monotonic() + (self.end - time.monotonic()) * _SCREENING
        limit = float(round(max(20.0, (self.end - time.monotonic()) * _SCREENING / 3)))
        self.console.print("\n[bold]Screening[/]: one run of each")
        again = bool(stored) and self._plain_failed()
        study = Study(rows, [self.base.seed], self.out / "screening", "screening", PLAIN, self.command, planned=True)
        expected = self._seconds(rows[0])
        settings = Settings(limit, again, inspect=False, until=until, expected=expected, entries=self.entries)
        result = run_study(study, settings, console=self.console, isolation=self.isolation)
        if result.interrupted:
            raise KeyboardInterrupt
        plain = next(run for run in result.findings.runs if run.recipe == PLAIN)
        if plain.status != "ok":
            why = plain.reason or "the time was over"
            if plain.status == "timeout" and self.step:
                why += f", though its steps took {self.step:.2f} s before (is something else using this machine?)"
            raise UserError(
                f"the plain recipe did not end: {why}. The same command tries again; or give more --minutes"
            )
        self._learn(plain.result, (plain.finished or 0.0) - (plain.started or 0.0))
        return self._screened(rows, facts)

    def _plain_failed(self) -> bool:
        """Whether an earlier screening is worth nothing, as what it compares with did not run."""
        with Store(self.out / "screening" / STORE, create=False) as store:
            return any(
                run.recipe == PLAIN and run.status in ("failed", "timeout", "out_of_memory") for run in store.runs()
            )

    def _screened(
        self, rows: list[Recipe], facts: dict[str, Any], remedy: str = "Give more --minutes"
    ) -> tuple[list[Recipe], dict[str, str]]:
        """What the screening's store says: the rows worth a study, and why the others are not.

        Args:
            rows: of the screening.
            facts: of this machine, the candidates among them.
            remedy: for those that the time was too short for.
        """
        with Store(self.out / "screening" / STORE, create=False) as store:
            found = findings(store)
        names = [recipe.name for recipe in rows]
        dtype = (facts["first"].get("mixed_precision") or {}).get("dtype")
        ground = dtype if dtype in names else PLAIN
        screened = screen(found.rows, facts["candidates"], ground)
        base = next(recipe for recipe in rows if recipe.name == PLAIN)
        self.told = screened.told
        chosen, more = final_rows(base, screened)
        unfinished = {name: f"{why}. {remedy}" for name, why in screened.unfinished.items()}
        return chosen, screened.rejected | unfinished | more

    def _learn(self, result: dict[str, Any], seconds: float) -> None:
        steps = [s for s in result.get("step_seconds") or [] if s]
        if steps:
            self.step = min(steps)
            self.overhead = max(0.5, seconds - sum(steps))

    # --- The study ---

    def _study(self, rows: list[Recipe], rejected: dict[str, str], folder: Path) -> Recommendation:
        if len(rows) == 1:
            text = "No speed-up helped in the screening (one run of each, not judged): use the plain recipe."
            if not self.told:
                text = "No recommendation: no speed-up could be looked at; the reasons are above."
            return self._finished(Answer(None, text, {}), rejected, None, folder)
        left = self.end - time.monotonic() - _RESERVE
        stored = self._stored(folder)
        if not stored and self.step:
            steps = self._steps(left / (len(rows) * (_SEEDS[0] + 1)))
            rows = [self._short(row, steps) for row in rows]
        run = self._seconds(rows[0])
        count = max(_SEEDS[0], min(_SEEDS[1], int(left / (run * len(rows))))) if run else _SEEDS[0]
        # What was stopped goes on as it was begun.
        seeds = self._planned(folder) if stored else [(self.base.seed + n) % 2**32 for n in range(count)]
        self.console.print("\n[bold]Study[/]: the best of them together, repeated and interleaved")
        for row in rows:
            if row.description != row.name:
                self.console.print(f"{row.name}: {row.description}", markup=False, highlight=False)
        study = Study(rows, seeds, folder, self.out.name, PLAIN, self.command, planned=True)
        settings = Settings(inspect=False, until=self.end - _RESERVE / 2, expected=run, entries=self.entries)
        result = run_study(study, settings, console=self.console, isolation=self.isolation)
        if result.interrupted:
            raise KeyboardInterrupt
        # Only now: a duration in batches is more samples or fewer with the batch that was measured.
        samples = in_samples(self.base.duration, self.dataset, self.base.batch_size)
        found = answer(result.findings.rows, CONFIDENCE, samples, self._compare())
        return self._finished(found, rejected, result.findings, folder)

    @staticmethod
    def _planned(folder: Path) -> list[int]:
        """The seeds of the study in `folder`."""
        with Store(folder / STORE, create=False) as store:
            return list(dict.fromkeys(run.seed for run in store.runs()))

    def _compare(self) -> str:
        """The command that trains the plain recipe and the recommended one to their end."""
        files = [self.out / f"{PLAIN}.yaml", self.out / "recommended.yaml"]
        words = ["composer-speedups", "ablate", *files, "--seeds", _SEEDS[0], "--out", self.out / "quality"]
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
        more = [key for key, arguments in speedups.items() if self.base.speedups.get(key) != arguments]
        path = self.out / "recommended.yaml"
        lines = [f"{time.strftime('%Y-%m-%d')}: {self.command}", *_wrapped(found.sentence), "Rejected:"]
        lines += [line for name, why in reasons.items() for line in _wrapped(f"{name}: {why}", "  ")] or ["  nothing"]
        write_recipe(
            path,
            recipe,
            None,
            None,
            description=f"recommended: {', '.join(more) or 'no speed-ups beyond the plain recipe'}"[:500],
            evidence=lines,
            reasons={},
            overwrite=True,
        )
        if found.row is not None:
            write_recipe(
                self.out / f"{PLAIN}.yaml",
                self.base.model_copy(update={"batch_size": batch}),
                None,
                None,
                description="what recommended.yaml was measured against",
                evidence=[],
                reasons={},
                overwrite=True,
            )
        return Recommendation(Answer(found.row, found.sentence, reasons), recipe, path, result, folder=folder)

    def _stored(self, folder: Path) -> list[Recipe]:
        """The recipes of the study in `folder`; none if there is none yet; another's is refused."""
        from composer_speedups.recipes import Recipe

        if not os.path.isfile(folder / STORE):
            return []
        with Store(folder / STORE, create=False) as store:
            recipes = store.recipes()
        try:
            stored = [Recipe.model_validate(recipe) for recipe in recipes.values()]
        except ValidationError as error:
            why = explain(error, Recipe)[1].partition(". ")[0]  # without what a user would write instead
            raise UserError(f"{folder} holds a study of another version ({why}). Choose another --out") from None
        if not stored:
            return []
        plain = stored[0]
        same = plain.name == PLAIN and self._identity(plain) == self._identity(self.base)
        if not same or (self.own_batch and plain.batch_size != self.base.batch_size):
            raise UserError(f"{folder} holds another study. Choose another --out, or remove that folder")
        self.base = self.base.model_copy(update={"batch_size": plain.batch_size})
        return stored

    def _identity(self, recipe: Recipe) -> dict[str, Any]:
        """What of a recipe bears on speed, in the form that is measured."""
        free = {"name", "description", "published", "extends", "batch_size", "eval_batch_size"}
        return {key: value for key, value in self._short(recipe, 1).to_dict().items() if key not in free}


def _wrapped(text: str, indent: str = "") -> list[str]:
    return textwrap.wrap(
        text,
        112,
        initial_indent=indent,
        subsequent_indent=2 * indent,
        break_long_words=False,  # paths
        break_on_hyphens=False,
    )
