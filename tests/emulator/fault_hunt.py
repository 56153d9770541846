"""Looks for planted faults: runs a mutant under several schedules and inputs until something shows.

The default run plants a few faults of each kind, spread over the kernel; with ``--long`` every fault is planted, in
``PARTS`` tests per kind that can run in parallel. A fault that no run notices must be one that changes nothing, for a
reason that redundant.py knows and checks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from .attention import ForwardCase, artefact, assert_right, run_forward
from .errors import EmulatorError
from .launch import Options, Report
from .mutants import Fault, faults, sample
from .redundant import Statements, reason

SEEDS = 20
"""Schedules within which a fault must be found."""
CLEAN_SEEDS = 200
"""Schedules over which the kernels themselves must be clean."""
PARTS = 8
PER_KIND = 4
"""Faults of each kind in the default run."""
Check = Callable[[str, int], None]
"""(PTX, seed): runs and raises EmulatorError or AssertionError where something is wrong."""


@dataclass
class Hunt:
    """One forward kernel and the calls that are to show its faults; all ``cases`` have the same spec.

    ``checks``: further ones, tried with the first seed where the cases show nothing.
    """

    cases: Sequence[ForwardCase]
    tensor_fences: bool = False
    checks: Sequence[Check] = ()
    _operands: list = field(default_factory=list)
    _executed: set[int] = field(default_factory=set)
    _effects: set[int] = field(default_factory=set)
    _statements: Statements | None = None

    def options(self, seed: int) -> Options:
        return Options(seed=seed, tensor_fences=self.tensor_fences)

    @property
    def ptx(self) -> str:
        return artefact(self.cases[0].spec).ptx

    def run(self, ptx: str, seed: int) -> Report:
        """One call, checked; successive seeds take the cases in turn."""
        if not self._operands:
            self._operands = [case.operands(1) for case in self.cases]
        number = (seed - 1) % len(self.cases)
        case, operands = self.cases[number], self._operands[number]
        result = run_forward(case, operands, self.options(seed), ptx)
        assert_right(case, operands, result)
        return result.reports[0]

    @property
    def executed(self) -> set[int]:
        """Lines that clean runs of the cases reach."""
        if not self._executed:
            for seed in range(1, len(self.cases) + 1):
                report = self.run(self.ptx, seed)
                self._executed |= report.lines
                self._effects |= report.effects
            for check in self.checks:
                check(self.ptx, 1)
        return self._executed

    def finds(self, ptx: str) -> bool:
        try:
            for seed in range(1, SEEDS + 1):
                self.run(ptx, seed)
                if seed == len(self.cases):
                    for check in self.checks:
                        check(ptx, seed)
        except (EmulatorError, AssertionError):
            return True
        return False

    def redundant(self, fault: Fault) -> str | None:
        """Why the fault changes nothing, or None."""
        if self._statements is None:
            self._statements = Statements(self.ptx)
        return reason(fault, self._statements, self._effects)

    def missed(self, kind: str, part: int | None) -> tuple[int, list[int]]:
        """(faults planted, lines of those that neither showed nor are redundant). ``part``: None for a sample."""
        planted = list(faults(self.ptx, self.executed, (kind,)))
        if part is None:  # the redundant ones would only take time
            planted = sample([fault for fault in planted if self.redundant(fault) is None], PER_KIND)
        else:
            planted = planted[part::PARTS]
        lost = [fault for fault in planted if not self.finds(fault[2]) and self.redundant(fault) is None]
        return len(planted), [line for _, line, _ in lost]


def parts(metafunc) -> Sequence[int | None]:
    """Parts of the set of faults: one test for the sample, or ``PARTS`` for all."""
    return range(PARTS) if metafunc.config.getoption("--long") else (None,)


def clean_seeds(part: int | None) -> range:
    """Schedules of a kernel without faults: a few, or this part's share of ``CLEAN_SEEDS``."""
    return range(1, 9) if part is None else range(1 + part, 1 + CLEAN_SEEDS, PARTS)


def rows_alone(case: ForwardCase) -> Check:
    """A check that a row's output does not depend on which other rows share its warp, bit by bit.

    Every fourth row has small scores, the others once small and once large scores.
    """
    q, k, v = case.operands(1)
    small = (q.astype(np.float32) * 0.02).astype(q.dtype)
    mixed = q.copy()
    mixed[:, ::4] = small[:, ::4]

    def check(ptx: str, seed: int) -> None:
        first, second = (run_forward(case, (x, k, v), Options(seed=seed), ptx) for x in (small, mixed))
        assert first.out[:, ::4].tobytes() == second.out[:, ::4].tobytes(), "rows depend on their neighbours"

    return check


def is_noticed(check: Callable[[], None]) -> bool:
    try:
        check()
    except (EmulatorError, AssertionError):
        return True
    return False
