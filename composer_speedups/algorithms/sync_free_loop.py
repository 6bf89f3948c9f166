"""SyncFreeLoop: Composer's training loop without the moments at which the host waits for the GPU.

**Why it is faster.** Launching a kernel takes the host microseconds and returns at once, so the host can queue
work far ahead of the GPU. Reading a number back ends that: the host waits until all queued work is done, and the
GPU then idles until new work arrives. Composer does it seven times a step: it sends its own counts (samples,
tokens, seconds, "is the data exhausted") to the GPU only to read them back, and it reads the loss in the middle of
the step, before the optimizer is launched, and again at its end. Here the counts stay on the host, where they came
from, and the loss is read once, after everything of the step has been queued; with `delayed_loss=True` it is
not waited for at all.

**Numerics.** Bit-exact: the same operations in the same order. With `delayed_loss=True` the loss that is logged
and that callbacks find in `state.total_loss_dict` is the one of the step before (the first step of each `fit` reports
its own); the training is the same, a NaN is noticed one step later.

**When it pays.** Where steps are short: small models, small batches, many small kernels; most together with
`FusedAdamW`, whose step asks for nothing either. Large batches hide it. The copy that Composer makes of every
microbatch for the train metrics is left out where there are none; where there are, Composer 0.32 takes them of the
outputs that the step has made, and no second pass is left to take away.

**Needs.** CUDA: on a CPU nothing runs ahead of the host. Composer 0.32's `Trainer`, whose functions it
recognises by name. Several ranks agree on their counts over Gloo, host to host, instead of over NCCL. Loss
scaling (`amp_fp16`) with an optimizer that is not fused reads `found_inf` once a step, in PyTorch. The Trainer's
device is as it was when the Trainer closes; where NCCL is the only backend, Composer's collectives take tensors on the
host for the rest of the process.

Source: PyTorch's Performance Tuning Guide, "Avoid unnecessary CPU-GPU synchronization"; read in
`composer/trainer/trainer.py`, 0.32.1, lines 2379, 2381, 2468, 2686, 2840 and 3636.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from types import CodeType, SimpleNamespace
from typing import Any

import torch
from composer.core import Event, State
from composer.devices import Device
from composer.loggers import Logger
from composer.utils import dist

from composer_speedups.arguments import check_flag
from composer_speedups.speedup import SpeedUp, Stage

__all__ = ["SyncFreeLoop", "apply_sync_free_loop"]

# Functions of Composer's Trainer that send what the host knows to the device in order to read it back.
_COUNTING = ("_accumulate_time_across_ranks", "_iter_dataloader", "_train_microbatches")
_LOSS = "_train_batch"


def apply_sync_free_loop(device: Device, delayed_loss: bool = False, train_metrics: Callable[[], bool] = bool) -> int:
    """Let Composer's Trainer keep its counts on the host and read the loss late, in place; return how many places.

    Args:
        device: of the Trainer: `state.device`.
        delayed_loss: report the loss of the step before, so that no step is waited for.
        train_metrics: tells whether there are metrics of the training batches, which need a copy of each batch.

    A device that was changed already is left alone: 0. `SyncFreeLoop` also forgets the last loss when another `fit`
    starts, and undoes all this when its Trainer closes.
    """
    if _transfer_of(device) is not None:
        return 0
    transfer = _Transfer(device, delayed_loss, train_metrics)
    # On the instance: its own methods for batches and optimizers would otherwise come through here, too.
    device.__dict__["batch_to_device"] = transfer.batch
    device.__dict__["optimizer_to_device"] = lambda optimizer: type(device).optimizer_to_device(
        transfer.plain, optimizer
    )
    device.__dict__["tensor_to_device"] = transfer
    _reduce_on_the_host()
    return len(_COUNTING) + 1


class SyncFreeLoop(SpeedUp):
    """Apply `apply_sync_free_loop` to the Trainer's device, at `Event.INIT`.

    Args:
        delayed_loss: log each loss one step late, and wait for none.

    >>> SyncFreeLoop()
    SyncFreeLoop(delayed_loss=False)
    """

    stage = Stage.LOOP
    events = frozenset({Event.AFTER_LOAD, Event.FIT_START})

    def __init__(self, delayed_loss: bool = False) -> None:
        self.delayed_loss = check_flag("delayed_loss", delayed_loss)

    def unavailable(self, device: torch.device) -> str | None:
        if device.type != "cuda":
            return f"it is about waiting for a GPU, which a {device.type} run does not do: remove it"
        try:
            _codes()
        except AttributeError as error:
            return f"this Composer's Trainer has another loop ({error}): use mosaicml 0.32"
        return None

    def install(self, state: State, logger: Logger) -> None:
        count = apply_sync_free_loop(state.device, self.delayed_loss, lambda: bool(state.train_metrics))
        self.report(logger, count, "the device was changed already", loss="delayed" if self.delayed_loss else "late")

    def on_event(self, event: Event, state: State, logger: Logger) -> None:
        if event is Event.FIT_START:
            transfer = _transfer_of(state.device)
            if transfer is not None and transfer.delayed is not None:
                transfer.delayed.forget()
        elif self.evidence.get("changed"):  # by this Trainer, and not by another one with the same device
            self.at_close(state, partial(_undo, state.device))


def _transfer_of(device: Device) -> _Transfer | None:
    found = device.__dict__.get("tensor_to_device")
    return found if isinstance(found, _Transfer) else None


def _undo(device: Device) -> None:
    """Let `device` be as it was before `apply_sync_free_loop`."""
    if _transfer_of(device) is not None:
        for name in ("batch_to_device", "optimizer_to_device", "tensor_to_device"):
            del device.__dict__[name]


class _Transfer:
    """Stands for `device.tensor_to_device`: looks at who asks."""

    def __init__(self, device: Device, delayed_loss: bool, train_metrics: Callable[[], bool]) -> None:
        self._send = type(device).tensor_to_device.__get__(device)
        self._train_metrics = train_metrics
        self._counting, self._loss, self._microbatches = _codes()
        self.delayed = _Delayed() if delayed_loss else None
        self.plain = SimpleNamespace(tensor_to_device=self._send)  # all that `Device`'s other methods need of `self`

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        frame = sys._getframe(1)
        asking = frame.f_code
        # Zeros that the parts of a loss are added to, if it has some, are the only tensors of one dimension that
        # _train_microbatches asks for. Those of the sum are _train_batch's.
        part = asking is self._microbatches and tensor.ndim
        if asking in self._counting and not part:
            return tensor
        sent = self._send(tensor)
        if part and self.delayed is not None:
            return _RunningLoss.of(sent, partial(self.delayed.swap, frame.f_locals["loss_key"]))
        if asking is self._loss and tensor.is_floating_point():
            return _RunningLoss.of(sent, None if self.delayed is None else partial(self.delayed.swap, "total"))
        return sent

    def batch(self, batch: Any) -> Any:
        moved = Device.batch_to_device(self.plain, batch)  # type: ignore[arg-type]
        if type(moved) is dict and sys._getframe(1).f_code is self._microbatches and not self._train_metrics():
            return _Batch(moved)
        return moved


class _Batch(dict):
    """A microbatch whose copy shares its tensors: nobody reads the copy where there are no train metrics."""

    def __deepcopy__(self, memo: dict) -> dict:
        return dict(self)


class _RunningLoss(torch.Tensor):
    """The sum of a step's losses, as `_train_batch` makes it.

    Composer's closure for the optimizer ends in `.item()`: that gives this tensor itself, as PyTorch's own closures
    do, and waits for nothing. The end of the step calls `.cpu().item()`: that is the one real reading.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl
    _swap: Callable[[torch.Tensor], torch.Tensor] | None = None

    @staticmethod
    def of(tensor: torch.Tensor, swap: Callable[[torch.Tensor], torch.Tensor] | None) -> _RunningLoss:
        loss = torch.Tensor._make_subclass(_RunningLoss, tensor)
        loss._swap = swap
        return loss

    def item(self) -> Any:
        return self

    def cpu(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        plain = self.as_subclass(torch.Tensor)
        return plain.cpu(*args, **kwargs) if self._swap is None else self._swap(plain)


class _Delayed:
    """Hands out the losses of the step before; this step's are copied while the next one is being queued."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[torch.Tensor, torch.cuda.Event | None]] = {}

    def forget(self) -> None:
        """There is no step before."""
        self._last.clear()

    def swap(self, name: str, loss: torch.Tensor) -> torch.Tensor:
        if loss.is_cuda:
            copy = torch.empty(loss.shape, dtype=loss.dtype, pin_memory=True)
            copy.copy_(loss, non_blocking=True)
            done = torch.cuda.Event()
            done.record()
        else:
            copy, done = loss.clone(), None
        before, self._last[name] = self._last.get(name, (copy, done)), (copy, done)
        if before[1] is not None:
            before[1].synchronize()  # of the step before: long done, unless the host is a whole step ahead
        return before[0]


def _codes() -> tuple[frozenset[CodeType], CodeType, CodeType]:
    """The code of the Trainer's functions that are recognised. AttributeError if one is not there."""
    from composer import Trainer

    codes = {name: getattr(Trainer, name).__code__ for name in (*_COUNTING, _LOSS)}
    return frozenset(codes[name] for name in _COUNTING), codes[_LOSS], codes["_train_microbatches"]


def takes_host_tensors() -> bool:
    """Whether Composer's `all_reduce`, of ranks that there are, takes tensors on the host."""
    return getattr(dist.all_reduce, "takes_host_tensors", False) or "gloo" in torch.distributed.get_backend_config()


def _reduce_on_the_host() -> None:
    """Let Composer's `all_reduce` and `broadcast` take tensors on the host, where NCCL alone would raise."""
    if not torch.distributed.is_initialized() or takes_host_tensors():
        return
    hosts = torch.distributed.new_group(backend="gloo") if dist.get_world_size() > 1 else None
    for name in ("all_reduce", "broadcast"):
        setattr(dist, name, _host_or_device(getattr(dist, name), getattr(torch.distributed, name), hosts))


def _host_or_device(original: Callable, collective: Callable, hosts: Any) -> Callable:
    def reduce(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if tensor.device.type != "cpu":
            return original(tensor, *args, **kwargs)
        if hosts is None:
            return None  # one rank: the sum and the maximum of one number are that number
        operation = kwargs.pop("reduce_operation", None)
        if operation is not None:
            kwargs["op"] = getattr(torch.distributed.ReduceOp, operation.upper())
        return collective(tensor, *args, group=hosts, **kwargs)

    reduce.takes_host_tensors = True  # type: ignore[attr-defined]
    return reduce
