"""Arithmetic of 32 lanes: the numerical meaning of PTX instructions on NumPy arrays or uniform scalars.

Rounding: results of add, sub, mul and fma are correctly rounded in every mode. Approximate functions return the
correctly rounded value; hardware is within 2 ulp of it (PTX ISA: ex2 2**-22 relative, lg2 2**-22 absolute
near 1, rcp 1 ulp, rsqrt 2**-22.9, tanh 2**-11).
"""

from __future__ import annotations

import math
from fractions import Fraction

import ml_dtypes
import numpy as np

u1, u2, u4, u8 = np.uint8, np.uint16, np.uint32, np.uint64
i2, i4, i8 = np.int16, np.int32, np.int64
f2, f4, f8 = np.float16, np.float32, np.float64
bf2 = ml_dtypes.bfloat16
FULL = np.ones(32, bool)
FULL.flags.writeable = False
NONE = np.zeros(32, bool)
NONE.flags.writeable = False
LANE = np.arange(32, dtype=u4)
_TINY = f4(np.finfo(f4).tiny)


def ftz(x):
    """Subnormal float32 values become zeros of the same sign."""
    return x * (np.abs(x) >= _TINY)


# ---- representation changes ------------------------------------------------------------------------------------------
def bits_to_float(x):
    return u4(x).view(f4)


def float_to_bits(x):
    return int(f4(x).view(u4))


def bits_to_double(x):
    return u8(x).view(f8)


def double_to_bits(x):
    return int(f8(x).view(u8))


def pair_from_64(x):
    """uint64 lanes, or one Python int, to a (2, 32) array of float32: low halves first."""
    if isinstance(x, int):
        x = np.full(32, x, u8)
    return np.ascontiguousarray(x.view(f4).reshape(32, 2).T)


def pair_to_64(x):
    return np.ascontiguousarray(x.T).view(u8).reshape(32)


def pack_pair(lo, hi):
    out = np.empty((2, 32), f4)
    out[0] = lo
    out[1] = hi
    return out


def pack32(lo, hi):
    """Two 32-bit values to 64 bits; either may be a uniform int."""
    if isinstance(lo, int) and isinstance(hi, int):
        return lo | hi << 32
    out = np.empty((32, 2), u4)
    out[:, 0] = lo
    out[:, 1] = hi
    return out.view(u8).reshape(32)


def low32(x):
    return x & 0xFFFFFFFF if isinstance(x, int) else x.view(u4)[0::2]


def high32(x):
    return x >> 32 if isinstance(x, int) else x.view(u4)[1::2]


def pack16(lo, hi):
    if isinstance(lo, int) and isinstance(hi, int):
        return lo | hi << 16
    out = np.empty((32, 2), u2)
    out[:, 0] = lo
    out[:, 1] = hi
    return out.view(u4).reshape(32)


def low16(x):
    return x & 0xFFFF if isinstance(x, int) else x.astype(u2)


def high16(x):
    return x >> 16 if isinstance(x, int) else (x >> 16).astype(u2)


def lanes(x, dtype):
    """An array of 32 lanes from a scalar or an array."""
    return x if isinstance(x, np.ndarray) and x.ndim else np.full(32, x, dtype)


# ---- integers --------------------------------------------------------------------------------------------------------
_UNSIGNED = {16: u2, 32: u4, 64: u8}
_SIGNED = {16: i2, 32: i4, 64: i8}


def signed(x, bits):
    """The two's complement reading of an unsigned value of ``bits`` bits: int to int, array to array."""
    if isinstance(x, int):
        return x - (1 << bits) if x >> (bits - 1) else x
    return x.view(_SIGNED[bits])


def resize(x, source, source_signed, target):
    """Truncates or extends an unsigned representation from ``source`` to ``target`` bits."""
    if isinstance(x, int):
        x &= (1 << source) - 1
        if source_signed and x >> (source - 1):
            x -= 1 << source
        return x & ((1 << target) - 1)
    if source == 8:
        x = x.astype(u1)
        x = x.view(np.int8) if source_signed else x
    else:
        x = x.astype(_UNSIGNED[source], copy=False)
        x = x.view(_SIGNED[source]) if source_signed else x
    if target == 8:
        return x.astype(u1).astype(u2)
    wide = x.astype(_SIGNED[target] if source_signed else _UNSIGNED[target])
    return wide.view(_UNSIGNED[target])


