"""Run things in fresh processes, and tell how each of them ended, whatever it did.

>>> with Isolation("my_package.my_module:train") as isolation:  # doctest: +SKIP
...     outcome = isolation.run({"recipe": "fp32"}, timeout=60)
"""

from __future__ import annotations

import json
import logging
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from composer_speedups import cgroup
from composer_speedups.ablation.contention import NOTABLE
from composer_speedups.ablation.presence import Presence
from composer_speedups.ablation.worker import MESSAGE_LIMIT
from composer_speedups.errors import UserError

__all__ = ["CannotStart", "Isolation", "Outcome", "ServerEnded"]

log = logging.getLogger("composer_speedups")

LOG_LIMIT = 262_144  # bytes kept of a run's output: its end tells what went wrong
_SERVER = """
import json, sys
setup = json.loads(sys.argv[2])
descriptor = int(sys.argv[1])
sys.path[:] = setup["path"]
sys.argv[:] = ["composer-speedups"]
from composer_speedups.ablation.worker import main
main(descriptor, setup["preload"])
"""
_TICK = 0.2  # seconds between looks at the clock


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
    def alone(self) -> bool:
        """Whether the machine was its own as far as can be told."""
        return not self.overlapped and (self.waited or 0.0) < NOTABLE


class ServerEnded(UserError, RuntimeError):
    """The process that starts the runs ended by itself, or was killed, twice."""

    def __init__(self, code: int | None, output: str) -> None:
        killed = code is not None and code < 0
        how = f"was killed by {signal.Signals(-code).name}" if killed else f"ended with exit code {code}"
        last = output.strip().splitlines()[-1:]
        super().__init__(
            f"the process that starts the runs {how}, twice{': is there enough memory?' if killed else '.'} The same "
            "command goes on from here." + "".join(f" Its last words: {line}" for line in last)
        )


class CannotStart(UserError, RuntimeError):
    """No process can be had for runs, or none that could do them."""


class _Gone(Exception):
    """The process that starts the runs does not answer."""


