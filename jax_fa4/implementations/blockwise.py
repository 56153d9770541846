"""FlashAttention in JAX: online softmax over key blocks, backward by recomputation.

Memory is O(T + S): no score matrix outlives its tile. Tiles that the mask rules out are not computed: each block of
query rows loops over the range of key blocks that it can see (and each key block, in the backward, over the range of
query blocks that see it). The algorithm is FlashAttention-2's (Dao 2023, sections 3.1 and 3.2) with whole-array blocks
in place of thread blocks.

Layout inside: queries (blocks_m, B, K, G * tile_m, H), keys and values (blocks_n, B, K, tile_n, H or Hv), so that a
tile of scores is one matrix product for each (batch, key head) and the group's query heads share its key operand.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jax_fa4.config import AttentionConfig, Dims, Gradients, Operands, dims_of
from jax_fa4.implementations import xla
from jax_fa4.implementations.base import Implementation
from jax_fa4.implementations.numerics import accumulator_dtype, einsum, group_heads, scale_of
from jax_fa4.implementations.split import split_backward, split_forward
from jax_fa4.masks import Intersection, mask_of

TILE_SCORES = 2**18
"""Scores in one tile of all batch entries and heads: 1 MiB, about what a CPU core's second-level cache holds."""
TILE_LIMITS = (128, 512)
"""Least and greatest tile length: shorter ones are too small for a matrix product, longer ones skip too little."""


def _tile_limit(dims: Dims) -> int:
    """Largest number of query rows and of keys in a tile: a power of two."""
    tile = TILE_LIMITS[1]
    while tile > TILE_LIMITS[0] and dims.batch * dims.query_heads * tile * tile > TILE_SCORES:
        tile //= 2
    return tile