def mul_wide(a, b, bits, is_signed):
    out = 2 * bits
    if isinstance(a, int) and isinstance(b, int):
        if is_signed:
            a, b = signed(a, bits), signed(b, bits)
        return (a * b) & ((1 << out) - 1)
    a, b = lanes(a, _UNSIGNED[bits]), lanes(b, _UNSIGNED[bits])
    if is_signed:
        return (a.view(_SIGNED[bits]).astype(_SIGNED[out]) * b.view(_SIGNED[bits])).view(_UNSIGNED[out])
    return a.astype(_UNSIGNED[out]) * b


def mul_hi(a, b, bits, is_signed):
    if bits == 64 and not (isinstance(a, int) and isinstance(b, int)):
        a, b = lanes(a, u8), lanes(b, u8)
        return np.array([mul_hi(int(x), int(y), 64, is_signed) for x, y in zip(a, b, strict=True)], u8)
    wide = mul_wide(a, b, bits, is_signed)
    if isinstance(wide, int):
        return wide >> bits
    return (wide >> bits).astype(_UNSIGNED[bits])


def divide(a, b, bits, is_signed, remainder):
    """Integer division truncating towards zero. Division by zero gives all ones, as the hardware sequence does."""
    scalar = isinstance(a, int) and isinstance(b, int)
    a, b = lanes(a, _UNSIGNED[bits]), lanes(b, _UNSIGNED[bits])
    zero = b == 0
    safe = np.where(zero, np.ones_like(b), b)
    if is_signed:
        x, y = a.view(_SIGNED[bits]), safe.view(_SIGNED[bits])
        q = np.abs(x).view(_UNSIGNED[bits]) // np.abs(y).view(_UNSIGNED[bits])
        q = np.where((x < 0) != (y < 0), -q, q)
    else:
        q = a // safe
    out = (a - q * safe) if remainder else q
    out = np.where(zero, a if remainder else _UNSIGNED[bits]((1 << bits) - 1), out).astype(_UNSIGNED[bits])
    return int(out[0]) if scalar else out


def shift(a, n, bits, kind):
    """``shl``, ``shr`` unsigned ("u") or signed ("s"); amounts beyond the width behave as PTX says (clamped)."""
    mask = (1 << bits) - 1
    if isinstance(a, int) and isinstance(n, int):
        if kind == "l":
            return (a << n) & mask if n < bits else 0
        if kind == "u":
            return a >> n if n < bits else 0
        return (signed(a, bits) >> min(n, bits)) & mask
    a, n = lanes(a, _UNSIGNED[bits]), lanes(n, u4)
    big = n >= bits
    n = np.where(big, bits - 1, n)
    if kind == "s":
        return (a.view(_SIGNED[bits]) >> n.astype(_SIGNED[bits])).view(_UNSIGNED[bits])
    n = n.astype(_UNSIGNED[bits])
    out = a << n if kind == "l" else a >> n
    return np.where(big, _UNSIGNED[bits](0), out)


def funnel(a, b, n, left, wrap):
    """``shf``: the 64-bit value {b, a} shifted by n."""
    scalar = all(isinstance(v, int) for v in (a, b, n))
    a, b, n = lanes(a, u4), lanes(b, u4), lanes(n, u4)
    n = (n & 31 if wrap else np.minimum(n, 32)).astype(u8)
    both = pack32(a, b)
    out = ((both << n) >> u8(32)).astype(u4) if left else (both >> n).astype(u4)
    return int(out[0]) if scalar else out


def bit_field_extract(a, pos, length, bits, is_signed):
    scalar = all(isinstance(v, int) for v in (a, pos, length))
    out = []
    for x, p, n in zip(lanes(a, _UNSIGNED[bits]), lanes(pos, u4), lanes(length, u4), strict=True):
        x, p, n = int(x), int(p) & 255, int(n) & 255
        value = (x >> p) & ((1 << n) - 1) if n else 0
        top = x >> min(p + n - 1, bits - 1) & 1 if n else 0
        if is_signed and top:
            value |= ~((1 << n) - 1)
        out.append(value & ((1 << bits) - 1))
    return out[0] if scalar else np.array(out, _UNSIGNED[bits])


