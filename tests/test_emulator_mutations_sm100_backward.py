"""Faults planted in the PTX of the Blackwell backward's main kernel, alone and on pairs of CTAs, are found."""

import re

import pytest

from tests.compiled import require_kernels
from tests.emulator import attention_backward as backward
from tests.emulator.attention import ForwardCase, artefact
from tests.emulator.cases import SM100_BACKWARD_FAULTS as BACKWARD
from tests.emulator.cases import SM100_PAIR_FAULTS as PAIR
from tests.emulator.cases import SM100_WIDE_PAIR_FAULTS as WIDE_PAIR
from tests.emulator.errors import EmulatorError
from tests.emulator.fault_hunt import PARTS, PER_KIND, parts
from tests.emulator.launch import Options
from tests.emulator.mutants import faults, sample

require_kernels()

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


def pytest_generate_tests(metafunc):
    if "part" in metafunc.fixturenames:
        metafunc.parametrize("part", parts(metafunc))


def options(seed: int) -> Options:
    return Options(seed=seed, tensor_fences=True)


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
def test_faults_in_the_backward_are_found(kind, backward_kernel, part):
    planted = list(faults(backward_kernel.ptx, backward_kernel.executed, (kind,)))
    assert planted
    for _, line, mutant in sample(planted, PER_KIND) if part is None else planted[part::PARTS]:
        assert backward_kernel.finds(mutant), f"PTX line {line}"


@pytest.mark.parametrize("case", [PAIR, WIDE_PAIR], ids=["d128", "d192x128"])
def test_faults_in_the_exchange_of_a_pair_are_found(case):
    """Every fault in the warp that sends half of dS to the peer and says what has arrived."""
    kernel = Backward(case, True)
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
