"""The pipeline between the roles: every edge with its producer, its consumer, its stages and its arrival counts.

An edge is two mbarriers per stage. *full*: the producer's data are there. *empty*: the consumer has done with them
(absent where another edge already implies it). Counts are in arrivals: one per warp for warpgroups, one for TMA and
for ``tcgen05.commit``. A step is one block of query rows of one head.

===== ======== ======== ==============================================================================================
edge  producer consumer hands over
===== ======== ======== ==============================================================================================
k     load     mma      the CTA's keys, once
v     load     mma      the CTA's values, once
q     load     mma      a block of Q. Empty: the dK product that reads it, the last to do so, is complete
dout  load     mma      a block of dO. Empty: the dV product is complete
stat  load     compute  lse2 and delta of a block. Empty: both have been read
s     mma      compute  scores in tensor memory. Empty is implied by p
p     compute  mma      probabilities over the scores. Its columns are free again when the next scores come, which the
                        tensor core computes after the dV product
dp    mma      compute  dP in tensor memory; also says that the dK and dQ products of the step before are complete, so
                        that dS may be written in tensor and shared memory. Empty is implied by ds
ds    compute  mma      dS over dP in tensor memory, and in shared memory
dq    mma      reduce   dQ in tensor memory. Empty: it has been read into registers
grad  mma      compute  dK and dV, once; all products are complete
===== ======== ======== ==============================================================================================
"""

from __future__ import annotations

from collections.abc import Sequence

from jax_fa4.kernels.sm100.backward.config import COMPUTE_GROUPS, STAT_STAGES, BackwardConfig
from jax_fa4.kernels.sm100.forward.edges import BARRIER_BYTES, WARPS, EdgeSpec

COMPUTE_WARPS = COMPUTE_GROUPS * WARPS


def edge_specs(config: BackwardConfig) -> tuple[EdgeSpec, ...]:
    """The edges of one configuration, in the order of their barriers in shared memory."""
    return (
        EdgeSpec("k", "load", "mma", 1, full=1, empty=0),
        EdgeSpec("v", "load", "mma", 1, full=1, empty=0),
        EdgeSpec("q", "load", "mma", config.query_stages, full=1, empty=1),
        EdgeSpec("dout", "load", "mma", config.dout_stages, full=1, empty=1),
        EdgeSpec("stat", "load", "compute", STAT_STAGES, full=1, empty=COMPUTE_WARPS),
        EdgeSpec("s", "mma", "compute", 1, full=1, empty=0),
        EdgeSpec("p", "compute", "mma", 1, full=COMPUTE_WARPS, empty=0),
        EdgeSpec("dp", "mma", "compute", 1, full=1, empty=0),
        EdgeSpec("ds", "compute", "mma", 1, full=COMPUTE_WARPS, empty=0),
        EdgeSpec("dq", "mma", "reduce", 1, full=1, empty=WARPS),
        EdgeSpec("grad", "mma", "compute", 1, full=1, empty=0),
    )


def barrier_bytes(specs: Sequence[EdgeSpec]) -> int:
    """Shared memory of all barriers."""
    return sum(spec.stages * (2 if spec.empty else 1) for spec in specs) * BARRIER_BYTES
