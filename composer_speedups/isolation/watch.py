"""A run from outside: what it reports, how it ends, and what that says of it."""

from __future__ import annotations

import json
import os
import pickle
import select
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from composer_speedups import cgroup
from composer_speedups.isolation.contention import NOTABLE
from composer_speedups.isolation.worker import MESSAGE_LIMIT
from composer_speedups.termination import signal_name

__all__ = ["TICK", "Outcome", "Watch", "tail"]

LOG_LIMIT = 262_144  # bytes kept of a run's output: its end tells what went wrong
TICK = 0.2  # seconds between looks at the clock


@dataclass
class Outcome:
    """How a run ended. `value` is what the entry returned, or None.

    `overlapped`: another run was measured meanwhile. `waited`: of the time in which it wanted a core, the share that
    others had it; None where that is not known. `killed`, or politely asked to end: by what the system has against lack
    of memory, or by somebody: which of them is not known. `seconds`: from its fork on.
    """

    status: str
    reason: str
    value: Any
    log: str
    seconds: float
    overlapped: bool = False
    waited: float | None = None
    killed: bool = False

    @property
    def facts(self) -> dict[str, Any]:
        """What the run says of itself; empty if it came to no end."""
        return self.value if isinstance(self.value, dict) else {}

    @property
    def verdict(self) -> tuple[str, str]:
        """Status and reason: what the run says of itself goes before what its process did."""
        return self.facts.get("status", self.status), self.facts.get("reason") or self.reason

    @property
    def alone(self) -> bool:
        """Whether the machine was its own as far as can be told."""
        return not self.overlapped and (self.waited or 0.0) < NOTABLE


class Watch:
    """Follows one run until it ends."""

    def __init__(
        self,
        pid: int,
        events: int,
        server: socket.socket,
        report: Callable[[Any], None] | None,
        tick: Callable[[], None] | None,
    ) -> None:
        self.pid, self.events, self.server, self.report, self.tick = pid, events, server, report, tick
        self.exited = False
        self._code: int | None = None
        self._buffer = b""
        self._result: dict[str, Any] = {}
        self._open = True
        self._oom_kills = _oom_kills()

    def wait(self, timeout: float | None) -> Outcome:
        start = time.monotonic()
        while not self._look(TICK):
            if self.tick is not None:
                self.tick()
            if timeout is not None and time.monotonic() - start > timeout:
                self._signal(signal.SIGUSR1)  # writes where it is into its log
                self._until(1.0, lambda: False)
                self._kill()
                return Outcome("timeout", f"over the time limit of {timeout:g} s", None, "", time.monotonic() - start)
        return self._outcome(time.monotonic() - start)

    def stop(self) -> None:
        """End the run: politely, then at once. A second Ctrl-C does not wait."""
        if self.exited:
            return
        try:
            self._signal(signal.SIGINT)
            self._until(3.0, lambda: self.exited)
        finally:
            self._kill()

    def _kill(self) -> None:
        if not self.exited:
            self._signal(signal.SIGKILL)
            self._until(10.0, lambda: self.exited)

    def _signal(self, number: int) -> None:
        try:
            # The group exists once the child has called setsid; before that, only the child itself does.
            if number in (signal.SIGKILL, signal.SIGUSR1):  # SIGUSR1: each of its ranks writes where it is
                try:
                    os.killpg(self.pid, number)
                except ProcessLookupError:
                    os.kill(self.pid, number)
            else:
                os.kill(self.pid, number)
        except ProcessLookupError:
            return

    def _until(self, seconds: float, done: Callable[[], bool]) -> None:
        end = time.monotonic() + seconds
        while not done() and time.monotonic() < end and not self._look(0.05):
            pass

    def _look(self, seconds: float) -> bool:
        """Take in what has arrived, waiting `seconds` at most; True once the run has ended."""
        if self.exited:
            return True
        watched = [self.server, self.events] if self._open else [self.server]
        ready, _, _ = select.select(watched, [], [], seconds)
        if self.events in ready:
            self._read()
        if self.server in ready:
            data = self.server.recv(MESSAGE_LIMIT)
            if not data:  # the server was killed, and took the run with it
                self._code = -signal.SIGKILL
                self._signal(signal.SIGKILL)
                self._drain()
                return True
            message = pickle.loads(data)
            if message.get("pid") == self.pid and "exit" in message:
                self.exited = True
                self._code = message["exit"]
                self._drain()
                return True
        return False

    def _drain(self) -> None:
        while self._open and select.select([self.events], [], [], 0)[0]:
            self._read()

    def _read(self) -> None:
        data = os.read(self.events, 65536)
        if not data:
            self._open = False
            return
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        for line in lines:
            event = json.loads(line)
            if "progress" in event:
                if self.report is not None:
                    self.report(event["progress"])
            elif not self._result:  # what comes after it comes of it
                self._result = event

    def _outcome(self, seconds: float) -> Outcome:
        value = self._result.get("result")
        told = value.get("status") if isinstance(value, dict) else None
        if "interrupted" in (told, self._result.get("failure")):
            # A terminal's Ctrl-C does not reach it, and where its owner stops it, nobody asks what came of it.
            reason = "ended by SIGTERM or SIGINT: of what watches over memory, or of somebody"
            return Outcome("failed", reason, None, "", seconds, killed=True)
        if "result" in self._result:
            return Outcome("ok", "", value, "", seconds, waited=self._result["waited"])
        if "failure" in self._result:
            return Outcome(self._result["failure"], self._result["reason"], None, "", seconds)
        code = self._code or 0
        if code == -signal.SIGKILL:
            if (_oom_kills() or 0) > (self._oom_kills or 0):
                return Outcome("out_of_memory", "killed by the system for lack of memory", None, "", seconds)
            reason = "killed by SIGKILL: by the system for lack of memory, or by somebody"
            return Outcome("failed", reason, None, "", seconds, killed=True)
        if code < 0:
            return Outcome("failed", f"crashed with {signal_name(-code)}", None, "", seconds)
        return Outcome("failed", f"ended without a result (exit code {code})", None, "", seconds)


def _oom_kills() -> int | None:
    """How many processes the kernel has killed for lack of memory so far: of this control group, or of all."""
    kills = cgroup.oom_kills()
    if kills is not None:
        return kills
    try:
        fields = dict(line.split()[:2] for line in Path("/proc/vmstat").read_text().splitlines())
        return int(fields["oom_kill"])
    except (OSError, KeyError, ValueError):
        return None


def tail(file: BinaryIO) -> str:
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - LOG_LIMIT))
    text = file.read().decode(errors="replace")
    return f"[{size - LOG_LIMIT} earlier bytes left out]\n{text}" if size > LOG_LIMIT else text
