"""What is found out of each recipe once, in processes of their own, when a run of it is stored.

Whatever ends there, Ctrl-C included, costs no run. The same study called again asks what has not been answered yet, of
runs that were made without these questions, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from composer_speedups.ablation.progress import Display
from composer_speedups.ablation.store import Run
from composer_speedups.measurement.results import NOT_TOLD
from composer_speedups.verification.findings import NOT_VERIFIED

if TYPE_CHECKING:
    from composer_speedups.ablation.work import Work

__all__ = ["Afterwards"]


@dataclass(frozen=True)
class _Question:
    """Asked of a recipe.

    Attributes:
        entry: answers it with changes to a run's result.
        answer: the field of a result that has something where it is answered.
        unanswered: how a warning begins that tells why it could not be.
        doing: what is being done, for who watches.
    """

    entry: str
    answer: str
    unanswered: str
    doing: str


class Afterwards:
    """Asks the questions that the settings of `work` hold."""

    def __init__(self, work: Work) -> None:
        self._work, settings = work, work.settings
        self._asked = set[tuple[str, str]]()  # by this call
        self._questions: list[_Question] = []
        if settings.inspect and settings.ranks > 1:  # one process looks inside itself at its run's end
            self._questions.append(
                _Question(settings.entries.look_inside, "memory", NOT_TOLD, "looking where its time and memory go")
            )
        if settings.verify:
            self._questions.append(
                _Question(settings.entries.verify, "numerics", NOT_VERIFIED, "comparing its numbers with float64")
            )

    def ask(self, display: Display) -> None:
        """Ask what has not been answered of the recipes that have a run which ended well."""
        for question, run in self._open():
            if self._work.time_limit() == 0:
                return
            self._asked.add((question.answer, run.recipe))
            display.between_runs(f"{self._work.short[run.recipe]}: {question.doing}")
            changes, log = self._answered(question, run, display)
            self._work.store.amend(run, changes, log, warned=question.unanswered)

    def left(self) -> bool:
        """Whether there is something to ask."""
        return bool(self._open())

    def _open(self) -> list[tuple[_Question, Run]]:
        """What has no answer yet, with the run that is to have it."""
        if not self._questions:
            return []
        good: dict[str, list[Run]] = {}
        for run in self._work.runs():
            if run.status == "ok" and not run.result.get("gave_up"):
                good.setdefault(run.recipe, []).append(run)
        found = []
        for question in self._questions:
            for name, runs in good.items():
                warnings = [w for run in runs for w in run.result.get("warnings") or []]
                warned = any(w.startswith(question.unanswered) for w in warnings)
                known = any(run.result.get(question.answer) for run in runs)
                known |= warned and not self._work.settings.retry
                if not known and (question.answer, name) not in self._asked:
                    found.append((question, runs[0]))
        return found

    def _answered(self, question: _Question, run: Run, display: Display) -> tuple[dict[str, Any], str]:
        """What to add to the result of `run`, which is done and well, whatever happens here; and to its log."""
        work = self._work
        try:
            outcome = work.isolation.run(
                work.payload(run) | {"train_samples": run.result.get("train_samples")},
                timeout=work.time_limit(),
                report=display.progress,
                tick=display.tick,
                entry=question.entry,
                ranks=work.settings.ranks,
            )
        except Exception as error:
            return {"warnings": [f"{question.unanswered}: {error}"]}, ""
        if outcome.status == "ok":
            return outcome.value, ""
        return {"warnings": [f"{question.unanswered}: {outcome.reason}"]}, outcome.log
