"""(DSL) What the kernel's prologue hands to every role: addresses, maps, edges, problem."""

from __future__ import annotations

from dataclasses import dataclass

from cutlass import Float32, Int32, Int64

from jax_fa4.kernels.common.invariant import Invariant
from jax_fa4.kernels.sm100 import ptx
from jax_fa4.kernels.sm100.forward.config import ForwardConfig
from jax_fa4.kernels.sm100.forward.pipeline import Edges
from jax_fa4.kernels.sm100.forward.scheduler import Scheduler
from jax_fa4.kernels.sm100.forward.shared import SharedMap
from jax_fa4.kernels.sm100.forward.work import Problem


@dataclass(frozen=True)
class TensorMaps(Invariant):
    """Generic addresses of the TMA descriptors."""

    q: Int64
    k: Int64
    v: Int64
    o: Int64


@dataclass(frozen=True)
class Context(Invariant):
    """``element``: DSL type of query, key, value and out. ``base``: shared-memory address of the map's start.
    ``rank``: the CTA's number in its pair. ``scale_log2``: softmax scale times log2 e, above 0. ``output``, ``lse``:
    global addresses. ``head_dim_v``: the true one (the config has the padded one)."""

    config: ForwardConfig
    element: type
    shared: SharedMap
    base: Int32
    rank: Int32 | int
    edges: Edges
    scheduler: Scheduler
    maps: TensorMaps
    problem: Problem
    scale_log2: Float32
    output: Int64
    lse: Int64
    head_dim_v: Int32

    def slot_address(self, slot: Int32) -> Int32:
        """Shared-memory address of a slot of the K/V ring."""
        return self.base + self.shared.kv + slot * self.config.kv_slot_bytes

    def arrive_mma(self, barrier: Int32) -> None:
        """One arrival at a barrier that the MMA warp waits for."""
        if self.config.ctas == 2:
            ptx.mbarrier_arrive_leader(barrier)
        else:
            ptx.mbarrier_arrive(barrier)
