"""The probe's wgmma kernels in the emulator, and the rules that its results are compared with."""

import numpy as np
import pytest

from tests.emulator.accumulation import Rule, accumulate, to_float32
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
