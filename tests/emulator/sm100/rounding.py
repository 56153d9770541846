"""float32 add, multiply and fused multiply-add under every PTX rounding mode, and the 16-bit and three-input forms.

All functions take and return float32 arrays of any (broadcastable) shape, so that a packed f32x2 operation is one
call on an array of shape (2, 32). The exact result is held as a float64 plus the sign of what float64 lost.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

MODES = ("rn", "rz", "rm", "rp")
SMALLEST_NORMAL = np.float32(2.0**-126)


def flush(x: np.ndarray) -> np.ndarray:
    """Subnormals to zero of the same sign (.ftz)."""
    return np.where(np.abs(x) < SMALLEST_NORMAL, np.copysign(np.float32(0), x), x)


def _round(high: np.ndarray, low: np.ndarray, mode: str) -> np.ndarray:
    """Rounds the exact value high + low (float64; |low| below half an ulp of high) to float32."""
    if mode == "rn":
        # Round to odd in float64, then to nearest: no double rounding.
        bits = np.ascontiguousarray(high).view(np.int64)
        toward = np.where((low > 0) == (high > 0), 1, -1)
        inexact = (low != 0) & (bits & 1 == 0) & np.isfinite(high)
        return np.where(inexact, bits + toward, bits).view(np.float64).astype(np.float32)
    near = high.astype(np.float32)
    wide = near.astype(np.float64)
    with np.errstate(invalid="ignore"):
        below = (wide < high) | ((wide == high) & (low > 0))  # the exact value lies above near
        above = (wide > high) | ((wide == high) & (low < 0))
    finite = np.isfinite(high)
    down, up = np.float32(-np.inf), np.float32(np.inf)
    if mode == "rm":
        return np.where(finite & above, np.nextafter(near, down), near)
    if mode == "rp":
        return np.where(finite & below, np.nextafter(near, up), near)
    if mode == "rz":
        shrunk = np.where(high > 0, np.nextafter(near, down), np.nextafter(near, up))
        return np.where(finite & np.where(high > 0, above, below), shrunk, near)
    raise ValueError(f"rounding mode .{mode} is unknown: one of {MODES}")


def _sum(a: np.ndarray, b: np.ndarray, mode: str) -> np.ndarray:
    """Rounded sum of float64 arrays (float32 values or exact products of two)."""
    high = a + b
    part = high - a
    low = (a - (high - part)) + (b - part)
    low = np.where(np.isfinite(high), low, 0.0)
    result = _round(high, low, mode)
    if mode == "rm":  # an exact zero from operands of unlike sign is -0 when rounding down
        result = np.where((high == 0) & (low == 0) & (np.signbit(a) != np.signbit(b)), np.float32(-0.0), result)
    return result


def _prepare(ftz: bool, *operands: np.ndarray) -> list[np.ndarray]:
    arrays = [np.asarray(x, np.float32) for x in operands]
    return [flush(x) for x in arrays] if ftz else arrays


def add(a: np.ndarray, b: np.ndarray, mode: str = "rn", ftz: bool = False) -> np.ndarray:
    """a + b."""
    a, b = _prepare(ftz, a, b)
    with np.errstate(invalid="ignore", over="ignore"):
        result = a + b if mode == "rn" else _sum(a.astype(np.float64), b.astype(np.float64), mode)
    return flush(result) if ftz else result


def multiply(a: np.ndarray, b: np.ndarray, mode: str = "rn", ftz: bool = False) -> np.ndarray:
    """a * b."""
    a, b = _prepare(ftz, a, b)
    with np.errstate(invalid="ignore", over="ignore", under="ignore"):
        if mode == "rn":
            result = a * b
        else:
            product = a.astype(np.float64) * b
            result = _round(product, np.zeros_like(product), mode)
    return flush(result) if ftz else result


def fma(a: np.ndarray, b: np.ndarray, c: np.ndarray, mode: str = "rn", ftz: bool = False) -> np.ndarray:
    """a * b + c with one rounding."""
    a, b, c = _prepare(ftz, a, b, c)
    with np.errstate(invalid="ignore", over="ignore", under="ignore"):
        result = _sum(a.astype(np.float64) * b, c.astype(np.float64), mode)
    return flush(result) if ftz else result


def extremum(operands: list[np.ndarray], largest: bool, nan: bool = False, ftz: bool = False) -> np.ndarray:
    """max/min of two or three float32 operands: a NaN is ignored unless ``nan`` (.NaN); -0 is below +0."""
    arrays = _prepare(ftz, *operands)
    result = arrays[0]
    for other in arrays[1:]:
        with np.errstate(invalid="ignore"):
            first = (result > other) if largest else (result < other)
        equal = result == other
        signed = np.signbit(other) if largest else ~np.signbit(other)
        chosen = np.where(first | (equal & signed), result, other)
        missing = np.isnan(other) if not nan else np.isnan(result)
        result = np.where(missing, result, chosen)
        result = np.where(np.isnan(result), np.float32(np.nan) if nan else other, result)
    return result


FORMATS = {"bf16": ml_dtypes.bfloat16, "f16": np.float16}


def exp2_packed(words: np.ndarray, name: str) -> np.ndarray:
    """ex2.approx of the two 16-bit values in each uint32 word; subnormal bf16 inputs and results become zero (.ftz)."""
    kind = FORMATS[name]
    halves = np.ascontiguousarray(words).view(np.uint16).view(kind).astype(np.float32)
    with np.errstate(over="ignore", under="ignore"):
        result = np.exp2(halves.astype(np.float64)).astype(np.float32)
    if name == "bf16":
        result = flush(result)
    return result.astype(kind).view(np.uint16).view(np.uint32)
