"""(DSL) A ring of shared-memory stages guarded by two mbarriers a stage.

A position in the ring is one Int32 in [0, 2 * stages): it names the stage and the phase of its barriers, so that no
loop carries phase bits by hand. Producer and consumer each start at 0 and advance once per use of a stage.
"""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Int32, const_expr

from jax_fa4.kernels.common.invariant import Invariant


class Ring(Invariant):
    """``stages`` full barriers followed by ``stages`` empty ones, 8 bytes each, at ``barriers`` in shared memory."""

    def __init__(self, barriers: cute.Pointer, stages: int):
        self.barriers = barriers
        self.stages = stages

    def initialise(self, producers: int, consumers: int) -> None:
        """Arrival counts of the full and the empty barriers (one thread calls this, then fences)."""
        for stage in range(self.stages):
            cute.arch.mbarrier_init(self.barriers + stage, producers)
            cute.arch.mbarrier_init(self.barriers + self.stages + stage, consumers)

    def stage(self, position: Int32) -> Int32:
        if const_expr(self.stages == 1):
            return Int32(0)
        if const_expr(self.stages & (self.stages - 1) == 0):
            return position & (self.stages - 1)
        return position - self.phase(position) * self.stages

    def phase(self, position: Int32) -> Int32:
        if const_expr(self.stages & (self.stages - 1) == 0):
            return position >> (self.stages.bit_length() - 1)
        return Int32(position >= self.stages)

    def advance(self, position: Int32) -> Int32:
        if const_expr(self.stages & (self.stages - 1) == 0):
            return (position + 1) & (2 * self.stages - 1)
        following = position + 1
        return following - Int32(following >= 2 * self.stages) * (2 * self.stages)

    def full(self, position: Int32) -> cute.Pointer:
        return self.barriers + self.stage(position)

    def empty(self, position: Int32) -> cute.Pointer:
        return self.barriers + self.stages + self.stage(position)

    def full_phase(self, position: Int32) -> tuple[cute.Pointer, Int32]:
        """Full barrier and the phase to wait for."""
        return self.full(position), self.phase(position)

    def wait_full(self, position: Int32) -> None:
        """Consumer: until the stage's data has arrived."""
        cute.arch.mbarrier_wait(self.full(position), self.phase(position))

    def wait_empty(self, position: Int32) -> None:
        """Producer: until the stage's last use is over; passes at once the first time round."""
        cute.arch.mbarrier_wait(self.empty(position), self.phase(position) ^ 1)
