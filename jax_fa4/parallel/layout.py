"""How a sequence is split over the devices of an axis.

``contiguous`` gives device r the r-th of P equal pieces. ``zigzag`` cuts the sequence into 2·P chunks and gives
device r the chunks r and 2·P-1-r, so that under a causal mask every device has the same amount of work (a long-known
balancing for ring attention: Brandon et al. 2023, "Striped Attention", section 3 discusses the imbalance; the paired
form is the one used for training Llama 3, section 3.3.2 of its report).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

LAYOUTS = ("contiguous", "zigzag")


def check(layout: str) -> None:
    """Raises ValueError unless ``layout`` is one of :data:`LAYOUTS`."""
    if layout not in LAYOUTS:
        raise ValueError(f"layout: got {layout!r}, allowed are {', '.join(map(repr, LAYOUTS))}")


def chunks_per_device(layout: str) -> int:
    """Separate chunks of the sequence that one device holds."""
    return {"contiguous": 1, "zigzag": 2}[layout]


def chunk_indices(layout: str, devices: int) -> np.ndarray:
    """int (devices, chunks_per_device): index, in sequence order, of each chunk that a device holds."""
    ranks = np.arange(devices)
    if layout == "contiguous":
        return ranks[:, None]
    return np.stack([ranks, 2 * devices - 1 - ranks], 1)


def chunk_length(layout: str, local_length: int, what: str) -> int:
    """Tokens in one chunk; raises ValueError where a device's piece does not split into its chunks."""
    chunks = chunks_per_device(layout)
    if local_length % chunks:
        raise ValueError(
            f"{what}: a device holds {local_length} tokens, but layout {layout!r} needs a multiple of {chunks}"
        )
    return local_length // chunks


def _check_length(layout: str, devices: int, length: int) -> None:
    check(layout)
    chunks = devices * chunks_per_device(layout)
    if length % chunks:
        raise ValueError(f"length: got {length}, layout {layout!r} over {devices} devices needs a multiple of {chunks}")


def to_layout(x: jax.Array, devices: int, *, layout: str = "zigzag", axis: int = 1) -> jax.Array:
    """Reorders the tokens of a global array so that splitting ``axis`` evenly gives each device its piece.

    Args:
      x: any array with the sequence along ``axis``, its length a multiple of devices (times 2 for zigzag).
      devices: size of the mesh axis over which the sequence is split.
      layout: "contiguous" (returns x unchanged) or "zigzag".
      axis: the sequence axis.

    Raises:
      ValueError: unknown layout, or a length that does not divide.
    """
    axis = _axis(x, axis)
    _check_length(layout, devices, x.shape[axis])
    if layout == "contiguous":
        return x
    # Chunks 0 .. P-1 beside chunks 2P-1 .. P. Reversal and concatenation rather than a gather: the transpose of a
    # gather is a scatter-add, which XLA runs with atomics.
    first, second = jnp.split(_split(x, axis, 2, devices), 2, axis)
    both = jnp.concatenate([first, jnp.flip(second, axis + 1)], axis)
    return jnp.swapaxes(both, axis, axis + 1).reshape(x.shape)


def from_layout(x: jax.Array, devices: int, *, layout: str = "zigzag", axis: int = 1) -> jax.Array:
    """Inverse of :func:`to_layout`."""
    axis = _axis(x, axis)
    _check_length(layout, devices, x.shape[axis])
    if layout == "contiguous":
        return x
    first, second = jnp.split(jnp.swapaxes(_split(x, axis, devices, 2), axis, axis + 1), 2, axis)
    return jnp.concatenate([first, jnp.flip(second, axis + 1)], axis).reshape(x.shape)


def _axis(x: jax.Array, axis: int) -> int:
    if not -x.ndim <= axis < x.ndim:
        raise ValueError(f"axis: got {axis} for an array of shape {x.shape}")
    return axis % x.ndim


def _split(x: jax.Array, axis: int, outer: int, inner: int) -> jax.Array:
    """``axis`` as three: outer, inner and the tokens of a chunk."""
    return x.reshape(*x.shape[:axis], outer, inner, x.shape[axis] // (outer * inner), *x.shape[axis + 1 :])


def positions(layout: str, devices: int, length: int) -> np.ndarray:
    """int (length,): position in the sequence of each token of an array in ``layout``'s order (for rotary
    embeddings).
    """
    _check_length(layout, devices, length)
    chunks = devices * chunks_per_device(layout)
    return np.arange(length).reshape(chunks, -1)[chunk_indices(layout, devices).reshape(-1)].reshape(-1)
