"""Faults planted in the PTX of the Hopper forward are found; with ``--long`` every one of them."""

import pytest

from tests.compiled import require_kernels
from tests.emulator.cases import SM90_FAULTS, SM90_ROWS
from tests.emulator.fault_hunt import Hunt, is_noticed, parts, rows_alone
from tests.emulator.mutants import RULES, faults, shifted_mask

require_kernels()

AT_LEAST = 100
"""Faults that the kernel has a place for, all kinds together."""
KINDS = [kind for kind in RULES if not kind.startswith(("tcgen05", "tensor memory", "warp barrier"))]
"""The kinds of fault that exist on this architecture and in this kernel."""


def pytest_generate_tests(metafunc):
    if "part" in metafunc.fixturenames:
        metafunc.parametrize("part", parts(metafunc))


@pytest.fixture(scope="module")
def hunt():
    return Hunt(SM90_FAULTS, checks=[rows_alone(SM90_ROWS)])


@pytest.mark.parametrize("kind", KINDS)
def test_faults_are_found(kind, part, hunt):
    planted, missed = hunt.missed(kind, part)
    assert planted or part, f"the kernel has nothing where '{kind}' could be planted"
    assert not missed, f"{len(missed)} of {planted} not found, at PTX lines {missed}"


def test_enough_places_for_faults(hunt):
    assert sum(1 for _ in faults(hunt.ptx, hunt.executed, tuple(KINDS))) >= AT_LEAST


def test_mask_off_by_one_is_found(hunt):
    mutant = shifted_mask(hunt.ptx)
    assert is_noticed(lambda: hunt.run(mutant, 1))
