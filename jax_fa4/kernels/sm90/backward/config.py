"""Compile-time configuration of the backward's main kernel, derived from its spec."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

from jax_fa4.kernels.sm90.backward.scratch import WARPGROUP, DqBlock
from jax_fa4.kernels.spec import KernelSpec

SWIZZLE_ROW = 64
"""16-bit elements in a row of the 128-byte swizzle: head dims are padded to whole rows, TMA boxes are one row wide."""

PRODUCER_REGISTERS, CONSUMER_REGISTERS = 24, 240


class NamedBarrier(enum.IntEnum):
    """Hardware barriers; 0 is the one of ``sync_threads``."""

    EPILOGUE = 1  # both consumer warpgroups
    DQ_FULL = 2  # four: chunk * 2 + buffer, a consumer warpgroup to its dQ writer warp
    DQ_EMPTY = 6  # four: chunk * 2 + buffer, a dQ writer warp to its consumer warpgroup
    TURN = 10  # two: the warpgroup whose turn it is to issue its products


class Warp(enum.IntEnum):
    """Roles in the producer warpgroup; consumers are warps 4 to 11."""

    LOAD = 0
    DQ_WRITER = 1  # two: one per dQ chunk
    STORE = 3


@dataclass(frozen=True)
class MainConfig:
    """``head_dim`` and ``head_dim_v`` are multiples of 64 up to 128; ``tile_n`` keys are two warpgroups' rows."""

    dtype_name: str
    head_dim: int
    head_dim_v: int
    tile_m: int
    tile_n: int
    mask: str
    varlen: bool
    deterministic: bool
    ping_pong: bool
    persistent: bool

    consumers = 2
    stages = 2
    dscore_stages = 2
    dq_buffers = 2
    threads = 3 * WARPGROUP

    @classmethod
    def of(cls, spec: KernelSpec) -> MainConfig:
        return cls(
            dtype_name=spec.dtype,
            head_dim=whole_swizzle_rows(spec.head_dim),
            head_dim_v=whole_swizzle_rows(spec.head_dim_v),
            tile_m=spec.tile.m,
            tile_n=spec.tile.n,
            mask=spec.mask,
            varlen=spec.varlen,
            deterministic=spec.deterministic,
            ping_pong=bool(spec.tile.option("pingpong")),
            persistent=bool(spec.tile.option("persistent")),
        )

    @property
    def row_padding(self) -> int:
        """Query rows of a head are padded to a multiple of this in the scratch buffers."""
        return self.tile_m

    @property
    def early_dvalue(self) -> bool:
        """Whether dV runs while dS is computed; wider score tiles leave no registers for that."""
        return self.tile_m == 64

    @property
    def dtype(self) -> Any:
        """The DSL's element type (plans are built where the DSL is not installed: imported here only)."""
        return element_type(self.dtype_name)

    @property
    def dq_block(self) -> DqBlock:
        return DqBlock(self.tile_m, self.head_dim)

    @property
    def query_bytes(self) -> int:
        """Bytes of one stage of Q."""
        return self.tile_m * self.head_dim * 2

    @property
    def dout_bytes(self) -> int:
        return self.tile_m * self.head_dim_v * 2

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of the kernel: the tiles, then one KiB for mbarriers and alignment."""
        keys = self.tile_n * (self.head_dim + self.head_dim_v) * 2
        streams = self.stages * (self.query_bytes + self.dout_bytes + 2 * self.row_stat_bytes)
        scores = self.dscore_stages * self.tile_n * self.tile_m * 2
        dq = self.dq_buffers * self.dq_block.elements * 4
        return keys + streams + scores + dq + 1024

    @property
    def row_stat_bytes(self) -> int:
        """Bytes of one block of ``lse2`` or ``delta``."""
        return self.tile_m * 4


def whole_swizzle_rows(head_dim: int) -> int:
    """Head dim as the tiles hold it: whole rows of the 128-byte swizzle (TMA fills the difference with zeros)."""
    return -(-head_dim // SWIZZLE_ROW) * SWIZZLE_ROW


def element_type(name: str) -> Any:
    """The DSL's type for a spec's dtype."""
    import cutlass

    return {"bfloat16": cutlass.BFloat16, "float16": cutlass.Float16}[name]
