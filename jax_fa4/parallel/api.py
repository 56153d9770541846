"""Sequence parallelism: the public functions for use inside ``jax.shard_map``."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike

from jax_fa4 import dispatch
from jax_fa4.arguments import check
from jax_fa4.config import AttentionConfig, Operands
from jax_fa4.implementations import registered
from jax_fa4.implementations.base import Implementation
from jax_fa4.parallel import layout as layouts
from jax_fa4.parallel.block import Engine, Placement
from jax_fa4.parallel.gather import all_gather_core
from jax_fa4.parallel.ring import make_ring, ring_core
from jax_fa4.parallel.tasks import Task
from jax_fa4.parallel.ulysses import ulysses_core
from jax_fa4.varying import vary, varying_axes
from jax_fa4.vjp import attend


class _Call(NamedTuple):
    """A checked call. ``config.query_offset`` has moved to ``placement``, which adds the chunks' positions to it."""

    config: AttentionConfig
    operands: Operands
    placement: Placement
    batched: bool
    implementation: str | None

    def decide(self, config: AttentionConfig, operands: Operands) -> Implementation:
        """The implementation that serves operands such as these."""
        decision = dispatch.decide(config, operands, self.implementation)
        dispatch.warn_of_fallback(decision, stacklevel=6)
        return decision.implementation

    def attend(self, config: AttentionConfig, operands: Operands) -> tuple[Array, Array]:
        """Differentiable attention."""
        return attend(self.decide(config, operands), config, operands)

    def finish(self, out: Array, lse: Array, return_lse: bool) -> Array | tuple[Array, Array]:
        """The caller's results: batch axis as it came, LSE if asked for."""
        if not self.batched:
            out, lse = out[0], lse[0]
        return (out, lse) if return_lse else out


def _axis_size(axis_name: Any) -> int:
    try:
        return lax.axis_size(axis_name)
    except NameError as error:
        raise ValueError(
            f"axis_name: got {axis_name!r}, which is no mesh axis here; expected an axis of the mesh of an enclosing "
            "jax.shard_map (outside of one, use jax_fa4.parallel.make_attention)"
        ) from error


def _prepare(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    axis_name: str,
    layout: str,
    implementation: str | None,
    **options: Any,
) -> _Call:
    layouts.check(layout)
    if implementation == dispatch.CUDNN:
        raise ValueError("implementation: got 'cudnn', which gives no differentiable log-sum-exp; expected another one")
    config, operands, batched = check(query, key, value, None, None, **options)
    devices = _axis_size(axis_name)
    query_chunk = layouts.chunk_length(layout, operands.query.shape[1], "query")
    key_chunk = layouts.chunk_length(layout, operands.key.shape[1], "key")
    placement = Placement(axis_name, devices, layout, query_chunk, key_chunk, config.query_offset)
    # Replicated operands get the psum of their gradient from the transpose of this cast. The axis itself counts too:
    # what a device computes depends on its rank even if every operand is replicated.
    rank = varying_axes(lax.axis_index(axis_name))
    present = {name: x for name, x in operands._asdict().items() if x is not None}
    cast = vary(varying_axes(operands) | rank, *present.values())
    operands = operands._replace(**dict(zip(present, cast, strict=True)))
    return _Call(dataclasses.replace(config, query_offset=0), operands, placement, batched, implementation)


def _engine(implementation: Implementation) -> Engine:
    """The two directions of one chunk pair. Plain XLA has no backward that takes a larger set's LSE: blockwise has."""
    backward = implementation.backward or registered()["blockwise"].backward
    assert backward is not None
    return Engine(implementation.forward, backward)


def ring_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    *,
    axis_name: str,
    layout: str = "contiguous",
    implementation: str | None = None,
    return_lse: bool = False,
    scale: ArrayLike | None = None,
    is_causal: bool = False,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    local_window_size: int | tuple[int | None, int | None] | None = None,
    query_segment_ids: ArrayLike | None = None,
    key_value_segment_ids: ArrayLike | None = None,
    logits_soft_cap: float | None = None,
    sinks: ArrayLike | None = None,
    query_offset: ArrayLike = 0,
    deterministic: bool = True,
) -> Array | tuple[Array, Array]:
    """Ring attention: K/V pieces travel around the axis, partial results merge by their log-sum-exp in float32.

    Call it inside ``jax.shard_map`` over a mesh whose axis ``axis_name`` (P devices) splits the sequence; the arrays
    are the local pieces. B batch, T and S local query and key lengths, N query heads, K key heads, H and Hv head
    dimensions. A piece travels only as far as some device needs it (causal, windows).

    Args:
      query: (B, T, N, H) or (T, N, H).
      key: (B, S, K, H) or (S, K, H).
      value: (B, S, K, Hv) or (S, K, Hv).
      axis_name: the mesh axis.
      layout: "contiguous": device r holds the r-th piece of the sequence. "zigzag": of 2·P chunks it holds the r-th
        and the (2·P-1-r)-th, which balances causal work; :func:`jax_fa4.parallel.to_layout` reorders global arrays.
      implementation: as for :func:`jax_fa4.attention`, for the attention of one chunk of queries to one of keys.
      return_lse: also return the log-sum-exp.
      scale, is_causal, local_window_size, logits_soft_cap, sinks, query_offset, deterministic: as for
        :func:`jax_fa4.attention`. Positions are those of the whole sequence.
      query_seq_lengths, key_value_seq_lengths: int32 (B,), of the whole sequence, the same on all devices.
      query_segment_ids, key_value_segment_ids: integers (B, T) and (B, S), local pieces.

    Returns:
      (B, T, N, Hv) in query's dtype; with ``return_lse`` a pair with lse, float32 (B, N, T). With shard_map's
      check_vma on, the gradient of an operand that is replicated over a mesh axis is summed over that axis.

    Raises:
      ValueError, TypeError: an argument is illegal, or ``axis_name`` is no mesh axis of an enclosing shard_map.
    """
    call = _prepare(
        query,
        key,
        value,
        axis_name,
        layout,
        implementation,
        scale=scale,
        is_causal=is_causal,
        query_seq_lengths=query_seq_lengths,
        key_value_seq_lengths=key_value_seq_lengths,
        local_window_size=local_window_size,
        query_segment_ids=query_segment_ids,
        key_value_segment_ids=key_value_segment_ids,
        logits_soft_cap=logits_soft_cap,
        sinks=sinks,
        query_offset=query_offset,
        deterministic=deterministic,
    )
    # Sinks join once, after all keys: a partial result must not contain them.
    operands = call.operands._replace(sinks=None)
    first = Task((0, 1), (0, 1), "placed")  # what serves the most general task serves the others
    served = call.decide(*call.placement.part(call.config, operands, 0, first))
    ring = make_ring(call.config, _engine(served), call.placement, static_offset=operands.query_offset is None)
    out, lse = ring_core(ring, operands)
    if call.operands.sinks is not None:
        out, lse = _join_sinks(out, lse, call.operands.sinks)
    return call.finish(out, lse, return_lse)


