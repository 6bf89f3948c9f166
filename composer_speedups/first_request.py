"""What a classifier asks of its last layer: to compute each row's first token only, as long as it runs, in its thread.

Nothing of it is kept in the model: threads may share that, and copies know of no call. A layer is told by an argument
of its call, `first_only`, which checkpointing keeps with the others: it runs the layer again when nobody asks any more,
and maybe in a thread of autograd's.
"""

from __future__ import annotations

import threading
from typing import Any

import torch

__all__ = ["ask", "asked_for_first", "with_request"]


class _Request(threading.local):
    """Which layer is asked: each thread's own. Not a `ContextVar`, which cannot be set in compiled code."""

    def __init__(self) -> None:
        self.layer: torch.nn.Module | None = None  # of every thread, as the compiler would take nothing for a new case


_here = _Request()


def ask(layer: torch.nn.Module | None) -> torch.nn.Module | None:
    """Ask `layer`, or none, for first tokens; return which was asked before, to be asked again afterwards."""
    before, _here.layer = _here.layer, layer
    return before


def asked_for_first(layer: torch.nn.Module) -> bool:
    """Whether `layer` computes each row's first token only, when it is called now, here."""
    return _here.layer is layer


def with_request(layer: torch.nn.Module, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments by name of a call of `layer`, with what it is asked for."""
    return {**kwargs, "first_only": True} if asked_for_first(layer) else kwargs