def bit_field_insert(a, b, pos, length, bits):
    scalar = all(isinstance(v, int) for v in (a, b, pos, length))
    pos, length = lanes(pos, u4) & 255, lanes(length, u4) & 255
    out = []
    zipped = zip(lanes(a, _UNSIGNED[bits]), lanes(b, _UNSIGNED[bits]), pos, length, strict=True)
    for x, y, p, n in zipped:
        mask = (((1 << int(n)) - 1) << int(p)) & ((1 << bits) - 1)
        out.append((int(y) & ~mask) | (int(x) << int(p)) & mask)
    return out[0] if scalar else np.array(out, _UNSIGNED[bits])


def permute_bytes(a, b, selector):
    """``prmt`` in its default mode."""
    scalar = all(isinstance(v, int) for v in (a, b, selector))
    data = np.concatenate([lanes(v, u4).reshape(32, 1).view(u1) for v in (a, b)], axis=1)
    selector = lanes(selector, u4)
    out = np.zeros((32, 4), u1)
    rows = np.arange(32)
    for i in range(4):
        nibble = (selector >> (4 * i)) & 15
        byte = data[rows, nibble & 7]
        sign = np.where(byte & 0x80, u1(0xFF), u1(0))
        out[:, i] = np.where(nibble & 8, sign, byte)
    result = out.view(u4).reshape(32)
    return int(result[0]) if scalar else result


