"""(DSL) Epilogue of the compute warpgroups: gradients from tensor memory to global memory.

Data flow: grad.full -> 64 columns at a time, scaled, 16 bits, swizzled into the memory of the resident operand of the
same shape -> TMA store, which drops what is beyond the tensor. Boxes are dealt to the two warpgroups in turn. A block
that meets nothing gets zeros; its products never ran.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32

from jax_fa4.kernels.common.ptx import pack_pair
from jax_fa4.kernels.sm100 import ptx
from jax_fa4.kernels.sm100.backward.config import BOX_COLUMNS, BOX_ROW_BYTES
from jax_fa4.kernels.sm100.backward_split import maps
from jax_fa4.kernels.sm100.backward_split.config import COMPUTE_GROUPS, RESIDENT, RESIDENT_BOX
from jax_fa4.kernels.sm100.backward_split.context import Context

CHUNK = 32
"""Accumulator columns in registers at a time."""

GROUP_BARRIER = 2
"""Hardware barriers of the compute warpgroups: this one and the next."""


class EpilogueRole:
    """``group`` (DSL integer) is the number of the warpgroup."""

    def __init__(self, context: Context, group):
        self.c = context
        self.group = group
        self.row = cute.arch.thread_idx()[0] & (RESIDENT - 1)
        self.issuer = Boolean(self.row == 0)
        self.lanes = (self.row & ~31) << maps.LANE_SHIFT

    @cute.jit
    def run(self):
        c = self.c
        config = c.config
        worked = c.work.any_steps
        if worked:
            c.edges.grad.wait_full(0, 0)
            ptx.tmem_fence_after()
        qk_first = c.first_box(config.qk_boxes, config.qk_part)
        v_first = c.first_box(config.v_boxes, config.v_part)
        for group in cutlass.range_constexpr(COMPUTE_GROUPS):
            if self.group == group:
                for box in cutlass.range_constexpr(config.v_part):
                    if cutlass.const_expr(box % COMPUTE_GROUPS == group):
                        column, shared = maps.FIRST + box * BOX_COLUMNS, c.base + c.shared.y
                        new = v_first + box >= c.work.part * config.v_part
                        self.box(c.maps.dy, column, shared, v_first + box, new, group, worked, Float32(1.0))
                for box in cutlass.range_constexpr(config.qk_part):
                    if cutlass.const_expr((config.v_part + box) % COMPUTE_GROUPS == group):
                        column, shared = maps.second(config) + box * BOX_COLUMNS, c.base + c.shared.x
                        new = qk_first + box >= c.work.part * config.qk_part
                        self.box(c.maps.dx, column, shared, qk_first + box, new, group, worked, c.scale)
        # Shared memory must outlive the reads, global visibility comes with the kernel's end.
        ptx.bulk_wait(0, read=False)

    @cute.jit
    def box(self, descriptor, column: cutlass.Constexpr, shared, box, new, group: cutlass.Constexpr, worked, factor):
        """64 columns of one gradient; not stored where another part does (``new`` is false)."""
        c = self.c
        start = shared + box * RESIDENT_BOX
        target = start + self.row * BOX_ROW_BYTES
        swizzle = (self.row & 7) << 4
        for first in cutlass.range_constexpr(0, BOX_COLUMNS, CHUNK):
            values = [Float32(0.0)] * CHUNK
            if worked:
                values = ptx.tmem_load(self.lanes + (column + first), CHUNK)
            packed = [pack_pair(values[j] * factor, values[j + 1] * factor, c.element) for j in range(0, CHUNK, 2)]
            for j in cutlass.range_constexpr(0, CHUNK // 2, 4):
                address = target + (((first + 2 * j) * 2) ^ swizzle)
                ptx.store_shared_vector(address, packed[j : j + 4])
        ptx.fence_async_shared()
        ptx.named_barrier(GROUP_BARRIER + group, 128)
        if self.issuer & new:
            ptx.tma_store(descriptor, (box * BOX_COLUMNS, c.work.block * RESIDENT, c.work.head, c.work.batch), start)
            ptx.bulk_commit()
