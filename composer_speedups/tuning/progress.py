"""What a search shows: a live line in a terminal, and one that stays for each try."""

from __future__ import annotations

import time
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.text import Text

from composer_speedups.ablation.estimate import duration
from composer_speedups.measurement.results import loss_text

__all__ = ["Display"]

_REDRAW = 2  # times a second: on a small machine drawing would take time from what is measured


class Display:
    """Shows the tries of one search. Without a terminal, only the lines that stay."""

    def __init__(self, console: Console, budget: int) -> None:
        self.console, self.budget, self.used = console, budget, 0
        self._live = Live(console=console, refresh_per_second=_REDRAW, transient=True) if console.is_terminal else None
        self._label = ""
        self._last: dict[str, Any] = {}
        self._drawn = self._started = 0.0

    def __enter__(self) -> Display:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def start(self, label: str) -> None:
        self._label, self._last, self._started = label, {}, time.monotonic()
        self.tick(force=True)

    def progress(self, event: dict[str, Any]) -> None:
        self._last = event
        self.tick()

    def tick(self, force: bool = False) -> None:
        if self._live is None or (not force and time.monotonic() - self._drawn < 1 / _REDRAW):
            return
        self._drawn = time.monotonic()
        last = self._last
        parts = [f"[bold]{escape(self._label)}[/]"]
        parts.append(f"{last['step']}/{last['steps']}" if last.get("steps") else "starting")
        if last.get("loss") is not None:
            parts.append(f"loss {loss_text(last['loss'], 3)}")
        if last.get("samples_per_second") is not None:
            parts.append(f"{last['samples_per_second']:.4g} samples/s")
        share = min(1.0, self.used / self.budget) if self.budget else 0.0
        parts.append(f"[dim]{share:.0%} of the samples used, {duration(time.monotonic() - self._started)} on this[/]")
        line = Text.from_markup("  ".join(parts), overflow="ellipsis")
        line.no_wrap = True
        self._live.update(line, refresh=force)

    def say(self, text: str, style: str | None = None) -> None:
        self.console.print(escape(text), highlight=False, soft_wrap=not self.console.is_terminal, style=style)
