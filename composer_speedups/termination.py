"""`kill` ends a command as Ctrl-C does: with everything written that is done."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["end_on_termination", "put_back", "signal_name", "stop_on_termination"]


def stop_on_termination() -> None:
    """From now on SIGTERM raises KeyboardInterrupt in the main thread, as SIGINT does.

    Composer, when it is imported, puts handlers for both in place that end the process with no word.
    """
    if threading.current_thread() is not threading.main_thread() or sys.platform == "win32":
        return

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def put_back(handlers: Mapping[int, Any]) -> None:
    """Let signals have the handlers that `signal.signal` has given when others were set; None stands for one that was
    not set from Python, and cannot be."""
    for number, handler in handlers.items():
        if handler is not None:
            signal.signal(number, handler)


def signal_name(number: int) -> str:
    """As `SIGSEGV`; real-time signals have none.

    >>> signal_name(11), signal_name(35)
    ('SIGSEGV', 'signal 35')
    """
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


@contextlib.contextmanager
def end_on_termination() -> Iterator[None]:
    """For the seconds in which Composer is imported, when nothing has begun: both signals end the process at once.

    While it is imported it puts handlers in place that raise, tries whether PEFT can be imported, and takes what they
    raise meanwhile for PEFT's absence: a Ctrl-C would be lost.
    """
    if threading.current_thread() is not threading.main_thread() or sys.platform == "win32":
        yield
        return

    def end(*_: object) -> None:
        os.write(2, b"stopped\n")
        os._exit(130)

    set_handler = signal.signal
    before = {number: set_handler(number, end) for number in (signal.SIGTERM, signal.SIGINT)}
    signal.signal = lambda number, handler: set_handler(number, end if number in before else handler)
    try:
        yield
    finally:
        signal.signal = set_handler
        put_back(before)
