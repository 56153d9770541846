"""Fused multiply-add rounds once, also where a rounding to float64 (or float32) in between would show."""

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

from tests.emulator.snippets import operation


def assert_nearest(got, exact: Fraction) -> None:
    """``got`` (a NumPy float) is the value nearest to ``exact``, the even one of two."""
    kind = type(got)
    distance = abs(Fraction(float(got)) - exact)
    for direction in (-np.inf, np.inf):
        other = abs(Fraction(float(np.nextafter(got, kind(direction)))) - exact)
        even = int(np.asarray(got).view(f"u{got.itemsize}")) % 2 == 0
        assert distance < other or (distance == other and even), (got, exact)


def hard_operands() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """float32 operands whose float64 sum lies exactly between two float32 values while the exact one does not."""
    a, b, c = (np.ones(32, np.float32) for _ in range(3))
    a[:] = b[:] = 1 + 2.0**-12  # the square ends in 2^-24, half a unit in the last place
    c[:] = 2.0 ** -np.arange(50, 82)
    c[1::2] *= -1
    a[2::4] = -a[2::4]
    a[::8] = 1 - 2.0**-12
    # Subnormal results have their middles elsewhere: 2^-150 (1 - 2^-46) above an odd multiple of 2^-149.
    a[28:], b[28:] = 2.0**-75 * (1 + 2.0**-23), 2.0**-75 * (1 - 2.0**-23)
    c[28:] = 2.0**-127 + 2.0**-149
    a[30:] *= -1
    c[29::2] *= -1
    return a, b, c


@pytest.mark.parametrize("uniform", [False, True], ids=["lanes", "uniform"])
def test_float32(uniform):
    a, b, c = hard_operands()
    twice = (a.astype(np.float64) * b + c).astype(np.float32)
    differing = 0
    for i in range(32) if uniform else (0,):
        rolled = [np.roll(x, -i) for x in (a, b, c)]
        (got,) = operation(" fma.rn.f32 %r9, %r0, %r1, %r2;", rolled, ["%r9"], uniform)
        got = got.view(np.float32)
        for lane in range(1 if uniform else 32):
            x, y, z = (Fraction(float(v[lane])) for v in rolled)
            assert_nearest(got[lane], x * y + z)
            differing += got[lane] != twice[i + lane]
    assert differing >= 5  # the operands are hard


def test_float64():
    a, b, c = np.ones(32), np.ones(32), np.ones(32)
    a[:] = 1 + 2.0 ** -np.arange(20, 52)
    b[:] = 1 - 2.0**-30
    c[:] = -1 + 2.0 ** -np.arange(1, 33)
    (got,) = operation(" fma.rn.f64 %d9, %d0, %d1, %d2;", [a, b, c], ["%d9"])
    got = got.view(np.float64)
    for lane in range(32):
        assert_nearest(got[lane], Fraction(a[lane]) * Fraction(b[lane]) + Fraction(c[lane]))
    assert (got != a * b + c).any()


def test_float64_special_values():
    infinity = np.inf
    a = np.resize([0.0, -0.0, infinity, 1e308, -1e308, np.nan], 32)
    b = np.resize([1.0, 1.0, 0.0, 10.0, 10.0, 1.0], 32)
    c = np.resize([-0.0, -0.0, 1.0, 1.0, 1.0, 1.0], 32)
    (got,) = operation(" fma.rn.f64 %d9, %d0, %d1, %d2;", [a, b, c], ["%d9"])
    got = got.view(np.float64)[:6]
    assert np.signbit(got[:2]).tolist() == [False, True] and (got[:2] == 0).all()
    assert np.isnan(got[[2, 5]]).all() and got[3] == infinity and got[4] == -infinity


@pytest.mark.parametrize("name", ["bf16", "f16"])
def test_halves(name):
    kind = {"bf16": ml_dtypes.bfloat16, "f16": np.float16}[name]
    step = {"bf16": 2.0**-7, "f16": 2.0**-10}[name]
    # For bf16 the squares in odd lanes lie in the middle: there c decides, and it is below float32's reach.
    a = np.where(np.arange(64) % 2, 1 + step * (8 if name == "bf16" else 16), 1 + step * np.arange(64)).astype(kind)
    c = np.where(np.arange(64) % 4 < 2, 1, -1) * 2.0 ** (-24.0 if name == "f16" else -40.0)
    c = c.astype(kind)
    words = [np.ascontiguousarray(x).view(np.uint32) for x in (a, a, c)]
    (got,) = operation(f" fma.rn.{name}x2 %r9, %r0, %r1, %r2;", words, ["%r9"])
    got = got.view(np.uint16).view(kind)
    once = (a.astype(np.float32) * a.astype(np.float32) + c.astype(np.float32)).astype(kind)
    for lane in range(64):
        x, z = Fraction(float(a[lane])), Fraction(float(c[lane]))
        neighbours = np.arange(-1, 2) + int(got[lane].view(np.uint16))
        distances = [abs(Fraction(float(np.uint16(n).view(kind))) - (x * x + z)) for n in neighbours]
        even = int(neighbours[1]) % 2 == 0
        assert all(distances[1] < d or (distances[1] == d and even) for d in (distances[0], distances[2]))
    if name == "bf16":
        assert (got != once).any()
