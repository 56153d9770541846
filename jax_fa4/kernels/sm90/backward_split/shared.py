"""Shared memory of the two kernels of the split backward.

Annotations are evaluated here (no ``from __future__ import annotations``): ``cute.struct`` reads them.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int64

from jax_fa4.kernels.common.invariant import Invariant
from jax_fa4.kernels.sm90.backward import wgmma
from jax_fa4.kernels.sm90.backward_split.config import KeyValueConfig, QueryConfig


@dataclass(frozen=True)
class Ring(Invariant):
    """Full and empty mbarriers of a ring of stages. Use ``i`` (0, 1, ...) has stage ``i % stages``."""

    full: cute.Pointer
    empty: cute.Pointer
    stages: int

    def init(self, producers: int, consumers: int) -> None:
        """By one thread: arrivals that complete a phase of each kind."""
        for stage in range(self.stages):
            cute.arch.mbarrier_init(self.full + stage, producers)
            cute.arch.mbarrier_init(self.empty + stage, consumers)

    def wait_full(self, use: Any) -> None:
        cute.arch.mbarrier_wait(self.full + use % self.stages, (use // self.stages) & 1)

    def wait_empty(self, use: Any) -> None:
        cute.arch.mbarrier_wait(self.empty + use % self.stages, ((use // self.stages) & 1) ^ 1)


def _rings(barriers: cute.Pointer, stages: tuple[int, ...]) -> list[Ring]:
    rings = []
    for count in stages:
        rings.append(Ring(barriers, barriers + count, count))
        barriers = barriers + 2 * count
    return rings


@dataclass(frozen=True)
class KeyValueShared(Invariant):
    """Tensors and rings of the dK, dV kernel."""

    query: cute.Tensor
    dout: cute.Tensor
    key: cute.Tensor
    value: cute.Tensor
    lse2: cute.Tensor
    delta: cute.Tensor
    exchange: cute.Tensor
    key_ring: Ring
    value_ring: Ring
    query_ring: Ring
    dout_ring: Ring
    exchange_ring: Ring


def key_value_layouts(c: KeyValueConfig) -> dict[str, Any]:
    return {
        "query": wgmma.rows_layout(c.dtype, c.tile_m, c.head_dim, c.stages),
        "dout": wgmma.rows_layout(c.dtype, c.tile_m, c.head_dim_v, c.stages),
        "key": wgmma.rows_layout(c.dtype, c.tile_n, c.head_dim),
        "value": wgmma.rows_layout(c.dtype, c.tile_n, c.head_dim_v),
    }


def allocate_key_value(c: KeyValueConfig) -> KeyValueShared:
    layouts = key_value_layouts(c)

    def tile(name: str) -> Any:
        return cute.struct.Align[cute.struct.MemRange[c.dtype, cute.cosize(layouts[name])], 1024]

    @cute.struct
    class Storage:
        query: tile("query")  # type: ignore[valid-type]
        dout: tile("dout")  # type: ignore[valid-type]
        key: tile("key")  # type: ignore[valid-type]
        value: tile("value")  # type: ignore[valid-type]
        exchange: cute.struct.Align[cute.struct.MemRange[Float32, c.exchange_elements * c.exchange_stages], 128]
        lse2: cute.struct.Align[cute.struct.MemRange[Float32, c.tile_m * c.stages], 128]
        delta: cute.struct.Align[cute.struct.MemRange[Float32, c.tile_m * c.stages], 128]
        barriers: cute.struct.MemRange[Int64, 2 * (2 + 2 * c.stages + c.exchange_stages)]

    storage = _allocate(Storage, c.shared_bytes)
    rows = cute.make_layout((c.tile_m, c.stages))
    rings = _rings(storage.barriers.data_ptr(), (1, 1, c.stages, c.stages, c.exchange_stages))
    names = ("key_ring", "value_ring", "query_ring", "dout_ring", "exchange_ring")
    return KeyValueShared(
        **_tiles(storage, layouts),
        lse2=storage.lse2.get_tensor(rows),
        delta=storage.delta.get_tensor(rows),
        exchange=storage.exchange.get_tensor(cute.make_layout((c.exchange_elements, c.exchange_stages))),
        **dict(zip(names, rings, strict=True)),
    )


@dataclass(frozen=True)
class QueryShared(Invariant):
    """Tensors and rings of the dQ kernel."""

    query: cute.Tensor
    dout: cute.Tensor
    key: cute.Tensor
    value: cute.Tensor
    query_ring: Ring
    dout_ring: Ring
    key_ring: Ring
    value_ring: Ring


def query_layouts(c: QueryConfig) -> dict[str, Any]:
    return {
        "query": wgmma.rows_layout(c.dtype, c.tile_m, c.head_dim),
        "dout": wgmma.rows_layout(c.dtype, c.tile_m, c.head_dim_v),
        "key": wgmma.rows_layout(c.dtype, c.tile_n, c.head_dim, c.key_stages),
        "value": wgmma.rows_layout(c.dtype, c.tile_n, c.head_dim_v, c.value_stages),
    }


def allocate_query(c: QueryConfig) -> QueryShared:
    layouts = query_layouts(c)

    def tile(name: str) -> Any:
        return cute.struct.Align[cute.struct.MemRange[c.dtype, cute.cosize(layouts[name])], 1024]

    @cute.struct
    class Storage:
        query: tile("query")  # type: ignore[valid-type]
        dout: tile("dout")  # type: ignore[valid-type]
        key: tile("key")  # type: ignore[valid-type]
        value: tile("value")  # type: ignore[valid-type]
        barriers: cute.struct.MemRange[Int64, 2 * (2 + c.key_stages + c.value_stages)]

    storage = _allocate(Storage, c.shared_bytes)
    rings = _rings(storage.barriers.data_ptr(), (1, 1, c.key_stages, c.value_stages))
    names = ("query_ring", "dout_ring", "key_ring", "value_ring")
    return QueryShared(**_tiles(storage, layouts), **dict(zip(names, rings, strict=True)))


def _allocate(storage: Any, planned_bytes: int) -> Any:
    if storage.size_in_bytes() > planned_bytes:
        raise ValueError(f"shared memory: {storage.size_in_bytes()} bytes, the launch plan gives {planned_bytes}")
    return cutlass.utils.SmemAllocator().allocate(storage)


def _tiles(storage: Any, layouts: dict[str, Any]) -> dict[str, cute.Tensor]:
    return {
        name: getattr(storage, name).get_tensor(layout.outer, swizzle=layout.inner) for name, layout in layouts.items()
    }
