"""The pipeline between the roles: every edge with its producer, its consumer, its stages and its arrival counts.

An edge is two mbarriers per stage. *full*: the producer's data are there. *empty*: the consumer has done with them
(absent where another edge already implies it). Counts are in arrivals: one per warp for warpgroups, one for TMA and
for ``tcgen05.commit``.

========= =========== =========== ======================================================================================
edge      producer    consumer    hands over
========= =========== =========== ======================================================================================
q         load        mma         a Q tile (TMA). Empty: the tile's last score product is complete, and, where O leaves
                                  through the same memory, the O store has read it
kv        load        mma         a chunk of K or V (TMA) in the ring
s         mma         softmax     a block of scores in tensor memory. Empty is implied by p: probabilities that are
                                  ready mean scores that are read, and products complete in order
p_early   softmax     mma         three quarters of the probabilities. Its buffer is free again when the next scores
                                  come, which the tensor core computes after it has read them
p_late    softmax     mma         the last quarter
o         mma         correction  O with one more block added. Empty: rescaled (or, after the last block, read out)
stat      softmax     correction  the rescale factor of a block; after the last one, sum and maximum of each row
out       correction  store       the finished O tile in shared memory
work      scheduler   all warps   the next tile, with cluster launch control only (each warp arrives when it has read)
========= =========== =========== ======================================================================================

In a pair of CTAs, what the MMA warp waits for (q, kv and p full, o empty) are barriers of the first CTA, where both
CTAs' bytes and warps are counted; what it signals goes to both CTAs.
"""

from __future__ import annotations

from dataclasses import dataclass

from jax_fa4.kernels.sm100.forward.config import ForwardConfig

WARPS = 4
"""Warps of a warpgroup: one elected arrival each."""

BARRIER_BYTES = 8


@dataclass(frozen=True)
class EdgeSpec:
    """One row of the table above; ``empty`` is 0 where the edge has no empty barriers."""

    name: str
    producer: str
    consumer: str
    stages: int
    full: int
    empty: int


def edge_specs(config: ForwardConfig) -> tuple[EdgeSpec, ...]:
    """The edges of one configuration, in the order of their barriers in shared memory."""
    tiles, both = config.q_stages, WARPS * config.ctas
    work = (EdgeSpec("work", "scheduler", "all", 2, full=1, empty=config.warps),) if config.launch_control else ()
    return (
        *work,
        EdgeSpec("q", "load", "mma", tiles, full=1, empty=2 if config.o_over_q else 1),
        EdgeSpec("kv", "load", "mma", config.kv_stages, full=1, empty=1),
        EdgeSpec("s", "mma", "softmax", 2, full=1, empty=0),
        EdgeSpec("p_early", "softmax", "mma", 2, full=both, empty=0),
        EdgeSpec("p_late", "softmax", "mma", 2, full=both, empty=0),
        EdgeSpec("o", "mma", "correction", tiles, full=1, empty=both),
        EdgeSpec("stat", "softmax", "correction", tiles, full=WARPS, empty=WARPS),
        EdgeSpec("out", "correction", "store", tiles, full=WARPS, empty=1),
    )


def barrier_bytes(config: ForwardConfig) -> int:
    """Shared memory of all barriers."""
    return sum(spec.stages * (2 if spec.empty else 1) for spec in edge_specs(config)) * BARRIER_BYTES
