"""Tries of a search: each a short training in a fresh process, made once, and recorded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from composer_speedups import registry
from composer_speedups.ablation.estimate import seconds_per_sample
from composer_speedups.ablation.jobs import PRELOAD
from composer_speedups.ablation.rows import precision
from composer_speedups.ablation.study import Entries
from composer_speedups.errors import SpeedUpUnavailable
from composer_speedups.hardware import hardware, peaks_at_work, summary
from composer_speedups.isolation.isolate import Isolation, Outcome
from composer_speedups.isolation.look import look
from composer_speedups.isolation.ranks import together
from composer_speedups.measurement.results import loss_text
from composer_speedups.recipes.schema import in_samples
from composer_speedups.tasks.inputs import Mark
from composer_speedups.tuning.progress import Display
from composer_speedups.tuning.record import Record
from composer_speedups.tuning.settings import Settings

if TYPE_CHECKING:
    from composer_speedups.recipes import Recipe

__all__ = ["ENTRIES", "Tries"]

ENTRIES = Entries(
    train="composer_speedups.tuning.jobs:trial",
    survey="composer_speedups.tuning.jobs:survey",
    preload=(*PRELOAD, "composer_speedups.tuning.jobs"),
)
_SHARE = {"cpu": 0.8, "cuda": 0.95}  # of the memory there is, where no limit is given
_VARYING = 0.85  # on a GPU, where batches differ in tokens: the fullest one need not be among those tried


class Tries:
    """Look at the machine, in a process of its own, for tries of `recipe` on it.

    Args:
        recipe: the one that is tuned.
        settings: see there; its limits hold for each try.
        isolation: what makes the processes.
        entries: what runs in them.

    Attributes:
        facts: of the machine.
        machine: it, and the ranks, in words.
        samples: that the recipe's task has for training.
        predicted: batch size -> peak of a rank in bytes, as `memory.predict` has it; empty where it is not known.
        seconds_per_sample: as the matmul peak suggests; 0 where that is not known.
        cuda: whether tries run on a GPU.
        limit: bytes that a rank of a try may take; None where the machine's memory is not known.

    Raises:
        SpeedUpUnavailable: the recipe cannot run on this machine.
        UserError: the recipe is wrong, or the machine could not be looked at.
    """

    def __init__(self, recipe: Recipe, settings: Settings, isolation: Isolation, entries: Entries) -> None:
        self.recipe, self.settings, self.isolation = recipe, settings, isolation
        kind = hardware()
        wanted = precision(recipe.to_dict(), kind)
        ranks = settings.ranks
        payload = {"recipe": recipe, "peaks": {recipe.name: wanted}, "ranks": ranks}
        answer = look(isolation, payload, entries.survey, 1200)
        if answer["skip"]:
            raise SpeedUpUnavailable(f"{recipe.name} cannot run here: {next(iter(answer['skip'].values()))}")
        self.facts: dict[str, Any] = answer["environment"]
        self.machine = together(ranks, summary(self.facts))
        self.samples: int = answer["samples"]
        shared = 1 if settings.constant else ranks  # a microbatch is one rank's, a batch of all
        self.predicted = {int(size) * shared: peak for size, peak in answer["memory"].items()}
        peaks = peaks_at_work(answer["peaks"], self.facts)
        self.seconds_per_sample = seconds_per_sample(recipe.to_dict(), peaks, kind) or 0.0
        self.cuda = self.facts["hardware"] == "cuda"
        self.limit = settings.memory_limit or self._whole_memory()

    def begin(self, record: Record, display: Display, inputs: Mapping[str, Mark]) -> None:
        """From here on tries are kept in `record`, and shown on `display`; none is made on other `inputs`."""
        self.record, self.display, self.inputs = record, display, dict(inputs)

    def own_samples(self) -> int:
        """Samples of the recipe's own duration."""
        return in_samples(self.recipe.duration, self.samples, self.recipe.batch_size)

    def once(
        self, what: dict[str, Any], label: str, recipe: Recipe, rate: float, steps: int, whole: bool = False
    ) -> dict[str, Any]:
        """What came of the try `what`: from the record, or made now and recorded, if it would end the same way again.

        It trains `steps` steps; if `whole`, as long as the recipe says, which should be about so many, and evaluates.

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
        trial = what | {"steps": steps} | self._try(label, recipe, rate, steps, whole)
        return self.record.add(trial) if lasting(trial) else trial

    def _try(self, label: str, recipe: Recipe, rate: float, steps: int, whole: bool) -> dict[str, Any]:
        """Train `steps` steps in a fresh process; what came of it, for the record."""
        plain = recipe.to_dict() | {"learning_rate": rate, "evaluate": whole, "loggers": {}, "published": None}
        if not whole:
            plain["duration"] = f"{steps}ba"
            plain["schedule"] = plain["schedule"] | {"warmup": self._warmup()}
        self.display.start(label)
        outcome = self.isolation.run(
            {
                "recipe": plain,
                "seed": recipe.seed,
                "memory_limit": self.limit,
                "device_limit": self.settings.memory_limit,
                "inputs": self.inputs,
            },
            timeout=self.settings.timeout,
            report=self.display.progress,
            tick=self.display.tick,
            ranks=self.settings.ranks,
        )
        result = self._result(outcome, whole)
        self.display.say(f"  {label}, {steps} steps: {_told(result)}")
        return result

    def _result(self, outcome: Outcome, whole: bool) -> dict[str, Any]:
        """What came of a try, as the record keeps it."""
        value, (status, reason) = outcome.facts, outcome.verdict
        if outcome.killed and not self.cuda:
            # The kernel counts the processes that it kills, and `isolate` looks there; earlyoom and its like do not,
            # and send SIGTERM first.
            status = "out_of_memory"
        peak = value.get("peak_memory_bytes")
        if status == "ok" and self.limit and peak and peak > self.limit:
            status, reason = "over_limit", f"{peak / 1e9:.2f} GB"
        losses = [loss for loss in value.get("losses") or [] if loss is not None]
        tail = losses[-max(1, len(losses) // 4) :] if value.get("finite", True) else []
        return {
            "status": status,
            "reason": " ".join(str(reason).split()),
            "samples_per_second": value.get("samples_per_second"),
            "peak_memory_bytes": peak,
            "loss": sum(tail) / len(tail) if tail else None,
            "first": sum(losses[:3]) / len(losses[:3]) if losses else None,
            "tail": [float(f"{one:.6g}") for one in tail],
            "loss_unit": value.get("loss_unit", 1.0),
            **({key: value.get(key) for key in ("eval_loss", "eval_accuracy")} if whole else {}),
            "seconds": round(outcome.seconds, 2),
            "allowed": self.settings.timeout,
            "overlapped": not outcome.alone,
            "killed": outcome.killed,
        }

    def _whole_memory(self) -> int | None:
        """The memory that a rank of a try may take where the user sets no limit."""
        if self.cuda:
            varying = self.recipe.task.padding != "max_length" or (
                self.recipe.speedups.keys() & {"unpadding", *registry.regrouping()}
            )
            total = min((gpu["memory_bytes"] for gpu in self.facts["gpus"]), default=None)
            share = _VARYING if varying else _SHARE["cuda"]
        else:
            total, share = self.facts.get("memory_bytes"), _SHARE["cpu"] / self.settings.ranks
        return None if total is None else round(share * total)

    def _warmup(self) -> str:
        """The recipe's warm-up as a share of a training: counted in batches, it would outlast a try."""
        warmup = self.recipe.schedule.warmup
        if warmup.endswith("dur"):
            return warmup
        samples = in_samples(warmup, self.samples, self.recipe.batch_size)
        # A share is below 1: such a training is warm-up to its end.
        return f"{min(0.999999, samples / self.own_samples()):.6f}dur"


def _told(result: Mapping[str, Any]) -> str:
    """The `result` of a try on one line."""
    facts = [f"{result['seconds']:.1f} s"]
    if result["samples_per_second"]:
        facts.append(f"{result['samples_per_second']:.4g} samples/s")
    if result["peak_memory_bytes"]:
        facts.append(f"{result['peak_memory_bytes'] / 1e6:,.0f} MB")
    if result["loss"] is not None:
        facts.append(f"loss {loss_text(result['loss'], 4)}")
        if result.get("eval_loss") is not None:
            facts[-1] += f", on evaluation texts {loss_text(result['eval_loss'], 4)}"
    elif result["status"] == "ok":
        facts.append("the loss was not finite")
    if result["overlapped"]:
        facts.append("beside other work")
    words = "" if result["status"] == "ok" else f"{result['status'].replace('_', ' ')}: {result['reason']}; "
    return words + ", ".join(facts)
