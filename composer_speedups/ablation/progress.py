"""What a study shows while it runs: what is running, how far it is, and how long is left."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.text import Text

from composer_speedups.ablation.estimate import duration, remaining_seconds
from composer_speedups.ablation.store import OPEN, Run
from composer_speedups.isolation.isolate import Outcome
from composer_speedups.measurement.results import loss_text

__all__ = ["Display"]

_REDRAW = 2  # times a second: on a small machine drawing would take time from what is measured
_MARKS = {"ok": "[green]ok[/]", "skipped": "[dim]skipped[/]", "interrupted": "[yellow]stopped[/]"}
_WIDTH = 16  # of a bar
_PHASES = {
    "data": "preparing data",
    "train": "training",
    "eval": "evaluating",
    "verify": "verifying",
}


class Display:
    """In a terminal one live line and a line for every finished run; elsewhere a line at start and end."""

    def __init__(self, console: Console, names: Mapping[str, str]) -> None:
        self.console, self.names = console, names
        self.width = max((len(name) for name in names.values()), default=0)
        self._live = Live(console=console, refresh_per_second=_REDRAW, transient=True) if console.is_terminal else None
        self._run: Run | None = None
        self._runs: Sequence[Run] = ()
        self._expected: Mapping[str, float | None] = {}
        self._started = self._drawn = 0.0
        self._last: dict[str, Any] = {}
        self._between = ""

    def __enter__(self) -> Display:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def start(self, run: Run, runs: Sequence[Run], expected: Mapping[str, float | None]) -> None:
        """A run begins."""
        self._run, self._runs, self._expected = run, runs, expected
        self._started, self._last, self._between = time.monotonic(), {}, ""
        if self._live is None:
            self._say(f"{self._position()} {escape(self._label(run))} started{self._left()}")
        self._draw(force=True)

    def progress(self, event: dict[str, Any]) -> None:
        """The run says how far it is."""
        self._last = event
        self._draw()

    def tick(self) -> None:
        self._draw()

    def waiting(self, why: str) -> None:
        """Nothing to do but wait for another process."""
        self.between_runs(f"waiting: {why}")

    def between_runs(self, what: str) -> None:
        """Something is done that is no run."""
        if what != self._between and self._live is None:
            self._say(escape(what))
        self._between, self._run, self._last = what, None, {}
        self._draw(force=True)

    def finished(self, run: Run, status: str, reason: str, outcome: Outcome) -> None:
        """A run has ended: one line that stays."""
        result = outcome.facts
        facts = [f"{outcome.seconds:.1f} s"]
        if result.get("samples_per_second") is not None:
            facts.append(f"{result['samples_per_second']:.4g} samples/s")
        if result.get("final_loss") is not None:
            facts.append(f"loss {loss_text(result['final_loss'], 3)}")
        if result.get("eval_accuracy") is not None:
            facts.append(f"accuracy {result['eval_accuracy']:.3f}")
        if result.get("eval_r2") is not None:
            facts.append(f"R² {result['eval_r2']:.3f}")
        mark = _MARKS.get(status, f"[red]{status.replace('_', ' ')}[/]")
        text = f"{self._position()} {escape(self._label(run))} {mark}  {', '.join(facts)}"
        self._run = None
        self._say(text)
        if reason:
            self._say(f"  [dim]{escape(' '.join(reason.split()))}[/]")

    def taken_over(self, run: Run) -> None:
        """A run has ended here that another process had taken for dead: its result is the one that counts."""
        line = f"{self._position()} {escape(self._label(run))} [yellow]not counted[/]  another process took it over"
        self._run = None
        self._say(line)

    def _draw(self, force: bool = False) -> None:
        if self._live is None or (not force and time.monotonic() - self._drawn < 1 / _REDRAW):
            return
        self._drawn = time.monotonic()
        line = Text.from_markup(self._line(), overflow="ellipsis")
        line.no_wrap = True
        self._live.update(line, refresh=force)

    def _say(self, text: str) -> None:
        """One line, cut where the terminal ends: what it says in full is in the notes and in the store."""
        self.console.print(text, highlight=False, no_wrap=True, overflow="ellipsis")

    def _line(self) -> str:
        if self._run is None:
            return "  ".join(escape(part) for part in (self._between, str(self._last.get("message") or "")) if part)
        last = self._last
        parts = [f"[bold]{escape(self._label(self._run).rstrip())}[/] {_PHASES.get(last.get('phase', ''), 'starting')}"]
        if last.get("steps"):
            parts.append(f"{_bar(last['step'] / last['steps'])} {last['step']}/{last['steps']}")
        if last.get("loss") is not None:
            parts.append(f"loss {loss_text(last['loss'], 3)}")
        if last.get("samples_per_second") is not None:
            parts.append(f"{last['samples_per_second']:.4g} samples/s")
        if last.get("accuracy") is not None:
            parts.append(f"accuracy {last['accuracy']:.3f}")
        if last.get("message"):
            parts.append(escape(str(last["message"])))
        return f"{self._position()} " + "  ".join(parts) + self._left()

    def _label(self, run: Run) -> str:
        return f"{self.names.get(run.recipe, run.recipe):<{self.width}} seed {run.seed}"

    def _position(self) -> str:
        total = sum(run.status != "skipped" for run in self._runs)
        done = sum(run.status not in (*OPEN, "skipped") for run in self._runs)
        return rf"\[{done + 1}/{total}]"

    def _left(self) -> str:
        current: dict[int, float | None] = {}
        if self._run is not None:
            current[self._run.id] = self._left_of_run()
        seconds = remaining_seconds(self._runs, self._expected, current)
        return "" if seconds is None else f"  [dim]about {duration(seconds)} left in all[/]"

    def _left_of_run(self) -> float | None:
        """Seconds that the present run needs still."""
        assert self._run is not None
        if self._last.get("seconds_left") is not None:
            return float(self._last["seconds_left"])
        alone = remaining_seconds([r for r in self._runs if r.status not in OPEN] + [self._run], self._expected)
        return None if alone is None else max(1.0, alone - (time.monotonic() - self._started))


def _bar(share: float) -> str:
    full = max(0, min(_WIDTH, round(share * _WIDTH)))
    return f"[cyan]{'━' * full}[/][dim]{'─' * (_WIDTH - full)}[/]"