class Isolation:
    """Runs `entry` (`module:function`) in a fresh process for each call of `run`.

    Args:
        entry: called as `entry(payload, report)` in the new process; `report` takes plain data.
        preload: modules imported once and shared by all runs. They must start no thread and leave CUDA alone;
            where one does, each run gets a new interpreter instead.
        environment: variables set in every run.
    """

    def __init__(
        self,
        entry: str,
        preload: Sequence[str] = (),
        environment: dict[str, str] | None = None,
    ) -> None:
        self.entry = entry
        self.preload = tuple(preload)
        self.environment = dict(environment or {})
        self.shared, self.note = True, ""
        self._server: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._ready = False
        self._server_log: BinaryIO | None = None

    def __enter__(self) -> Isolation:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Start importing, in the background."""
        if self._server is not None:
            return
        if sys.platform != "linux":
            raise CannotStart(
                f"runs in processes of their own are forks, which need Linux, and this is {sys.platform}: use a "
                "container or another machine. `train`, and algorithms in a Trainer, work here"
            )
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._server_log = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `close`
        preload = self.preload if self.shared else ()
        with theirs:
            # -P: a file in the current folder must not hide a module.
            self._server = subprocess.Popen(
                [sys.executable, "-P", "-c", _SERVER, str(theirs.fileno()), json.dumps(_setup(preload))],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self._server_log,
                stderr=self._server_log,
                start_new_session=True,
            )
        self._socket, self._ready = ours, False

    def close(self) -> None:
        """Stop everything that was started."""
        if self._socket is not None:
            self._socket.close()
        if self._server is not None:
            try:
                self._server.wait(5)
            except subprocess.TimeoutExpired:
                self._server.kill()
                self._server.wait()
        if self._server_log is not None:
            self._server_log.close()
        self._server = self._socket = self._server_log = None

    def run(
        self,
        payload: Any,
        *,
        timeout: float | None = None,
        report: Callable[[Any], None] | None = None,
        tick: Callable[[], None] | None = None,
        entry: str | None = None,
        ranks: int = 1,
    ) -> Outcome:
        """Run the entry with `payload` in a fresh process and wait for its end.

        Args:
            payload: anything that can be pickled.
            timeout: seconds after which the process is killed.
            report: called with each thing that the run reports.
            tick: called a few times a second while the run goes on.
            entry: another `module:function` than the usual one.
            ranks: processes that run it together, as torchrun's would; what the first returns and reports counts.

        Raises:
            KeyboardInterrupt: on Ctrl-C, after the process was stopped.
            CannotStart, ServerEnded: there is no process to run it in.
        """
        asked = pickle.dumps(
            {"entry": entry or self.entry, "payload": payload, "environment": self.environment, "ranks": ranks}
        )
        events, writing = os.pipe()
        theirs: int | None = writing

        def watched() -> None:
            presence.look()
            if tick is not None:
                tick()

        try:
            with Presence() as presence, tempfile.TemporaryFile() as log, tempfile.TemporaryFile() as job:
                job.write(asked)  # in a file, as it may be larger than a message
                job.flush()
                pid = self._launch([writing, log.fileno(), job.fileno()], watched)
                os.close(writing)  # the run has its own: at its end the pipe is, too
                theirs = None
                watch = _Watch(pid, events, self._connection(), report, watched)
                try:
                    outcome = watch.wait(timeout)
                except BaseException:
                    watch.stop()
                    raise
                outcome.log = _tail(log)
        finally:
            os.close(events)
            if theirs is not None:
                os.close(theirs)
            if not self.shared:
                self.close()
        if not watch.exited:  # the server itself died: the next run gets a new one
            self.close()
        outcome.overlapped = presence.overlapped
        return outcome

    def _launch(self, descriptors: list[int], tick: Callable[[], None] | None) -> int:
        ended = False
        for _ in range(3):  # once more if the server may not fork, and once more if somebody killed it
            self.start()
            server, log = self._server, self._server_log
            assert server is not None and log is not None
            try:
                if not self._wait_ready(tick):
                    continue
                self._send(b"run", descriptors)
                reply = self._receive(tick)
            except _Gone:
                output = _tail(log)
                self.close()
                if ended:
                    raise ServerEnded(server.returncode, output) from None
                ended = True
                continue
            if "pid" in reply:
                return reply["pid"]
            self._give_up_sharing(reply["unsafe"])
        raise CannotStart("no process for runs could be started: is the limit of processes (ulimit -u) reached?")

    def _wait_ready(self, tick: Callable[[], None] | None) -> bool:
        """True if the server can fork safely; False once it has been decided to use new interpreters."""
        if self._ready:
            return True
        reply = self._receive(tick)
        if "error" in reply:
            self.close()
            *_, last = reply["error"].strip().splitlines()
            log.error("the process for runs could not import what they need:\n%s", reply["error"])
            raise CannotStart(f"the process for runs could not import what they need: {last}")
        self._ready = True
        if reply["unsafe"] and self.shared:
            self._give_up_sharing(reply["unsafe"])
            return False
        return True

    def _give_up_sharing(self, reason: str) -> None:
        if not self.shared:
            raise CannotStart(f"runs cannot be started here: {reason}")
        self.shared = False
        self.note = f"every run starts a new interpreter: {reason}"
        self.close()

    def _connection(self) -> socket.socket:
        assert self._socket is not None
        return self._socket

    def _receive(self, tick: Callable[[], None] | None) -> dict[str, Any]:
        while not select.select([self._connection()], [], [], _TICK)[0]:
            if tick is not None:
                tick()
        try:
            data = self._connection().recv(MESSAGE_LIMIT)
        except ConnectionError as error:
            raise _Gone from error
        if not data:
            raise _Gone
        return pickle.loads(data)

    def _send(self, word: bytes, descriptors: list[int]) -> None:
        try:
            socket.send_fds(self._connection(), [word], descriptors)
        except ConnectionError as error:
            raise _Gone from error


class _Watch:
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
        while not self._look(_TICK):
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
            if number == signal.SIGKILL:
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
            else:
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
            return Outcome("failed", f"crashed with {signal.Signals(-code).name}", None, "", seconds)
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


def _tail(file: BinaryIO) -> str:
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - LOG_LIMIT))
    text = file.read().decode(errors="replace")
    return f"[{size - LOG_LIMIT} earlier bytes left out]\n{text}" if size > LOG_LIMIT else text


def _setup(preload: Sequence[str]) -> dict[str, list[str]]:
    """What the server is told: modules are found where this process finds them."""
    return {"path": [str(Path(p).absolute()) for p in sys.path], "preload": list(preload)}
