"""Types and operands of PTX, as NumPy has them."""

from __future__ import annotations

import re
import struct
from typing import Any

import numpy as np

from benchmarks.null_gpu.ptx.parse import Unsupported

__all__ = ["APART", "BITS", "immediate", "numpy_name", "vector"]

APART = 4096  # addresses of parameters, one after the other
BITS = {f"{letter}{bits}": bits for letter in "busf" for bits in (8, 16, 32, 64)}
BITS |= {"pred": 1, "bf16": 16, "f32x2": 64}


def numpy_name(kind: str) -> str:
    """NumPy's name for a type."""
    return {"f": "float", "s": "int", "u": "uint", "b": "uint"}[kind[0]] + kind[1:]


def immediate(text: str, kind: str) -> Any:
    """The number that `text` is, of this type."""
    if found := re.fullmatch(r"0([fd])([0-9A-Fa-f]+)", text):
        value = struct.unpack("!f" if found[1] == "f" else "!d", bytes.fromhex(found[2]))[0]
        bits = int(found[2], 16)
        if kind[0] in "bus":  # a float's bits, moved as such
            return getattr(np, numpy_name(kind))(bits)
        return np.float64(value) if kind == "f64" else np.float32(value)
    if re.fullmatch(r"-?(0x[0-9A-Fa-f]+|0|[1-9]\d*)U?", text):
        number = int(text.rstrip("U"), 0)
        if kind in ("f16", "bf16"):
            raise Unsupported(f"{text} as {kind}")
        if kind == "pred":
            return np.bool_(number != 0)
        if kind[0] == "f":
            raise Unsupported(f"{text} as {kind}")
        bits = BITS[kind]
        return np.array(number & ((1 << bits) - 1), f"uint{bits}").view(numpy_name(kind))[()]
    raise Unsupported(f"the operand {text}")


def vector(operand: str) -> list[str]:
    """The operands in braces, or the one there is."""
    return [part.strip() for part in operand.strip("{}").split(",")] if operand[0] == "{" else [operand]
