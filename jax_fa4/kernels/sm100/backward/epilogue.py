"""(DSL) Epilogue of the compute warpgroups: dK (scaled) and dV from tensor memory to global memory.

Data flow: grad.full -> 64 columns at a time, 16 bits, swizzled into the memory of K or V -> TMA store, which drops what
is beyond the tensor. The boxes of dV and dK are dealt to the two warpgroups in turn. A key block that no query sees
gets zeros; its products never ran.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from jax_fa4.kernels.common.ptx import pack_pair
from jax_fa4.kernels.sm100 import ptx
from jax_fa4.kernels.sm100.backward import tmem
from jax_fa4.kernels.sm100.backward.config import BOX_BYTES, BOX_COLUMNS, BOX_ROW_BYTES, COMPUTE_GROUPS, KEYS
from jax_fa4.kernels.sm100.backward.context import Context

CHUNK = 32
"""Accumulator columns in registers at a time."""

GROUP_BARRIER = 2
"""Hardware barriers of the compute warpgroups: this one and the next."""


class EpilogueRole:
    """``group`` (DSL integer) is the number of the warpgroup; ``dvalue``, ``dkey``: first columns of dV and dK."""

    def __init__(self, context: Context, group: Int32, dvalue: int = tmem.DVALUE, dkey: int = tmem.DKEY):
        self.c = context
        self.dvalue, self.dkey = dvalue, dkey
        self.group = group
        thread = cute.arch.thread_idx()[0]
        self.key = thread & (KEYS - 1)
        self.issuer = Boolean(self.key == 0)
        self.lanes = (self.key & ~31) << tmem.LANE_SHIFT

    @cute.jit
    def run(self):
        c = self.c
        config = c.config
        worked = c.work.any_steps
        if worked:
            c.edges.grad.wait_full(0, 0)
            ptx.tmem_fence_after()
        for group in cutlass.range_constexpr(COMPUTE_GROUPS):
            if self.group == group:
                for box in cutlass.range_constexpr(config.v_boxes):
                    if cutlass.const_expr(box % COMPUTE_GROUPS == group):
                        self.box(c.maps.dv, self.dvalue, c.base + c.shared.value, box, group, worked, Float32(1.0))
                for box in cutlass.range_constexpr(config.qk_boxes):
                    if cutlass.const_expr((config.v_boxes + box) % COMPUTE_GROUPS == group):
                        self.box(c.maps.dk, self.dkey, c.base + c.shared.key, box, group, worked, c.scale)
        # Shared memory must outlive the reads, global visibility comes with the kernel's end.
        ptx.bulk_wait(0, read=False)

    @cute.jit
    def box(
        self,
        descriptor,
        column: cutlass.Constexpr,
        shared,
        box: cutlass.Constexpr,
        group: cutlass.Constexpr,
        worked,
        factor,
    ):
        """64 columns of one gradient."""
        c = self.c
        target = shared + box * BOX_BYTES + self.key * BOX_ROW_BYTES
        swizzle = (self.key & 7) << 4
        for first in cutlass.range_constexpr(0, BOX_COLUMNS, CHUNK):
            values = [Float32(0.0)] * CHUNK
            if worked:
                values = ptx.tmem_load(self.lanes + (column + box * BOX_COLUMNS + first), CHUNK)
            packed = [pack_pair(values[j] * factor, values[j + 1] * factor, c.element) for j in range(0, CHUNK, 2)]
            for j in cutlass.range_constexpr(0, CHUNK // 2, 4):
                address = target + (((first + 2 * j) * 2) ^ swizzle)
                ptx.store_shared_vector(address, packed[j : j + 4])
        ptx.fence_async_shared()
        ptx.named_barrier(GROUP_BARRIER + group, 128)
        if self.issuer:
            coordinates = (Int32(box * BOX_COLUMNS), c.work.key_block * KEYS, c.work.key_head, c.work.batch)
            ptx.tma_store(descriptor, coordinates, shared + box * BOX_BYTES)
            ptx.bulk_commit()
