"""See which attention kernel really ran: flash, memory-efficient, cuDNN or math.

`scaled_dot_product_attention` chooses among its kernels anew on every call, by dtype, head size, mask, dropout
and device. Asking it what it would choose repeats its rules; here the operators that PyTorch did execute are
recorded instead, with its own profiler, for one forward pass. Nothing is patched and nothing compiled gets a hook,
so compiled code is seen as it runs and no guard of it fails; outside that one pass it costs nothing.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch

__all__ = ["AttentionWatch", "watch_attention"]

# Operator -> name of the kernel, as PyTorch's `SDPBackend` and its documentation call them.
_KERNELS = {
    "aten::_scaled_dot_product_flash_attention": "flash",
    "aten::_scaled_dot_product_flash_attention_for_cpu": "flash",
    "aten::_flash_attention_forward": "flash",  # variable lengths, called directly
    "aten::_scaled_dot_product_efficient_attention": "memory-efficient",
    "aten::_efficient_attention_forward": "memory-efficient",
    "aten::_scaled_dot_product_cudnn_attention": "cudnn",
    "aten::_cudnn_attention_forward": "cudnn",
    "aten::_scaled_dot_product_attention_math": "math",
    "aten::_scaled_dot_product_attention_math_for_mps": "math",
    "aten::_scaled_dot_product_fused_attention_overrideable": "overrideable",
}


class AttentionWatch:
    """Records the attention kernels that run between `start` and `stop`, on the thread that called them."""

    def __init__(self) -> None:
        self.kernels: tuple[str, ...] = ()
        self._profile: torch.autograd.profiler.profile | None = None
        self._hook: torch.utils.hooks.RemovableHandle | None = None

    @property
    def running(self) -> bool:
        """Whether it was started, and not stopped yet."""
        return self._profile is not None or self._hook is not None

    def start(self, model: torch.nn.Module | None = None) -> bool:
        """Begin; False, and nothing happens, if the user's own profiler is at work: there can be only one.

        Args:
            model: whose next forward pass is to be seen. The profiler ends with it, also by an error, after which
                nobody may come to call `stop`. A model that is compiled itself is left alone: a hook is part of its
                code.
        """
        if torch.autograd._profiler_enabled():
            return False
        self.kernels, self._profile = (), torch.autograd.profiler.profile(use_kineto=False)
        if model is not None and model._compiled_call_impl is None:
            # Not taken away by itself: PyTorch goes through the hooks when it calls those that are to see an error.
            self._hook = model.register_forward_hook(self._end, always_call=True)
        with _quiet():
            self._profile.__enter__()
        return True

    def stop(self) -> tuple[str, ...]:
        """End, and return the names of the kernels that ran, sorted; none if no attention kernel did."""
        if not self.running:
            return ()
        self._end()
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        return self.kernels

    def _end(self, *_: Any) -> None:
        profile, self._profile = self._profile, None
        if profile is None:
            return
        with _quiet():
            profile.__exit__(None, None, None)
            events = profile.function_events or ()
        self.kernels = tuple(sorted({_KERNELS[e.name] for e in events if e.name in _KERNELS}))


@contextlib.contextmanager
def watch_attention() -> Iterator[AttentionWatch]:
    """Record the attention kernels that run inside the block.

    >>> import torch
    >>> x = torch.ones(1, 1, 4, 8)
    >>> with watch_attention() as watch:
    ...     _ = torch.nn.functional.scaled_dot_product_attention(x, x, x)
    >>> watch.kernels
    ('flash',)
    """
    watch = AttentionWatch()
    if not watch.start():
        raise RuntimeError("watch_attention: a profiler is running already, stop it first")
    try:
        yield watch
    finally:
        watch.stop()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """A CUDA build of PyTorch on a machine without a GPU prints an error line when it first profiles."""
    name, before = "KINETO_LOG_LEVEL", os.environ.get("KINETO_LOG_LEVEL")
    if before is not None or torch.cuda.is_available():
        yield
        return
    os.environ[name] = "5"
    try:
        yield
    finally:
        os.environ.pop(name, None)
