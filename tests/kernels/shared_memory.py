"""How long the emulator's programs use shared memory, which a GPU reads and writes 32 banks of 4 bytes at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import numpy as np

from benchmarks.null_gpu.ptx.machine import _Machine

__all__ = ["counted"]


@contextmanager
def counted() -> Iterator[dict[str, int]]:
    """`cycles` that accesses take, and how many it would be `at_best`, if no bank had two rows asked for at a time."""
    found = {"cycles": 0, "at_best": 0}

    def count(machine: _Machine, where, offset: int, size: int, m) -> None:
        active = machine._active(m)
        words = (np.broadcast_to(where, machine.count)[active].astype(np.int64) + offset) // 4
        # Wide accesses are served for so many neighbours at a time as ask for 128 bytes.
        together = np.arange(machine.count)[active] // (128 // max(size, 4))
        each = np.arange(max(size // 4, 1))
        asked = np.unique(np.stack([np.repeat(together, len(each)), (words[:, None] + each).ravel()]), axis=1)
        banks, rows = np.unique(np.stack([asked[0], asked[1] % 32]), axis=1, return_counts=True)
        for group in np.unique(banks[0]):
            found["cycles"] += int(rows[banks[0] == group].max())
            found["at_best"] += 1

    load, store = _Machine.load_shared, _Machine.store_shared

    def loads(machine, where, offset, each, number, m):
        count(machine, where, offset, each * number, m)
        return load(machine, where, offset, each, number, m)

    def stores(machine, where, offset, each, values, m):
        count(machine, where, offset, each * len(values), m)
        return store(machine, where, offset, each, values, m)

    with patch.object(_Machine, "load_shared", loads), patch.object(_Machine, "store_shared", stores):
        yield found
