"""(DSL) 2^x on the FMA units, for the share of the probabilities that the special-function unit has no time for.

Cody-Waite: x = n + f with n = floor(x); adding 2^23 + 2^22 with rounding down leaves n in the low bits of the sum. 2^f
on [0, 1) is a degree-3 polynomial (FlashAttention-4 paper, section on exp2 emulation: relative error at most 8.8e-5 in
float32, below the 3.9e-3 of the rounding to bfloat16), evaluated by Horner's rule; n is added to its exponent bits.
"""

from __future__ import annotations

from cutlass import Float32

from jax_fa4.kernels.sm100 import ptx

COEFFICIENTS = (1.0, 0.69514614, 0.22756439, 0.07711909)
"""Of f^0 to f^3. The constant is exactly 1, so that 2^n is exact for integers."""

ROUND = float(2**23 + 2**22)
SMALLEST = -127.0
"""Arguments are clamped here: 2^-127 has an all-zero exponent field and comes out as 0 (masked scores are -inf)."""

EXPONENT_SHIFT = 23


def exp2_fma(x: ptx.Pair) -> ptx.Pair:
    """2^x of two float32 values below 128; values under -126 lose their last bits, those under -127 give 0."""
    x = (ptx.max2(x[0], Float32(SMALLEST)), ptx.max2(x[1], Float32(SMALLEST)))
    shifted = ptx.add2(x, (Float32(ROUND), Float32(ROUND)), rounding="rm")
    floor = ptx.add2(shifted, (Float32(-ROUND), Float32(-ROUND)))
    fraction = ptx.fma2(floor, (Float32(-1.0), Float32(-1.0)), x)
    power = (Float32(COEFFICIENTS[3]), Float32(COEFFICIENTS[3]))
    for coefficient in reversed(COEFFICIENTS[:3]):
        power = ptx.fma2(power, fraction, (Float32(coefficient), Float32(coefficient)))
    low, high = (
        ptx.from_bits(ptx.bits(p) + (ptx.bits(s) << EXPONENT_SHIFT)) for p, s in zip(power, shifted, strict=True)
    )
    return low, high
