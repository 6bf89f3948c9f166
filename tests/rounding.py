"""How results are rounded when they are stored."""

from __future__ import annotations

import os

import torch

__all__ = ["rounding"]


def rounding(dtype: torch.dtype) -> float:
    """The largest relative error: half of the spacing at 1; Triton's interpreter cuts off what bf16 has no room for.

    (With `emulated.py` only the package thinks that it is interpreted.)
    """
    cuts = dtype == torch.bfloat16 and os.environ.get("TRITON_INTERPRET") == "1" and "EMULATED" not in os.environ
    return torch.finfo(dtype).eps / (1 if cuts else 2)
