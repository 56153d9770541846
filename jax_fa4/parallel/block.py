"""One chunk of queries against one chunk of keys: where the chunks lie in the sequence, and who computes them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from jax_fa4.config import AttentionConfig, Gradients, Operands
from jax_fa4.parallel import layout as layouts
from jax_fa4.parallel.schedule import Reach
from jax_fa4.varying import vary, varying_axes


class Engine(NamedTuple):
    """An implementation's two directions, as functions of one chunk pair.

    ``forward(config, operands) -> (out, lse)``; ``backward(config, operands, out, lse, d_out, d_lse) -> Gradients``,
    where out and lse may be those of a larger set of keys, of which this call has a part.
    """

    forward: Callable[..., tuple[Array, Array]]
    backward: Callable[..., Gradients]


def slice_tokens(x: Array, length: int, index: int, axis: int = 1) -> Array:
    """Chunk ``index`` of ``length`` tokens along ``axis``."""
    return lax.slice_in_dim(x, index * length, (index + 1) * length, axis=axis)


@dataclass(frozen=True)
class Placement:
    """Where the pieces lie.

    Attributes:
      axis_name: mesh axis over which the sequence is split.
      devices: its size.
      layout: "contiguous" or "zigzag".
      query_chunk, key_chunk: tokens in one chunk of queries and of keys.
      query_offset: static offset of query positions; not used where the operands carry one.
    """

    axis_name: str
    devices: int
    layout: str
    query_chunk: int
    key_chunk: int
    query_offset: int = 0

    def reach(self, config: AttentionConfig) -> Reach:
        """The affine mask's bounds on key position minus query position, the static offset counted in."""
        left, right, offset = config.window_left, config.window_right, self.query_offset
        return Reach(None if left is None else left - offset, None if right is None else right + offset)

    def _position(self, rank_shift: int, chunk: int, length: int) -> Array:
        """Position of the first token of a chunk held by the device ``rank_shift`` before this one."""
        rank = (lax.axis_index(self.axis_name) - rank_shift) % self.devices
        table = jnp.asarray(layouts.chunk_indices(self.layout, self.devices)[:, chunk], jnp.int32)
        return table[rank] * length

    def query_position(self, chunk: int) -> Array:
        """Position of the first token of one of this device's query chunks."""
        return self._position(0, chunk, self.query_chunk)

    @staticmethod
    def remaining(total: Array | None, start: Array, length: int) -> Array | None:
        """Of ``total`` valid tokens (B,), how many lie in the chunk of ``length`` tokens that begins at ``start``."""
        return None if total is None else jnp.clip(total - start, 0, length)

    def offsets(self, operands: Operands, difference: Array) -> Array:
        """int32 (B,): query offset of a chunk whose first token is ``difference`` after the keys' first token."""
        own = self.query_offset if operands.query_offset is None else operands.query_offset
        return jnp.broadcast_to(difference + own, operands.query.shape[:1]).astype(jnp.int32)

    def position_difference(self, operands: Operands, offset: int, a: int, b: int) -> Array:
        """int32 (B,): query position minus key position of the first tokens of a chunk pair."""
        return self.offsets(operands, self.query_position(a) - self._position(offset, b, self.key_chunk))

    def pair(self, operands: Operands, offset: int, a: int, b: int) -> Operands:
        """Operands of one chunk pair: token slices, lengths and query offset relative to the chunks' first tokens."""
        q_start, k_start = self.query_position(a), self._position(offset, b, self.key_chunk)

        def ids(x: Array | None, length: int, index: int) -> Array | None:
            return None if x is None else slice_tokens(x, length, index)

        return operands._replace(
            query=slice_tokens(operands.query, self.query_chunk, a),
            key=slice_tokens(operands.key, self.key_chunk, b),
            value=slice_tokens(operands.value, self.key_chunk, b),
            query_segment_ids=ids(operands.query_segment_ids, self.query_chunk, a),
            key_value_segment_ids=ids(operands.key_value_segment_ids, self.key_chunk, b),
            query_lengths=self.remaining(operands.query_lengths, q_start, self.query_chunk),
            key_value_lengths=self.remaining(operands.key_value_lengths, k_start, self.key_chunk),
            query_offset=self.offsets(operands, q_start - k_start),
        )

    def vary(self, operands: Operands, *arrays: Array) -> list[Array]:
        """Types ``arrays`` as varying over every mesh axis over which an operand does (a no-op without check_vma)."""
        return vary(varying_axes(operands), *arrays)
