"""Ulysses attention: all-to-all turns a split of the sequence into a split of the heads and back (Jacobs et al. 2023).

Each device attends a part of the heads over the whole sequence. With fewer key heads than devices each key head is
repeated on as many devices as share it, so that every device receives one.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax

from jax_fa4.config import AttentionConfig, Operands
from jax_fa4.parallel import layout as layouts
from jax_fa4.parallel.block import Placement
from jax_fa4.parallel.gather import gather_sequence
from jax_fa4.varying import vary, varying_axes


def _to_heads(x: Array, placement: Placement) -> Array:
    """(B, S_local, N, H) to (B, S, N / P, H), tokens in the order of the sequence."""
    whole = lax.all_to_all(x, placement.axis_name, split_axis=2, concat_axis=1, tiled=True)
    return layouts.from_layout(whole, placement.devices, layout=placement.layout, axis=1)


def _to_sequence(x: Array, placement: Placement, *, sequence_axis: int, head_axis: int) -> Array:
    """Inverse of :func:`_to_heads` for an array with the given axes."""
    ordered = layouts.to_layout(x, placement.devices, layout=placement.layout, axis=sequence_axis)
    return lax.all_to_all(ordered, placement.axis_name, split_axis=sequence_axis, concat_axis=head_axis, tiled=True)


def check_heads(query_heads: int, key_heads: int, devices: int) -> None:
    """Raises ValueError where heads cannot be dealt out over the devices."""
    if query_heads % devices:
        raise ValueError(
            f"query: ulysses_attention needs a number of heads that the axis size divides; got {query_heads} heads, "
            f"axis size {devices}"
        )
    if key_heads % devices and devices % key_heads:
        raise ValueError(
            f"key: ulysses_attention needs a number of heads that divides the axis size or is divided by it; got "
            f"{key_heads} heads, axis size {devices}"
        )


def ulysses_core(call, config: AttentionConfig, operands: Operands, placement: Placement) -> tuple[Array, Array]:
    """(out, lse) of this device's tokens, all heads.

    ``call(config, operands)`` is differentiable attention on whole operands.
    """
    devices = placement.devices
    heads, key_heads = operands.query.shape[2], operands.key.shape[2]
    check_heads(heads, key_heads, devices)
    copies = devices // key_heads if key_heads % devices else 1

    def ids(x: Array | None) -> Array | None:
        return None if x is None else gather_sequence(x, placement)

    sinks = operands.sinks
    if sinks is not None:
        # The slice below differs by device; typing the whole as varying makes its transpose the psum it needs to be.
        (sinks,) = vary(varying_axes(operands), sinks)
        sinks = lax.dynamic_slice_in_dim(
            sinks, lax.axis_index(placement.axis_name) * (heads // devices), heads // devices
        )
    out, lse = call(
        config,
        operands._replace(
            query=_to_heads(operands.query, placement),
            key=_to_heads(jnp.repeat(operands.key, copies, 2), placement),
            value=_to_heads(jnp.repeat(operands.value, copies, 2), placement),
            query_segment_ids=ids(operands.query_segment_ids),
            key_value_segment_ids=ids(operands.key_value_segment_ids),
            sinks=sinks,
        ),
    )
    return (
        _to_sequence(out, placement, sequence_axis=1, head_axis=2),
        _to_sequence(lse, placement, sequence_axis=2, head_axis=1),
    )
