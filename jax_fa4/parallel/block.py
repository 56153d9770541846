"""One call of attention between chunks: where the chunks lie in the sequence, and who computes it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from jax_fa4.config import AttentionConfig, Gradients, Operands
from jax_fa4.parallel import layout as layouts
from jax_fa4.parallel.schedule import Reach
from jax_fa4.parallel.tasks import Chunks, Task
from jax_fa4.varying import vary, varying_axes


class Engine(NamedTuple):
    """An implementation's two directions, as functions of one task's operands.

    ``forward(config, operands) -> (out, lse)``; ``backward(config, operands, out, lse, d_out, d_lse) -> Gradients``,
    where out and lse may be those of a larger set of keys, of which this call has a part.
    """

    forward: Callable[..., tuple[Array, Array]]
    backward: Callable[..., Gradients]


def slice_chunks(x: Array, length: int, chunks: tuple[int, int], axis: int = 1) -> Array:
    """Chunks (first, end) of ``length`` tokens each along ``axis``."""
    first, end = chunks
    return lax.slice_in_dim(x, first * length, end * length, axis=axis)


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

    @property
    def chunks(self) -> Chunks:
        """How the sequence is cut."""
        return Chunks(self.layout, self.devices, self.query_chunk, self.key_chunk)

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
    def remaining(total: Array, start: Array, length: int) -> Array:
        """Of ``total`` valid tokens (B,), how many lie in the chunk of ``length`` tokens that begins at ``start``."""
        return jnp.clip(total - start, 0, length)

    def offsets(self, operands: Operands, difference: Array) -> Array:
        """int32 (B,): query offset of a chunk whose first token is ``difference`` after the keys' first token."""
        own = self.query_offset if operands.query_offset is None else operands.query_offset
        return jnp.broadcast_to(difference + own, operands.query.shape[:1]).astype(jnp.int32)

    def position_difference(self, operands: Operands, offset: int, task: Task) -> Array:
        """int32 (B,): query position minus key position of the first tokens of a task."""
        key = self._position(offset, task.keys[0], self.key_chunk)
        return self.offsets(operands, self.query_position(task.queries[0]) - key)

    def part(
        self, config: AttentionConfig, operands: Operands, offset: int, task: Task, *, sharing: bool = False
    ) -> tuple[AttentionConfig, Operands]:
        """A task's call: token slices, lengths and query offset relative to the first tokens.

        Args:
          config: of the whole call, with query_offset 0.
          operands: of this device, key and value being the piece that is here after moves by ``offset``.
          offset, task: the stop and one of its tasks.
          sharing: whether a transfer is under way, which takes multiprocessors for itself. The offset is then always an
            operand: kernels that take one have a CTA for each tile, which the hardware puts where there is room. The
            others give each multiprocessor its share of the tiles from the start, and a share whose place is taken
            begins when the transfer or another share has ended (6.1 ms became 10.4 on an H200).
        """
        query_offset = None
        if task.mask == "none":
            config = dataclasses.replace(config, window_left=None, window_right=None)
        elif task.mask == "aligned" and not sharing:
            config = dataclasses.replace(config, query_offset=self.query_offset)
        if task.mask == "placed":
            query_offset = self.position_difference(operands, offset, task)
        elif sharing:
            (query_offset,) = self.vary(operands, self.offsets(operands, jnp.zeros((), jnp.int32)))

        def rows(x: Any) -> Any:
            return None if x is None else slice_chunks(x, self.query_chunk, task.queries)

        def columns(x: Any) -> Any:
            return None if x is None else slice_chunks(x, self.key_chunk, task.keys)

        def lengths(total: Array | None, chunk: int, shift: int, chunks: tuple[int, int]) -> Array | None:
            # Chunks lie in the order of the sequence: what is valid of them together is a prefix.
            if total is None:
                return None
            starts = [self._position(shift, i, chunk) for i in range(*chunks)]
            return sum((self.remaining(total, start, chunk) for start in starts), jnp.zeros_like(total))

        return config, operands._replace(
            query=rows(operands.query),
            key=columns(operands.key),
            value=columns(operands.value),
            query_segment_ids=rows(operands.query_segment_ids),
            key_value_segment_ids=columns(operands.key_value_segment_ids),
            query_lengths=lengths(operands.query_lengths, self.query_chunk, 0, task.queries),
            key_value_lengths=lengths(operands.key_value_lengths, self.key_chunk, offset, task.keys),
            query_offset=query_offset,
        )

    def vary(self, operands: Operands, *arrays: Array) -> list[Array]:
        """Types ``arrays`` as varying over every mesh axis over which an operand does (a no-op without check_vma)."""
        return vary(varying_axes(operands), *arrays)