def logic3(a, b, c, table):
    """``lop3.b32``."""
    scalar = all(isinstance(v, int) for v in (a, b, c))
    a, b, c = lanes(a, u4), lanes(b, u4), lanes(c, u4)
    out = np.zeros(32, u4)
    for i in range(8):
        if table >> i & 1:
            out |= (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
    return int(out[0]) if scalar else out


def per_lane(function, bits, *values):
    """A bit-twiddling function of ints applied lane by lane (popc, clz, brev, bfind): rare instructions."""
    if all(isinstance(v, int) for v in values):
        return function(*values)
    arrays = [lanes(v, u8) for v in values]
    return np.array([function(*(int(x) for x in row)) for row in zip(*arrays, strict=True)], _UNSIGNED[bits])


# ---- floats ----------------------------------------------------------------------------------------------------------
_LOST = u8(0x1FFFFFFF)  # the 29 bits of a float64 significand that float32 does not have
_TIE = u8(0x10000000)
_SUBNORMAL = u8(((1023 - 126) << 53) - 1)  # doubled bits of a float64 (its sign gone), less one, of a subnormal float32
_ONE = u8(1)


def fma(a, b, c):
    """a b + c of float32 values, rounded once, to nearest even.

    The product is exact in float64. Its sum with c, rounded to float64, rounds on to the right float32 value unless it
    lies in the middle between two of them (or below the normal ones, where the middles are elsewhere): only then does
    what float64 lost matter. A zero has lost nothing.
    """
    product = a.astype(f8) * b
    s = product + c
    bits = s.view(u8)
    if (bits & _LOST == _TIE).any() or (bits + bits - _ONE < _SUBNORMAL).any():
        return round_to_odd(*two_sum(product, c.astype(f8))).astype(f4)
    return s.astype(f4)


def round_to_odd(s, e):
    """The exact value s + e (float64 s, error term e) in float64 with the last bit set if anything was lost.

    Rounding that to a shorter type is a single rounding of the exact value.
    """
    bits = np.asarray(s).view(i8)
    with np.errstate(invalid="ignore"):
        toward = np.where((e > 0) == (s > 0), 1, -1)
        even = (e != 0) & (bits & 1 == 0) & np.isfinite(s)
    return np.where(even, bits + toward, bits).view(f8)[()]


def fma_double(a, b, c):
    """a b + c of float64 values, rounded once, to nearest even: exactly, by rational numbers (rare instructions)."""

    def one(x, y, z):
        if not (math.isfinite(x) and math.isfinite(y) and math.isfinite(z)):
            return x * y + z
        exact = Fraction(x) * Fraction(y) + Fraction(z)
        try:
            return float(exact) if exact else x * y + z  # for the zero's sign
        except OverflowError:
            return math.inf if exact > 0 else -math.inf

    if not any(isinstance(v, np.ndarray) and v.ndim for v in (a, b, c)):
        return f8(one(float(a), float(b), float(c)))
    rows = zip(*(lanes(v, f8).tolist() for v in (a, b, c)), strict=True)
    return np.array([one(*row) for row in rows], f8)


def round_exact(s, e, mode):
    """float32 rounding of the exact value s + e (float64 s, error term e) in mode rn, rz, rm or rp."""
    r = s.astype(f4)
    d = np.where(np.isfinite(s), (s - r) + e, 0)  # an overflow to infinity went too far
    if mode == "rm":
        r = np.where(d < 0, np.nextafter(r, f4(-np.inf)), r)
    elif mode == "rp":
        r = np.where(d > 0, np.nextafter(r, f4(np.inf)), r)
    elif mode == "rz":
        r = np.where(((r > 0) & (d < 0)) | ((r < 0) & (d > 0)), np.nextafter(r, f4(0)), r)
    return r


def two_sum(a, b):
    s = a + b
    t = s - a
    return s, (a - (s - t)) + (b - t)


def add_mode(a, b, mode):
    if mode == "rm":  # an exact zero sum of operands of unlike sign is -0 when rounding down
        return -add_mode(-a, -b, "rp")
    s, e = two_sum(a.astype(f8), b.astype(f8))
    return round_exact(s, e, mode)


def mul_mode(a, b, mode):
    return round_exact(a.astype(f8) * b, 0.0, mode)


def fma_mode(a, b, c, mode):
    if mode == "rm":
        return -fma_mode(-a, b, -c, "rp")
    s, e = two_sum(a.astype(f8) * b, c.astype(f8))
    return round_exact(s, e, mode)


def _ordered_zeros(function, both):
    """``function`` (a NumPy minimum or maximum) with -0 below +0; ``both`` joins the sign bits of two zeros."""

    def extremum(a, b):
        result = function(a, b)
        if result.dtype == f4 and np.count_nonzero(result) != result.size:
            equal = np.asarray(both(np.asarray(a, f4).view(u4), np.asarray(b, f4).view(u4))).view(f4)
            result = np.where(a == b, equal, result)[()]
        return result

    return extremum


fmax, fmin = _ordered_zeros(np.fmax, np.bitwise_and), _ordered_zeros(np.fmin, np.bitwise_or)
maximum, minimum = _ordered_zeros(np.maximum, np.bitwise_and), _ordered_zeros(np.minimum, np.bitwise_or)


def to_bf16(x, mode="rn", relu=False):
    """float32 to bfloat16 bits (uint16 array or int). NaN becomes 0x7FFF."""
    scalar = not (isinstance(x, np.ndarray) and x.ndim)
    x = lanes(x, f4)
    if relu:
        x = np.where(x > 0, x, np.where(np.isnan(x), x, f4(0)))
    bits = x.view(u4)
    out = ((bits + (((bits >> 16) & 1) + 0x7FFF)) >> 16) if mode == "rn" else bits >> 16
    out = np.where(x != x, u4(0x7FFF), out).astype(u2)
    return int(out[0]) if scalar else out


def pack_bf16(lo, hi):
    """``cvt.rn.bf16x2.f32``: two float32 values to one packed pair, rounded to nearest even."""
    scalar = not (isinstance(lo, np.ndarray) and lo.ndim) and not (isinstance(hi, np.ndarray) and hi.ndim)
    out = np.empty((32, 2), bf2)
    out[:, 0] = lo
    out[:, 1] = hi
    packed = out.view(u4).reshape(32)
    return int(packed[0]) if scalar else packed


def pack_f16(lo, hi):
    """``cvt.rn.f16x2.f32``."""
    scalar = not (isinstance(lo, np.ndarray) and lo.ndim) and not (isinstance(hi, np.ndarray) and hi.ndim)
    out = np.empty((32, 2), f2)
    out[:, 0] = lo
    out[:, 1] = hi
    packed = out.view(u4).reshape(32)
    return int(packed[0]) if scalar else packed


def to_f16(x, mode="rn", relu=False):
    scalar = not (isinstance(x, np.ndarray) and x.ndim)
    x = lanes(x, f4)
    if relu:
        x = np.where(x > 0, x, np.where(np.isnan(x), x, f4(0)))
    out = x.astype(f2)
    if mode == "rz":
        out = np.where(np.abs(out.astype(f4)) > np.abs(x), np.nextafter(out, f2(0)), out)
    bits = np.where(np.isnan(x), u2(0x7FFF), out.view(u2))
    return int(bits[0]) if scalar else bits


def from_half(bits, bf16):
    """16-bit float bits to float32."""
    if isinstance(bits, int):
        return bits_to_float(bits << 16) if bf16 else u2(bits).view(f2).astype(f4)
    return (bits.astype(u4) << 16).view(f4) if bf16 else bits.view(f2).astype(f4)


def fma_odd(a, b, c):
    """a b + c of 16-bit values (held as float32), in float32 so that rounding it to 16 bits is a single rounding."""
    wide = round_to_odd(*two_sum(a.astype(f8) * b, c.astype(f8)))
    r = wide.astype(f4)
    low = np.where(np.abs(r) > np.abs(wide), np.nextafter(r, f4(0)), r)  # toward zero, then odd if inexact
    inexact = (low != wide) & np.isfinite(wide)
    return np.where(inexact, low.view(u4) | u4(1), low.view(u4)).view(f4)


def half2(function, bf16, *values):
    """A float32 function applied to both halves of packed 16-bit pairs, rounded to nearest once."""
    scalar = all(isinstance(v, int) for v in values)
    arrays = [lanes(v, u4).view(u2) for v in values]
    floats = [(a.astype(u4) << 16).view(f4) if bf16 else a.view(f2).astype(f4) for a in arrays]
    out = np.asarray(function(*floats)).astype(f4)
    bits = to_bf16(out) if bf16 else to_f16(out)
    packed = bits.view(u4)
    return int(packed[0]) if scalar else packed


def half1(function, bf16, *values):
    """The same for single 16-bit values."""
    scalar = all(isinstance(v, int) for v in values)
    floats = [from_half(lanes(v, u2), bf16) for v in values]
    out = np.asarray(function(*floats)).astype(f4)
    bits = to_bf16(out) if bf16 else to_f16(out)
    return int(bits[0]) if scalar else bits


def exp2(x):
    return np.exp2(x.astype(f8)).astype(f4)


def log2(x):
    return np.log2(x.astype(f8)).astype(f4)


def reciprocal(x):
    return (1.0 / x.astype(f8)).astype(f4)


def rsqrt(x):
    return (1.0 / np.sqrt(x.astype(f8))).astype(f4)


def sqrt(x):
    return np.sqrt(x.astype(f8)).astype(f4)


def sine(x):
    return np.sin(x.astype(f8)).astype(f4)


def cosine(x):
    return np.cos(x.astype(f8)).astype(f4)


def tanh(x):
    return np.tanh(x.astype(f8)).astype(f4)


def divide_float(a, b):
    return (a.astype(f8) / b).astype(f4)


def float_to_int(x, mode, bits, is_signed):
    """``cvt.<mode>i``: rounds to an integer and clamps to the target's range; NaN becomes 0."""
    scalar = not (isinstance(x, np.ndarray) and x.ndim)
    x = np.atleast_1d(np.asarray(x)).astype(f8)
    r = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}[mode](x)
    low, high = (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if is_signed else (0, (1 << bits) - 1)
    out = [0 if v != v else int(min(max(v, low), high)) & ((1 << bits) - 1) for v in r]
    return out[0] if scalar else np.array(out, _UNSIGNED[max(bits, 16)])


def int_to_float(x, bits, is_signed, dtype=f4):
    if isinstance(x, int):
        return dtype(signed(x, bits) if is_signed else x)
    x = x.view(_SIGNED[bits]) if is_signed else x
    return x.astype(dtype)
