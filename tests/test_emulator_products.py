"""The probe's wgmma kernels in the emulator, and the rules that its results are compared with."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest

from tests.emulator.accumulation import HOPPER, Rule, accumulate, hopper_product, to_float32
from tests.emulator.matrix import to_float
from tests.gpu.tensor_core_probe import KINDS, TYPES, in_emulator, multiply, random_operands


@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize("registers", [False, True], ids=["shared", "registers"])
@pytest.mark.parametrize("dtype", TYPES)
def test_probe_multiplies(dtype, registers, steps):
    for kind in KINDS:
        a, b, c = random_operands(kind, dtype, steps, blocks=2)
        d = multiply(in_emulator, dtype, a, b, c, registers)
        exact = np.einsum("bsmk,bsnk->bmn", a, b) + c
        size = np.einsum("bsmk,bsnk->bmn", np.abs(a), np.abs(b)) + np.abs(c)
        assert (np.abs(d - exact) <= 2.0**-20 * size).all()


@pytest.mark.parametrize("dtype", TYPES)
def test_bits_of_the_chip(dtype):
    """Results of single instructions that an H200 gave (tensor_core_probe.py): a sample of each kind of operands."""
    data = np.load(Path(__file__).parent / "emulator/data/wgmma_h200.npz")
    a, b = (to_float(data[f"{dtype}_{name}"], dtype == "bf16") for name in "ab")
    c, d = (data[f"{dtype}_{name}"] for name in "cd")
    for number in range(len(KINDS)):
        got = hopper_product(a[number], b[number], c[number])
        assert got.tobytes() == d[number].tobytes(), KINDS[number]
        wide = [x[number].astype(np.float64) for x in (a, b)]
        rule = accumulate(wide[0][:, None], wide[1][None], c[number], HOPPER)
        assert rule.tobytes() == d[number].tobytes(), KINDS[number]


@pytest.mark.parametrize("dtype", TYPES)
def test_wgmma_follows_the_chip(dtype):
    """With the option, the instruction in the emulator, four in a row."""
    for kind in KINDS:
        a, b, c = random_operands(kind, dtype, 4, blocks=1)
        got = multiply(partial(in_emulator, chip_products=True), dtype, a, b, c, False)
        deep = [x.transpose(0, 2, 1, 3).reshape(len(x), x.shape[2], -1) for x in (a, b)]
        wanted = accumulate(deep[0][:, :, None], deep[1][:, None], c, HOPPER)
        assert got.tobytes() == wanted.tobytes(), kind


def test_products_of_nothing():
    a, b = np.zeros((16, 16), np.float32), np.ones((8, 16), np.float32)
    assert (hopper_product(a, b, None) == 0).all()
    assert (hopper_product(a, b, np.full((16, 8), 2.5, np.float32)) == 2.5).all()
    a[0, 0], a[1, 1] = np.inf, np.nan
    got = hopper_product(a, b, None)
    assert (got[0] == np.inf).all() and np.isnan(got[1]).all() and (got[2:] == 0).all()


def one_row(addends, c: float, rule: Rule) -> float:
    a = np.zeros(16)
    a[: len(addends)] = addends
    return float(accumulate(a, np.ones(16), np.float32(c), rule))


INSIDE = Rule(16, 25, "sum", "zero", "inside", "zero")


def test_rules_cut_where_they_say():
    assert one_row([1, 2.0**-25, -1], 0, INSIDE) == 2.0**-25
    assert one_row([1, 2.0**-26, -1], 0, INSIDE) == 0
    assert one_row([1, 1.75 * 2.0**-25, -1], 0, INSIDE) == 2.0**-25
    assert one_row([1, -1.75 * 2.0**-25, -1], 0, INSIDE) == -(2.0**-25)
    assert one_row([1, -1.75 * 2.0**-25, -1], 0, INSIDE._replace(align="down")) == -(2.0**-24)
    assert one_row([1, 1.75 * 2.0**-25, -1], 0, INSIDE._replace(align="nearest")) == 2.0**-24


def test_rules_treat_the_accumulator_as_they_say():
    assert one_row([-1, 2.0**-26], 1, INSIDE) == 0
    assert one_row([1, -1], 2.0**-40, INSIDE) == 0
    assert one_row([1, -1], 2.0**-40, INSIDE._replace(accumulator="after")) == 2.0**-40


def test_rules_group_products():
    assert one_row([1, -1, 0, 0, 2.0**-40], 0, INSIDE) == 0
    assert one_row([1, -1, 0, 0, 2.0**-40], 0, INSIDE._replace(group=4)) == 2.0**-40


def test_rules_round_the_sum():
    assert one_row([1, 2.0**-23, 2.0**-24], 0, INSIDE) == 1 + 2.0**-23
    assert one_row([1, 2.0**-23, 2.0**-24], 0, INSIDE._replace(final="nearest")) == 1 + 2.0**-22
    assert to_float32(np.array([-1 - 2.0**-24 - 2.0**-25]), "zero") == -1


def test_exponent_of_a_product_counts_its_carry_or_not():
    b = np.ones(16)
    b[[0, 2]] = 1.5
    a = np.zeros(16)
    a[:3] = 1.5, 2.0**-25, -1.5
    assert accumulate(a, b, np.float32(0), INSIDE) == 2.0**-25
    assert accumulate(a, b, np.float32(0), INSIDE._replace(exponent="value")) == 0
