"""Configuration of the two kernels of the split backward; sizes in elements, bytes and threads as named.

Above head dim 128 tensor memory has no room for dK, dV, dQ and two score tiles at once. So there are two kernels, which
are the same but for what is resident and what streams by. Both keep 128 rows of two operands in shared memory, compute
two score tiles against 64 rows of two others at a time, and accumulate in tensor memory:

========== ========= ============ ========================================================
side       resident  streamed     per step (lanes are resident rows)
========== ========= ============ ========================================================
key_value  K, V      Q, dO        S = K Q^T, dP = V dO^T, dV += P dO, dK += dS Q
query      Q, dO     K, V         S = Q K^T, dP = dO V^T, dQ += dS K
========== ========= ============ ========================================================

Scores are computed once on each side. Nothing is added in global memory and no CTA waits for another: deterministic by
construction. Where dK and dV together are wider than the 384 columns that the scores leave, CTAs take one half of their
columns each (``parts``).
"""

from __future__ import annotations

from dataclasses import dataclass

from jax_fa4.kernels.sm100.backward.config import BOX_COLUMNS, BOX_ROW_BYTES, K_STEP, SHARED_LIMIT, boxes
from jax_fa4.kernels.spec import KernelSpec

RESIDENT = 128
"""Rows of the resident operands: the lanes of every accumulator."""

STREAMED = 64
"""Rows of the streamed operands per step: the N of the score products."""

RESIDENT_BOX = RESIDENT * BOX_ROW_BYTES
STREAMED_BOX = STREAMED * BOX_ROW_BYTES

STAT_BYTES = STREAMED * 4
"""Bytes of one block of lse2 or delta."""

STAT_STAGES = 2
COMPUTE_GROUPS = 2
HALF = STREAMED // COMPUTE_GROUPS
"""Score columns of a compute warpgroup."""

COMPUTE_WARPS = 8
MMA_WARP = 8
LOAD_WARP = 9
THREADS = 384

ACCUMULATOR_COLUMNS = 512 - 2 * STREAMED
RESERVED = 2048
"""Shared memory for row statistics and barriers."""

SIDES = {"backward_key_value": "key_value", "backward_query": "query"}


@dataclass(frozen=True)
class SplitConfig:
    """Everything static that the roles ask for."""

    side: str
    dtype: str
    head_dim: int
    head_dim_v: int
    mask: str
    varlen: bool

    @classmethod
    def from_spec(cls, spec: KernelSpec) -> SplitConfig:
        return cls(SIDES[spec.kind], spec.dtype, spec.head_dim, spec.head_dim_v, spec.mask, spec.varlen)

    @property
    def key_side(self) -> bool:
        return self.side == "key_value"

    @property
    def qk_boxes(self) -> int:
        return boxes(self.head_dim)

    @property
    def v_boxes(self) -> int:
        return boxes(self.head_dim_v)

    @property
    def qk_steps(self) -> int:
        """K steps of S; columns beyond the padded head dim are not touched."""
        return self.head_dim // K_STEP

    @property
    def v_steps(self) -> int:
        """K steps of dP."""
        return self.head_dim_v // K_STEP

    @property
    def parts(self) -> int:
        """CTAs that share the columns of one key block's dK and dV."""
        wide = (self.qk_boxes + self.v_boxes) * BOX_COLUMNS > ACCUMULATOR_COLUMNS
        return 2 if self.key_side and wide else 1

    @property
    def qk_part(self) -> int:
        """Boxes of dK (or dQ) that one CTA accumulates; the parts of an odd number overlap by one box."""
        return -(-self.qk_boxes // self.parts)

    @property
    def v_part(self) -> int:
        """Boxes of dV that one CTA accumulates."""
        return -(-self.v_boxes // self.parts) if self.key_side else 0

    @property
    def stages(self) -> int:
        """Stages of each streamed operand: two where shared memory has room."""
        both = self.qk_boxes + self.v_boxes
        return 2 if both * (RESIDENT_BOX + 2 * STREAMED_BOX) + RESERVED <= SHARED_LIMIT else 1
