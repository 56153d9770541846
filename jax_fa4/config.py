"""What is static about an attention call, and the arrays that go with it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from jax import Array

MAX_POSITION = 2**29
"""Bound on |query_offset| and on window sizes: sums of two such values stay inside int32."""


@dataclass(frozen=True)
class AttentionConfig:
    """Everything static that selects a kernel or changes the traced program. Hashable.

    Attributes:
      scale: softmax scale, or None when it is an operand (traced or differentiated).
      window_left: keys j >= i + query_offset - window_left are visible; None for no left bound. Tokens.
      window_right: keys j <= i + query_offset + window_right are visible; None for no right bound. Causal is 0.
      query_offset: absolute position of query row 0, or 0 when it is an operand. Tokens.
      logits_soft_cap: cap of ``cap * tanh(x / cap)`` on scaled, biased scores, or None.
      deterministic: whether gradients must be bitwise reproducible.
    """

    scale: float | None
    window_left: int | None = None
    window_right: int | None = None
    query_offset: int = 0
    logits_soft_cap: float | None = None
    deterministic: bool = True

    @property
    def mask_kind(self) -> Literal["none", "causal", "window"]:
        """The affine mask in the kernels' terms: a right bound of exactly 0 alone is "causal"."""
        if self.window_left is None and self.window_right is None:
            return "none"
        if self.window_left is None and self.window_right == 0:
            return "causal"
        return "window"


class Operands(NamedTuple):
    """The arrays of one call in canonical form (a pytree; absent operands are None).

    B batch, T query length, S key length, N query heads, K key heads (N = K * G), H and Hv head dimensions.
    """

    query: Array  # (B, T, N, H)
    key: Array  # (B, S, K, H)
    value: Array  # (B, S, K, Hv)
    bias: Array | None = None  # (B|1, N|1, T|1, S|1), added to scaled scores
    mask: Array | None = None  # bool (B|1, N|1, T|1, S|1), True attends
    sinks: Array | None = None  # float32 (N,)
    scale: Array | None = None  # float32 (), where config.scale is None
    query_offset: Array | None = None  # int32 (B,), replaces config.query_offset
    query_lengths: Array | None = None  # int32 (B,)
    key_value_lengths: Array | None = None  # int32 (B,)
    query_segment_ids: Array | None = None  # int32 (B, T)
    key_value_segment_ids: Array | None = None  # int32 (B, S)


DIFFERENTIABLE = ("query", "key", "value", "bias", "sinks", "scale")
"""Fields of :class:`Operands` that have a gradient."""


class Gradients(NamedTuple):
    """Cotangents of the fields named in :data:`DIFFERENTIABLE`, in the operands' shapes and dtypes.

    None stands for zero: the operand is absent, or nobody asked for its gradient.
    """

    query: Any = None
    key: Any = None
    value: Any = None
    bias: Any = None
    sinks: Any = None
    scale: Any = None


@dataclass(frozen=True)
class Dims:
    """The sizes of one call (see :class:`Operands`)."""

    batch: int
    query_length: int
    key_length: int
    query_heads: int
    key_heads: int
    head_dim: int
    head_dim_v: int

    @property
    def group(self) -> int:
        """Query heads for each key head."""
        return self.query_heads // self.key_heads

    @property
    def empty(self) -> bool:
        """Whether there is no score at all to compute."""
        return 0 in (self.batch, self.query_length, self.key_length)

    @property
    def scores(self) -> int:
        """Number of scores, B * N * T * S."""
        return self.batch * self.query_heads * self.query_length * self.key_length


def dims_of(operands: Operands) -> Dims:
    """Reads the sizes off the operands' shapes."""
    batch, query_length, query_heads, head_dim = operands.query.shape
    _, key_length, key_heads, head_dim_v = operands.value.shape
    return Dims(batch, query_length, key_length, query_heads, key_heads, head_dim, head_dim_v)
