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
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from composer_speedups.errors import UserError
from composer_speedups.isolation.presence import Presence
from composer_speedups.isolation.watch import TICK, Outcome, Watch, tail
from composer_speedups.isolation.worker import MESSAGE_LIMIT
from composer_speedups.termination import signal_name

__all__ = ["CannotStart", "Isolation", "Outcome", "ServerEnded"]

log = logging.getLogger("composer_speedups")

_SERVER = """
import json, sys
setup = json.loads(sys.argv[2])
descriptor = int(sys.argv[1])
sys.path[:] = setup["path"]
sys.argv[:] = ["composer-speedups"]
from composer_speedups.isolation.worker import main
main(descriptor, setup["preload"])
"""


class ServerEnded(UserError, RuntimeError):
    """The process that starts the runs ended by itself, or was killed, twice."""

    def __init__(self, code: int | None, output: str) -> None:
        killed = code is not None and code < 0
        how = f"was killed by {signal_name(-code)}" if killed else f"ended with exit code {code}"
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
        if os.environ.get("WORLD_SIZE", "1") != "1":
            raise CannotStart(
                f"WORLD_SIZE is {os.environ['WORLD_SIZE']}, as of a process of several, and runs start their ranks "
                "themselves: leave out composer -n or torchrun and use --ranks, or unset WORLD_SIZE"
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
                watch = Watch(pid, events, self._connection(), report, watched)
                try:
                    outcome = watch.wait(timeout)
                except BaseException:
                    watch.stop()
                    raise
                outcome.log = tail(log)
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
                output = tail(log)
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
        while not select.select([self._connection()], [], [], TICK)[0]:
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


def _setup(preload: Sequence[str]) -> dict[str, list[str]]:
    """What the server is told: modules are found where this process finds them."""
    return {"path": [str(Path(p).absolute()) for p in sys.path], "preload": list(preload)}
