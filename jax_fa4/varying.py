"""Varying types of arrays inside ``jax.shard_map``: over which mesh axes an array's value differs between devices."""

from __future__ import annotations

from typing import Any

import jax
from jax import Array, lax


def varying_axes(tree: Any) -> frozenset[Any]:
    """Union of the mesh axes over which a pytree's arrays vary; empty outside shard_map and without check_vma."""
    return frozenset[Any]().union(*(jax.typeof(x).manual_axis_type.varying for x in jax.tree.leaves(tree)))


def vary(axes: frozenset[Any], *arrays: Array) -> list[Array]:
    """Casts each array to vary over ``axes`` too.

    The gradient of an operand that is replicated over an axis on which others vary is a sum over that axis; the cast's
    transpose is that sum. Left to a custom rule, it would be dropped silently.
    """

    def one(x: Array) -> Array:
        missing = tuple(sorted(axes - jax.typeof(x).manual_axis_type.varying))
        return lax.pcast(x, missing, to="varying") if missing else x

    return [one(x) for x in arrays]
