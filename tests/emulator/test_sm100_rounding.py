"""Rounding of float32 operations against exact rational arithmetic."""

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

from tests.emulator.sm100 import rounding


def exact_to_float32(value: Fraction, mode: str) -> np.float32:
    """Rounds an exact nonzero value: neighbours by bisection of the float32 bit pattern."""
    low, high = 0, 0x7F7FFFFF

    def at(bits: int) -> Fraction:
        return Fraction(float(np.uint32(bits).view(np.float32)))

    magnitude = abs(value)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if at(middle) <= magnitude else (low, middle - 1)
    below, above = at(low), at(min(low + 1, 0x7F7FFFFF))
    negative = value < 0
    if below == magnitude or mode == "rz" or mode == ("rp" if negative else "rm"):
        bits = low
    elif mode in ("rm", "rp"):
        bits = low + 1
    else:
        twice = 2 * magnitude - below - above
        bits = low + 1 if twice > 0 or (twice == 0 and low & 1) else low
    return -np.uint32(bits).view(np.float32) if negative else np.uint32(bits).view(np.float32)


def samples(count: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(count) * 2.0 ** rng.integers(-20, 20, count)).astype(np.float32)


@pytest.mark.parametrize("mode", rounding.MODES)
def test_against_exact_arithmetic(mode):
    a, b, c = samples(300, 1), samples(300, 2), samples(300, 3)
    a[:8], b[:8], c[:8] = 1, 1 + 2.0**-23, 2.0 ** -np.arange(40, 48)  # ties and near-ties of the sum
    a[8:12], b[8:12], c[8:12] = 3, 1 / 3, [-1, 1, 2.0**-60, -(2.0**-60)]
    fma = rounding.fma(a, b, c, mode)
    add = rounding.add(a, c, mode)
    product = rounding.multiply(a, b, mode)
    for i in range(a.size):
        x, y, z = (Fraction(float(v[i])) for v in (a, b, c))
        assert fma[i] == exact_to_float32(x * y + z, mode), (a[i], b[i], c[i])
        assert add[i] == exact_to_float32(x + z, mode)
        assert product[i] == exact_to_float32(x * y, mode)


def test_no_double_rounding():
    # In float64 the sum is a tie at half a float32 ulp; the exact sum lies above it.
    a, b, c = np.float32([1 + 2.0**-12]), np.float32([1 + 2.0**-12]), np.float32([2.0**-60])
    product = Fraction(float(a[0])) * Fraction(float(b[0]))
    assert rounding.fma(a, b, c)[0] == exact_to_float32(product + Fraction(float(c[0])), "rn")
    assert np.float32(np.float64(a[0]) * np.float64(b[0]) + np.float64(c[0])) != rounding.fma(a, b, c)[0]


def test_special_values():
    inf, nan = np.float32(np.inf), np.float32(np.nan)
    for mode in rounding.MODES:
        got = rounding.fma(
            np.float32([inf, inf, 0, -inf]), np.float32([1, 0, inf, 1]), np.float32([1, 1, 1, inf]), mode
        )
        assert got[0] == inf and np.isnan(got[1:]).all()
        assert rounding.add(np.float32([-inf]), np.float32([5]), mode)[0] == -inf
        zero = rounding.add(np.float32([1.5]), np.float32([-1.5]), mode)
        assert zero[0] == 0 and np.signbit(zero[0]) == (mode == "rm")
    assert np.isnan(rounding.multiply(np.float32([nan]), np.float32([1]), "rz"))[0]


def test_flush_to_zero():
    tiny = np.float32([2.0**-130, -(2.0**-130)])
    assert (rounding.add(tiny, np.float32([0, 0]), ftz=True) == 0).all()
    assert np.signbit(rounding.multiply(tiny, np.float32([1, 1]), ftz=True)).tolist() == [False, True]
    assert rounding.multiply(np.float32([2.0**-70]), np.float32([2.0**-70]), ftz=True)[0] == 0
    assert (rounding.add(tiny, np.float32([0, 0])) == tiny).all()


def test_split_of_an_exponent_argument():
    """Adding 2^23 + 2^22 rounded down leaves floor(x) in the low mantissa bits: how exp2 is split on the FMA pipe."""
    x = np.float32([-0.25, -1.0, -3.75, -126.5, 0.0])
    shifted = rounding.add(x, np.float32(2.0**23 + 2.0**22), "rm", ftz=True)
    np.testing.assert_array_equal(shifted - np.float32(2.0**23 + 2.0**22), np.floor(x))


def test_extremum():
    nan, inf = np.float32(np.nan), np.float32(np.inf)
    a, b, c = (
        np.float32([1, nan, nan, -0.0, -inf]),
        np.float32([3, 2, nan, 0.0, -inf]),
        np.float32([2, 1, nan, -0.0, -5]),
    )
    got = rounding.extremum([a, b, c], largest=True)
    assert got[0] == 3 and got[1] == 2 and np.isnan(got[2]) and not np.signbit(got[3]) and got[4] == -5
    low = rounding.extremum([a, b, c], largest=False)
    assert low[0] == 1 and low[1] == 1 and np.isnan(low[2]) and np.signbit(low[3]) and low[4] == -inf
    assert np.isnan(rounding.extremum([a, b], largest=True, nan=True)[1])


def test_packed_exponential():
    for name, kind in (("bf16", ml_dtypes.bfloat16), ("f16", np.float16)):
        halves = np.array([0, 1, -1, 3.5, -2.25, -np.inf], np.float32).astype(kind)
        words = halves.view(np.uint16).view(np.uint32)
        got = rounding.exp2_packed(words, name).view(np.uint16).view(kind)
        np.testing.assert_array_equal(got, np.exp2(halves.astype(np.float64)).astype(kind))
    assert rounding.exp2_packed(np.uint32([0xC300C300]), "bf16")[0] == 0  # 2^-128 is subnormal
