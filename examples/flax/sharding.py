"""Where arrays live on a mesh: batch split over ``data``, heads and MLP over ``model``, the sequence over ``seq``."""

from __future__ import annotations

import argparse
import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jax_fa4 import parallel

DATA, MODEL, SEQUENCE = "data", "model", "seq"

SPLIT_PARAMETERS = {
    # (B, T, width) x (width, N, H) -> (B, T, N, H): each device has its own heads ...
    ("query", "kernel"): PartitionSpec(None, MODEL, None),
    ("key", "kernel"): PartitionSpec(None, MODEL, None),
    ("value", "kernel"): PartitionSpec(None, MODEL, None),
    # ... and (N, H, width) sums over them.
    ("out", "kernel"): PartitionSpec(MODEL, None, None),
    ("mlp_in", "kernel"): PartitionSpec(None, MODEL),
    ("mlp_out", "kernel"): PartitionSpec(MODEL, None),
}
"""How parameters are split, by the last two names of their path; all others are copied to every device."""


def parse_mesh(text: str) -> dict[str, int]:
    """Reads ``data=N,model=M,seq=S`` (any may be left out and is then 1).

    Raises:
        argparse.ArgumentTypeError: a name or number that is not allowed.
    """
    sizes = {DATA: 1, MODEL: 1, SEQUENCE: 1}
    for part in text.split(","):
        name, _, number = part.strip().partition("=")
        if name not in sizes or not number.isdecimal() or int(number) < 1:
            raise argparse.ArgumentTypeError(f"got {part!r}; allowed is data=N,model=M,seq=S, each at least 1")
        sizes[name] = int(number)
    return sizes


def make_mesh(sizes: dict[str, int], batch: int, heads: int, length: int, chunks: int = 1) -> Mesh:
    """A mesh of the first N * M * S devices; ``chunks`` is how many pieces of the sequence each device holds.

    Raises:
        ValueError: there are too few devices, or batch, heads or length cannot be split evenly.
    """
    needed = math.prod(sizes.values())
    if needed > jax.device_count():
        wanted = ",".join(f"{name}={size}" for name, size in sizes.items())
        raise ValueError(f"--mesh: {wanted} needs {needed} devices, there are {jax.device_count()}")
    if sizes[SEQUENCE] > 1 and length % (sizes[SEQUENCE] * chunks):
        raise ValueError(
            f"--mesh: --seq-len {length} cannot be split over seq={sizes[SEQUENCE]} in {chunks} pieces each"
        )
    if batch % sizes[DATA]:
        raise ValueError(f"--mesh: --batch {batch} cannot be split over data={sizes[DATA]}")
    if heads % sizes[MODEL]:
        raise ValueError(f"--mesh: --heads {heads} cannot be split over model={sizes[MODEL]}")
    return jax.make_mesh(
        tuple(sizes.values()),
        tuple(sizes),
        axis_types=(AxisType.Auto,) * len(sizes),
        devices=jax.devices()[:needed],
    )


@dataclasses.dataclass(frozen=True)
class Split:
    """How a model's activations lie on a mesh, and in which order a device group of ``seq`` holds the tokens."""

    mesh: Mesh
    layout: str = "contiguous"

    @property
    def _devices(self) -> int:
        return self.mesh.shape[SEQUENCE]

    def positions(self, length: int) -> np.ndarray:
        """Position in the text of each token as held, int (length,)."""
        return parallel.positions(self.layout, self._devices, length) if self._devices > 1 else np.arange(length)

    def order(self, tokens: jax.Array) -> jax.Array:
        """Tokens (B, T) in the order in which they are held."""
        return jnp.take(tokens, self.positions(tokens.shape[1]), axis=1)

    def restore(self, x: jax.Array) -> jax.Array:
        """Inverse of :meth:`order` for an array (B, T, ...)."""
        return jnp.take(x, np.argsort(self.positions(x.shape[1])), axis=1)

    def place(self, x: jax.Array) -> jax.Array:
        """Activations (B, T, width): rows over ``data``, tokens over ``seq``."""
        if self._devices == 1:
            return x
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, PartitionSpec(DATA, SEQUENCE, None)))


def state_shardings(mesh: Mesh, abstract_state: Any) -> Any:
    """A NamedSharding for each leaf of a training state; the optimizer's moments lie as their parameters do."""

    def place(path: tuple[Any, ...], _: Any) -> NamedSharding:
        names = [str(getattr(entry, "key", getattr(entry, "name", entry))) for entry in path]
        return NamedSharding(mesh, SPLIT_PARAMETERS.get(tuple(names[-2:]), PartitionSpec()))

    return jax.tree_util.tree_map_with_path(place, abstract_state)


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Tokens (B, T + 1): rows are split over ``data``."""
    return NamedSharding(mesh, PartitionSpec(DATA, None))
