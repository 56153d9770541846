"""Map of shared memory in each CTA of a pair::

    key, value       128 keys x head dim, boxes of 64 columns: this CTA's
    key_t            256 keys x half of the columns: all of the pair's keys
    query, dout      half of a part's rows x head dim, boxes of 64 columns
    query_t, dout_t  all of a part's rows x half of the columns
    dscore           256 keys x 64 rows: dS with this CTA's half of a block's rows; box ``r`` is about the keys of rank
                     ``r``, of which one is the CTA's own and the other comes from its peer
    outgoing         128 keys x 64 rows: dS of this CTA's keys with the peer's rows
    piece            pieces of dQ on their way out

Query rows are halved where a product has their tensor as B with the rows along N, and a pair's product takes half of B
from each CTA; columns are halved where they run along N. Every tile has one stage: each is read by one product a part
only, so that its next load has most of the time of a part. Tiles are in the 128-byte swizzle, dS as in the single-CTA
kernel (one key a 128-byte row), but for ``key_t`` and ``query_t`` of 96 columns: boxes of 32 in the 64-byte swizzle.
dK and dV leave through the memory of K and V.
"""

from __future__ import annotations

from dataclasses import dataclass

from jax_fa4.kernels.sm100.backward.config import (
    BOX_BYTES,
    BOX_ROW_BYTES,
    KEYS,
    SHARED_LIMIT,
    STAT_BYTES,
    STAT_STAGES,
    BackwardConfig,
)
from jax_fa4.kernels.sm100.backward.edges import barrier_bytes
from jax_fa4.kernels.sm100.backward.shared import SharedMap
from jax_fa4.kernels.sm100.backward_pair.config import CTAS, PIECE_BUFFERS, SEND_BYTES, PairShape
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
        """Raises ValueError for head dims that the kernel does not take."""
        shape = PairShape.of(config)
        sizes = {
            "key": config.qk_boxes * BOX_BYTES,
            "value": config.v_boxes * BOX_BYTES,
            "key_t": CTAS * KEYS * shape.columns * 2,
            "query": config.qk_boxes * shape.row_box_bytes,
            "query_t": shape.rows * shape.columns * 2,
            "dout": config.v_boxes * shape.row_box_bytes,
            "dout_t": shape.rows * BOX_ROW_BYTES,
            "dscore": CTAS * SEND_BYTES,
            "outgoing": SEND_BYTES,
            "piece": PIECE_BUFFERS * shape.piece_bytes,
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
