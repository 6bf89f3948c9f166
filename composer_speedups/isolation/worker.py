"""The process that makes fresh processes: started by `isolate.py`, runs nothing itself.

It imports what every run needs (15 seconds for torch, transformers and Composer), then forks once for each
run. A fork starts in milliseconds and shares nothing with other runs but the imported code: memory, caches,
compiled graphs, CUDA contexts and random states are its own. Forking is only safe while no thread runs and
CUDA is untouched: both are checked before every fork, and where they do not hold, the caller is told and
starts a new interpreter for each run instead.

Own code and not `multiprocessing`'s forkserver, because that one lives on while a killed study's run
lives, imports the caller's `__main__` again in each child, and cannot give each run its own output file.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import importlib
import json
import os
import pickle
import random
import select
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

from composer_speedups.collector import importing
from composer_speedups.errors import OutOfMemory, SpeedUpUnavailable, UserError, first_line, in_a_line, is_out_of_memory
from composer_speedups.isolation.contention import Contention
from composer_speedups.isolation.ranks import Ranks, die_with
from composer_speedups.termination import signal_name

__all__ = ["MESSAGE_LIMIT", "classify", "main", "resolve"]

MESSAGE_LIMIT = 150_000  # bytes; a packet on a Unix socket is refused above about 200 kB
_GRACE = 5.0  # seconds that atexit handlers of a finished run may take
_WHILE_IMPORTING = {  # against what does not survive a fork; runs see the user's settings again
    # OpenBLAS starts its threads when numpy is imported. PyTorch on x86 brings its own BLAS, so nothing that is
    # measured gets slower.
    "OPENBLAS_NUM_THREADS": "1",
    # pyarrow's allocator has a thread of its own, which pandas 3 and datasets bring in.
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
    # torch.cuda.is_available() would initialise the CUDA driver.
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    # Inductor starts its compile workers, and a thread that reads from them, when it is imported. Runs start theirs
    # when they compile.
    "TORCH_WARM_POOL": "0",
}


def main(descriptor: int, preload: list[str]) -> None:
    """Serve the socket `descriptor` until the other end closes it, as it does when its owner is killed."""
    before = {name: os.environ.get(name) for name in _WHILE_IMPORTING}
    os.environ.update(_WHILE_IMPORTING)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the study's business
    connection = socket.socket(fileno=descriptor)
    try:
        with _left_to_runs("bitsandbytes"), importing():
            for name in preload:
                importlib.import_module(name)
        if environment := sys.modules.get("composer.utils.collect_env"):
            environment.get_cpu_model()  # each Trainer asks, by a process that takes a second; runs inherit the answer
    except BaseException:
        _send(connection, {"error": traceback.format_exc()[-MESSAGE_LIMIT // 8 :]})
        return
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    gc.collect()
    gc.freeze()  # the collector of a child then leaves the shared pages alone
    _send(connection, {"ready": True, "unsafe": unsafe_to_fork()})
    _serve(connection)


@contextmanager
def _left_to_runs(package: str) -> Iterator[None]:
    """Make imports of `package` fail, as those of one that is not installed; that it is can be seen.

    bitsandbytes initialises CUDA when it is imported, and where PEFT is installed it is: by PEFT, which does without if
    it must, and which Composer imports.
    """
    finder = _Refusal(package)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


class _Refusal(MetaPathFinder, Loader):
    """Finds the package it is told, and does not load it."""

    def __init__(self, package: str) -> None:
        self.package = package

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path) if name == self.package else None
        if spec is not None:
            spec.loader = self
        return spec

    def exec_module(self, module: ModuleType) -> None:
        raise ImportError(f"{self.package} is left to the runs to import", name=self.package)


def unsafe_to_fork() -> str:
    """Why a fork of this process could misbehave; empty if it is safe."""
    try:
        names = [_read(f"/proc/self/task/{task}/comm") for task in os.listdir("/proc/self/task")]
    except OSError:
        return "the threads of a process cannot be counted here (no /proc)"
    if len(names) > 1:
        return f"{len(names) - 1} thread(s) run besides the main one ({', '.join(sorted(names))})"
    try:
        # Answers 3 (not initialised) without initialising anything.
        state = ctypes.CDLL("libcuda.so.1").cuDeviceGetCount(ctypes.byref(ctypes.c_int()))
    except (OSError, AttributeError):
        return ""
    return "" if state == 3 else "an imported module has initialised CUDA"


def _serve(connection: socket.socket) -> None:
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    child = 0
    while True:
        ready, _, _ = select.select([connection, wake_read], [], [])
        if wake_read in ready:
            os.read(wake_read, 512)
            pid, status = os.waitpid(child, os.WNOHANG) if child else (0, 0)
            if pid:
                _kill_group(pid)  # what the run left behind: data loaders, compile workers
                child = 0
                _send(connection, {"exit": os.waitstatus_to_exitcode(status), "pid": pid})
        if connection in ready:
            message, descriptors, _, _ = socket.recv_fds(connection, MESSAGE_LIMIT, 3)
            if not message:  # the study is gone: nobody waits for this run any more
                if child:
                    _kill_group(child)
                return
            reason = unsafe_to_fork()
            if reason:
                _send(connection, {"unsafe": reason})
            else:
                child = _fork(connection, (wake_read, wake_write), descriptors)
                _send(connection, {"pid": child})
            for descriptor in descriptors:
                os.close(descriptor)


def _fork(connection: socket.socket, wake: tuple[int, int], descriptors: list[int]) -> int:
    server = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    code = os.EX_SOFTWARE
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.setsid()  # its own group: Ctrl-C in the terminal does not reach it, and one kill ends all of it
        die_with(server)
        connection.close()
        for descriptor in wake:
            os.close(descriptor)
        code = run_child(*descriptors)
    finally:
        os._exit(code)


def run_child(events: int, log: int, job: int) -> int:
    """Run `entry(payload, report)` as `job` says, its output in `log`; write what happens to `events`.

    Args:
        events: descriptor of a pipe.
        log: descriptor of a file.
        job: descriptor of a file that `Isolation.run` has pickled.
    """
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # asked for where the time went before a kill
    random.seed()  # as in any new process; what must be reproducible seeds itself

    def send(event: dict[str, Any]) -> None:
        data = json.dumps(event).encode() + b"\n"
        while data:
            data = data[os.write(events, data) :]

    def failed(code: int, words: str) -> None:
        """Another rank has: this one says so for it, and ends."""
        if code == -signal.SIGKILL:  # who did it, and why, `isolate.py` finds out as for this one
            os.kill(os.getpid(), signal.SIGKILL)
        how = f"crashed with {signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
        send(json.loads(words) if words.startswith("{") else {"failure": "failed", "reason": f"a rank {how}"})

    ranks = None
    try:
        with open(job, "rb") as file:
            file.seek(0)
            asked = pickle.load(file)
        os.environ.update(asked["environment"])
        ranks = Ranks(asked["ranks"], failed)
        contention = Contention()
        report = (lambda progress: send({"progress": progress})) if ranks.rank == 0 else (lambda progress: None)
        result = resolve(asked["entry"])(asked["payload"], report)
        waited = contention.waited()  # while the other ranks are there to be counted
        ranks.end()
        send({"result": result, "waited": waited})
    except BaseException as error:
        status, reason = classify(error)
        if ranks is not None:
            # What the user asked for is wrong on all ranks alike, and told in the same words by whichever is first;
            # memory may be short on one.
            if ranks.count > 1 and (isinstance(error, OutOfMemory) or not isinstance(error, UserError)):
                reason = f"rank {ranks.rank}: {reason}"
            ranks.fail(json.dumps({"failure": status, "reason": reason}))
        traceback.print_exc()
        if ranks is not None and not isinstance(error, UserError):
            ranks.settle()
        send({"failure": status, "reason": reason})
    # What handlers at exit do is no part of the run, but may not hold up the study either.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, _GRACE)
    import atexit

    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return 0


def classify(error: BaseException) -> tuple[str, str]:
    """The status and the one-line reason of a run that raised `error`."""
    text = first_line(error)
    if isinstance(error, SpeedUpUnavailable):
        return "skipped", text
    if isinstance(error, OutOfMemory):
        return "out_of_memory", text
    if isinstance(error, UserError):
        return "failed", text
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", "stopped by the user"
    if isinstance(error, SystemExit) and error.code == 128 + signal.SIGTERM:  # Composer's way to take it
        return "failed", "ended by SIGTERM"
    return "out_of_memory" if is_out_of_memory(error) else "failed", in_a_line(error)


def resolve(entry: str) -> Callable[..., Any]:
    """The function that `package.module:name` names."""
    module, _, name = entry.partition(":")
    return getattr(importlib.import_module(module), name)


def _send(connection: socket.socket, message: dict[str, Any]) -> None:
    try:
        connection.send(pickle.dumps(message))
    except OSError:
        return  # the study is gone; the next read says so


def _kill_group(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _read(path: str) -> str:
    with open(path) as file:
        return file.read().strip()
