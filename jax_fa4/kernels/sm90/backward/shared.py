"""Shared memory of the backward's main kernel.

Annotations are evaluated here (no ``from __future__ import annotations``): ``cute.struct`` reads them.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from jax_fa4.kernels.sm90.backward import wgmma
from jax_fa4.kernels.sm90.backward.config import MainConfig
from jax_fa4.kernels.sm90.backward.scratch import DQ_CHUNKS
from jax_fa4.kernels.sm90.backward.tile_queue import SLOTS


@dataclass(frozen=True)
class Shared:
    """Tensors and mbarriers in shared memory; barriers with a stage index are pointers to the first stage's. Those from
    ``key_empty`` on, and ``ticket``, are for persistent CTAs."""

    query: cute.Tensor
    dout: cute.Tensor
    key: cute.Tensor
    value: cute.Tensor
    dscore: cute.Tensor
    lse2: cute.Tensor
    delta: cute.Tensor
    dq: cute.Tensor
    dkey: cute.Tensor
    ticket: cute.Tensor
    key_full: cute.Pointer
    value_full: cute.Pointer
    query_full: cute.Pointer
    query_empty: cute.Pointer
    dout_full: cute.Pointer
    dout_empty: cute.Pointer
    dscore_full: cute.Pointer
    dscore_empty: cute.Pointer
    key_empty: cute.Pointer
    staged_full: cute.Pointer
    staged_empty: cute.Pointer
    tile_full: cute.Pointer
    tile_empty: cute.Pointer


def shared_layouts(c: MainConfig) -> dict[str, Any]:
    """Layouts of the tiles that TMA or wgmma reads, by name."""
    return {
        "query": wgmma.rows_layout(c.dtype, c.tile_m, c.head_dim, c.stages),
        "dout": wgmma.rows_layout(c.dtype, c.tile_m, c.head_dim_v, c.stages),
        "key": wgmma.rows_layout(c.dtype, c.tile_n, c.head_dim),
        "value": wgmma.rows_layout(c.dtype, c.tile_n, c.head_dim_v),
        "dscore": wgmma.rows_layout(c.dtype, c.tile_n, c.tile_m, c.dscore_stages),
    }


def storage_type(c: MainConfig) -> Any:
    layouts = shared_layouts(c)

    def tile(name: str) -> Any:
        return cute.struct.Align[cute.struct.MemRange[c.dtype, cute.cosize(layouts[name])], 1024]

    @cute.struct
    class Storage:
        query: tile("query")  # type: ignore[valid-type]
        dout: tile("dout")  # type: ignore[valid-type]
        key: tile("key")  # type: ignore[valid-type]
        value: tile("value")  # type: ignore[valid-type]
        dscore: tile("dscore")  # type: ignore[valid-type]
        dq: cute.struct.Align[cute.struct.MemRange[Float32, c.dq_block.elements * c.dq_buffers], 1024]
        lse2: cute.struct.Align[cute.struct.MemRange[Float32, c.tile_m * c.stages], 128]
        delta: cute.struct.Align[cute.struct.MemRange[Float32, c.tile_m * c.stages], 128]
        barriers: cute.struct.MemRange[Int64, 5 + 2 * SLOTS + 4 * c.stages + 2 * c.dscore_stages]
        ticket: cute.struct.MemRange[Int32, SLOTS]

    storage: Any = Storage
    if storage.size_in_bytes() > c.shared_bytes:
        raise ValueError(f"shared memory: {storage.size_in_bytes()} bytes, the launch plan gives {c.shared_bytes}")
    return storage


def allocate(c: MainConfig) -> Shared:
    """Lays the shared memory out."""
    layouts = shared_layouts(c)
    storage = cutlass.utils.SmemAllocator().allocate(storage_type(c))

    def tile(name: str) -> cute.Tensor:
        return getattr(storage, name).get_tensor(layouts[name].outer, swizzle=layouts[name].inner)

    barriers = storage.barriers.data_ptr()
    dscore = barriers + 2 + 4 * c.stages
    persistent = dscore + 2 * c.dscore_stages
    rows = cute.make_layout((c.tile_m, c.stages))
    chunks = cute.make_layout((c.dq_block.chunk_elements, DQ_CHUNKS, c.dq_buffers))
    return Shared(
        **{name: tile(name) for name in layouts},
        lse2=storage.lse2.get_tensor(rows),
        delta=storage.delta.get_tensor(rows),
        dq=storage.dq.get_tensor(chunks),
        # dK leaves through the memory of dS, dV through that of V.
        dkey=storage.dscore.get_tensor(layouts["key"].outer, swizzle=layouts["key"].inner),
        ticket=storage.ticket.get_tensor(cute.make_layout(SLOTS)),
        key_full=barriers,
        value_full=barriers + 1,
        query_full=barriers + 2,
        query_empty=barriers + 2 + c.stages,
        dout_full=barriers + 2 + 2 * c.stages,
        dout_empty=barriers + 2 + 3 * c.stages,
        dscore_full=dscore,
        dscore_empty=dscore + c.dscore_stages,
        key_empty=persistent,
        staged_full=persistent + 1,
        staged_empty=persistent + 2,
        tile_full=persistent + 3,
        tile_empty=persistent + 3 + SLOTS,
    )
