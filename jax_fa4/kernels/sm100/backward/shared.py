"""Map of shared memory: K, V, rings of Q and dO, dS, pieces of dQ on their way out, row statistics, barriers.

Every 16-bit tile is a sequence of boxes of 64 columns (128-byte rows) in the 128-byte swizzle, as TMA writes and reads
them and as the tensor core's descriptors name them. dS is kept as the compute threads have it: box ``g`` holds the 64
query rows of warpgroup ``g`` as columns, one key per 128-byte row; for the product dQ = dS K this is an M-major
operand. dK and dV leave through the memory of K and V.
"""

from __future__ import annotations

from dataclasses import dataclass

from jax_fa4.kernels.sm100.backward.config import (
    BOX_BYTES,
    COMPUTE_GROUPS,
    PIECE_BUFFERS,
    PIECE_BYTES,
    SHARED_LIMIT,
    STAT_BYTES,
    STAT_STAGES,
    BackwardConfig,
)
from jax_fa4.kernels.sm100.backward.edges import barrier_bytes, edge_specs

ALIGNMENT = 1024
"""The swizzle XORs address bits 4-6 with bits 7-9, so tiles start where all of these are zero."""


@dataclass(frozen=True)
class SharedMap:
    """Byte offsets from the (1024-byte aligned) start of dynamic shared memory."""

    key: int
    value: int
    query: int
    dout: int
    dscore: int
    piece: int
    stat: int
    barriers: int
    tmem_base: int
    size: int

    @classmethod
    def of(cls, config: BackwardConfig) -> SharedMap:
        """Raises ValueError if the configuration needs more than an SM has."""
        key = 0
        value = key + config.qk_boxes * BOX_BYTES
        query = value + config.v_boxes * BOX_BYTES
        dout = query + config.query_stages * config.qk_boxes * BOX_BYTES
        dscore = dout + config.dout_stages * config.v_boxes * BOX_BYTES
        piece = dscore + COMPUTE_GROUPS * BOX_BYTES
        stat = piece + PIECE_BUFFERS * PIECE_BYTES
        # lse2, then delta.
        barriers = stat + STAT_STAGES * 2 * STAT_BYTES
        tmem_base = barriers + barrier_bytes(edge_specs(config))
        size = tmem_base + 8
        if size > SHARED_LIMIT:
            raise ValueError(f"{config} needs {size} bytes of shared memory, limit {SHARED_LIMIT}")
        return cls(key, value, query, dout, dscore, piece, stat, barriers, tmem_base, size)
