"""All-gather attention: every device collects the whole K/V and attends its own queries to it.

One collective each way: all-gather of K and V forward, reduce-scatter of dK and dV backward (its transpose). Memory for
the whole K/V on each device; the simplest choice while that fits (used with zigzag for Llama 3, section 3.3.2 of its
report).
"""

from __future__ import annotations

import functools

import jax.numpy as jnp
from jax import Array, lax

from jax_fa4.config import AttentionConfig, Operands
from jax_fa4.parallel import layout as layouts
from jax_fa4.parallel.block import Placement, slice_chunks

GROUP_BYTES = 64 * 2**20
"""Gathered keys and values come in groups of heads of this size at least. Enough for the links' full speed, and more
than XLA joins into one collective (30 MiB)."""
MAX_GROUPS = 4


def gather_sequence(x: Array, placement: Placement) -> Array:
    """Local (B, S_local, …) to global (B, S, …) in the order of the sequence."""
    whole = lax.all_gather(x, placement.axis_name, axis=1, tiled=True)
    return layouts.from_layout(whole, placement.devices, layout=placement.layout, axis=1)


def head_groups(operands: Operands, devices: int) -> int:
    """In how many groups of heads keys and values are gathered: one, or two or four where they are large."""
    size = devices * (operands.key.nbytes + operands.value.nbytes)
    key_heads = operands.key.shape[2]
    return max(n for n in (1, 2, MAX_GROUPS) if n == 1 or (key_heads % n == 0 and size // n >= GROUP_BYTES))


def all_gather_core(call, config: AttentionConfig, operands: Operands, placement: Placement) -> tuple[Array, Array]:
    """(out, lse) of this device's queries. ``call(config, operands)`` is differentiable attention on whole operands.

    Heads attend one group after the other, so that all transfers but those of the first group (in the backward: of the
    last) have the attention of another group to hide under.
    """
    groups = head_groups(operands, placement.devices)
    queries = jnp.split(operands.query, groups, 2)
    sinks = [None] * groups if operands.sinks is None else jnp.split(operands.sinks, groups)
    ids = operands.key_value_segment_ids
    ids = None if ids is None else gather_sequence(ids, placement)
    lses: list[Array] = []

    def gathered(group: int) -> tuple[Array, Array]:
        size = operands.key.shape[2] // groups
        wait = group >= 2 and lses[group - 2].size
        start = group * size + (_zero_after(lses[group - 2]) if wait else 0)
        key, value = (lax.dynamic_slice_in_dim(x, start, size, 2) for x in (operands.key, operands.value))
        return _gather_pair(key, value, placement)

    arriving = [gathered(group) for group in range(min(2, groups))]
    outs: list[Array] = []
    for group, (query, sink) in enumerate(zip(queries, sinks, strict=True)):
        key, value = arriving[group]
        whole = operands._replace(query=query, key=key, value=value, key_value_segment_ids=ids, sinks=sink)
        out, lse = _chunks(call, config, whole, placement)
        outs.append(out)
        lses.append(lse)
        if group + 2 < groups:
            arriving.append(gathered(group + 2))
    return jnp.concatenate(outs, 2), jnp.concatenate(lses, 1)


def _zero_after(lse: Array) -> Array:
    """int32 0 that is known only when ``lse`` is.

    XLA takes every call of attention to be short and would start all transfers, one after the other, before the first:
    what begins with this begins when the attention is done. The last row is of the last call, where a device has
    several chunks of queries.
    """
    return jnp.minimum(jnp.isnan(lse[0, 0, -1]).astype(jnp.int32), 0)


def _gather_pair(key: Array, value: Array, placement: Placement) -> tuple[Array, Array]:
    """Both whole, in one collective if head dimensions agree: XLA keeps one in flight."""
    if key.shape == value.shape:
        key, value = jnp.split(gather_sequence(jnp.concatenate([key, value], 2), placement), 2, 2)
        return key, value
    return gather_sequence(key, placement), gather_sequence(value, placement)


def _chunks(call, config: AttentionConfig, operands: Operands, placement: Placement) -> tuple[Array, Array]:
    """(out, lse) of this device's queries, one chunk of them after the other; key and value are whole."""
    outs, lses = [], []
    for chunk in range(layouts.chunks_per_device(placement.layout)):
        start = placement.query_position(chunk)
        rows = functools.partial(slice_chunks, length=placement.query_chunk, chunks=(chunk, chunk + 1))
        ids, lengths = operands.query_segment_ids, operands.query_lengths
        out, lse = call(
            config,
            operands._replace(
                query=rows(operands.query),
                query_segment_ids=None if ids is None else rows(ids),
                query_lengths=None if lengths is None else placement.remaining(lengths, start, placement.query_chunk),
                query_offset=placement.offsets(operands, start),
            ),
        )
        outs.append(out)
        lses.append(lse)
    return jnp.concatenate(outs, 1), jnp.concatenate(lses, 2)
