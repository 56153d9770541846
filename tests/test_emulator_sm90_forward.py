"""The Hopper forward kernels, executed from their PTX, against float64: all variants, several schedules."""

import pytest

from tests.compiled import require_kernels
from tests.emulator.attention import ForwardCase, assert_right, run_forward
from tests.emulator.cases import SM90_CASES, SM90_CLEAN
from tests.emulator.fault_hunt import clean_seeds, parts
from tests.emulator.launch import Options

require_kernels()

SEEDS = (0, 1, 2, 3)


def pytest_generate_tests(metafunc):
    if "part" in metafunc.fixturenames:
        metafunc.parametrize("part", parts(metafunc))


@pytest.mark.parametrize("case", SM90_CASES, ids=lambda case: case.name)
def test_forward(case):
    operands = case.operands()
    for seed in SEEDS:
        assert_right(case, operands, run_forward(case, operands, Options(seed=seed)))


def test_schedules_do_not_change_a_bit():
    case = ForwardCase(300, 300, 128, heads=2, mask="causal", ramp=0.02, multiprocessors=3)
    operands = case.operands(3)
    first = run_forward(case, operands, Options(seed=0))
    for seed in range(1, 6):
        other = run_forward(case, operands, Options(seed=seed))
        assert (first.out.view("uint16") == other.out.view("uint16")).all()
        assert (first.lse == other.lse).all()


@pytest.mark.parametrize("case", SM90_CLEAN, ids=lambda case: case.name)
def test_clean_over_many_seeds(case, part):
    operands = case.operands(1)
    for seed in clean_seeds(part):
        assert_right(case, operands, run_forward(case, operands, Options(seed=seed)))
