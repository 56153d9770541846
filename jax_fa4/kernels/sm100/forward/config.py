"""Configuration of one forward kernel, derived from its KernelSpec; sizes in elements, bytes and threads as named.

Two shapes of the algorithm:

- *paired* (``q_stages == 2``, head_dim_v <= 128): two tiles of 128 query rows, each with a softmax warpgroup of its
  own, take turns on the tensor core. Each tile's scores have one buffer.
- *wide* (``q_stages == 1``): one tile, one softmax warpgroup; the accumulator takes up to 256 columns, and the scores
  of two consecutive key blocks have a buffer each, so that the tensor core runs ahead of the softmax.

Either can run on a pair of CTAs (``ctas == 2``): each has query tiles of its own and half of K (by keys) and V (by
columns); the first CTA's MMA warp issues products of 256 rows for both.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from jax_fa4.kernels.spec import KernelSpec

ROWS = 128
"""Query rows per tile: the M of one MMA and the lanes of tensor memory."""

KEYS = 128
"""Keys per block: the N of the score product."""

BOX_COLUMNS = 64
"""Elements of one 128-byte row of a swizzled shared-memory box."""

K_STEP = 16
"""Contraction length of one 16-bit MMA instruction."""

SHARED_LIMIT = 227 * 1024
RESERVED = 3 * 1024
"""Of it, for row statistics and barriers."""

RESCALE_THRESHOLD = 8.0
"""The running maximum moves only when it has grown by more than this (log2 units): factors stay below 2^8."""

EARLY_STEPS = 6
"""K steps (of KEYS / K_STEP = 8) of a P tile whose probabilities are signalled early: three quarters."""


def boxes(head_dim: int) -> int:
    """Swizzled boxes that hold a padded head dim."""
    return -(-head_dim // BOX_COLUMNS)


@dataclass(frozen=True)
class ForwardConfig:
    """Everything static that the roles ask for."""

    dtype: str
    head_dim: int
    head_dim_v: int
    mask: str
    varlen: bool
    pack_gqa: bool
    q_stages: int
    kv_stages: int
    k_chunks: int
    v_chunks: int
    exp2_fma_pairs: int
    ctas: int
    launch_control: bool

    @classmethod
    def from_spec(cls, spec: KernelSpec) -> ForwardConfig:
        tile = spec.tile
        return cls(
            dtype=spec.dtype,
            head_dim=spec.head_dim,
            head_dim_v=spec.head_dim_v,
            mask=spec.mask,
            varlen=spec.varlen,
            pack_gqa=spec.pack_gqa,
            q_stages=tile.m // ROWS,
            kv_stages=tile.stages,
            k_chunks=tile.option("kchunks", 1),
            v_chunks=tile.option("vchunks", 1),
            exp2_fma_pairs=tile.option("exp2fma", 0),
            ctas=tile.option("ctas", 1),
            launch_control=bool(tile.option("clc", 0)),
        )

    def __post_init__(self) -> None:
        if self.launch_control and self.ctas != 1:
            raise ValueError("option clc is 1 with ctas 2; cluster launch control is for single CTAs")

    # --- shapes ---

    @property
    def paired(self) -> bool:
        return self.q_stages == 2

    @cached_property
    def qk_boxes(self) -> int:
        return boxes(self.head_dim)

    @cached_property
    def v_boxes(self) -> int:
        return boxes(self.head_dim_v)

    @cached_property
    def accumulator_columns(self) -> int:
        """N of the P V product: whole boxes, since half a box is no layout that the MN-major swizzle offers."""
        return self.v_boxes * BOX_COLUMNS

    @cached_property
    def qk_steps(self) -> int:
        """K steps of one score product; columns of the last box beyond the padded head dim are not touched."""
        return self.head_dim // K_STEP

    @property
    def qk_steps_per_chunk(self) -> int:
        return -(-self.qk_boxes // self.k_chunks) * (BOX_COLUMNS // K_STEP)

    @property
    def v_keys_per_chunk(self) -> int:
        return KEYS // self.v_chunks

    @property
    def pv_steps_per_chunk(self) -> int:
        return self.v_keys_per_chunk // K_STEP

    @property
    def k_keys(self) -> int:
        """Keys of a block whose K this CTA loads: half of them in a pair."""
        return KEYS // self.ctas

    @property
    def v_own_boxes(self) -> int:
        """Boxes of V's columns that this CTA loads: half of them in a pair."""
        return self.v_boxes // self.ctas

    # --- bytes ---

    @property
    def box_row_bytes(self) -> int:
        return BOX_COLUMNS * 2

    @property
    def q_bytes(self) -> int:
        """One Q tile."""
        return self.qk_boxes * ROWS * self.box_row_bytes

    @property
    def o_bytes(self) -> int:
        """One O tile."""
        return self.v_boxes * ROWS * self.box_row_bytes

    @property
    def k_chunk_bytes(self) -> int:
        return self.qk_boxes // self.k_chunks * self.k_keys * self.box_row_bytes

    @property
    def v_chunk_bytes(self) -> int:
        return self.v_own_boxes * self.v_keys_per_chunk * self.box_row_bytes

    @property
    def kv_slot_bytes(self) -> int:
        """One slot of the ring that K and V chunks share."""
        return max(self.k_chunk_bytes, self.v_chunk_bytes)

    @property
    def o_over_q(self) -> bool:
        """O leaves through the shared memory of its own Q tile, where there is no room for both."""
        return (
            self.q_stages * (self.q_bytes + self.o_bytes) + self.kv_stages * self.kv_slot_bytes
            > SHARED_LIMIT - RESERVED
        )

    # --- warps ---

    @property
    def threads(self) -> int:
        return 128 * (self.q_stages + 2)

    @property
    def correction_warp(self) -> int:
        """First warp of the correction warpgroup; the softmax warpgroups come before it."""
        return 4 * self.q_stages

    @property
    def mma_warp(self) -> int:
        return self.correction_warp + 4

    @property
    def load_warp(self) -> int:
        return self.mma_warp + 1

    @property
    def store_warp(self) -> int:
        return self.mma_warp + 2

    @property
    def scheduler_warp(self) -> int:
        """Asks for further work with cluster launch control, and is idle without."""
        return self.mma_warp + 3

    @property
    def warps(self) -> int:
        return self.threads // 32

    @property
    def registers(self) -> tuple[int, int, int]:
        """Registers per thread of softmax, correction, and the single-warp roles; they share 64 Ki of the SM."""
        if not self.paired:
            return (232, 112, 80)
        # More chunks are more addresses for the MMA warp to keep.
        return (176, 80, 80) if self.k_chunks > 1 else (176, 88, 72)
