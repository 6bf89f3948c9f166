"""The label of what is not learnt from: PyTorch's cross entropy leaves it out, and so transformers fills up with it."""

from __future__ import annotations

__all__ = ["IGNORED"]

IGNORED = -100
