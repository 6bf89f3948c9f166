"""CUDA graphs on the null GPU: what is computed while one is captured is computed again whenever it is replayed.

It finds its operands where they were, as on a GPU, and leaves its results there. Random numbers are new ones.
"""

from __future__ import annotations

import ctypes
from collections import defaultdict
from collections.abc import Callable

__all__ = ["capturing", "install", "record"]

_LAUNCH_FAILED = 719
_Replay = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_ulonglong)
_runtime = ctypes.CDLL(None)  # libnull.so, preloaded
_captured: dict[int, list[Callable[[], None]]] = defaultdict(list)


def install() -> None:
    _runtime.null_capture.restype = ctypes.c_ulonglong

    @_Replay
    def replay(capture: int) -> int:
        try:
            for again in _captured[capture]:
                again()
        except Exception as error:
            _runtime.null_say(f"in a graph: {error}".encode())
            return _LAUNCH_FAILED
        return 0

    _runtime.null_replay_with(replay)
    install.kept = replay  # or Python would free what the runtime calls


def capturing() -> bool:
    return bool(_runtime.null_capture())


def record(again: Callable[[], None]) -> None:
    """If a graph is being captured, `again` is what its replays do here."""
    if capture := _runtime.null_capture():
        _captured[capture].append(again)
