"""(DSL) What the prologue hands to every role of a CTA in a pair: a single CTA's context, and the place in the pair."""

from __future__ import annotations

from dataclasses import dataclass

from cutlass import Int32

from jax_fa4.kernels.sm100.backward.context import Context, Edges
from jax_fa4.kernels.sm100.backward_pair.config import SEND_BYTES
from jax_fa4.kernels.sm100.backward_pair.shared import PairMap
from jax_fa4.kernels.sm100.forward.pipeline import Edge


class PairEdges(Edges):
    """All edges by name."""

    kt: Edge
    qt: Edge
    doutt: Edge
    read: Edge
    send: Edge
    received: Edge
    exchange: Edge


@dataclass(frozen=True)
class PairContext(Context):
    """``rank``: the CTA's number in its pair. ``dq_accum`` is the generic address of the scratch's tensor map."""

    shared: PairMap
    edges: PairEdges
    rank: Int32

    def dscore(self) -> Int32:
        """Shared-memory address of dS of this rank's keys: in this CTA its own, in the peer what this CTA sends."""
        return self.base + self.shared.dscore + self.rank * SEND_BYTES