def _tile(length: int, limit: int) -> tuple[int, int]:
    """(tile, blocks) for a sequence: equal tiles, as few as ``limit`` allows, so that padding is below one a tile."""
    blocks = -(-length // limit)
    return -(-length // blocks), blocks


def _zeros(shape: tuple[int, ...], dtype: Any, like: Array, fill: float = 0) -> Array:
    """A constant that varies over the same manual mesh axes as ``like`` (loop carries must agree in that)."""
    axes = tuple(jax.typeof(like).manual_axis_type.varying)
    constant = jnp.full(shape, fill, dtype)
    return lax.pcast(constant, axes, to="varying") if axes else constant


@dataclass(frozen=True)
class _Call:
    """One call cut into tiles, with what both directions need."""

    config: AttentionConfig
    operands: Operands
    dims: Dims
    tile_m: int
    tile_n: int
    blocks_m: int
    blocks_n: int
    mask: Intersection
    dtype: Any
    scale: Array
    bias: Array | None  # (B|1, K|1, G|1, T|1, S|1), padded
    occupied: Array | np.ndarray  # bool (blocks_m, blocks_n)
    sparse: bool  # whether tiles inside a block range may be empty

    def split_queries(self, x: Array) -> Array:
        """(B, T, N, d) -> (blocks_m, B, K, G * tile_m, d)."""
        dims = self.dims
        x = _pad(x, 1, self.blocks_m * self.tile_m)
        x = jnp.reshape(x, (dims.batch, self.blocks_m, self.tile_m, dims.key_heads, dims.group, x.shape[-1]))
        x = jnp.transpose(x, (1, 0, 3, 4, 2, 5))
        return jnp.reshape(x, (*x.shape[:3], dims.group * self.tile_m, x.shape[-1]))

    def join_queries(self, x: Array) -> Array:
        """The inverse of :meth:`split_queries`."""
        dims = self.dims
        x = jnp.reshape(x, (self.blocks_m, dims.batch, dims.key_heads, dims.group, self.tile_m, x.shape[-1]))
        x = jnp.transpose(x, (1, 0, 4, 2, 3, 5))
        x = jnp.reshape(x, (dims.batch, self.blocks_m * self.tile_m, dims.query_heads, x.shape[-1]))
        return x[:, : dims.query_length]

    def split_keys(self, x: Array) -> Array:
        """(B, S, K, d) -> (blocks_n, B, K, tile_n, d)."""
        x = _pad(x, 1, self.blocks_n * self.tile_n)
        x = jnp.reshape(x, (x.shape[0], self.blocks_n, self.tile_n, *x.shape[2:]))
        return jnp.transpose(x, (1, 0, 3, 2, 4))

    def join_keys(self, x: Array) -> Array:
        """The inverse of :meth:`split_keys`."""
        x = jnp.transpose(x, (1, 0, 3, 2, 4))
        x = jnp.reshape(x, (x.shape[0], self.blocks_n * self.tile_n, *x.shape[3:]))
        return x[:, : self.dims.key_length]

    def split_rows(self, x: Array) -> Array:
        """(B, N, T) -> (blocks_m, B, K, G * tile_m, 1)."""
        return self.split_queries(jnp.transpose(x, (0, 2, 1))[..., None])

    def join_rows(self, x: Array) -> Array:
        """The inverse of :meth:`split_rows`."""
        return jnp.transpose(self.join_queries(x)[..., 0], (0, 2, 1))

    def sinks(self) -> Array | None:
        """(1, K, G * tile_m, 1), or None."""
        if self.operands.sinks is None:
            return None
        sinks = jnp.reshape(self.operands.sinks.astype(self.dtype), (1, self.dims.key_heads, self.dims.group, 1))
        sinks = jnp.broadcast_to(sinks, (*sinks.shape[:3], self.tile_m))
        return jnp.reshape(sinks, (1, self.dims.key_heads, self.dims.group * self.tile_m, 1))

    def scores(self, query: Array, key: Array, m: Array, n: Array) -> tuple[Array, Array | None]:
        """Masked scores of tile (m, n), (B, K, G * tile_m, tile_n), and the soft cap's derivative."""
        dims = self.dims
        scores = einsum("bkmh,bknh->bkmn", query, key, self.dtype) * self.scale
        flat = scores.shape
        grouped = (dims.batch, dims.key_heads, dims.group, self.tile_m, self.tile_n)
        if self.bias is not None:
            tile = self.bias_tile(self.bias, m, n).astype(self.dtype)
            scores = jnp.reshape(jnp.reshape(scores, grouped) + tile, flat)
        slope = None
        if self.config.logits_soft_cap is not None:
            capped = jnp.tanh(scores / self.config.logits_soft_cap)
            scores = self.config.logits_soft_cap * capped
            slope = 1 - capped * capped
        visible = self.mask.visible(m * self.tile_m, self.tile_m, n * self.tile_n, self.tile_n)
        if visible is not None:
            visible = group_heads(visible, dims.key_heads)
            scores = jnp.reshape(jnp.where(visible, jnp.reshape(scores, grouped), -jnp.inf), flat)
        return scores, slope

    def bias_tile(self, bias: Array, m: Array, n: Array) -> Array:
        """The part of a (B|1, K|1, G|1, T|1, S|1) array that belongs to tile (m, n)."""
        if bias.shape[3] != 1:
            bias = lax.dynamic_slice_in_dim(bias, m * self.tile_m, self.tile_m, axis=3)
        if bias.shape[4] != 1:
            bias = lax.dynamic_slice_in_dim(bias, n * self.tile_n, self.tile_n, axis=4)
        return bias

    def add_bias_tile(self, total: Array, d_scores: Array, m: Array, n: Array) -> Array:
        """Adds a tile's score gradients to the bias gradient, summed over the axes that the bias broadcasts."""
        dims = self.dims
        tile = jnp.reshape(d_scores, (dims.batch, dims.key_heads, dims.group, self.tile_m, self.tile_n))
        reduced = tuple(axis for axis in range(5) if total.shape[axis] == 1)
        tile = jnp.sum(tile, axis=reduced, keepdims=True)
        zero = jnp.int32(0)
        row = zero if total.shape[3] == 1 else m * self.tile_m
        col = zero if total.shape[4] == 1 else n * self.tile_n
        at = (zero, zero, zero, row, col)
        return lax.dynamic_update_slice(total, lax.dynamic_slice(total, at, tile.shape) + tile, at)


def _pad(x: Array, axis: int, length: int) -> Array:
    missing = length - x.shape[axis]
    if missing == 0:
        return x
    return jnp.pad(x, [(0, missing) if k == axis else (0, 0) for k in range(x.ndim)])


def _cut(config: AttentionConfig, operands: Operands) -> _Call:
    dims = dims_of(operands)
    limit = _tile_limit(dims)
    (tile_m, blocks_m), (tile_n, blocks_n) = _tile(dims.query_length, limit), _tile(dims.key_length, limit)
    mask = mask_of(config, operands, padded_t=tile_m * blocks_m, padded_s=tile_n * blocks_n)
    dtype = accumulator_dtype(operands.query.dtype)
    bias = operands.bias
    if bias is not None:
        bias = group_heads(bias, dims.key_heads)
        bias = bias if bias.shape[3] == 1 else _pad(bias, 3, tile_m * blocks_m)
        bias = bias if bias.shape[4] == 1 else _pad(bias, 4, tile_n * blocks_n)
    return _Call(
        config,
        operands,
        dims,
        tile_m,
        tile_n,
        blocks_m,
        blocks_n,
        mask,
        dtype,
        scale_of(config, operands, dtype),
        bias,
        mask.occupied(tile_m, tile_n, blocks_m, blocks_n),
        operands.mask is not None or operands.query_segment_ids is not None,
    )


def _ranges(occupied: Array | np.ndarray) -> tuple[Array, Array]:
    """Smallest range of columns that holds each row's True entries: int32 (start, stop), stop = 0 for no entry."""
    xp: Any = np if isinstance(occupied, np.ndarray) else jnp
    blocks = occupied.shape[1]
    some = xp.any(occupied, axis=1)
    start = xp.where(some, xp.argmax(occupied, axis=1), 0)
    stop = xp.where(some, blocks - xp.argmax(occupied[:, ::-1], axis=1), 0)
    return jnp.asarray(start, jnp.int32), jnp.asarray(stop, jnp.int32)


def _index(x: Array, i: Array) -> Array:
    return lax.dynamic_index_in_dim(x, i, keepdims=False)


def forward(config: AttentionConfig, operands: Operands) -> tuple[Array, Array]:
    """See :data:`jax_fa4.implementations.base.Forward`."""
    if dims_of(operands).empty:
        return xla.forward(config, operands)
    call = _cut(config, operands)
    dims = call.dims
    keys, values = call.split_keys(operands.key), call.split_keys(operands.value)
    sinks = call.sinks()
    rows = (dims.batch, dims.key_heads, dims.group * call.tile_m)
    occupied = jnp.asarray(call.occupied)

    def query_block(inputs: tuple[Array, Array, Array, Array]) -> tuple[Array, Array]:
        query, m, start, stop = inputs

        def tile(n: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            acc, maximum, total = carry
            scores, _ = call.scores(query, _index(keys, n), m, n)
            above = jnp.maximum(maximum, jnp.max(scores, axis=-1, keepdims=True))
            # A row that has seen no key yet has maximum -inf; -inf - -inf would be NaN.
            shift = jnp.where(above == -jnp.inf, 0, above)
            weights = jnp.exp(scores - shift)
            rescale = jnp.exp(maximum - shift)
            total = total * rescale + jnp.sum(weights, axis=-1, keepdims=True)
            value = _index(values, n)
            acc = acc * rescale + einsum("bkmn,bknh->bkmh", weights.astype(value.dtype), value, call.dtype)
            return acc, above, total

        def step(n: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            if not call.sparse:
                return tile(n, carry)
            return lax.cond(occupied[m, n], lambda c: tile(n, c), lambda c: c, carry)

        acc = _zeros((*rows, dims.head_dim_v), call.dtype, query)
        maximum = _zeros((*rows, 1), call.dtype, query, -jnp.inf)
        total = _zeros((*rows, 1), call.dtype, query)
        if sinks is not None:
            maximum = jnp.maximum(maximum, sinks)
            total = jnp.where(maximum == -jnp.inf, total, 1)
        acc, maximum, total = lax.fori_loop(start, stop, step, (acc, maximum, total))
        seen = total > 0
        out = acc / jnp.where(seen, total, 1)
        lse = jnp.where(seen, maximum + jnp.log(jnp.where(seen, total, 1)), -jnp.inf)
        return out.astype(operands.query.dtype), lse

    start, stop = _ranges(call.occupied)
    queries = call.split_queries(operands.query)
    out, lse = lax.map(query_block, (queries, jnp.arange(call.blocks_m, dtype=jnp.int32), start, stop))
    return call.join_queries(out), call.join_rows(lse)


def backward(
    config: AttentionConfig,
    operands: Operands,
    out: Array,
    lse: Array,
    d_out: Array,
    d_lse: Array | None,
    wanted: frozenset[str],
) -> Gradients:
    """See :data:`jax_fa4.implementations.base.Backward`. Deterministic: every sum has a fixed order."""
    if dims_of(operands).empty:
        return _empty_backward(operands, d_lse)
    call = _cut(config, operands)
    dtype = call.dtype
    queries, d_outs = call.split_queries(operands.query), call.split_queries(d_out)
    # dS = P * (dP - D): the row sums D absorb the cotangent of lse, whose derivative by a score is P.
    delta = jnp.einsum("btnh,btnh->bnt", out.astype(dtype), d_out.astype(dtype), precision=lax.Precision.HIGHEST)
    if d_lse is not None:
        delta = delta - d_lse
    deltas, lses = call.split_rows(delta), call.split_rows(jnp.where(lse == -jnp.inf, 0, lse))
    occupied = jnp.asarray(call.occupied)
    with_bias = call.bias is not None and "bias" in wanted

    def key_block(totals: dict[str, Array], inputs: tuple[Array, ...]) -> tuple[dict[str, Array], tuple[Array, Array]]:
        key, value, n, start, stop = inputs

        def tile(m: Array) -> tuple[Array, Array, Array, Array]:
            query, d_out_m = _index(queries, m), _index(d_outs, m)
            scores, slope = call.scores(query, key, m, n)
            weights = jnp.exp(scores - _index(lses, m))
            d_value = einsum("bkmn,bkmh->bknh", weights.astype(d_out_m.dtype), d_out_m, dtype)
            d_weights = einsum("bkmh,bknh->bkmn", d_out_m, value, dtype)
            d_scores = weights * (d_weights - _index(deltas, m))
            if slope is not None:
                d_scores = d_scores * slope
            narrow = d_scores.astype(query.dtype)
            d_key = einsum("bkmn,bkmh->bknh", narrow, query, dtype)
            d_query = einsum("bkmn,bknh->bkmh", narrow, key, dtype)
            return d_query, d_key, d_value, d_scores if with_bias else _zeros((), dtype, key)

        def step(m: Array, carry: dict[str, Array]) -> dict[str, Array]:
            if call.sparse:
                shapes = jax.eval_shape(tile, m)
                nothing = lambda _: tuple(_zeros(x.shape, x.dtype, key) for x in shapes)  # noqa: E731
                d_query, d_key, d_value, d_scores = lax.cond(occupied[m, n], tile, nothing, m)
            else:
                d_query, d_key, d_value, d_scores = tile(m)
            carry = dict(carry)
            previous = _index(carry["query"], m)
            carry["query"] = lax.dynamic_update_index_in_dim(carry["query"], previous + d_query, m, axis=0)
            carry["key"] += d_key
            carry["value"] += d_value
            if with_bias:
                carry["bias"] = call.add_bias_tile(carry["bias"], d_scores, m, n)
            return carry

        carry = dict(totals, key=_zeros(key.shape, dtype, key), value=_zeros(value.shape, dtype, key))
        carry = lax.fori_loop(start, stop, step, carry)
        return carry, (carry.pop("key"), carry.pop("value"))

    totals = {"query": _zeros(queries.shape, dtype, queries)}
    if with_bias and call.bias is not None:
        totals["bias"] = _zeros(call.bias.shape, dtype, queries)
    start, stop = _ranges(call.occupied.T)
    blocks = jnp.arange(call.blocks_n, dtype=jnp.int32)
    keys, values = call.split_keys(operands.key), call.split_keys(operands.value)
    totals, (d_keys, d_values) = lax.scan(key_block, totals, (keys, values, blocks, start, stop))

    d_query = call.join_queries(totals["query"])
    gradients: dict[str, Callable[[], Array]] = {
        "query": lambda: d_query * call.scale,
        "key": lambda: call.join_keys(d_keys) * call.scale,
        "value": lambda: call.join_keys(d_values),
        "bias": lambda: _ungroup_bias(totals["bias"], operands.bias),
        "sinks": lambda: _d_sinks(operands.sinks, lse, delta),
        "scale": lambda: jnp.sum(d_query * operands.query.astype(dtype)),
    }
    return Gradients(
        **{
            name: gradients[name]().astype(getattr(operands, name).dtype)
            for name in gradients
            if name in wanted and getattr(operands, name) is not None
        }
    )


def _ungroup_bias(total: Array, bias: Array | None) -> Array:
    """(B|1, K|1, G|1, padded T|1, padded S|1) -> the bias's own shape."""
    assert bias is not None
    total = jnp.reshape(total, (total.shape[0], total.shape[1] * total.shape[2], *total.shape[3:]))
    return total[:, :, : bias.shape[2], : bias.shape[3]]


def _d_sinks(sinks: Array | None, lse: Array, delta: Array) -> Array:
    """A sink is one more column of the softmax whose value row is zero: dS = P * (0 - D), summed over rows."""
    assert sinks is not None
    column = sinks.astype(lse.dtype)[None, :, None]
    weights = jnp.where(lse == -jnp.inf, 0, jnp.exp(column - jnp.where(lse == -jnp.inf, 0, lse)))
    return -jnp.sum(weights * delta, axis=(0, 2))


def _empty_backward(operands: Operands, d_lse: Array | None) -> Gradients:
    """No scores: only a sink reaches lse (which then equals it)."""
    sinks = None
    if operands.sinks is not None and d_lse is not None:
        sinks = jnp.sum(d_lse, axis=(0, 2)).astype(operands.sinks.dtype)
    return Gradients(sinks=sinks)


IMPLEMENTATION = Implementation(name="blockwise", forward=split_forward(forward), backward=split_backward(backward))
