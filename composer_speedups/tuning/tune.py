"""Tune one recipe: the batch first, then the learning rate for it, every try in a fresh process."""

from __future__ import annotations

import math
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from composer_speedups import hardware
from composer_speedups.ablation.estimate import duration, seconds_per_sample
from composer_speedups.ablation.isolate import Isolation
from composer_speedups.ablation.jobs import PRELOAD
from composer_speedups.ablation.rows import REGROUPING, precision
from composer_speedups.ablation.statistics import Margins
from composer_speedups.ablation.study import Entries
from composer_speedups.errors import NothingFits, SpeedUpUnavailable, UserError
from composer_speedups.recipe_schema import count_and_unit, in_samples
from composer_speedups.tuning import batch as batches
from composer_speedups.tuning import rate as rates
from composer_speedups.tuning.evidence import batch_lines, batch_reason, rate_lines
from composer_speedups.tuning.progress import Display
from composer_speedups.tuning.record import Record
from composer_speedups.tuning.sizes import batch_sizes, microbatch_sizes, predicted_line, starting_size
from composer_speedups.tuning.written import check_output, write_recipe

if TYPE_CHECKING:
    from composer_speedups.recipes import Recipe

__all__ = ["ENTRIES", "GOALS", "SAMPLES", "START", "TRIES", "Settings", "Tuned", "record_path", "tune"]

ENTRIES = Entries(
    train="composer_speedups.tuning.jobs:trial",
    survey="composer_speedups.tuning.jobs:survey",
    preload=(*PRELOAD, "composer_speedups.tuning.jobs"),
)
GOALS = ("largest", "fastest")
SAMPLES = 16_000
TRIES = 12  # of the batch, that a budget is divided by
START = 5.0  # seconds before the first step of a try, as a guess
_LEAST, _MOST = 6, 60  # steps of a try: three of them are warm-up
_FITTING = 4  # steps that show whether a batch fits: the optimizer's state is there after the first
_SHARE = {"cpu": 0.8, "cuda": 0.95}  # of the memory there is, where no limit is given
_VARYING = 0.85  # on a GPU, where batches differ in tokens: the fullest one need not be among those tried


