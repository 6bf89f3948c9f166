"""Meters of memory: what tensors hold, what autograd keeps, and the most that a run of operations holds at once."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["OperationMeter", "SavedForBackward", "tensor_bytes"]


def tensor_bytes(tensors: Iterable[Any]) -> int:
    """Bytes of the memory behind `tensors`, shared memory counted once.

    >>> x = torch.zeros(10)
    >>> tensor_bytes([x, x[2:], torch.zeros(2)])
    48
    """
    found: dict[int, int] = {}
    held = []
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor):
            storage = tensor.untyped_storage()
            held.append(storage)  # so that no address is given out twice
            found[storage._cdata] = storage.nbytes()
    return sum(found.values())


class SavedForBackward:
    """Counts what autograd keeps for the backward pass while this context is entered: `with` around a forward pass.

    Memory that belongs to `model`'s parameters and buffers is not counted. Tensors are counted, and kept, as they are.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.bytes = 0
        self._own = {t.untyped_storage()._cdata for t in (*model.parameters(), *model.buffers())}
        self._seen: dict[int, weakref.ref[Any]] = {}
        self._hooks: Any = None

    def __enter__(self) -> SavedForBackward:
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._hooks.__exit__(*error)

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        key = storage._cdata
        # An address is used again once its memory was freed: then it is another one's.
        if key not in self._own and (key not in self._seen or self._seen[key]() is None):
            self._seen[key] = weakref.ref(storage)
            self.bytes += storage.nbytes()
        return tensor


class OperationMeter(TorchDispatchMode):
    """Follows how many bytes the results of all operations hold, the model's own memory left out."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._seen = weakref.WeakSet([t.untyped_storage() for t in (*model.parameters(), *model.buffers())])
        self._held = [t.untyped_storage() for t in (*model.parameters(), *model.buffers())]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage not in self._seen:
                    self._seen.add(storage)
                    size = storage.nbytes()
                    self.now += size
                    weakref.finalize(storage, self._gone, size).atexit = False
        self.peak = max(self.peak, self.now)
        return out

    def _gone(self, size: int) -> None:
        self.now -= size
