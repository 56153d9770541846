"""Who may attend to whom.

Query row i of batch b has absolute position ``i + query_offset[b]``, key j has position j. A call's mask is an
intersection of parts:

- :class:`AffineMask`: sequence lengths, causal, window, query offset; computed from indices;
- :class:`IntervalMask`: each query row sees the keys of one half-open interval;
- :class:`SegmentMask`: a query sees the keys with its own segment id (sorted ids are intervals:
  :func:`segment_intervals`);
- :class:`DenseMask`: a boolean array.

Each part answers two questions: which pairs of a tile are visible, and which key blocks a block of query rows can see
at all. The closed forms of the affine part (:func:`affine_key_blocks` and its relatives) are integer formulas that use
nothing but ``+ - //`` and the minimum and maximum given to them, on non-negative dividends, so that one source serves
kernels, NumPy (static ranges) and JAX (traced ranges).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jax_fa4.config import AttentionConfig, Operands, dims_of

Int = Any
"""An integer of whatever kind the caller computes with: Python, NumPy, JAX or a kernel's register value."""


def affine_key_blocks(
    row: Int,
    rows: Int,
    tile_n: int,
    *,
    left: Int | None,
    right: Int | None,
    offset: Int,
    q_len: Int,
    kv_len: Int,
    minimum: Callable[[Any, Any], Any] = min,
    maximum: Callable[[Any, Any], Any] = max,
) -> tuple[Int, Int]:
    """Half-open range of key blocks of ``tile_n`` keys that hold a key visible to rows [row, row + rows).

    Args:
      row: first query row of the tile. ``rows``: its number of rows.
      left, right: window bounds in tokens, None where absent. ``offset``: position of query row 0.
      q_len, kv_len: numbers of valid rows and keys.
      minimum, maximum: binary functions for the caller's integers.

    Returns:
      (start, stop) with stop >= start; empty when no key is visible.
    """
    last = minimum(row + rows, q_len) - 1
    first_key: Int = 0
    if left is not None:
        first_key = maximum(row + offset - left, 0)
    stop_key = maximum(kv_len, 0)
    if right is not None:
        stop_key = minimum(stop_key, maximum(last + offset + right + 1, 0))
    start = first_key // tile_n
    blocks = (stop_key + (tile_n - 1)) // tile_n - start
    # 1 if there is a key between the bounds and a row before q_len, else 0: rounding to blocks hides that.
    some = maximum(minimum(minimum(stop_key - first_key, last - row + 1), 1), 0)
    return start, start + blocks * some


