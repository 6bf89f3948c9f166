"""`kill` ends a command as Ctrl-C does: with everything written that is done."""

from __future__ import annotations

import signal
import sys
import threading

__all__ = ["stop_on_termination"]


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
