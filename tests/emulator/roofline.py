"""Cycles that each unit of an SM needs for what a launch did: a lower bound per unit, from a Report's counts.

Rates are per SM and clock, as the design of the kernels assumes them for B200 (and B300, which differs in ``mufu``).
"""

from __future__ import annotations

from dataclasses import dataclass

from .launch import Report

WARP = 32
MUFU_OPCODES = ("ex2", "lg2", "rcp", "rsqrt", "sqrt", "sin", "cos", "tanh")
FMA_OPCODES = ("fma", "add", "sub", "mul")


@dataclass(frozen=True)
class Rates:
    """Per SM and clock: tensor-core FLOP, special-function results, float32 FMA-pipe lanes, shared-memory bytes."""

    mma_flop: int
    mufu: int
    fma: int
    shared_bytes: int


B200 = Rates(mma_flop=8192, mufu=16, fma=128, shared_bytes=128)
B300 = Rates(mma_flop=8192, mufu=32, fma=128, shared_bytes=128)


@dataclass(frozen=True)
class Cycles:
    """Busy cycles of each unit, summed over the launch. ``shared_mma``: operands of the tensor core alone."""

    mma: float
    shared_mma: float
    shared: float
    mufu: float
    fma: float

    def per(self, tiles: int) -> Cycles:
        """The same for one of ``tiles`` equal pieces of the work."""
        return Cycles(*(value / tiles for value in (self.mma, self.shared_mma, self.shared, self.mufu, self.fma)))

    def table(self) -> str:
        """One line per unit."""
        rows = vars(self).items()
        return "\n".join(f"{name:<12}{value:12.1f}" for name, value in rows)


def _count(report: Report, names: tuple[str, ...], floats_only: bool) -> int:
    """Lane operations of opcodes whose first part is in ``names``; a packed pair counts twice."""
    total = 0
    for opcode, times in report.opcodes.items():
        parts = opcode.split(".")
        if parts[0] not in names:
            continue
        pair = parts[-1] in ("f32x2", "bf16x2", "f16x2")
        if floats_only and parts[-1] not in ("f32", "f32x2"):
            continue
        total += times * WARP * (2 if pair else 1)
    return total


def cycles(report: Report, rates: Rates = B200) -> Cycles:
    """Busy cycles of each unit for everything in ``report``."""
    counters = report.counters
    operands = counters.get("mma_shared_bytes", 0)
    moved = sum(
        counters.get(name, 0) for name in ("shared_read", "shared_write", "async_shared_read", "async_shared_write")
    )
    return Cycles(
        mma=counters.get("mma_flop", 0) / rates.mma_flop,
        shared_mma=operands / rates.shared_bytes,
        shared=(operands + moved) / rates.shared_bytes,
        mufu=_count(report, MUFU_OPCODES, False) / rates.mufu,
        fma=_count(report, FMA_OPCODES, True) / rates.fma,
    )
