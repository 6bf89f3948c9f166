"""PrefetchBatches: the next batch travels to the GPU while the present one is computed.

**Why it is faster.** Composer copies a batch to the GPU when its step begins, on the stream that computes: the
copies are queued behind the last step's kernels and ahead of this step's. Copied one step early on a stream of
their own, from page-locked memory, they run beside the computation.

**Numerics.** None: the same batches in the same order, bit for bit, also after resuming. But where an epoch is broken
off (`train_subset_num_batches`, a duration in batches) and workers persist, they have made a batch more by then: what
they draw at random, and a stream that goes on, are those of one batch later from there on.

**When it pays.** A batch of token ids is small: expect little, and that where steps are short. More for inputs that are
large themselves (images, embeddings).

**Needs.** CUDA, and a `DataLoader` with `num_workers` of 1 or more (`workers` in a recipe): without workers the
next batch would be made by the training process, at another time than without this speed-up, which changes the
random numbers of collators that draw them. One more batch in the GPU's memory.

Source: NVIDIA Apex's `data_prefetcher`; "overlap data transfers" in NVIDIA's CUDA programming guide.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from composer.core import Event, State
from composer.devices import Device
from composer.loggers import Logger
from torch.utils.data import DataLoader

from composer_speedups.packed.packing import count_on_host, hand_over
from composer_speedups.speedup import SpeedUp, Stage

__all__ = ["PrefetchBatches", "apply_prefetch_batches"]


def apply_prefetch_batches(dataloader: DataLoader, device: torch.device | str) -> int:
    """Let iterating `dataloader` give batches that are on `device`, each sent one step ahead, in place.

    Sampler, workers and length stay; so does the object, but for its class.

    Args:
        dataloader: changed in place; with `num_workers` of 1 or more.
        device: where the batches are to be.

    Returns:
        1, or 0 if it is done already, or `dataloader` is none of torch's with workers.

    >>> loader = DataLoader([1, 2, 3], num_workers=1)
    >>> apply_prefetch_batches(loader, "cpu")
    1
    >>> len(loader), apply_prefetch_batches(loader, "cpu")
    (3, 0)
    """
    if not isinstance(dataloader, DataLoader) or isinstance(dataloader, _Prefetching) or dataloader.num_workers == 0:
        return 0
    dataloader.__class__ = type("PrefetchingDataLoader", (_Prefetching, type(dataloader)), {})
    dataloader.prefetch_device = torch.device(device)
    return 1


_END = object()


class PrefetchBatches(SpeedUp):
    """Apply `apply_prefetch_batches` to the train dataloader, at `Event.FIT_START`; undone at `Event.FIT_END`.

    >>> PrefetchBatches()
    PrefetchBatches()
    """

    stage = Stage.LOOP
    events = frozenset({Event.AFTER_LOAD, Event.FIT_START, Event.FIT_END})

    def unavailable(self, device: torch.device) -> str | None:
        if device.type != "cuda":
            return f"it copies batches to a GPU, and on a {device.type} run they are where they belong: remove it"
        return None

    def install(self, state: State, logger: Logger) -> None:
        """Nothing yet: the dataloader is not there before `Event.FIT_START`."""

    def on_event(self, event: Event, state: State, logger: Logger) -> None:
        if event is Event.AFTER_LOAD:
            self.at_close(state, lambda: _undo(state.train_dataloader))
        elif event is Event.FIT_START:
            loader = state.dataloader
            nothing = "the train dataloader has no workers: use DataLoader(num_workers=2)"
            if not isinstance(loader, DataLoader):
                nothing = f"the train dataloader is a {type(loader).__name__}, and it takes a torch DataLoader"
            elif isinstance(loader, _Prefetching):
                nothing = "the train dataloader sends its batches ahead already"
            self.report(logger, apply_prefetch_batches(loader, state.device._device), nothing)
        else:
            _undo(state.train_dataloader)


def _undo(loader: Any) -> None:
    if isinstance(loader, _Prefetching):
        loader.__class__ = type(loader).__bases__[1]


class _Prefetching(DataLoader):
    """A DataLoader whose iteration is one batch ahead."""

    prefetch_device: torch.device

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        batches = super().__iter__()
        send = _Sender(self.prefetch_device)
        ahead = _END if (first := next(batches, _END)) is _END else send(first)
        while ahead is not _END:
            batch = send.received(ahead)
            ahead = _END if (later := next(batches, _END)) is _END else send(later)
            yield batch


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """One for all epochs: PyTorch's allocator keeps what was freed for the stream that it was of."""
    return torch.cuda.Stream(device)


class _Sender:
    """Copies batches to `device` on a stream of its own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = _stream(device) if device.type == "cuda" else None

    def __call__(self, batch: Any) -> Any:
        count_on_host(
            batch
        )  # for `Unpadding`, which would have to wait for the device to ask how many tokens there are
        if self._stream is None:
            sent = _map_tensors(batch, lambda tensor: tensor.to(self._device))
        else:
            with torch.cuda.stream(self._stream):
                sent = _map_tensors(batch, self._send)
        hand_over(sent)
        return sent

    def _send(self, tensor: torch.Tensor) -> torch.Tensor:
        # A copy from pageable memory would make the host wait for it.
        tensor = tensor if tensor.is_cuda or tensor.is_pinned() else tensor.pin_memory()
        return tensor.to(self._device, non_blocking=True)

    def received(self, batch: Any) -> Any:
        """`batch`, once the computing stream may use it."""
        if self._stream is not None:
            computing = torch.cuda.current_stream(self._device)
            computing.wait_stream(self._stream)

            def keep(tensor: torch.Tensor) -> torch.Tensor:
                tensor.record_stream(computing)  # else its memory could be given away while a kernel still reads it
                return tensor

            _map_tensors(batch, keep)
        return batch


def _map_tensors(batch: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """`batch` with `function` applied to its tensors, nested as Composer nests."""
    return Device.batch_to_device(SimpleNamespace(tensor_to_device=function), batch)  # type: ignore[arg-type]
