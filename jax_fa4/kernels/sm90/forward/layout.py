"""Static layout of the Hopper forward: thread roles, shared-memory map, barrier numbers. Pure Python, no DSL."""

from __future__ import annotations

from dataclasses import dataclass

from jax_fa4.kernels.spec import KernelSpec

ROWS = 64
"""Query rows of one consumer warpgroup: the M of one wgmma."""

WARPGROUP = 128
ELEMENT = 2  # bytes of bfloat16 and float16
BARRIER = 8  # bytes of an mbarrier
SHARED_LIMIT = 227 * 1024

TURN_BARRIER = 1
"""Named barriers ``TURN_BARRIER + w``: it is warpgroup w's turn to issue products."""
STORE_BARRIER = 5
"""Named barriers ``STORE_BARRIER + w``: warpgroup w has written O to shared memory."""

_REGISTERS = {1: (24, 240), 2: (24, 240), 3: (32, 160)}
"""Registers of a producer and of a consumer thread (setmaxnreg) by number of consumer warpgroups."""


@dataclass(frozen=True)
class ForwardLayout:
    """Derived from the spec alone; shared by the kernel and the launch plan."""

    spec: KernelSpec

    @property
    def warpgroups(self) -> int:
        """Consumer warpgroups."""
        return self.spec.tile.m // ROWS

    @property
    def threads(self) -> int:
        return WARPGROUP * (1 + self.warpgroups)

    @property
    def producer_registers(self) -> int:
        return _REGISTERS[self.warpgroups][0]

    @property
    def consumer_registers(self) -> int:
        return _REGISTERS[self.warpgroups][1]

    @property
    def ping_pong(self) -> bool:
        return self.warpgroups > 1 and bool(self.spec.tile.option("pingpong", 1))

    @property
    def chunk(self) -> int:
        """Columns of one swizzled TMA box of Q and K."""
        return swizzle_chunk(self.spec.head_dim)

    @property
    def chunk_v(self) -> int:
        """Columns of one swizzled TMA box of V and O."""
        return swizzle_chunk(self.spec.head_dim_v)

    @property
    def paired(self) -> bool:
        """Whether CTAs take pairs of tiles (:mod:`jax_fa4.kernels.common.tile_order`)."""
        return self.spec.mask == "causal" and not self.spec.varlen

    @property
    def optimistic(self) -> bool:
        """Whether blocks without a mask skip the maximum (:func:`softmax.optimistic_block`)."""
        return bool(self.spec.tile.option("optimistic", 1))

    @property
    def output_slot(self) -> bool:
        """Whether O has shared memory of its own, so that the next tile's Q arrives while this one's O leaves."""
        rings = self.spec.tile.stages * (self.k_bytes + self.v_bytes)
        slots = self.warpgroups * ROWS * (self.spec.head_dim + self.spec.head_dim_v) * ELEMENT
        return slots + rings + self.barrier_bytes <= SHARED_LIMIT

    @property
    def q_bytes(self) -> int:
        """Bytes of one warpgroup's Q slot, which takes O too where that has none of its own."""
        columns = self.spec.head_dim if self.output_slot else max(self.spec.head_dim, self.spec.head_dim_v)
        return ROWS * columns * ELEMENT

    @property
    def o_bytes(self) -> int:
        """Bytes of one warpgroup's own O slot."""
        return ROWS * self.spec.head_dim_v * ELEMENT if self.output_slot else 0

    @property
    def k_bytes(self) -> int:
        """Bytes of one K block."""
        return self.spec.tile.n * self.spec.head_dim * ELEMENT

    @property
    def v_bytes(self) -> int:
        """Bytes of one V block."""
        return self.spec.tile.n * self.spec.head_dim_v * ELEMENT

    @property
    def q_offset(self) -> int:
        return 0

    @property
    def o_offset(self) -> int:
        return self.q_offset + self.warpgroups * self.q_bytes

    @property
    def k_offset(self) -> int:
        return self.o_offset + self.warpgroups * self.o_bytes

    @property
    def v_offset(self) -> int:
        return self.k_offset + self.spec.tile.stages * self.k_bytes

    @property
    def q_barriers(self) -> int:
        """Offset of the Q barriers: full and empty of each warpgroup in turn."""
        return self.v_offset + self.spec.tile.stages * self.v_bytes

    @property
    def k_barriers(self) -> int:
        return self.q_barriers + 2 * self.warpgroups * BARRIER

    @property
    def v_barriers(self) -> int:
        return self.k_barriers + 2 * self.spec.tile.stages * BARRIER

    @property
    def barrier_bytes(self) -> int:
        return 2 * (self.warpgroups + 2 * self.spec.tile.stages) * BARRIER

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a launch."""
        return self.q_barriers + self.barrier_bytes

    def check(self) -> None:
        """Raises ValueError where the tile cannot be built."""
        tile = self.spec.tile
        if tile.m % ROWS or self.warpgroups not in _REGISTERS:
            raise ValueError(f"tile.m is {tile.m}; the Hopper forward takes {[ROWS * w for w in _REGISTERS]}")
        if tile.n % 16 or not 16 <= tile.n <= 256:
            raise ValueError(f"tile.n is {tile.n}; the Hopper forward takes multiples of 16 up to 256")
        if self.shared_bytes > SHARED_LIMIT:
            raise ValueError(f"tile {tile.name} needs {self.shared_bytes} bytes of shared memory, limit {SHARED_LIMIT}")


def swizzle_chunk(head_dim: int) -> int:
    """Columns of one swizzled box: 64 (128-byte swizzle) where they divide the head dim, else 32 (64-byte)."""
    return 64 if head_dim % 64 == 0 else 32