def _join_sinks(out: Array, lse: Array, sinks: Array) -> tuple[Array, Array]:
    """Adds exp(sink) of each head to the softmax denominator of a finished result."""
    sink = sinks.astype(lse.dtype)[None, :, None]
    peak = lax.stop_gradient(jnp.maximum(lse, sink))
    peak = jnp.where(jnp.isneginf(peak), 0, peak)
    # exp of a row that saw nothing is 0; its derivative must not meet -inf - -inf, hence the inner selection.
    seen = jnp.where(jnp.isneginf(lse), 0, jnp.exp(jnp.where(jnp.isneginf(lse), 0, lse) - peak))
    total = seen + jnp.exp(sink - peak)
    empty = total == 0
    total = jnp.where(empty, 1, total)
    share = jnp.swapaxes(seen / total, 1, 2)[..., None]
    return (out * share).astype(out.dtype), jnp.where(empty, -jnp.inf, jnp.log(total) + peak)


def all_gather_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    *,
    axis_name: str,
    layout: str = "contiguous",
    implementation: str | None = None,
    return_lse: bool = False,
    scale: ArrayLike | None = None,
    is_causal: bool = False,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    local_window_size: int | tuple[int | None, int | None] | None = None,
    query_segment_ids: ArrayLike | None = None,
    key_value_segment_ids: ArrayLike | None = None,
    logits_soft_cap: float | None = None,
    sinks: ArrayLike | None = None,
    query_offset: ArrayLike = 0,
    deterministic: bool = True,
) -> Array | tuple[Array, Array]:
    """All-gather attention: K/V are collected on every device, dK/dV reduce-scattered.

    Arguments, results and errors as for :func:`ring_attention`. Each device holds the whole K/V for a while.
    """
    call = _prepare(
        query,
        key,
        value,
        axis_name,
        layout,
        implementation,
        scale=scale,
        is_causal=is_causal,
        query_seq_lengths=query_seq_lengths,
        key_value_seq_lengths=key_value_seq_lengths,
        local_window_size=local_window_size,
        query_segment_ids=query_segment_ids,
        key_value_segment_ids=key_value_segment_ids,
        logits_soft_cap=logits_soft_cap,
        sinks=sinks,
        query_offset=query_offset,
        deterministic=deterministic,
    )
    out, lse = all_gather_core(call.attend, call.config, call.operands, call.placement)
    return call.finish(out, lse, return_lse)


def ulysses_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    *,
    axis_name: str,
    layout: str = "contiguous",
    implementation: str | None = None,
    return_lse: bool = False,
    scale: ArrayLike | None = None,
    is_causal: bool = False,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    local_window_size: int | tuple[int | None, int | None] | None = None,
    query_segment_ids: ArrayLike | None = None,
    key_value_segment_ids: ArrayLike | None = None,
    logits_soft_cap: float | None = None,
    sinks: ArrayLike | None = None,
    query_offset: ArrayLike = 0,
    deterministic: bool = True,
) -> Array | tuple[Array, Array]:
    """Ulysses attention: all-to-all turns a split of the sequence into a split of the heads, and back.

    Arguments, results and errors as for :func:`ring_attention`. P must divide N, and K must divide P or P divide K.
    """
    call = _prepare(
        query,
        key,
        value,
        axis_name,
        layout,
        implementation,
        scale=scale,
        is_causal=is_causal,
        query_seq_lengths=query_seq_lengths,
        key_value_seq_lengths=key_value_seq_lengths,
        local_window_size=local_window_size,
        query_segment_ids=query_segment_ids,
        key_value_segment_ids=key_value_segment_ids,
        logits_soft_cap=logits_soft_cap,
        sinks=sinks,
        query_offset=query_offset,
        deterministic=deterministic,
    )
    config = dataclasses.replace(call.config, query_offset=call.placement.query_offset)
    out, lse = ulysses_core(call.attend, config, call.operands, call.placement)
    return call.finish(out, lse, return_lse)
