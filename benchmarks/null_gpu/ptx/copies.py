"""Copies to shared memory that a thread starts and later waits for (`cp.async`).

What is copied is in shared memory only when its thread has waited: a kernel that reads sooner finds what was there
before, though a GPU might have been faster.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

__all__ = ["Copies"]


class Copies:
    """Those of `threads` threads that are under way. A thread closes groups of them, and waits for all but the last."""

    def __init__(self, threads: int) -> None:
        self._closed = np.zeros(threads, np.int64)  # groups of each thread
        self._started: list[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]] = []

    def start(self, threads: np.ndarray, places: np.ndarray, words: np.ndarray) -> None:
        """`words` [threads, words of 4 bytes], to `places` [threads]."""
        self._started.append((threads, places, words, self._closed[threads]))

    def close(self, threads) -> None:
        self._closed[threads] += 1

    def arrived(self, threads: np.ndarray, latest: int) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """What `start` was given, of those that `threads` have waited for: of all groups but the `latest` ones."""
        still, waits = [], np.zeros(len(self._closed), bool)
        waits[threads] = True
        for who, places, words, group in self._started:
            done = waits[who] & (group + latest < self._closed[who])
            if done.any():
                yield who[done], places[done], words[done]
            if not done.all():
                still.append((who[~done], places[~done], words[~done], group[~done]))
        self._started = still
