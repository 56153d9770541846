"""Rules by which a tensor core may add the products of one instruction, to compare a chip's results with.

The products of two 16-bit operands are exact. A rule says which of them meet in one addition, at which bit they are
cut off before it, and how the sum becomes float32. Sources for the family: Fasi, Higham, Mikaitis and Pranesh,
"Numerical behavior of NVIDIA tensor cores" (2021), who found aligned sums with truncation on earlier chips.
"""

from __future__ import annotations

from itertools import product
from typing import NamedTuple

import numpy as np


class Rule(NamedTuple):
    """How 16 products and an accumulator are added.

    ``group``: products per addition, along k; the groups follow one another through the accumulator.
    ``bits``: addends are cut at the largest addend's exponent minus this many bits.
    ``exponent``: of a product, "sum" (of the operands' exponents) or "value" (of the product, up to one more).
    ``align``: how addends are cut: "zero", "down" or "nearest".
    ``accumulator``: "inside" the aligned sum, or added "after" it.
    ``final``: the sum's rounding to float32: "zero" or "nearest".
    """

    group: int
    bits: int
    exponent: str
    align: str
    accumulator: str
    final: str


CANDIDATES = [
    Rule(*values)
    for values in product(
        (16, 8, 4),
        range(22, 32),
        ("sum", "value"),
        ("zero", "down", "nearest"),
        ("inside", "after"),
        ("zero", "nearest"),
    )
]
_CUT = {"zero": np.trunc, "down": np.floor, "nearest": np.rint}
_NOTHING = -1000  # exponent of zero


def exponents(x: np.ndarray) -> np.ndarray:
    """floor(log2|x|) of float64 values; far below everything for zero."""
    return np.where(x == 0, _NOTHING, np.frexp(x)[1] - 1)


def to_float32(x: np.ndarray, mode: str) -> np.ndarray:
    """float64 to float32, rounded to nearest (even) or toward zero."""
    near = x.astype(np.float32)
    if mode == "nearest":
        return near
    return np.where(np.abs(near.astype(np.float64)) > np.abs(x), np.nextafter(near, np.float32(0)), near)


def accumulate(a: np.ndarray, b: np.ndarray, c: np.ndarray, rule: Rule) -> np.ndarray:
    """c + sum over k of a * b under a rule.

    a and b: (..., K) float64 values of 16-bit operands, K a multiple of 16, broadcastable against each other; c: (...)
    float32. Returns float32 of the broadcast shape.
    """
    products = a * b
    scales = exponents(a) + exponents(b) if rule.exponent == "sum" else exponents(products)
    scales = np.where(products == 0, _NOTHING, scales)
    total = np.broadcast_to(c, products.shape[:-1]).astype(np.float64)
    for start in range(0, products.shape[-1], rule.group):
        addends, levels = products[..., start : start + rule.group], scales[..., start : start + rule.group]
        if rule.accumulator == "inside":
            addends = np.concatenate((addends, total[..., None]), -1)
            levels = np.concatenate((levels, exponents(total)[..., None]), -1)
        quantum = levels.max(-1, keepdims=True) - rule.bits
        aligned = _CUT[rule.align](np.ldexp(addends, -quantum)).sum(-1)
        summed = to_float32(np.ldexp(aligned, quantum[..., 0]), rule.final).astype(np.float64)
        if rule.accumulator == "after":
            summed = to_float32(total + summed, rule.final).astype(np.float64)
        total = summed
    return total.astype(np.float32)


HOPPER = Rule(16, 25, "sum", "zero", "inside", "zero")
"""wgmma of 16-bit operands as measured on an H200 (docs/emulator.md): accumulator and 16 products are cut towards
zero 25 bits below the largest exponent, added exactly, and the sum is cut to float32."""

_FRACTION = np.int64(-1 << 29)  # mask of a float64's bits that keeps the 24 significant bits of a float32


def _exponents(x: np.ndarray) -> np.ndarray:
    """Of float32 values, as int16."""
    fields = (x.view(np.uint32) >> 23 & 255).astype(np.int16) - np.int16(127)
    return np.where(x == 0, np.int16(_NOTHING), fields)


def hopper_product(a: np.ndarray, b: np.ndarray, c: np.ndarray | None) -> np.ndarray:
    """c + a b^T by :data:`HOPPER`. a: (M, 16), b: (N, 16) float32 values of 16-bit operands; c: (M, N) float32."""
    products = a.T.astype(np.float64)[:, :, None] * b.T.astype(np.float64)[:, None, :]
    top = (_exponents(a).T[:, :, None] + _exponents(b).T[:, None, :]).max(0)
    if c is not None:
        top = np.maximum(top, _exponents(c))
    quantum = np.ldexp(1.0, np.maximum(top, -500) - HOPPER.bits)
    products /= quantum
    total = np.trunc(products, out=products).sum(0)
    if c is not None:
        total += np.trunc(c / quantum)
    total = (total.view(np.int64) & _FRACTION).view(np.float64)
    return (total * quantum).astype(np.float32)
