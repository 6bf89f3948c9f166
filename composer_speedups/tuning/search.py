"""One search: the batch first, then the learning rate for it, within one budget of samples."""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING, Any

from composer_speedups.ablation.quality import Margins
from composer_speedups.errors import NothingFits, UserError
from composer_speedups.recipe_schema import count_and_unit
from composer_speedups.tuning import batch as batches
from composer_speedups.tuning import rate as rates
from composer_speedups.tuning.evidence import batch_lines, batch_reason, rate_lines
from composer_speedups.tuning.sizes import batch_sizes, microbatch_sizes, predicted_line, starting_size
from composer_speedups.tuning.tries import Tries

if TYPE_CHECKING:
    from composer_speedups.recipes import Recipe

__all__ = ["BATCH_TRIES", "Search"]

BATCH_TRIES = 12  # that the batch's budget is divided by
_LEAST, _MOST = 6, 60  # steps of a try: three of them are warm-up
_FITTING = 4  # steps that show whether a batch fits: the optimizer's state is there after the first


class Search:
    """What is searched with `tries`, and how far it has got."""

    def __init__(self, tries: Tries) -> None:
        self.tries, self.recipe, self.settings = tries, tries.recipe, tries.settings
        self.goal = self.settings.goal or ("largest" if tries.cuda else "fastest")
        both = self.settings.batch and self.settings.rate and self.goal == "fastest"
        self.batch_budget = self.settings.samples // 2 if both else self.settings.samples
        self.used = 0

    def run(self) -> tuple[Recipe, list[str], dict[str, str]]:
        """The tuned recipe, the lines of evidence, and the reasons for its values."""
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
            capability = min((float(g["capability"]) for g in self.tries.facts["gpus"]), default=None)
            # A batch that leaves a training only a few steps is fast, and learns nothing.
            most = max(recipe.batch_size, self.tries.own_samples() // rates.LEAST_STEPS)
            sizes, start = batch_sizes(max(1, min(most, self.tries.samples)), capability), recipe.batch_size
        self._calls: Counter[int] = Counter()
        self._tried = list[dict[str, Any]]()
        if self.goal == "largest":
            fixed = 0
            if self.tries.predicted and self.tries.limit:
                start = starting_size(self.tries.predicted, self.tries.limit, sizes)
                fixed = round(predicted_line(self.tries.predicted)[0])
            size = batches.largest(self._measure, sizes, start, self.tries.limit, fixed)
        else:
            size = batches.fastest(self._measure, sizes, start, self.tries.limit)
        tried = self._tried
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
        within = f" within {self.tries.limit / 1e9:.1f} GB" if self.tries.limit else ""
        lines = [f"The {noun}{within}: {size}, {reason}.", *batch_lines(tried, noun)]
        self.tries.display.say(f"{noun} {size}: {reason}", style="bold")
        shared = sum(t["overlapped"] for t in tried)
        if shared and self.goal == "fastest":
            self.tries.display.say(
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
            steps = min(_MOST, max(_LEAST, math.ceil(self.batch_budget / BATCH_TRIES / batch)))
            steps = min(steps, (self.batch_budget - self.used) // batch)
            if steps < _FITTING:
                return None
            self.used += steps * batch
        micro = (None if size == batch else size) if self.settings.constant else None
        changed = {"batch_size": batch, "microbatch_size": micro}
        rate = rates.scaled_rate(recipe.learning_rate, recipe.batch_size, batch)
        label = f"{'microbatch' if self.settings.constant else 'batch'} {size}"
        what = {"kind": "batch", "size": size, "number": number}
        self.tries.display.used = self.used
        trial = self.tries.once(what, label, recipe.model_copy(update=changed), rate, steps)
        self._tried.append(trial)
        return batches.Tried(
            size, trial["status"], trial["reason"], trial["samples_per_second"], trial["peak_memory_bytes"]
        )

    # --- The learning rate ---

    def _search_rate(self, recipe: Recipe, start: float, rule: str) -> tuple[Recipe, list[str], str]:
        budget = self.settings.samples - (self.used if self.settings.batch and self.goal == "fastest" else 0)
        # One epoch at most: a loss over samples that were seen before says less.
        longest = max(min(self.tries.own_samples(), self.tries.samples), rates.LEAST_STEPS * recipe.batch_size)
        plan = rates.plan(budget, recipe.batch_size, self.settings.trials, longest)
        if plan is None:
            least = 2 * rates.LEAST_STEPS * recipe.batch_size
            note = f"{budget:,} samples are too few to compare rates at batch {recipe.batch_size} (at least {least:,})"
            self.tries.display.say(f"learning rate {start:g}: {rule}; {note}", style="bold")
            return recipe, [f"Learning rate: {rule}. Not searched: {note}."], f"{rule}; not searched"

        def train(rate: float, samples: int) -> float | None:
            what = {"kind": "rate", "rate": rate, "samples": samples, "batch": recipe.batch_size}
            self.tries.display.used = self.used
            trial = self.tries.once(what, f"learning rate {rate:g}", recipe, rate, samples // recipe.batch_size)
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
            "over the same samples. One run each: with another seed close rates may rank otherwise, and longer",
            "training may prefer another rate. Tried:",
            *rate_lines(tried, plan.samples),
        ]
        self.tries.display.say(f"learning rate {best:g}: {reason}", style="bold")
        return recipe.model_copy(update={"learning_rate": best}), lines, reason

    def _settle(self, best: float, rule: float, samples: int, batch: int, count: int) -> tuple[float, str]:
        """The rate with the lowest loss, if more than its steps' noise speaks for it, and else the rule's; and why.

        A rule's rate that was given up before the longest runs is not compared again.
        """
        found = {t["rate"]: t for t in self.tries.record.find(kind="rate", samples=samples, batch=batch) if t["tail"]}
        fallen = found[best]["first"] - found[best]["loss"]
        if fallen <= Margins().loss_floor:
            self.tries.display.say("Give more --samples: too little was learnt to tell rates apart", style="yellow")
            return rule, f"the loss fell by {max(0.0, fallen):.2g} only in {samples:,} samples, too little to compare"
        if best == rule or rule not in found or rates.shown_lower(found[best]["tail"], found[rule]["tail"], count):
            return best, f"lowest loss of {count} tried, one run each"
        return rule, f"none of {count} tried was shown to be better: {best:g} only within the noise"


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
