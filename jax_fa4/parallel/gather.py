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


def gather_sequence(x: Array, placement: Placement) -> Array:
    """Local (B, S_local, …) to global (B, S, …) in the order of the sequence."""
    whole = lax.all_gather(x, placement.axis_name, axis=1, tiled=True)
    return layouts.from_layout(whole, placement.devices, layout=placement.layout, axis=1)


def all_gather_core(call, config: AttentionConfig, operands: Operands, placement: Placement) -> tuple[Array, Array]:
    """(out, lse) of this device's queries. ``call(config, operands)`` is differentiable attention on whole operands."""
    ids = operands.key_value_segment_ids
    whole = operands._replace(
        key=gather_sequence(operands.key, placement),
        value=gather_sequence(operands.value, placement),
        key_value_segment_ids=None if ids is None else gather_sequence(ids, placement),
    )
    outs, lses = [], []
    for chunk in range(layouts.chunks_per_device(placement.layout)):
        start = placement.query_position(chunk)
        rows = functools.partial(slice_chunks, length=placement.query_chunk, chunks=(chunk, chunk + 1))
        ids, lengths = operands.query_segment_ids, operands.query_lengths
        out, lse = call(
            config,
            whole._replace(
                query=rows(operands.query),
                query_segment_ids=None if ids is None else rows(ids),
                query_lengths=None if lengths is None else placement.remaining(lengths, start, placement.query_chunk),
                query_offset=placement.offsets(operands, start),
            ),
        )
        outs.append(out)
        lses.append(lse)
    return jnp.concatenate(outs, 1), jnp.concatenate(lses, 2)
