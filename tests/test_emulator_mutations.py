"""Faults planted in the PTX of real kernels are found. Some statements are redundant in a given run (another barrier
orders the same accesses); per kind of fault the least share that must be found is stated."""

from collections import Counter

import pytest

from tests.emulator.attention import ForwardCase, artefact, assert_right, run_forward
from tests.emulator.errors import EmulatorError
from tests.emulator.launch import Options
from tests.emulator.mutants import RULES, faults, shifted_mask

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl to compile the kernels")

CASE = ForwardCase(400, 420, 64, mask="causal", multiprocessors=1, ramp=0.01)
"""Several tiles in one CTA, several key blocks each, moving maxima: every buffer and phase is used again."""

SHARE = {
    "wait skipped": 0.6,  # of two waits in a row the second may imply the first
    "wgmma wait removed": 0.6,  # a later wait may come before anybody looks
    "wgmma wait leaves one more group": 0.6,
    "wgmma commit removed": 0.6,
    "wgmma fence removed": 0.5,  # of two fences without register writes between, one is enough
    "proxy fence removed": 0.6,
    "CTA barrier removed": 0.8,
    "bulk wait removed": 0.5,  # one at the very end follows
    "bulk commit removed": 0.5,
    "shuffle over other lanes": 0.5,  # lanes may agree already
}
OVERALL = 0.85
AT_LEAST = 60


@pytest.fixture(scope="module")
def operands():
    return CASE.operands(1)


@pytest.fixture(scope="module")
def executed(operands):
    """PTX lines that a clean run reaches."""
    result = run_forward(CASE, operands, Options(seed=1))
    assert_right(CASE, operands, result)
    return result.reports[0].lines


@pytest.fixture(scope="module")
def tally():
    return Counter()


def is_found(ptx: str, operands, seeds: int) -> bool:
    for seed in range(1, seeds + 1):
        try:
            assert_right(CASE, operands, run_forward(CASE, operands, Options(seed=seed), ptx))
        except (EmulatorError, AssertionError):
            return True
    return False


@pytest.mark.parametrize("kind", RULES)
def test_faults_are_found(kind, operands, executed, tally, pytestconfig):
    seeds = 20 if pytestconfig.getoption("--long") else 4
    missed, total = [], 0
    for _, line, mutant in faults(artefact(CASE.spec).ptx, executed, (kind,)):
        total += 1
        if not is_found(mutant, operands, seeds):
            missed.append(line)
    assert total, f"the kernel has nothing where '{kind}' could be planted"
    tally[kind] = total - len(missed)
    tally["planted"] += total
    assert tally[kind] >= SHARE.get(kind, 1.0) * total, f"{len(missed)} of {total} not found, at PTX lines {missed}"


def test_enough_faults(tally):
    found = tally.total() - tally["planted"]
    if len(tally) == len(RULES) + 1:  # all kinds ran in this process
        assert found >= AT_LEAST
        assert found >= OVERALL * tally["planted"]


def test_mask_off_by_one_is_found(operands):
    assert is_found(shifted_mask(artefact(CASE.spec).ptx), operands, 1)
