"""CUDA graphs on the null GPU: what is computed while one is captured is computed again whenever it is replayed.

It finds its operands where they were, as on a GPU, and leaves its results there. Random numbers are new ones.
"""

from __future__ import annotations

import ctypes
from collections import defaultdict
from collections.abc import Callable

from benchmarks.null_gpu.runtime import answer, runtime

__all__ = ["capturing", "install", "record"]

_Replay = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_ulonglong)
_captured: dict[int, list[Callable[[], None]]] = defaultdict(list)


def install() -> None:
    runtime.null_capture.restype = ctypes.c_ulonglong

    @_Replay
    def replay(capture: int) -> int:
        def all_again() -> None:
            for again in _captured[capture]:
                again()

        return answer("in a graph", all_again)

    runtime.null_replay_with(replay)
    install.kept = replay  # or Python would free what the runtime calls


def capturing() -> bool:
    return bool(runtime.null_capture())


def record(again: Callable[[], None]) -> None:
    """If a graph is being captured, `again` is what its replays do here."""
    if capture := runtime.null_capture():
        _captured[capture].append(again)
