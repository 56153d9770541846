"""Faults planted in the PTX of real kernels are found. Some statements are redundant in a given run (another barrier
orders the same accesses); per kind of fault the least share that must be found is stated."""

import pytest

from tests.compiled import require_kernels
from tests.emulator.attention import artefact, assert_right, run_forward
from tests.emulator.cases import SM90_FAULTS as CASE
from tests.emulator.errors import EmulatorError
from tests.emulator.launch import Options
from tests.emulator.mutants import RULES, faults, sample, shifted_mask

require_kernels()

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
"""Least share of the faults of a kind that must be found, where it is not all of them (of a sample: one at least)."""

PER_KIND = 5
"""Faults of each kind in the default run; ``--long`` plants all of them."""
AT_LEAST = 60
"""Faults that the kernel has a place for, all kinds together."""
KINDS = [kind for kind in RULES if not kind.startswith(("tcgen05", "tensor memory", "warp barrier"))]
"""The kinds of fault that exist on this architecture and in this kernel."""


@pytest.fixture(scope="module")
def operands():
    return CASE.operands(1)


@pytest.fixture(scope="module")
def executed(operands):
    """PTX lines that a clean run reaches."""
    result = run_forward(CASE, operands, Options(seed=1))
    assert_right(CASE, operands, result)
    return result.reports[0].lines


def is_found(ptx: str, operands, seeds: int) -> bool:
    for seed in range(1, seeds + 1):
        try:
            assert_right(CASE, operands, run_forward(CASE, operands, Options(seed=seed), ptx))
        except (EmulatorError, AssertionError):
            return True
    return False


@pytest.mark.parametrize("kind", KINDS)
def test_faults_are_found(kind, operands, executed, pytestconfig):
    thorough = pytestconfig.getoption("--long")
    planted = list(faults(artefact(CASE.spec).ptx, executed, (kind,)))
    assert planted, f"the kernel has nothing where '{kind}' could be planted"
    if not thorough:
        planted = sample(planted, PER_KIND)
    missed = [line for _, line, mutant in planted if not is_found(mutant, operands, 20 if thorough else 4)]
    found = len(planted) - len(missed)
    least = len(planted) if kind not in SHARE else SHARE[kind] * len(planted) if thorough else 1
    assert found >= least, f"{len(missed)} of {len(planted)} not found, at PTX lines {missed}"


def test_enough_places_for_faults(executed):
    assert sum(1 for _ in faults(artefact(CASE.spec).ptx, executed, tuple(KINDS))) >= AT_LEAST


def test_mask_off_by_one_is_found(operands):
    assert is_found(shifted_mask(artefact(CASE.spec).ptx), operands, 1)
