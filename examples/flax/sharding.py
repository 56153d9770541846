"""Where arrays live on a mesh of devices: the batch is split over ``data``, the heads and the MLP over ``model``."""

from __future__ import annotations

import argparse
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

DATA, MODEL = "data", "model"

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
    """Reads ``data=N,model=M`` (either may be left out and is then 1).

    Raises:
        argparse.ArgumentTypeError: a name or number that is not allowed.
    """
    sizes = {DATA: 1, MODEL: 1}
    for part in text.split(","):
        name, _, number = part.strip().partition("=")
        if name not in sizes or not number.isdecimal() or int(number) < 1:
            raise argparse.ArgumentTypeError(f"got {part!r}; allowed is data=N,model=M with N and M at least 1")
        sizes[name] = int(number)
    return sizes


def make_mesh(sizes: dict[str, int], batch: int, heads: int) -> Mesh:
    """A mesh of the first N * M devices.

    Raises:
        ValueError: there are too few devices, or the batch or the heads cannot be split evenly.
    """
    needed = sizes[DATA] * sizes[MODEL]
    if needed > jax.device_count():
        raise ValueError(
            f"--mesh: data={sizes[DATA]},model={sizes[MODEL]} needs {needed} devices, there are {jax.device_count()}"
        )
    if batch % sizes[DATA]:
        raise ValueError(f"--mesh: --batch {batch} cannot be split over data={sizes[DATA]}")
    if heads % sizes[MODEL]:
        raise ValueError(f"--mesh: --heads {heads} cannot be split over model={sizes[MODEL]}")
    return jax.make_mesh(
        (sizes[DATA], sizes[MODEL]),
        (DATA, MODEL),
        axis_types=(AxisType.Auto, AxisType.Auto),
        devices=jax.devices()[:needed],
    )


def state_shardings(mesh: Mesh, abstract_state: Any) -> Any:
    """A NamedSharding for each leaf of a training state; the optimizer's moments lie as their parameters do."""

    def place(path: tuple[Any, ...], _: Any) -> NamedSharding:
        names = [str(getattr(entry, "key", getattr(entry, "name", entry))) for entry in path]
        return NamedSharding(mesh, SPLIT_PARAMETERS.get(tuple(names[-2:]), PartitionSpec()))

    return jax.tree_util.tree_map_with_path(place, abstract_state)


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Tokens (B, T + 1): rows are split over ``data``."""
    return NamedSharding(mesh, PartitionSpec(DATA, None))
