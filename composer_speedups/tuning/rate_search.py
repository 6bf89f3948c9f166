"""The search for the learning rate that goes with a batch: by short runs first, then by whole trainings."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from composer_speedups.ablation.quality import Margins
from composer_speedups.errors import UserError
from composer_speedups.tuning import rate as rates
from composer_speedups.tuning import whole as wholes
from composer_speedups.tuning.evidence import broken_words, rate_lines, whole_lines
from composer_speedups.tuning.tries import Tries

if TYPE_CHECKING:
    from composer_speedups.recipes import Recipe

__all__ = ["RateSearch"]

Found = tuple[float, str, list[str]]  # a rate, why it is that, and lines of evidence


class RateSearch:
    """What is searched with `tries`, and how far it has got.

    Args:
        tries: make the runs.
        recipe: with the batch that was found.
        rule: the rate to begin with.
        words: where that comes from.
        used: samples that the search for the batch took out of the budget.
    """

    def __init__(self, tries: Tries, recipe: Recipe, rule: float, words: str, used: int) -> None:
        self.tries, self.recipe, self.rule, self.words = tries, recipe, rule, words
        # For short runs, where the user named no number, and else for all.
        self.budget, self.used = tries.settings.short - used, used
        self.own, self.batch = tries.own_samples(), recipe.batch_size
        self.trainings = 0  # whole ones, at most

    def run(self) -> tuple[Recipe, list[str], str]:
        """The recipe with its rate, the lines of evidence, and the reason for it."""
        budget = self.budget
        plan = self._plan(budget)
        if plan is None:
            least = 2 * rates.LEAST_STEPS * self.batch
            note = f"{budget:,} samples are too few to compare rates at batch {self.batch} (at least {least:,})"
            self.tries.display.say(f"learning rate {self.rule:g}: {self.words}; {note}", style="bold")
            return self.recipe, [f"Learning rate: {self.words}. Not searched: {note}."], f"{self.words}; not searched"
        if self._is_short(plan):
            if self.tries.settings.samples is None:
                self.trainings = wholes.MOST_TRAININGS
            elif trainings := wholes.affordable(budget - self._least_short, self.own):
                self.trainings = trainings
                budget -= trainings * self.own
                plan = self._plan(budget) or plan
        best, why, lines = self._by_short_runs(plan, budget)
        if self.trainings and not self._is_too_long():
            best, why, lines = self._by_whole_trainings(best, why, lines)
        elif self._is_short(plan) and not self.trainings:
            self.tries.display.say(
                f"Found in runs of {plan.samples[-1]:,} samples at most: a training of {self.own:,} often likes a "
                f"lower rate. {self._enough()} samples would do for runs as long",
                style="yellow",
            )
        reason = f"{why}; {self.words}"
        self.tries.display.say(f"learning rate {best:g}: {reason}", style="bold")
        found = self.recipe.model_copy(update={"learning_rate": best})
        return found, [f"Learning rate {best:g}, {reason}.", *lines], reason

    @property
    def _least_short(self) -> int:
        """Samples for four rates: without short runs nobody knows where to begin."""
        return 4 * rates.LEAST_STEPS * self.batch

    def _enough(self) -> str:
        """Samples for a search with three whole trainings, its share for the batch included."""
        share = self.tries.settings.short / self.budget
        return f"{math.ceil(share * (self._least_short + 3 * self.own) / 1000) * 1000:,}"

    def _plan(self, budget: int) -> rates.Plan | None:
        # One epoch at most: a loss over samples that were seen before says less.
        longest = max(min(self.own, self.tries.samples), rates.LEAST_STEPS * self.batch)
        return rates.plan(budget, self.batch, self.tries.settings.trials, longest)

    def _is_short(self, plan: rates.Plan) -> bool:
        """Whether the recipe's own training is longer than all of the plan's runs, by more than a tenth."""
        return plan.samples[-1] < 0.9 * self.own

    def _by_short_runs(self, plan: rates.Plan, budget: int) -> Found:
        """What Optuna's search within `budget` samples leads to."""

        def train(rate: float, samples: int) -> float | None:
            trial = self._once("rate", rate, samples)
            if trial["status"] != "ok":
                return None
            return math.nan if trial["loss"] is None else trial["loss"]

        best, tried = rates.search(train, self.rule, plan, budget, self.recipe.seed)
        if best is None:
            low, high = min(one.rate for one in tried), max(one.rate for one in tried)
            raise UserError(
                f"no learning rate from {low:g} to {high:g} ended with a finite loss. Start lower, e.g. with "
                f"learning_rate={low / 10:.1g} and another --out"
            )
        furthest = plan.samples[max(len(one.losses) for one in tried if one.rate == best) - 1]
        best, why = self._settle(best, furthest, len(tried))
        lines = [
            "Loss: mean over the last quarter of a whole run with its own warm-up and decay, all from the same weights",
            "over the same samples. One run each: with another seed close rates may rank otherwise, and longer",
            "training may prefer another rate. Tried:",
            *rate_lines(tried, plan.samples),
        ]
        return best, why, lines

    def _settle(self, best: float, samples: int, count: int) -> tuple[float, str]:
        """The rate with the lowest loss, if more than its steps' noise speaks for it, and else the rule's; and why.

        A rule's rate that was given up before the longest runs is not compared again.
        """
        rule = self.rule
        found = {
            t["rate"]: t for t in self.tries.record.find(kind="rate", samples=samples, batch=self.batch) if t["tail"]
        }
        fallen = found[best]["first"] - found[best]["loss"]
        if fallen <= self._floor(found[best]):
            if not self.trainings:
                self.tries.display.say("Give more --samples: too little was learnt to tell rates apart", style="yellow")
            return rule, f"the loss fell by {max(0.0, fallen):.2g} only in {samples:,} samples, too little to compare"
        if best == rule or rule not in found or rates.shown_lower(found[best]["tail"], found[rule]["tail"], count):
            return best, f"lowest loss of {count} tried, one run each"
        return rule, f"none of {count} tried was shown to be better: {best:g} only within the noise"

    def _by_whole_trainings(self, start: float, why: str, lines: list[str]) -> Found:
        """What trainings lead to, from where short runs ended: at `start`, for the reason `why`, as `lines` show."""

        def train(rate: float) -> wholes.Trained:
            trial = self._once("whole", rate, self.own)
            if trial["status"] != "ok":
                return wholes.Trained(rate, broken=broken_words(trial))
            if trial["loss"] is None or trial["eval_loss"] is None or not math.isfinite(trial["eval_loss"]):
                return wholes.Trained(rate)
            return wholes.Trained(rate, trial["eval_loss"], trial["eval_accuracy"])

        tried = wholes.walk(train, start, self.trainings)
        lowest, broken = wholes.lowest(tried), next((one.broken for one in tried if one.broken), "")
        if lowest is None and not broken:
            low = min(one.rate for one in tried)
            raise UserError(
                f"no whole training ended with a finite loss, down to a learning rate of {low:g}; short runs did. "
                f"Start lower, e.g. with learning_rate={low / 10:.1g} and another --out"
            )
        if broken:
            self.tries.display.say(
                f"A whole training did not end well ({broken}). See whether this batch, and its evaluation, fit into "
                "memory and --timeout",
                style="yellow",
            )
        lines = [
            "Short runs like higher rates than long ones: from where they ended the search went on by halves or",
            "doubles, in whole trainings, judged by the evaluation texts, so that these flatter the rate a little.",
            "Tried:",
            *whole_lines(tried),
            "",
            f"The short runs ended at {start:g}: {why}.",
            *lines,
        ]
        if lowest is None:
            return start, f"{why}, in short runs: no whole training ended well", lines
        margin = self._floor(*self.tries.record.find(kind="whole", batch=self.batch))
        return *self._judge(tried, lowest, margin), lines

    def _is_too_long(self) -> bool:
        """Whether a training, by the speed of the short runs, takes longer than a try may; if so, it is said."""
        speeds = [t["samples_per_second"] for t in self.tries.record.find(kind="rate", batch=self.batch)]
        # A forward pass is a third of a step; and a try takes some time to begin.
        samples = self.own + (self.recipe.task.eval_samples or 0) / 3
        seconds = 1.1 * samples / min(filter(None, speeds), default=math.inf)
        if seconds <= self.tries.settings.timeout:
            return False
        self.tries.display.say(
            f"A whole training would take about {seconds / 60:.0f} minutes, longer than a try may. It may like a lower "
            f"rate: search again with --timeout {math.ceil(1.2 * seconds / 60) + 1} to know",
            style="yellow",
        )
        return True

    @staticmethod
    def _floor(*trials: Mapping[str, Any]) -> float:
        """What is no difference between two losses."""
        return Margins().loss_floor * next((t["loss_unit"] for t in trials if "loss_unit" in t), 1.0)

    def _judge(self, tried: list[wholes.Trained], lowest: wholes.Trained, margin: float) -> tuple[float, str]:
        """The rate with the lowest loss, if more than `margin` speaks for it, and else the rule's; and why."""
        told = [one.rate for one in tried if not one.broken]
        count = len(told)
        if lowest.rate != self.rule and any(t.rate == self.rule and t.loss - lowest.loss <= margin for t in tried):
            return self.rule, f"no whole training of {count} had an evaluation loss lower by over {margin:g}"
        why = f"lowest evaluation loss of {count} whole trainings, one of each"
        if count == 1:
            why = "the only rate with a whole training that ended well, so that it was compared with none"
        sides = [word for word, end in (("lower", min(told)), ("higher", max(told))) if lowest.rate == end]
        if sides:
            why += f" ({' or '.join(sides)} ones may be better still)"
        return lowest.rate, why

    def _once(self, kind: str, rate: float, samples: int) -> dict[str, Any]:
        """One try of a rate, from the record if it was made before."""
        whole = kind == "whole"
        what = {"kind": kind, "rate": rate, "samples": samples, "batch": self.batch}
        label = f"learning rate {rate:g}" + ", whole training" * whole
        self.tries.display.used = self.used
        trial = self.tries.once(what, label, self.recipe, rate, samples // self.batch, whole)
        self.used += samples
        if trial["status"] in ("failed", "skipped") and not whole:
            raise UserError(f"learning rate {rate:g} failed: {trial['reason']}")
        return trial
