"""See which attention kernel really ran: flash, memory-efficient, cuDNN or math.

`scaled_dot_product_attention` chooses among its kernels anew on every call, by dtype, head size, mask, dropout
and device. Asking it what it would choose repeats its rules; here the operators that PyTorch did execute are
recorded instead, with its own profiler, for one forward pass. Nothing is patched and no hook is set, so
compiled code is seen as it runs and no guard of it fails; outside that one pass it costs nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

# Not the newer one: with it, CUPTI stays attached to the GPU's driver and slows the training down to its end.
from torch.autograd.profiler_legacy import profile

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
        self._profile: profile | None = None

    @property
    def running(self) -> bool:
        return self._profile is not None

    def start(self) -> bool:
        """Begin; False, and nothing happens, if the user's own profiler is at work: there can be only one."""
        if torch.autograd._profiler_enabled():
            return False
        self._profile = profile()
        self._profile.__enter__()
        return True

    def stop(self) -> tuple[str, ...]:
        """End, and return the names of the kernels that ran, sorted; none if no attention kernel did."""
        running, self._profile = self._profile, None
        if running is None:
            return ()
        running.__exit__(None, None, None)
        events = running.function_events or ()
        self.kernels = tuple(sorted({_KERNELS[e.name] for e in events if e.name in _KERNELS}))
        return self.kernels


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
