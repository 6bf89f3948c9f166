"""The most memory that a training held at once: of the CUDA allocator, or of the process."""

from __future__ import annotations

import sys

import torch

from composer_speedups import hardware

__all__ = ["PeakMemory"]


class PeakMemory:
    """Bytes at most since `start`, or since the process began: on a GPU of tensors, and of what CUDA graphs keep for
    their replays; else resident.

    What a recorded forward pass leaves for its backward pass is nobody's tensor between two replays, and so free in the
    allocator's books; but its memory is the graphs' own, and nothing else can have it. So it is added to the tensors
    that are there at the same time.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._highest = self._kept = self._changes = 0

    def start(self) -> None:
        """Begin anew."""
        self._highest = 0
        if self._device.type == "cuda":
            self._reset()
            return
        try:
            with open("/proc/self/clear_refs", "w") as file:
                file.write("5")  # resets the high-water mark of the resident set
        except OSError:
            pass  # not Linux, or not permitted: the peak since the process began is what there is

    def look(self) -> None:
        """To be called after each step, as graphs are recorded in some. Does not wait for the device."""
        if self._device.type == "cuda" and _changes(self._device) != self._changes:
            self._highest = self._up_to_now()
            self._reset()

    def bytes(self) -> int | None:
        """At most, until now."""
        if self._device.type == "cuda":
            return self._up_to_now()
        if (peak := hardware.resident_memory(peak=True)) is not None:
            return peak
        import resource

        unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes here, the others kibibytes
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit

    def _reset(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)
        self._changes, self._kept = _changes(self._device), _kept_by_graphs(self._device)

    def _up_to_now(self) -> int:
        return max(self._highest, torch.cuda.max_memory_allocated(self._device) + self._kept)


def _changes(device: torch.device) -> int:
    """Grows with whatever the allocator asks of the device, or gives back: a look at all that it has takes longer."""
    counts = torch.cuda.memory_stats(device)
    return counts.get("num_device_alloc", 0) + counts.get("num_device_free", 0)


def _kept_by_graphs(device: torch.device) -> int:
    """Bytes in memory of graphs' own that are no tensor's at present."""
    index = torch.cuda.current_device() if device.index is None else device.index
    segments = [s for s in torch.cuda.memory_snapshot() if s["device"] == index and any(s["segment_pool_id"])]
    return sum(segment["total_size"] - segment["allocated_size"] for segment in segments)
