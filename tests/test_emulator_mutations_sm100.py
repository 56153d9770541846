"""Faults planted in the PTX of the Blackwell kernels are found: what test_emulator_mutations.py does for Hopper's.

The default run plants a few faults of each kind, spread over the kernel; ``--long`` plants all of them.
"""

import pytest

from tests.compiled import require_kernels
from tests.emulator import attention_backward as backward
from tests.emulator.attention import artefact, assert_right, run_forward
from tests.emulator.cases import SM100_BACKWARD_FAULTS as BACKWARD
from tests.emulator.cases import SM100_FAULTS as CASE
from tests.emulator.errors import EmulatorError
from tests.emulator.launch import Options
from tests.emulator.mutants import RULES, faults, sample

require_kernels()

SHARE = {
    "wait skipped": 0.6,  # of two waits in a row the second may imply the first
    "phase flipped": 0.9,
    "one arrival more in the count": 0.9,
    "warp barrier removed": 0.25,  # collective tcgen05 waits order the lanes' tensor-memory accesses as well
    "bulk wait removed": 0.6,  # the last one before the exit
    "tcgen05 fence before removed": 0.4,  # fences around allocation order nothing, and two in a row are one
    "tcgen05 fence after removed": 0.6,
}
"""Least share of the faults of a kind that must be found, where it is not all of them (of a sample: one at least)."""

PER_KIND = 4

BACKWARD_KINDS = (
    "arrival removed",
    "tcgen05 commit removed",
    "tcgen05 store wait removed",
    "tcgen05 load wait removed",
)
"""Kinds of which every fault in the backward must be found."""


def kinds() -> list[str]:
    """The kinds of fault that the kernel has a place for: no wgmma, no shuffles of partial results."""
    absent = ("wgmma", "shuffle", "barrier arrival")
    return [kind for kind in RULES if not kind.startswith(absent)]


@pytest.fixture(scope="module")
def operands():
    return CASE.operands(1)


def options(seed: int) -> Options:
    return Options(seed=seed, tensor_fences=True)


@pytest.fixture(scope="module")
def executed(operands):
    """PTX lines that a clean run reaches."""
    result = run_forward(CASE, operands, options(1))
    assert_right(CASE, operands, result)
    return result.reports[0].lines


def is_found(ptx: str, operands, seeds: int) -> bool:
    for seed in range(1, seeds + 1):
        try:
            assert_right(CASE, operands, run_forward(CASE, operands, options(seed), ptx))
        except (EmulatorError, AssertionError):
            return True
    return False


@pytest.mark.parametrize("kind", kinds())
def test_faults_are_found(kind, operands, executed, pytestconfig):
    thorough = pytestconfig.getoption("--long")
    planted = list(faults(artefact(CASE.spec).ptx, executed, (kind,)))
    assert planted, f"the kernel has nothing where '{kind}' could be planted"
    if not thorough:
        planted = sample(planted, PER_KIND)
    missed = [line for _, line, mutant in planted if not is_found(mutant, operands, 20 if thorough else 3)]
    found = len(planted) - len(missed)
    least = len(planted) if kind not in SHARE else SHARE[kind] * len(planted) if thorough else 1
    assert found >= least, f"{len(missed)} of {len(planted)} not found, at PTX lines {missed}"


def test_schedules_of_the_kernel_itself_are_clean(operands, pytestconfig):
    for seed in range(200 if pytestconfig.getoption("--long") else 10):
        assert_right(CASE, operands, run_forward(CASE, operands, options(seed)))


def backward_is_right(given, seed: int, texts: dict[str, str]) -> bool:
    try:
        backward.assert_right(BACKWARD, given, backward.run_backward(BACKWARD, given, options(seed), texts=texts))
    except (EmulatorError, AssertionError):
        return False
    return True


@pytest.mark.parametrize("kind", BACKWARD_KINDS)
def test_faults_in_the_backward_are_found(kind, pytestconfig):
    given = backward.inputs(BACKWARD)
    specs = backward.backward_specs(
        BACKWARD.arch, BACKWARD.problem, mask=BACKWARD.mask, varlen=False, deterministic=True
    )
    position = [spec.kind for spec in specs].index("backward_main")
    clean = backward.run_backward(BACKWARD, given, options(1))
    backward.assert_right(BACKWARD, given, clean)
    planted = list(faults(artefact(specs[position]).ptx, clean.reports[position].lines, (kind,)))
    assert planted
    if not pytestconfig.getoption("--long"):
        planted = sample(planted, PER_KIND)
    for _, line, mutant in planted:
        texts = {"backward_main": mutant}
        assert not all(backward_is_right(given, seed, texts) for seed in (1, 2, 3)), f"PTX line {line}"
