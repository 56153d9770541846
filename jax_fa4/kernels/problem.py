"""ForwardProblem: the shapes and run-time scalars of one attention call, as the kernels' launch plans take them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

LOG2_E = math.log2(math.e)
UNBOUNDED = 1 << 30
"""Stands for an absent window bound: larger than any position, and sums of it with positions stay below 2**31."""


class ForwardBuffers(NamedTuple):
    """Buffer indices of a launch plan: operands query, key, value (and batch_info), then results out, lse."""

    query: int
    key: int
    value: int
    batch_info: int | None
    out: int
    lse: int


@dataclass(frozen=True)
class ForwardProblem:
    """One call.

    query (batch, seqlen_q, heads, head_dim), key (batch, seqlen_k, kv_heads, head_dim), value (batch, seqlen_k,
    kv_heads, head_dim_v), out (batch, seqlen_q, heads, head_dim_v) of ``dtype``; lse (batch, heads, seqlen_q) float32;
    all row-major. ``scale`` multiplies the scores and is not negative. ``left`` and ``right`` are the bounds of mask
    "window"; ``query_offset`` counts without ``varlen`` only (else ``batch_info`` has it).
    """

    batch: int
    seqlen_q: int
    seqlen_k: int
    heads: int
    kv_heads: int
    head_dim: int
    head_dim_v: int
    dtype: str
    scale: float
    query_offset: int = 0
    left: int = UNBOUNDED
    right: int = UNBOUNDED

    def __post_init__(self) -> None:
        if self.kv_heads <= 0 or self.heads % self.kv_heads:
            raise ValueError(f"heads is {self.heads}; it must be a multiple of kv_heads, which is {self.kv_heads}")
        if not 0 <= self.scale < math.inf:
            raise ValueError(f"scale is {self.scale}; the kernels take finite scales from 0 up")
        for name in ("left", "right", "query_offset"):
            if abs(getattr(self, name)) > UNBOUNDED:
                raise ValueError(f"{name} is {getattr(self, name)}; the kernels take magnitudes up to {UNBOUNDED}")

    @property
    def group(self) -> int:
        """Query heads per key/value head."""
        return self.heads // self.kv_heads

    @property
    def scale_log2(self) -> float:
        """Scale for base-2 exponentials."""
        return self.scale * LOG2_E

    @property
    def out_bytes(self) -> int:
        return self.batch * self.seqlen_q * self.heads * self.head_dim_v * 2

    @property
    def lse_bytes(self) -> int:
        return self.batch * self.seqlen_q * self.heads * 4

    def buffers(self, varlen: bool) -> ForwardBuffers:
        """Buffer indices; ``varlen`` calls have a fourth operand, batch_info int32 (batch, 4)."""
        return ForwardBuffers(0, 1, 2, 3, 4, 5) if varlen else ForwardBuffers(0, 1, 2, None, 3, 4)
