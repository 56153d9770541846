"""(DSL) The mbarriers of the edges that ``edges`` declares, and positions in the K/V ring."""

from __future__ import annotations

from cutlass import Int32, select_

from jax_fa4.kernels.common.invariant import Invariant
from jax_fa4.kernels.sm100 import ptx
from jax_fa4.kernels.sm100.forward.config import ForwardConfig
from jax_fa4.kernels.sm100.forward.edges import BARRIER_BYTES, EdgeSpec, edge_specs


class Edge(Invariant):
    """One edge's barriers at a shared-memory address. Stages are ints or DSL integers.

    Waits take the number of the use (0, 1, 2, ...) of the stage, as an integer or only its lowest bit.
    """

    def __init__(self, spec: EdgeSpec, base: Int32, ctas: int = 1):
        self.spec = spec
        self._base = base
        # The MMA warp of a pair, and a warp that relays what the peer sends, are told by both CTAs.
        self._full_scope = "cluster" if ctas == 2 and spec.consumer in ("mma", "relay") else "cta"
        self._empty_scope = "cluster" if ctas == 2 and spec.producer == "mma" else "cta"

    def full(self, stage) -> Int32:
        """Address of a full barrier."""
        return self._base + stage * BARRIER_BYTES

    def empty(self, stage) -> Int32:
        """Address of an empty barrier."""
        if not self.spec.empty:
            raise ValueError(f"edge {self.spec.name} has no empty barriers")
        return self._base + (self.spec.stages + stage) * BARRIER_BYTES

    def wait_full(self, stage, use) -> None:
        """Consumer: waits for the data of this use of the stage."""
        ptx.mbarrier_wait(self.full(stage), Int32(use) & 1, scope=self._full_scope)

    def wait_empty(self, stage, use) -> None:
        """Producer: waits until the use before this one is released; the first use passes at once."""
        ptx.mbarrier_wait(self.empty(stage), (Int32(use) & 1) ^ 1, scope=self._empty_scope)

    def initialise(self) -> None:
        """Sets the arrival counts (one thread, before any use)."""
        for stage in range(self.spec.stages):
            ptx.mbarrier_init(self.full(stage), self.spec.full)
            if self.spec.empty:
                ptx.mbarrier_init(self.empty(stage), self.spec.empty)


class Edges(Invariant):
    """All edges by name, laid out from ``base`` on."""

    q: Edge
    kv: Edge
    s: Edge
    p_early: Edge
    p_late: Edge
    o: Edge
    stat: Edge
    out: Edge
    work: Edge

    def __init__(self, config: ForwardConfig, base: Int32):
        self.all: list[Edge] = []
        offset = 0
        for spec in edge_specs(config):
            edge = Edge(spec, base + offset, config.ctas)
            setattr(self, spec.name, edge)
            self.all.append(edge)
            offset += spec.stages * (2 if spec.empty else 1) * BARRIER_BYTES


def next_slot(slot: Int32, use: Int32, stages: int) -> tuple[Int32, Int32]:
    """The ring position after (slot, use): the use counts how often the ring has wrapped around."""
    wrapped = slot == Int32(stages - 1)
    return select_(wrapped, Int32(0), slot + 1), use + Int32(wrapped)


def take_slots(slot: Int32, use: Int32, count: int, stages: int) -> tuple[list[tuple[Int32, Int32]], Int32, Int32]:
    """The next ``count`` ring positions, and the position after them."""
    taken = []
    for _ in range(count):
        taken.append((slot, use))
        slot, use = next_slot(slot, use, stages)
    return taken, slot, use