def affine_full_key_blocks(
    row: Int,
    rows: Int,
    tile_n: int,
    *,
    left: Int | None,
    right: Int | None,
    offset: Int,
    q_len: Int,
    kv_len: Int,
    minimum: Callable[[Any, Any], Any] = min,
    maximum: Callable[[Any, Any], Any] = max,
) -> tuple[Int, Int]:
    """The part of :func:`affine_key_blocks` whose pairs are all visible, so that tiles in it need no masking.

    Rows at or past ``q_len`` are not regarded: a kernel drops them when it stores.
    """
    start, stop = affine_key_blocks(
        row, rows, tile_n, left=left, right=right, offset=offset, q_len=q_len, kv_len=kv_len,
        minimum=minimum, maximum=maximum,
    )  # fmt: skip
    last = minimum(row + rows, q_len) - 1
    full_start, full_stop = start, maximum(kv_len, 0) // tile_n
    if left is not None:
        full_start = maximum(full_start, (maximum(last + offset - left, 0) + (tile_n - 1)) // tile_n)
    if right is not None:
        full_stop = minimum(full_stop, maximum(row + offset + right + 1, 0) // tile_n)
    full_start = minimum(full_start, stop)
    return full_start, maximum(minimum(full_stop, stop), full_start)


def affine_query_blocks(
    key: Int,
    keys: Int,
    tile_m: int,
    *,
    left: Int | None,
    right: Int | None,
    offset: Int,
    q_len: Int,
    kv_len: Int,
    minimum: Callable[[Any, Any], Any] = min,
    maximum: Callable[[Any, Any], Any] = max,
) -> tuple[Int, Int]:
    """Half-open range of blocks of ``tile_m`` query rows that see a key in [key, key + keys).

    The transpose of :func:`affine_key_blocks`: row i sees key j iff j sees i with left and right exchanged and the
    offset negated.
    """
    return affine_key_blocks(
        key, keys, tile_m, left=right, right=left, offset=-offset, q_len=kv_len, kv_len=q_len,
        minimum=minimum, maximum=maximum,
    )  # fmt: skip


MAX_INT = 2**31 - 1


def interval_key_blocks(start: Int, stop: Int, tile_n: int, rows_axis: int = -1) -> tuple[Int, Int]:
    """Range of key blocks for a tile whose rows see [start[i], stop[i]): minimum of starts, maximum of stops.

    Rows with an empty interval do not count. ``start`` and ``stop`` are arrays with the tile's rows along
    ``rows_axis``; the result drops that axis. An empty range is returned as (0, 0).
    """
    xp = np if isinstance(start, np.ndarray) and isinstance(stop, np.ndarray) else jnp
    seen = start < stop
    big = np.int32(MAX_INT)
    low = xp.min(xp.where(seen, start, big), axis=rows_axis, initial=big)
    high = xp.max(xp.where(seen, stop, np.int32(0)), axis=rows_axis, initial=0)
    low = xp.minimum(low, high)
    return low // tile_n, (high + (tile_n - 1)) // tile_n


def segment_intervals(query_segment_ids: Array, key_value_segment_ids: Array) -> tuple[Array, Array]:
    """Intervals of keys seen by each query row when key ids ascend along the sequence.

    Args:
      query_segment_ids: integers (B, T), in any order.
      key_value_segment_ids: integers (B, S), ascending along S.

    Returns:
      int32 (start, stop), each (B, T): row i of batch b sees keys [start, stop), empty if its id does not occur.
    """

    def search(side: str) -> Array:
        found = jax.vmap(lambda keys, queries: jnp.searchsorted(keys, queries, side=side))
        return found(key_value_segment_ids, query_segment_ids).astype(jnp.int32)

    return search("left"), search("right")


def _column(x: Int, axes: int) -> Int:
    """Appends ``axes`` unit axes to a per-batch array; leaves a number alone."""
    return jnp.reshape(x, (*x.shape, *(1,) * axes)) if isinstance(x, Array) else x


class Mask(Protocol):
    """One part of a mask. Tiles are [row, row + rows) x [col, col + cols); ``row`` and ``col`` may be traced."""

    def visible(self, row: Int, rows: int, col: Int, cols: int) -> Array | None:
        """Boolean, broadcastable to (B, N, rows, cols); None where every pair is visible."""

    def occupied(self, tile_m: int, tile_n: int, blocks_m: int, blocks_n: int) -> Array | np.ndarray:
        """Boolean, (blocks_m, blocks_n): False only where no batch entry and head sees a pair of the tile."""


@dataclass(frozen=True)
class AffineMask:
    """Lengths, causal, window and offset. Fields are Python ints or int32 (B,) arrays; see the module's docstring.

    ``q_len`` and ``kv_len`` are None where no row or key can be out of range.
    """

    left: int | None
    right: int | None
    offset: Int
    q_len: Int | None
    kv_len: Int | None

    def visible(self, row: Int, rows: int, col: Int, cols: int) -> Array | None:
        i = row + lax.broadcasted_iota(jnp.int32, (1, 1, rows, 1), 2)
        j = col + lax.broadcasted_iota(jnp.int32, (1, 1, 1, cols), 3)
        position = i + _column(self.offset, 3)
        parts = []
        if self.kv_len is not None:
            parts.append(j < _column(self.kv_len, 3))
        if self.q_len is not None:
            parts.append(i < _column(self.q_len, 3))
        if self.right is not None:
            parts.append(j <= position + self.right)
        if self.left is not None:
            parts.append(j >= position - self.left)
        return intersect(parts)

    def occupied(self, tile_m: int, tile_n: int, blocks_m: int, blocks_n: int) -> Array | np.ndarray:
        batched = any(isinstance(x, Array) for x in (self.offset, self.q_len, self.kv_len))
        xp: Any = jnp if batched else np
        row = xp.arange(blocks_m, dtype=xp.int32) * tile_m
        start, stop = affine_key_blocks(
            row if not batched else row[None, :],
            tile_m,
            tile_n,
            left=self.left,
            right=self.right,
            offset=_column(self.offset, 1),
            q_len=blocks_m * tile_m if self.q_len is None else _column(self.q_len, 1),
            kv_len=blocks_n * tile_n if self.kv_len is None else _column(self.kv_len, 1),
            minimum=xp.minimum,
            maximum=xp.maximum,
        )
        return _range_table(xp, start, stop, blocks_m, blocks_n)


def _range_table(xp: Any, start: Any, stop: Any, blocks_m: int, blocks_n: int) -> Any:
    """Boolean (blocks_m, blocks_n) from block ranges (blocks_m,) or (B, blocks_m)."""
    block = xp.arange(blocks_n, dtype=xp.int32)
    start, stop = xp.asarray(start), xp.asarray(stop)
    table = (block >= start[..., None]) & (block < stop[..., None])
    if table.ndim == 3:
        table = xp.any(table, axis=0)
    return xp.broadcast_to(table, (blocks_m, blocks_n))


def _blocks(x: Array, axis: int, tile: int, blocks: int, fill: Any) -> Array:
    """Splits ``axis`` of ``x`` into (blocks, tile), padding its end with ``fill``."""
    padding = [(0, 0)] * x.ndim
    padding[axis] = (0, blocks * tile - x.shape[axis])
    x = jnp.pad(x, padding, constant_values=fill) if padding[axis][1] else x
    return jnp.reshape(x, (*x.shape[:axis], blocks, tile, *x.shape[axis + 1 :]))


@dataclass(frozen=True)
class IntervalMask:
    """Row i of batch b sees keys [start[b, i], stop[b, i]). int32 (B, T) each."""

    start: Array
    stop: Array

    def visible(self, row: Int, rows: int, col: Int, cols: int) -> Array | None:
        j = col + lax.broadcasted_iota(jnp.int32, (1, 1, 1, cols), 3)
        start = lax.dynamic_slice_in_dim(self.start, row, rows, axis=1)[:, None, :, None]
        stop = lax.dynamic_slice_in_dim(self.stop, row, rows, axis=1)[:, None, :, None]
        return (start <= j) & (j < stop)

    def occupied(self, tile_m: int, tile_n: int, blocks_m: int, blocks_n: int) -> Array | np.ndarray:
        start = _blocks(self.start, 1, tile_m, blocks_m, 0)
        stop = _blocks(self.stop, 1, tile_m, blocks_m, 0)
        return _range_table(jnp, *interval_key_blocks(start, stop, tile_n), blocks_m, blocks_n)


@dataclass(frozen=True)
class SegmentMask:
    """A query sees the keys that carry its id. int32 (B, T) and (B, S), in any order."""

    query: Array
    key: Array

    def visible(self, row: Int, rows: int, col: Int, cols: int) -> Array | None:
        query = lax.dynamic_slice_in_dim(self.query, row, rows, axis=1)
        key = lax.dynamic_slice_in_dim(self.key, col, cols, axis=1)
        return query[:, None, :, None] == key[:, None, None, :]

    def occupied(self, tile_m: int, tile_n: int, blocks_m: int, blocks_n: int) -> Array | np.ndarray:
        def bounds(ids: Array, tile: int, blocks: int) -> tuple[Array, Array]:
            low = jnp.min(_blocks(ids, 1, tile, blocks, np.int32(MAX_INT)), axis=-1)
            return low, jnp.max(_blocks(ids, 1, tile, blocks, np.int32(-MAX_INT - 1)), axis=-1)

        (query_low, query_high), (key_low, key_high) = (
            bounds(self.query, tile_m, blocks_m),
            bounds(self.key, tile_n, blocks_n),
        )
        overlap = (query_low[:, :, None] <= key_high[:, None, :]) & (key_low[:, None, :] <= query_high[:, :, None])
        return jnp.any(overlap, axis=0)


@dataclass(frozen=True)
class DenseMask:
    """A boolean array, (B|1, N|1, T|1, S|1); True attends."""

    mask: Array

    def visible(self, row: Int, rows: int, col: Int, cols: int) -> Array | None:
        mask = self.mask
        if mask.shape[2] != 1:
            mask = lax.dynamic_slice_in_dim(mask, row, rows, axis=2)
        if mask.shape[3] != 1:
            mask = lax.dynamic_slice_in_dim(mask, col, cols, axis=3)
        return mask

    def occupied(self, tile_m: int, tile_n: int, blocks_m: int, blocks_n: int) -> Array | np.ndarray:
        table = jnp.any(self.mask, axis=(0, 1))
        if table.shape[1] != 1:
            table = jnp.any(_blocks(table, 1, tile_n, blocks_n, False), axis=2)
        if table.shape[0] != 1:
            table = jnp.any(_blocks(table, 0, tile_m, blocks_m, False), axis=1)
        return jnp.broadcast_to(table, (blocks_m, blocks_n))


def intersect(tiles: Sequence[Array | None]) -> Array | None:
    """Conjunction of visibility tiles; None stands for all True."""
    present = [tile for tile in tiles if tile is not None]
    return functools.reduce(jnp.logical_and, present) if present else None


@dataclass(frozen=True)
class Intersection:
    """Pairs that every part lets through."""

    parts: tuple[Mask, ...]

    def visible(self, row: Int, rows: int, col: Int, cols: int) -> Array | None:
        return intersect([part.visible(row, rows, col, cols) for part in self.parts])

    def occupied(self, tile_m: int, tile_n: int, blocks_m: int, blocks_n: int) -> Array | np.ndarray:
        tables = [part.occupied(tile_m, tile_n, blocks_m, blocks_n) for part in self.parts]
        return functools.reduce(lambda a, b: a & b, tables, np.ones((blocks_m, blocks_n), bool))


def mask_of(config: AttentionConfig, operands: Operands, *, padded_t: int = 0, padded_s: int = 0) -> Intersection:
    """The mask of a call.

    Args:
      config, operands: the call.
      padded_t, padded_s: lengths that the caller padded the sequences to (0: not padded). Rows and keys past the
        true lengths become invisible, and the per-row and per-key arrays are padded alike.
    """
    dims = dims_of(operands)
    q_len: Int | None = dims.query_length if padded_t > dims.query_length else None
    kv_len: Int | None = dims.key_length if padded_s > dims.key_length else None
    if operands.query_lengths is not None:
        q_len = jnp.minimum(operands.query_lengths, dims.query_length)
    if operands.key_value_lengths is not None:
        kv_len = jnp.minimum(operands.key_value_lengths, dims.key_length)
    offset: Int = config.query_offset if operands.query_offset is None else operands.query_offset
    parts: list[Mask] = []
    if not (q_len is None and kv_len is None and config.mask_kind == "none"):
        parts.append(AffineMask(config.window_left, config.window_right, offset, q_len, kv_len))

    def padded(x: Array, axis: int, length: int) -> Array:
        missing = length - x.shape[axis]
        if missing <= 0 or (x.shape[axis] == 1 and x.ndim == 4):
            return x
        return jnp.pad(x, [(0, missing) if k == axis else (0, 0) for k in range(x.ndim)])

    if operands.query_segment_ids is not None and operands.key_value_segment_ids is not None:
        query_ids = padded(operands.query_segment_ids, 1, padded_t)
        parts.append(SegmentMask(query_ids, padded(operands.key_value_segment_ids, 1, padded_s)))
    if operands.mask is not None:
        parts.append(DenseMask(padded(padded(operands.mask, 2, padded_t), 3, padded_s)))
    return Intersection(tuple(parts))
