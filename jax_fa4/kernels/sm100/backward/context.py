"""(DSL) What the kernel's prologue hands to every role: addresses, maps, edges, work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cutlass import Float32, Int32, Int64

from jax_fa4.kernels.common.invariant import Invariant
from jax_fa4.kernels.sm100.backward.config import BOX_BYTES, STAT_BYTES, BackwardConfig
from jax_fa4.kernels.sm100.backward.shared import SharedMap
from jax_fa4.kernels.sm100.backward.work import Work
from jax_fa4.kernels.sm100.forward.edges import BARRIER_BYTES, EdgeSpec
from jax_fa4.kernels.sm100.forward.pipeline import Edge


class Edges(Invariant):
    """All edges by name, laid out from ``base`` on."""

    k: Edge
    v: Edge
    q: Edge
    dout: Edge
    stat: Edge
    s: Edge
    p: Edge
    dp: Edge
    ds: Edge
    dq: Edge
    grad: Edge

    def __init__(self, specs: Sequence[EdgeSpec], base: Int32, ctas: int = 1):
        self.all: list[Edge] = []
        offset = 0
        for spec in specs:
            edge = Edge(spec, base + offset, ctas)
            setattr(self, spec.name, edge)
            self.all.append(edge)
            offset += spec.stages * (2 if spec.empty else 1) * BARRIER_BYTES


@dataclass(frozen=True)
class TensorMaps(Invariant):
    """Generic addresses of the TMA descriptors."""

    q: Int64
    k: Int64
    v: Int64
    dout: Int64
    dk: Int64
    dv: Int64

    @property
    def all(self) -> tuple[Int64, ...]:
        return (self.q, self.k, self.v, self.dout, self.dk, self.dv)


@dataclass(frozen=True)
class Context(Invariant):
    """``element``: DSL type of the 16-bit tensors. ``base``: shared-memory address of the map's start. ``scale``:
    softmax scale, ``scale_log2``: times log2 e. The rest are global addresses of the scratch; ``turn`` may be None."""

    config: BackwardConfig
    element: type
    shared: SharedMap
    base: Int32
    edges: Edges
    maps: TensorMaps
    work: Work
    scale: Float32
    scale_log2: Float32
    lse2: Int64
    delta: Int64
    dq_accum: Int64
    turn: Int64 | None

    def query(self, stage) -> Int32:
        """Shared-memory address of a stage of Q."""
        return self.base + self.shared.query + stage * (self.config.qk_boxes * BOX_BYTES)

    def dout(self, stage) -> Int32:
        """Shared-memory address of a stage of dO."""
        return self.base + self.shared.dout + stage * (self.config.v_boxes * BOX_BYTES)

    def stat(self, stage) -> Int32:
        """Shared-memory address of a stage of lse2; delta follows."""
        return self.base + self.shared.stat + stage * (2 * STAT_BYTES)