@dataclass(frozen=True)
class Settings:
    """What is searched, and with how much effort.

    Attributes:
        batch: search the batch.
        rate: search the learning rate; without it, the scaling rule gives it.
        constant: keep the effective batch, and search the microbatch instead (gradient accumulation).
        samples: that may be trained in all, to find the fastest batch and the learning rate.
        trials: learning rates, at most.
        memory_limit: bytes; None is most of what the machine has.
        goal: `largest` batch that fits or `fastest`; None is the largest on a GPU, the fastest without.
        timeout: seconds that one try may take.
    """

    batch: bool = True
    rate: bool = True
    constant: bool = False
    samples: int = SAMPLES
    trials: int = 8
    memory_limit: int | None = None
    goal: str | None = None
    timeout: float = 1800.0

    def __post_init__(self) -> None:
        if not self.batch and not self.rate:
            raise UserError("nothing to tune: use --batch, --lr, or both")
        for name, value in (("--samples", self.samples), ("--trials", self.trials), ("--timeout", self.timeout)):
            if not value > 0:
                raise UserError(f"{name} must be positive, got {value:g}")
        if self.memory_limit is not None and self.memory_limit <= 0:
            raise UserError(f"--memory-limit must be positive, got {self.memory_limit}. Write e.g. --memory-limit 8GB")
        if self.goal is not None and self.goal not in GOALS:
            raise UserError(f"--goal must be largest or fastest, got {self.goal!r}")


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
        UserError: the recipe is wrong, `out` is taken, the record beside it is damaged, or nothing fits.
    """
    settings, console = settings or Settings(), console or Console()
    check_output(out, overwrite)
    if settings.rate:
        rates.optuna_or_error()
    own = isolation is None
    isolation = isolation or Isolation(entries.train, entries.preload)
    record = None
    try:
        console.print("Looking at this machine ...", style="dim")
        session = _Session(recipe, settings, isolation, entries, console)
        search = {
            "recipe": {k: v for k, v in recipe.to_dict().items() if k not in ("name", "description", "published")},
            "settings": {k: v for k, v in asdict(settings).items() if k != "timeout"},
            "machine": {key: session.facts.get(key) for key in hardware.IDENTITY},
        }
        record = Record(record_path(out), search)
        _check_again(out, overwrite, record)
        session.announce(record, out)
        with Display(console, settings.samples) as display:
            found, evidence, reasons = session.search(record, display)
        day = time.strftime("%Y-%m-%d")
        head = [f"{day}: {command}" if command else f"{day}: tuned", f"On {hardware.summary(session.facts)}"]
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
            console.print(f"Stopped; {count} tries are kept in {record.path}", style="yellow", highlight=False)
        return Tuned(out, None)
    finally:
        if record is not None:
            record.close()
        if own:
            isolation.close()


def _check_again(out: Path, overwrite: bool, record: Record) -> None:
    """Another process may have ended the same search since `out` was looked at, and have let go of its record."""
    try:
        check_output(out, overwrite)
    except UserError:
        if not record.trials:
            record.remove()
        raise


class _Session:
    """One search, from the look at the machine on."""

    def __init__(
        self, recipe: Recipe, settings: Settings, isolation: Isolation, entries: Entries, console: Console
    ) -> None:
        self.recipe, self.settings, self.isolation, self.console = recipe, settings, isolation, console
        kind = hardware.hardware()
        wanted = precision(recipe.to_dict(), kind)
        payload = {"recipe": recipe, "peaks": {recipe.name: wanted}}
        outcome = isolation.run(payload, timeout=1200, entry=entries.survey)
        if outcome.value is None:
            raise UserError(f"cannot look at this machine: {outcome.reason}\n{outcome.log}".strip())
        answer = outcome.value
        if answer["error"]:
            raise UserError(answer["error"])
        if answer["skip"]:
            raise SpeedUpUnavailable(f"{recipe.name} cannot run here: {next(iter(answer['skip'].values()))}")
        self.facts: dict[str, Any] = answer["environment"]
        self.samples: int = answer["samples"]
        self.predicted = {int(size): peak for size, peak in answer["memory"].items()}
        self.per_sample = seconds_per_sample(recipe.to_dict(), answer["peaks"], kind) or 0.0
        self.cuda = self.facts["hardware"] == "cuda"
        self.goal = settings.goal or ("largest" if self.cuda else "fastest")
        self.limit = settings.memory_limit or self._whole_memory()
        both = settings.batch and settings.rate and self.goal == "fastest"
        self.batch_budget = settings.samples // 2 if both else settings.samples
        self.used = 0

    def announce(self, record: Record, out: Path) -> None:
        """Say what will run, and for about how long."""
        recipe, settings, say = self.recipe, self.settings, self._say
        noun = "microbatch" if settings.constant else "batch"
        parts, seconds = [], 0.0
        if settings.batch:
            within = f" within {self.limit / 1e9:.1f} GB" if self.limit else ""
            parts.append(f"the {self.goal} {noun}{within}")
            seconds += TRIES * START + (self.batch_budget if self.goal == "fastest" else 0) * self.per_sample
        if settings.rate:
            parts.append(f"the learning rate, {settings.trials} tried at most")
            seconds += 2 * settings.trials * START + (settings.samples - self.batch_budget or settings.samples) * (
                self.per_sample
            )
        say(f"Tuning {recipe.name}: {'; then '.join(parts)}")
        say(f"On {hardware.summary(self.facts)}")
        if record.trials:
            say(f"{len(record.trials)} tries of an earlier start are kept")
        say(
            f"Budget: {settings.samples:,} samples, each try a fresh process, about {duration(seconds)}. "
            f"Ctrl-C keeps what was found"
        )
        say(f"The recipe goes to {out}")

    def search(self, record: Record, display: Display) -> tuple[Recipe, list[str], dict[str, str]]:
        """The tuned recipe, the lines of evidence, and the reasons for its values."""
        self.record, self.display = record, display
        old, found, evidence = self.recipe, self.recipe, list[str]()
        reasons: dict[str, str] = {}
        if self.settings.batch:
            found, lines, reason = self._search_batch()
            evidence += ["", *lines]
            reasons["microbatch_size" if self.settings.constant else "batch_size"] = reason
        rule = rates.scaled_rate(old.learning_rate, old.batch_size, found.batch_size)
        if found.batch_size == old.batch_size:
            rule = old.learning_rate
            text = f"{rule:g} is the recipe's own"
        else:
            text = f"{old.learning_rate:g} x sqrt({found.batch_size}/{old.batch_size}) = {rule:g}"
        found = _same_samples(found, old).model_copy(update={"learning_rate": rule})
        if found.duration != old.duration:
            reasons["duration"] = "as many samples as before"
        reasons["learning_rate"] = text
        if self.settings.rate:
            found, lines, reasons["learning_rate"] = self._search_rate(found, rule, text)
            evidence += ["", *lines]
        return _written_as(found, old), evidence, reasons

    # --- The batch ---

    def _search_batch(self) -> tuple[Recipe, list[str], str]:
        recipe, constant = self.recipe, self.settings.constant
        noun = "microbatch" if constant else "batch"
        if constant:
            sizes, start = microbatch_sizes(recipe.batch_size), recipe.microbatch_size or recipe.batch_size
        else:
            capability = min((float(g["capability"]) for g in self.facts["gpus"]), default=None)
            # A batch that leaves a training only a few steps is fast, and learns nothing.
            most = max(recipe.batch_size, self._own_samples() // rates.LEAST_STEPS)
            sizes, start = batch_sizes(max(1, min(most, self.samples)), capability), recipe.batch_size
        self._calls: Counter[int] = Counter()
        self.tried = list[dict[str, Any]]()
        if self.goal == "largest":
            fixed = 0
            if self.predicted and self.limit:
                start, fixed = (
                    starting_size(self.predicted, self.limit, sizes),
                    round(predicted_line(self.predicted)[0]),
                )
            size = batches.largest(self._measure, sizes, start, self.limit, fixed)
        else:
            size = batches.fastest(self._measure, sizes, start, self.limit)
        tried = self.tried
        if size is None:
            reason = next((f": {t['reason']}" for t in reversed(tried) if t["reason"]), "")
            ended = {t["status"] for t in tried}
            ways = ["--timeout"] * ("timeout" in ended) + ["--memory-limit"] * bool(ended - {"timeout"})
            ways += ["--samples"] * (self.goal == "fastest")
            raise NothingFits(
                f"no {noun} of {recipe.name} was found to fit{reason}. Raise {' or '.join(ways)}, or shorten "
                f"task.max_length"
            )
        reason = batch_reason(tried, size, self.goal)
        within = f" within {self.limit / 1e9:.1f} GB" if self.limit else ""
        lines = [f"The {noun}{within}: {size}, {reason}.", *batch_lines(tried, noun)]
        self.display.say(f"{noun} {size}: {reason}", style="bold")
        shared = sum(t["overlapped"] for t in tried)
        if shared and self.goal == "fastest":
            self.display.say(
                f"{shared} of {len(tried)} tries ran beside other work on this machine, which slowed them. "
                f"Tune again when it is idle",
                style="yellow",
            )
        if constant:
            micro = None if size == recipe.batch_size else size
            return recipe.model_copy(update={"microbatch_size": micro}), lines, reason
        return recipe.model_copy(update={"batch_size": size, "microbatch_size": None}), lines, reason

    def _measure(self, size: int) -> batches.Tried | None:
        """One try of a batch, from the record if it was made before; None if the budget does not allow it."""
        recipe, number = self.recipe, self._calls[size]
        self._calls[size] += 1
        batch = recipe.batch_size if self.settings.constant else size
        if self.goal == "largest":
            steps = _FITTING
        else:
            steps = min(_MOST, max(_LEAST, math.ceil(self.batch_budget / TRIES / batch)))
            steps = min(steps, (self.batch_budget - self.used) // batch)
            if steps < _FITTING:
                return None
            self.used += steps * batch
        micro = (None if size == batch else size) if self.settings.constant else None
        changed = {"batch_size": batch, "microbatch_size": micro}
        rate = rates.scaled_rate(recipe.learning_rate, recipe.batch_size, batch)
        label = f"{'microbatch' if self.settings.constant else 'batch'} {size}"
        what = {"kind": "batch", "size": size, "number": number}
        trial = self._once(what, label, recipe.model_copy(update=changed), rate, steps)
        self.tried.append(trial)
        return batches.Tried(
            size, trial["status"], trial["reason"], trial["samples_per_second"], trial["peak_memory_bytes"]
        )

    # --- The learning rate ---

    def _search_rate(self, recipe: Recipe, start: float, rule: str) -> tuple[Recipe, list[str], str]:
        budget = self.settings.samples - (self.used if self.settings.batch and self.goal == "fastest" else 0)
        # One epoch at most: a loss over samples that were seen before says less.
        longest = max(min(self._own_samples(), self.samples), rates.LEAST_STEPS * recipe.batch_size)
        plan = rates.plan(budget, recipe.batch_size, self.settings.trials, longest)
        if plan is None:
            least = 2 * rates.LEAST_STEPS * recipe.batch_size
            note = f"{budget:,} samples are too few to compare rates at batch {recipe.batch_size} (at least {least:,})"
            self.display.say(f"learning rate {start:g}: {rule}; {note}", style="bold")
            return recipe, [f"Learning rate: {rule}. Not searched: {note}."], f"{rule}; not searched"

        def train(rate: float, samples: int) -> float | None:
            what = {"kind": "rate", "rate": rate, "samples": samples, "batch": recipe.batch_size}
            trial = self._once(what, f"learning rate {rate:g}", recipe, rate, samples // recipe.batch_size)
            self.used += samples
            if trial["status"] in ("failed", "skipped"):
                raise UserError(f"learning rate {rate:g} failed: {trial['reason']}")
            if trial["status"] != "ok":
                return None
            return math.nan if trial["loss"] is None else trial["loss"]

        best, tried = rates.search(train, start, plan, budget, recipe.seed)
        if best is None:
            low, high = min(one.rate for one in tried), max(one.rate for one in tried)
            raise UserError(
                f"no learning rate from {low:g} to {high:g} ended with a finite loss. Start lower, e.g. with "
                f"learning_rate={low / 10:.1g} and another --out"
            )
        furthest = plan.samples[max(len(one.losses) for one in tried if one.rate == best) - 1]
        best, why = self._settle(best, start, furthest, recipe.batch_size, len(tried))
        reason = f"{why}; {rule}"
        lines = [
            f"Learning rate {best:g}, {reason}.",
            "Loss: mean over the last quarter of a whole run with its own warm-up and decay, all from the same weights",
            "over the same samples; longer training may prefer another rate. Tried:",
            *rate_lines(tried, plan.samples),
        ]
        self.display.say(f"learning rate {best:g}: {reason}", style="bold")
        return recipe.model_copy(update={"learning_rate": best}), lines, reason

    def _settle(self, best: float, rule: float, samples: int, batch: int, count: int) -> tuple[float, str]:
        """The rate with the lowest loss, if more than noise speaks for it, and else the rule's; and why."""
        found = {t["rate"]: t for t in self.record.find(kind="rate", samples=samples, batch=batch) if t["tail"]}
        fallen = found[best]["first"] - found[best]["loss"]
        if fallen <= Margins().loss_floor:
            self.display.say("Give more --samples: too little was learnt to tell rates apart", style="yellow")
            return rule, f"the loss fell by {max(0.0, fallen):.2g} only in {samples:,} samples, too little to compare"
        if best == rule or rule not in found or rates.shown_lower(found[best]["tail"], found[rule]["tail"]):
            return best, f"lowest loss of {count} tried"
        return rule, f"none of {count} tried was shown to be better: {best:g} only within the noise"

    # --- One try ---

    def _once(self, what: dict[str, Any], label: str, recipe: Recipe, rate: float, steps: int) -> dict[str, Any]:
        """What came of the try `what`: from the record, or made now and recorded, if it would end the same way again.

        What need not end so again is left out: a mistake may be mended, a full disk emptied, and a kill may have been
        anybody's. The same command then tries it again.
        """

        def lasting(trial: dict[str, Any]) -> bool:
            if trial["status"] == "timeout":  # under a longer limit it may end well
                return trial["allowed"] >= self.settings.timeout
            return trial["status"] not in ("failed", "skipped") and not trial.get("killed")

        known = [trial for trial in self.record.find(**what) if lasting(trial)]
        if known:
            return known[-1]
        trial = what | {"steps": steps} | self._try(label, recipe, rate, steps)
        return self.record.add(trial) if lasting(trial) else trial

    def _try(self, label: str, recipe: Recipe, rate: float, steps: int) -> dict[str, Any]:
        """Train `steps` steps in a fresh process; what came of it, for the record."""
        plain = recipe.to_dict() | {
            "learning_rate": rate,
            "duration": f"{steps}ba",
            "evaluate": False,
            "loggers": {},
            "published": None,
        }
        plain["schedule"] = plain["schedule"] | {"warmup": self._warmup()}
        self.display.used = self.used
        self.display.start(label)
        outcome = self.isolation.run(
            {
                "recipe": plain,
                "seed": recipe.seed,
                "memory_limit": self.limit,
                "device_limit": self.settings.memory_limit,
            },
            timeout=self.settings.timeout,
            report=self.display.progress,
            tick=self.display.tick,
        )
        value = outcome.value if isinstance(outcome.value, dict) else {}
        status, reason = value.get("status", outcome.status), value.get("reason") or outcome.reason
        if status == "interrupted":
            raise KeyboardInterrupt
        if outcome.killed and not self.cuda:
            # The kernel counts the processes that it kills, and `isolate` looks there; earlyoom and its like do not.
            status = "out_of_memory"
        peak = value.get("peak_memory_bytes")
        if status == "ok" and self.limit and peak and peak > self.limit:
            status, reason = "over_limit", f"{peak / 1e9:.2f} GB"
        losses = [loss for loss in value.get("losses") or [] if loss is not None]
        tail = losses[-max(1, len(losses) // 4) :] if value.get("finite", True) else []
        loss = sum(tail) / len(tail) if tail else None
        result = {
            "status": status,
            "reason": " ".join(str(reason).split()),
            "samples_per_second": value.get("samples_per_second"),
            "peak_memory_bytes": peak,
            "loss": loss,
            "first": sum(losses[:3]) / len(losses[:3]) if losses else None,
            "tail": [round(one, 5) for one in tail],
            "seconds": round(outcome.seconds, 2),
            "allowed": self.settings.timeout,
            "overlapped": not outcome.alone,
            "killed": outcome.killed,
        }
        facts = [f"{outcome.seconds:.1f} s"]
        if result["samples_per_second"]:
            facts.append(f"{result['samples_per_second']:.4g} samples/s")
        if peak:
            facts.append(f"{peak / 1e6:,.0f} MB")
        if result["loss"] is not None:
            facts.append(f"loss {result['loss']:.4f}")
        elif status == "ok":
            facts.append("the loss was not finite")
        if not outcome.alone:
            facts.append("beside other work")
        words = "" if status == "ok" else f"{status.replace('_', ' ')}: {result['reason']}; "
        self.display.say(f"  {label}, {steps} steps: {words}{', '.join(facts)}")
        return result

    # --- Facts ---

    def _whole_memory(self) -> int | None:
        """The memory that a try may take where the user sets no limit."""
        if self.cuda:
            varying = self.recipe.task.padding != "max_length" or (
                self.recipe.speedups.keys() & {"unpadding", *REGROUPING}
            )
            total = min((gpu["memory_bytes"] for gpu in self.facts["gpus"]), default=None)
            share = _VARYING if varying else _SHARE["cuda"]
        else:
            total, share = self.facts.get("memory_bytes"), _SHARE["cpu"]
        return None if total is None else round(share * total)

    def _own_samples(self) -> int:
        """Samples of the recipe's own duration."""
        return in_samples(self.recipe.duration, self.samples, self.recipe.batch_size)

    def _warmup(self) -> str:
        """The recipe's warm-up as a share of a training: counted in batches, it would outlast a try."""
        warmup = self.recipe.schedule.warmup
        if warmup.endswith("dur"):
            return warmup
        samples = in_samples(warmup, self.samples, self.recipe.batch_size)
        # A share is below 1: such a training is warm-up to its end.
        return f"{min(0.999999, samples / self._own_samples()):.6f}dur"

    def _say(self, text: str) -> None:
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)


def _same_samples(found: Recipe, old: Recipe) -> Recipe:
    """What is counted in batches lasts as many samples as it did with the old batch."""

    def converted(text: str) -> str:
        if not text.endswith("ba"):
            return text
        count, _ = count_and_unit(text)
        return f"{max(1, round(count * old.batch_size / found.batch_size))}ba" if count else text

    schedule = found.schedule.model_copy(update={"warmup": converted(old.schedule.warmup)})
    changes = {"duration": converted(old.duration), "schedule": schedule}
    if isinstance(old.evaluate, str):
        changes["evaluate"] = converted(old.evaluate)
    return found.model_copy(update=changes)


def _written_as(found: Recipe, old: Recipe) -> Recipe:
    copied = found.model_copy(deep=True)
    copied._written = old._written
    return copied
