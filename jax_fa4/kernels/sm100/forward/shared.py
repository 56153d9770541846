"""Map of shared memory: the Q tiles, the ring of K and V chunks, the O tiles, row statistics, barriers.

Every tile is a sequence of boxes of 64 columns (128-byte rows) in the 128-byte swizzle, as TMA writes and reads them
and as the tensor core's descriptors name them.
"""

from __future__ import annotations

from dataclasses import dataclass

from jax_fa4.kernels.sm100.forward.config import ROWS, SHARED_LIMIT, ForwardConfig
from jax_fa4.kernels.sm100.forward.edges import barrier_bytes

ALIGNMENT = 1024
"""The swizzle XORs address bits 4-6 with bits 7-9, so tiles start where all of these are zero."""

STAT_BYTES = ROWS * 4

RESPONSE_BYTES = 16
"""One answer of cluster launch control."""


@dataclass(frozen=True)
class SharedMap:
    """Byte offsets from the (1024-byte aligned) start of dynamic shared memory."""

    q: int
    kv: int
    o: int
    o_stride: int
    stat: int
    responses: int
    barriers: int
    tmem_base: int
    size: int

    @classmethod
    def of(cls, config: ForwardConfig) -> SharedMap:
        """Raises ValueError if the configuration needs more than an SM has."""
        q = 0
        kv = q + config.q_stages * config.q_bytes
        end = kv + config.kv_stages * config.kv_slot_bytes
        # A stage's O may only lie over the Q of the same stage: each stage's Q is loaded anew on its own.
        o, o_stride = q, config.q_bytes
        if not config.o_over_q:
            o, o_stride, end = end, config.o_bytes, end + config.q_stages * config.o_bytes
        stat = end
        # Two floats per row: the factor or the sum, and the maximum.
        responses = stat + config.q_stages * 2 * STAT_BYTES
        barriers = responses + (2 * RESPONSE_BYTES if config.launch_control else 0)
        tmem_base = barriers + barrier_bytes(config)
        size = tmem_base + 8
        if size > SHARED_LIMIT:
            raise ValueError(f"{config} needs {size} bytes of shared memory, limit {SHARED_LIMIT}")
        return cls(q, kv, o, o_stride, stat, responses, barriers, tmem_base, size)
