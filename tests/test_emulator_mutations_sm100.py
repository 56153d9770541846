"""Faults planted in the PTX of the Blackwell kernels are found: what test_emulator_mutations.py does for Hopper's.

The default run plants a few faults of each kind, spread over the kernel; ``--long`` plants all of them.
"""

import re

import pytest

from tests.compiled import require_kernels
from tests.emulator import attention_backward as backward
from tests.emulator.attention import ForwardCase, artefact, assert_right, run_forward
from tests.emulator.cases import SM100_BACKWARD_FAULTS as BACKWARD
from tests.emulator.cases import SM100_FAULTS as CASE
from tests.emulator.cases import SM100_PAIR_FAULTS as PAIR
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

SEND = "cp.async.bulk.shared::cluster.shared::cta"
"""The copy of dS to the peer; the relay warp's other instructions are within RELAY_LINES of it."""

RELAY_LINES = 20
MISDIRECTED = {
    "copy to the sender's own dS": (r"mapa\S+ target, (%\w+), %\w+;", r"mov.b32 target, \1;"),
    "part of the copy": (r"\], 16384, \[barrier", "], 16368, [barrier"),
}
"""Faults that only an exchange has: what is wrong -> (pattern, replacement)."""


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


class Backward:
    """A backward whose main kernel gets faults; ``pair``: on pairs of CTAs."""

    def __init__(self, case: ForwardCase, pair: bool):
        self.case, self.pair = case, pair
        self.given = backward.inputs(case)
        specs = backward.specs_of(case, pair)
        position = [spec.kind for spec in specs].index("backward_main")
        self.ptx = artefact(specs[position]).ptx
        clean = self.run(1, self.ptx)
        backward.assert_right(case, self.given, clean)
        self.executed = clean.reports[position].lines

    def run(self, seed: int, ptx: str) -> backward.BackwardResult:
        return backward.run_backward(self.case, self.given, options(seed), texts={"backward_main": ptx}, pair=self.pair)

    def finds(self, ptx: str) -> bool:
        for seed in (1, 2, 3):
            try:
                backward.assert_right(self.case, self.given, self.run(seed, ptx))
            except (EmulatorError, AssertionError):
                return True
        return False


@pytest.fixture(scope="module", params=["single", "pair"])
def backward_kernel(request):
    return Backward(PAIR, True) if request.param == "pair" else Backward(BACKWARD, False)


@pytest.mark.parametrize("kind", BACKWARD_KINDS)
def test_faults_in_the_backward_are_found(kind, backward_kernel, pytestconfig):
    planted = list(faults(backward_kernel.ptx, backward_kernel.executed, (kind,)))
    assert planted
    if not pytestconfig.getoption("--long"):
        planted = sample(planted, PER_KIND)
    for _, line, mutant in planted:
        assert backward_kernel.finds(mutant), f"PTX line {line}"


def test_faults_in_the_exchange_of_a_pair_are_found():
    """Every fault in the warp that sends half of dS to the peer and says what has arrived."""
    kernel = Backward(PAIR, True)
    lines = kernel.ptx.split("\n")
    (send,) = (number for number, line in enumerate(lines, 1) if SEND in line)
    near = set(range(send - RELAY_LINES, send + RELAY_LINES)) & kernel.executed
    planted = list(faults(kernel.ptx, near))
    kinds_of_faults = {kind for kind, _, _ in planted}
    assert kinds_of_faults >= {"wait skipped", "phase flipped", "arrival removed", "copy removed"}
    for kind, line, mutant in planted:
        assert kernel.finds(mutant), f"{kind}, PTX line {line}"
    for kind, (pattern, replacement) in MISDIRECTED.items():
        mutant, count = re.subn(pattern, replacement, kernel.ptx)
        assert count == 1
        assert kernel.finds(mutant), kind
