"""(DSL) What the kernel's prologue hands to every role: addresses, maps, edges, work."""

from __future__ import annotations

from dataclasses import dataclass

from cutlass import Float32, Int32, Int64

from jax_fa4.kernels.common.invariant import Invariant
from jax_fa4.kernels.sm100.backward_split.config import STAT_BYTES, STREAMED_BOX, SplitConfig
from jax_fa4.kernels.sm100.backward_split.maps import SharedMap, edge_specs
from jax_fa4.kernels.sm100.backward_split.work import Work
from jax_fa4.kernels.sm100.forward.edges import BARRIER_BYTES
from jax_fa4.kernels.sm100.forward.pipeline import Edge


class Edges(Invariant):
    """All edges by name, laid out from ``base`` on."""

    x: Edge
    y: Edge
    z: Edge
    w: Edge
    stat: Edge
    s: Edge
    p: Edge
    dp: Edge
    ds: Edge
    grad: Edge

    def __init__(self, config: SplitConfig, base: Int32):
        self.all: list[Edge] = []
        offset = 0
        for spec in edge_specs(config):
            edge = Edge(spec, base + offset)
            setattr(self, spec.name, edge)
            self.all.append(edge)
            offset += spec.stages * (2 if spec.empty else 1) * BARRIER_BYTES


@dataclass(frozen=True)
class TensorMaps(Invariant):
    """Generic addresses of the TMA descriptors: resident x and y, streamed z and w, and the gradients that leave where
    x and y came from (``dy`` is None on the query side)."""

    x: Int64
    y: Int64
    z: Int64
    w: Int64
    dx: Int64
    dy: Int64 | None


@dataclass(frozen=True)
class Context(Invariant):
    """``element``: DSL type of the 16-bit tensors. ``base``: shared-memory address of the map's start. ``scale``:
    softmax scale, ``scale_log2``: times log2 e. ``lse2``, ``delta``: global addresses."""

    config: SplitConfig
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

    def z(self, stage) -> Int32:
        """Shared-memory address of a stage of the first streamed operand."""
        return self.base + self.shared.z + stage * (self.config.qk_boxes * STREAMED_BOX)

    def w(self, stage) -> Int32:
        """Shared-memory address of a stage of the second streamed operand."""
        return self.base + self.shared.w + stage * (self.config.v_boxes * STREAMED_BOX)

    def stat(self, stage) -> Int32:
        """Shared-memory address of a stage of lse2; delta follows."""
        return self.base + self.shared.stat + stage * (2 * STAT_BYTES)

    def first_box(self, boxes: int, part: int) -> Int32:
        """First box of this CTA's part of a gradient of ``boxes`` boxes, ``part`` boxes a CTA."""
        return self.work.part * (boxes - part)
