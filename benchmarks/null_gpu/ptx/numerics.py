"""What single instructions of PTX compute, on arrays of NumPy."""

from __future__ import annotations

import numpy as np

__all__ = [
    "extract",
    "flush",
    "fma",
    "fma_down",
    "fma_narrow",
    "high",
    "logarithm",
    "off",
    "pair",
    "permute",
    "quotient",
    "remainder",
    "shl",
    "shr",
    "to_bf16",
    "to_f16",
    "to_integer",
    "wide_bf16",
]

_TINY = np.finfo(np.float32).tiny


def flush(x):
    """Subnormal float32 numbers become zeros, of the same sign."""
    x = np.asarray(x)
    return np.where(np.abs(x) < _TINY, np.copysign(np.float32(0), x), x) if x.dtype == np.float32 else x


def off(exact, argument, bound: float, of=None):
    """`exact` in float64, to float32 with as large an error as is allowed, up or down by the argument's last bit,
    and rounded.

    `of`: what the bound is relative to, if not to the result itself.
    """
    argument = np.ascontiguousarray(argument, np.float32)
    error = (exact if of is None else of) * np.where(argument.view(np.uint32) & 1, bound, -bound)
    return np.float32(np.where(np.isfinite(exact), exact + error, exact))


def logarithm(x):
    """To base 2, as `off`: by 2^-22 of itself, or absolutely where x is between 0.5 and 2."""
    exact = np.log2(np.asarray(x).astype(np.float64))
    return off(exact, x, 2**-22, np.where(np.abs(exact) < 1, 1.0, exact))


def _to_odd(near, missing):
    """Where something is `missing` to the exact value: of its two neighbours the odd one, from which any narrower type
    is rounded to as from the value itself."""
    bits = np.ascontiguousarray(near).view(f"u{near.dtype.itemsize}")
    beyond = np.where((missing < 0) != (near < 0), bits - 1, bits) | 1
    return np.where((missing == 0) | ~np.isfinite(near) | (near == 0), bits, beyond).astype(bits.dtype).view(near.dtype)


def _product_and_sum(a, b, c):
    """To odd in float64, in which the product is exact."""
    product, c = np.broadcast_arrays(np.multiply(a, b, dtype=np.float64), np.asarray(c, np.float64))
    total = product + c
    other = total - product
    return _to_odd(total, (product - (total - other)) + (c - other))


def fma(a, b, c):
    return np.float32(_product_and_sum(a, b, c))


def fma_narrow(a, b, c):
    """In float32, but to odd: to be rounded to 16 bits."""
    exact = _product_and_sum(a, b, c)
    near = np.float32(exact)
    return _to_odd(near, exact - near)


def fma_down(a, b, c):
    """Rounded towards minus infinity."""
    exact = _product_and_sum(a, b, c)
    near = np.float32(exact)
    return np.where(near > exact, np.nextafter(near, np.float32(-np.inf)), near)


def wide_bf16(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32)


def to_bf16(x):
    """The bits of float32 numbers in bfloat16: to the nearest, ties to even."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(x), 0x7FFF, rounded).astype(np.uint16)


def to_f16(x):
    return np.asarray(x).astype(np.float16).view(np.uint16)


def pair(low, high):
    return low.astype(np.uint32) | (high.astype(np.uint32) << 16)


def half(both, place, kind):
    """Of two 16-bit floats the lower (0) or the upper (1), in float32."""
    bits = (np.asarray(both, np.uint32) >> np.uint32(16 * place)).astype(np.uint16)
    return wide_bf16(bits) if kind == "bf16" else bits.view(np.float16).astype(np.float32)


def to_integer(x, kind):
    """Whole numbers in floating point, saturated; no number becomes 0, or of 64 bits the sign's alone."""
    limits, wide = np.iinfo(kind), np.asarray(x, np.float64)
    above = float(limits.max) + (limits.bits < 64)  # the first number that is too large
    inside = np.where((wide >= limits.min) & (wide < above), wide, 0).astype(kind)
    found = np.where(wide < limits.min, limits.min, np.where(wide >= above, limits.max, inside)).astype(kind)
    none = np.array(1 << 63, np.uint64).astype(kind) if limits.bits == 64 else np.array(0, kind)
    return np.where(np.isnan(wide), none, found)


def high(a, b):
    """The upper half of the product of integers."""
    kind = np.result_type(a, b)
    bits = kind.itemsize * 8
    if bits < 64:
        wide = np.int64 if kind.kind == "i" else np.uint64
        return (np.multiply(a, b, dtype=wide) >> bits).astype(kind)
    a, b = np.broadcast_arrays(a, b)
    x, y = a.astype(np.uint64), b.astype(np.uint64)
    low, mask = np.uint64(32), np.uint64(0xFFFFFFFF)
    middle = (x >> low) * (y & mask) + ((x & mask) * (y & mask) >> low)
    other = (x & mask) * (y >> low) + (middle & mask)
    upper = (x >> low) * (y >> low) + (middle >> low) + (other >> low)
    if kind.kind == "i":
        upper = upper - np.where(a < 0, y, 0).astype(np.uint64) - np.where(b < 0, x, 0).astype(np.uint64)
    return upper.astype(kind)


def quotient(a, b):
    """Rounded towards zero; what is divided by zero is all ones, as on the GPU."""
    a, b = np.asarray(a), np.asarray(b)
    kind = np.result_type(a, b)
    safe = np.where(b == 0, 1, b).astype(kind)
    found = a // safe
    if kind.kind == "i":
        found = found + (((a % safe) != 0) & ((a < 0) != (safe < 0)))
    return np.where(b == 0, np.array(-1).astype(kind), found).astype(kind)


def remainder(a, b):
    """With the sign of `a`."""
    a, b = np.asarray(a), np.asarray(b)
    return np.where(b == 0, a, a - quotient(a, b) * b).astype(np.result_type(a, b))


def shl(a, by, bits: int):
    found = a << np.minimum(by, bits - 1).astype(a.dtype)
    return found if np.ndim(by) == 0 and by < bits else np.where(by < bits, found, 0)


def shr(a, by, bits: int):
    """Arithmetic if `a` is signed."""
    if a.dtype.kind == "u" and np.ndim(by) == 0 and by >= bits:
        return np.zeros_like(a)
    found = a >> np.minimum(by, bits - 1).astype(a.dtype)
    return found if a.dtype.kind == "i" or np.ndim(by) == 0 else np.where(by < bits, found, 0)


def extract(a, start, length):
    """`length` bits of `a` from bit `start` on; the upper one is the sign if `a` is signed."""
    bits = a.dtype.itemsize * 8
    start, length = int(start) & 255, int(length) & 255
    if not length:
        return np.zeros_like(a)
    end = min(start + length, bits)
    up = (a.view(f"u{a.dtype.itemsize}") << (bits - end)).view(a.dtype)
    return up >> (bits - end + start)


def permute(a, b, selector):
    """Four of the eight bytes of a (lower) and b, by half bytes of the selector; bit 3 of one: the byte's sign."""
    source = np.asarray(a).astype(np.uint64) | (np.asarray(b).astype(np.uint64) << np.uint64(32))
    out = np.zeros(np.broadcast_shapes(source.shape, np.shape(selector)), np.uint32)
    for place in range(4):
        which = (np.asarray(selector) >> np.uint32(4 * place)) & 15
        byte = (source >> ((which & 7).astype(np.uint64) * np.uint64(8))).astype(np.uint32) & 0xFF
        byte = np.where(which & 8, np.where(byte & 0x80, 0xFF, 0), byte).astype(np.uint32)
        out |= byte << np.uint32(8 * place)
    return out
