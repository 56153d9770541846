"""Maps of tensor memory and of shared memory, and the edges between the roles.

Tensor memory: 512 columns of 128 lanes (resident rows), allocated whole::

    0            64             128
    | S, P       | dP, dS       | dV (key_value side), then dK; or dQ

A compute warpgroup owns half of the columns of S and dP; its 16-bit P (dS) takes the first half of its own columns.

Shared memory: the resident operands, the stages of the streamed ones, row statistics (key_value side), barriers. The
gradients leave through the memory of the resident operands.

===== ======== ======== ==============================================================================================
edge  producer consumer hands over
===== ======== ======== ==============================================================================================
x, y  load     mma      the resident operands, once
z     load     mma      a block of Q (or K). Empty: the dK (or dQ) product that reads it is complete
w     load     mma      a block of dO (or V). Empty: the dV product (or dP) is complete
stat  load     compute  lse2 and delta of a block of rows (key_value side). Empty: both have been read
s     mma      compute  scores in tensor memory. Empty is implied by p
p     compute  mma      key_value side: probabilities over the scores. Query side: the scores have been read
dp    mma      compute  dP in tensor memory. Empty is implied by ds
ds    compute  mma      dS over dP
grad  mma      compute  the gradients, once; all products are complete
===== ======== ======== ==============================================================================================
"""

from __future__ import annotations

from dataclasses import dataclass

from jax_fa4.kernels.sm100.backward.config import K_STEP, SHARED_LIMIT
from jax_fa4.kernels.sm100.backward_split.config import (
    COMPUTE_WARPS,
    HALF,
    RESIDENT_BOX,
    STAT_BYTES,
    STAT_STAGES,
    STREAMED,
    STREAMED_BOX,
    SplitConfig,
)
from jax_fa4.kernels.sm100.forward.edges import BARRIER_BYTES, EdgeSpec

COLUMNS = 512
BASE = 0
"""The address that an allocation of all columns has."""

LANE_SHIFT = 16
SCORES = 0
DPROBABILITIES = STREAMED
FIRST = 2 * STREAMED
"""Column of dV, or of dQ."""


def second(config: SplitConfig) -> int:
    """Column of dK; on the query side of dQ."""
    return FIRST + config.v_part * 64


def operand_step(step: int) -> int:
    """Columns from the start of S (dP) to K step ``step`` of the 16-bit operand P (dS)."""
    half, inside = divmod(step, HALF // K_STEP)
    return half * HALF + inside * (K_STEP // 2)


def edge_specs(config: SplitConfig) -> tuple[EdgeSpec, ...]:
    """The edges, in the order of their barriers in shared memory."""
    return (
        EdgeSpec("x", "load", "mma", 1, full=1, empty=0),
        EdgeSpec("y", "load", "mma", 1, full=1, empty=0),
        EdgeSpec("z", "load", "mma", config.stages, full=1, empty=1),
        EdgeSpec("w", "load", "mma", config.stages, full=1, empty=1),
        EdgeSpec("stat", "load", "compute", STAT_STAGES, full=1, empty=COMPUTE_WARPS),
        EdgeSpec("s", "mma", "compute", 1, full=1, empty=0),
        EdgeSpec("p", "compute", "mma", 1, full=COMPUTE_WARPS, empty=0),
        EdgeSpec("dp", "mma", "compute", 1, full=1, empty=0),
        EdgeSpec("ds", "compute", "mma", 1, full=COMPUTE_WARPS, empty=0),
        EdgeSpec("grad", "mma", "compute", 1, full=1, empty=0),
    )


def barrier_bytes(config: SplitConfig) -> int:
    """Shared memory of all barriers."""
    return sum(spec.stages * (2 if spec.empty else 1) for spec in edge_specs(config)) * BARRIER_BYTES


@dataclass(frozen=True)
class SharedMap:
    """Byte offsets from the (1024-byte aligned) start of dynamic shared memory."""

    x: int
    y: int
    z: int
    w: int
    stat: int
    barriers: int
    tmem_base: int
    size: int

    @classmethod
    def of(cls, config: SplitConfig) -> SharedMap:
        """Raises ValueError if the configuration needs more than an SM has."""
        x = 0
        y = x + config.qk_boxes * RESIDENT_BOX
        z = y + config.v_boxes * RESIDENT_BOX
        w = z + config.stages * config.qk_boxes * STREAMED_BOX
        stat = w + config.stages * config.v_boxes * STREAMED_BOX
        barriers = stat + STAT_STAGES * 2 * STAT_BYTES
        tmem_base = barriers + barrier_bytes(config)
        size = tmem_base + 8
        if size > SHARED_LIMIT:
            raise ValueError(f"{config} needs {size} bytes of shared memory, limit {SHARED_LIMIT}")
        return cls(x, y, z, w, stat, barriers, tmem_base, size)
