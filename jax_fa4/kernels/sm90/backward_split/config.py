"""Compile-time configuration of the split backward: one kernel for dK and dV, one for dQ.

For head dims above 128, where one kernel's dK, dV and dQ traffic through shared memory is what limits. Scores are
computed twice, nothing is accumulated in global memory, and no CTA depends on another: deterministic by construction.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

from jax_fa4.kernels.sm90.backward.config import element_type, whole_swizzle_rows
from jax_fa4.kernels.sm90.backward.scratch import WARPGROUP
from jax_fa4.kernels.spec import KernelSpec

SHARED_LIMIT = 227 * 1024
"""Dynamic shared memory of a block on sm_90, in bytes."""

ROW_PADDING = 384
"""Query rows of a head are padded to a multiple of this in the row statistics (see ``backward/scratch.py``): whole
blocks of either kernel."""


class NamedBarrier(enum.IntEnum):
    """Hardware barriers; 0 is the one of ``sync_threads``."""

    EPILOGUE = 1  # two, one that each consumer warpgroup waits at and the other arrives at
    WARPGROUP = 3  # two: the threads of one consumer warpgroup


@dataclass(frozen=True)
class SplitConfig:
    """``head_dim`` and ``head_dim_v`` are multiples of 64 up to 256."""

    dtype_name: str
    head_dim: int
    head_dim_v: int
    tile_m: int
    tile_n: int
    stages: int
    mask: str
    varlen: bool

    consumers = 2
    threads = 3 * WARPGROUP
    row_padding = ROW_PADDING
    reserved_bytes = 1024
    """Shared memory for mbarriers and alignment."""

    @classmethod
    def of(cls, spec: KernelSpec) -> Any:
        return cls(
            dtype_name=spec.dtype,
            head_dim=whole_swizzle_rows(spec.head_dim),
            head_dim_v=whole_swizzle_rows(spec.head_dim_v),
            tile_m=spec.tile.m,
            tile_n=spec.tile.n,
            stages=spec.tile.stages,
            mask=spec.mask,
            varlen=spec.varlen,
        )

    @property
    def dtype(self) -> Any:
        """The DSL's element type."""
        return element_type(self.dtype_name)

    @property
    def query_bytes(self) -> int:
        return self.tile_m * self.head_dim * 2

    @property
    def dout_bytes(self) -> int:
        return self.tile_m * self.head_dim_v * 2

    @property
    def key_bytes(self) -> int:
        return self.tile_n * self.head_dim * 2

    @property
    def value_bytes(self) -> int:
        return self.tile_n * self.head_dim_v * 2


@dataclass(frozen=True)
class KeyValueConfig(SplitConfig):
    """dK and dV of 64 keys: one consumer warpgroup computes P and dV, the other dP, dS and dK."""

    @property
    def row_stat_bytes(self) -> int:
        """Bytes of one block of ``lse2`` or ``delta``."""
        return self.tile_m * 4

    @property
    def exchange_elements(self) -> int:
        """float32 elements of one P tile that the value warpgroup hands to the key warpgroup."""
        return self.tile_m * self.tile_n

    @property
    def exchange_stages(self) -> int:
        return 2 if self._bytes_with(2) <= SHARED_LIMIT else 1

    @property
    def shared_bytes(self) -> int:
        return self._bytes_with(self.exchange_stages)

    def _bytes_with(self, exchange_stages: int) -> int:
        streams = self.stages * (self.query_bytes + self.dout_bytes + 2 * self.row_stat_bytes)
        exchange = exchange_stages * self.exchange_elements * 4
        return self.key_bytes + self.value_bytes + streams + exchange + self.reserved_bytes


@dataclass(frozen=True)
class QueryConfig(SplitConfig):
    """dQ of 128 query rows, 64 for each consumer warpgroup."""

    key_stages = 2

    @property
    def value_stages(self) -> int:
        fixed = self.query_bytes + self.dout_bytes + self.key_stages * self.key_bytes + self.reserved_bytes
        return 2 if fixed + 2 * self.value_bytes <= SHARED_LIMIT else 1

    @property
    def shared_bytes(self) -> int:
        rings = self.key_stages * self.key_bytes + self.value_stages * self.value_bytes
        return self.query_bytes + self.dout_bytes + rings + self.reserved_bytes
