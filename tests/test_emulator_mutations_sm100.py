"""Faults planted in the PTX of the Blackwell forward are found: what test_emulator_mutations.py does for Hopper's."""

import pytest

from tests.compiled import require_kernels
from tests.emulator.cases import SM100_FAULTS
from tests.emulator.fault_hunt import Hunt, clean_seeds, parts
from tests.emulator.mutants import RULES

require_kernels()

ABSENT = ("wgmma", "shuffle", "barrier arrival")
KINDS = [kind for kind in RULES if not kind.startswith(ABSENT)]
"""The kinds of fault that the kernel has a place for: no wgmma, no shuffles of partial results."""


def pytest_generate_tests(metafunc):
    if "part" in metafunc.fixturenames:
        metafunc.parametrize("part", parts(metafunc))


@pytest.fixture(scope="module")
def hunt():
    return Hunt(SM100_FAULTS, tensor_fences=True)


@pytest.mark.parametrize("kind", KINDS)
def test_faults_are_found(kind, part, hunt):
    planted, missed = hunt.missed(kind, part)
    assert planted or part, f"the kernel has nothing where '{kind}' could be planted"
    assert not missed, f"{len(missed)} of {planted} not found, at PTX lines {missed}"


def test_schedules_of_the_kernel_itself_are_clean(part, hunt):
    for seed in clean_seeds(part):
        hunt.run(hunt.ptx, seed)
