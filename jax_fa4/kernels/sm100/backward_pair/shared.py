"""Map of shared memory in each CTA of a pair, for head dims of two boxes (65 to 128)::

    key, value       128 keys x head dim, boxes of 64 columns: this CTA's
    key_t            256 keys x 64 columns: all of the pair's keys, half of the columns
    query, dout      64 rows x head dim: half of a block's rows
    query_t, dout_t  128 rows x 64 columns: all of a block's rows, half of the columns
    dscore           256 keys x 64 rows: dS with this CTA's half of the rows; box ``r`` is about the keys of rank ``r``,
                     of which one is the CTA's own and the other comes from its peer
    outgoing         128 keys x 64 rows: dS of this CTA's keys with the peer's rows
    piece            pieces of dQ on their way out

Query rows are half of the block where a product has their tensor as B with the rows along N, and a pair's product takes
half of B from each CTA; columns are half where they run along N. Every tile has one stage: each is read by one product
a step only, so that its next load has most of a step. All are in the 128-byte swizzle, dS as in the single-CTA kernel:
one key a 128-byte row. dK and dV leave through the memory of K and V.
"""

from __future__ import annotations

from dataclasses import dataclass

from jax_fa4.kernels.sm100.backward.config import (
    BOX_BYTES,
    SHARED_LIMIT,
    STAT_BYTES,
    STAT_STAGES,
    BackwardConfig,
)
from jax_fa4.kernels.sm100.backward.edges import barrier_bytes
from jax_fa4.kernels.sm100.backward.shared import SharedMap
from jax_fa4.kernels.sm100.backward_pair.config import (
    CTAS,
    HALF_BOX_BYTES,
    PIECE_BUFFERS,
    PIECE_BYTES,
    SEND_BYTES,
)
from jax_fa4.kernels.sm100.backward_pair.edges import EDGES


@dataclass(frozen=True)
class PairMap(SharedMap):
    """Byte offsets from the (1024-byte aligned) start of dynamic shared memory, the same in both CTAs."""

    key_t: int
    query_t: int
    dout_t: int
    outgoing: int

    @classmethod
    def of(cls, config: BackwardConfig) -> PairMap:
        """Raises ValueError if the head dims are not of two boxes each."""
        if (config.qk_boxes, config.v_boxes) != (CTAS, CTAS):
            raise ValueError(f"{config}: each CTA of a pair has one box of columns of Q, K and dO, so two boxes it is")
        sizes = {
            "key": config.qk_boxes * BOX_BYTES,
            "value": config.v_boxes * BOX_BYTES,
            "key_t": CTAS * BOX_BYTES,
            "query": config.qk_boxes * HALF_BOX_BYTES,
            "query_t": BOX_BYTES,
            "dout": config.v_boxes * HALF_BOX_BYTES,
            "dout_t": BOX_BYTES,
            "dscore": CTAS * SEND_BYTES,
            "outgoing": SEND_BYTES,
            "piece": PIECE_BUFFERS * PIECE_BYTES,
            "stat": STAT_STAGES * 2 * STAT_BYTES,
            "barriers": barrier_bytes(EDGES),
            "tmem_base": 8,
        }
        offsets, size = {}, 0
        for name, count in sizes.items():
            offsets[name] = size
            size += count
        if size > SHARED_LIMIT:
            raise ValueError(f"{config} needs {size} bytes of shared memory, limit {SHARED_LIMIT}")
        return cls(**offsets, size=size)
