"""One search: the batch first, then the learning rate for it, within one budget of samples."""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING, Any

from composer_speedups.errors import NothingFits
from composer_speedups.measurement.results import SHORT_RUN
from composer_speedups.recipes.schema import count_and_unit
from composer_speedups.tuning import batch as batches
from composer_speedups.tuning import rate as rates
from composer_speedups.tuning.evidence import batch_lines, batch_reason
from composer_speedups.tuning.rate_search import RateSearch
from composer_speedups.tuning.sizes import batch_sizes, memory_line, microbatch_sizes, starting_size
from composer_speedups.tuning.tries import Tries
from composer_speedups.tuning.whole import MOST_TRAININGS

if TYPE_CHECKING:
    from composer_speedups.recipes import Recipe

__all__ = ["BATCH_TRIES", "Search"]

BATCH_TRIES = 12  # that the batch's budget is divided by
_FITTING = 4  # steps that show whether a batch fits: the optimizer's state is there after the first


class Search:
    """What is searched with `tries`, and how far it has got."""

    def __init__(self, tries: Tries) -> None:
        self.tries, self.recipe, self.settings = tries, tries.recipe, tries.settings
        self.goal = self.settings.goal or ("largest" if tries.cuda else "fastest")
        # What a largest batch needs, four steps of each, is not counted.
        counted = self.settings.short if self.settings.batch and self.goal == "fastest" else 0
        self.batch_budget = counted // 2 if self.settings.rate else counted
        # Where nobody says how much, there may be whole trainings beside the short runs.
        beside = self.settings.rate and self.settings.samples is None
        self.budget = self.settings.short + (MOST_TRAININGS * tries.own_samples() if beside else 0)
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
            rate = RateSearch(self.tries, found, rule, text, self.used)
            found, lines, reasons["learning_rate"] = rate.run()
            evidence += ["", *lines]
        return found, evidence, reasons

    # --- The batch ---

    def _search_batch(self) -> tuple[Recipe, list[str], str]:
        recipe, constant, ranks = self.recipe, self.settings.constant, self.settings.ranks
        noun = "microbatch" if constant else "batch"
        if constant:
            own = recipe.batch_size // ranks
            sizes, start = microbatch_sizes(own), recipe.microbatch_size or own
        else:
            capability = min((float(g["capability"]) for g in self.tries.facts["gpus"]), default=None)
            # A batch that leaves a training only a few steps is fast, and learns nothing.
            most = max(recipe.batch_size, self.tries.own_samples() // rates.LEAST_STEPS)
            of_one = batch_sizes(max(1, min(most, self.tries.samples) // ranks), capability)
            sizes, start = [ranks * size for size in of_one], recipe.batch_size
        self._calls: Counter[int] = Counter()
        self._tried = list[dict[str, Any]]()
        if self.goal == "largest":
            fixed = 0
            if self.tries.predicted and self.tries.limit:
                start = starting_size(self.tries.predicted, self.tries.limit, sizes)
                fixed = round(memory_line(self.tries.predicted)[0])
            size = batches.largest(self._measure, sizes, start, self.tries.limit, fixed)
        else:
            size = batches.fastest(self._measure, sizes, start, self.tries.limit)
        tried = self._tried
        if size is None:
            reason = next((f": {t['reason']}" for t in reversed(tried) if t["reason"]), "")
            ended = {t["status"] for t in tried}
            ways = ["--timeout"] * ("timeout" in ended) + ["--memory-limit"] * bool(ended - {"timeout"})
            ways += ["--samples"] * (self.goal == "fastest")
            found = f"no {noun} of {recipe.name} was found to fit{reason}"
            if not tried:
                found = f"{self.settings.short:,} samples are too few to try a {noun} of {recipe.name}"
            raise NothingFits(f"{found}. Raise {' or '.join(ways)}, or shorten task.max_length")
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
            micro = None if size == own else size
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
            steps = min(SHORT_RUN[1], max(SHORT_RUN[0], math.ceil(self.batch_budget / BATCH_TRIES / batch)))
            steps = min(steps, (self.batch_budget - self.used) // batch)
            if steps < _FITTING:
                return None
            self.used += steps * batch
        micro = size if self.settings.constant and size * self.settings.ranks < batch else None
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
