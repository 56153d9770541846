"""How a planned call is split over a mesh: by batch and by heads, nothing else.

Axes are named per operand and result (:class:`Dimensions`). Query heads are the compound of key heads and the group's
heads, ``n = k * g``, key head major: a mesh axis that splits query heads splits key heads alike as long as there are
enough of them, then the heads within a group, with key and value replicated over it. The latter not where a result has
key heads (a gradient): it would be a sum over devices.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

BATCH, QUERY_HEADS, KEY_HEADS = "b", "n", "k"
"""Names of the axes that may be split; every other name must be replicated."""


@dataclass(frozen=True)
class Dimensions:
    """Names of the axes of each operand and each result, e.g. ``("btnh", "bskh", "bskv")`` and ``("btnv", "bnt")``.

    One letter an axis; ``b``, ``n`` and ``k`` as above. The first operand has all of ``b`` and ``n``.
    """

    operands: tuple[str, ...]
    results: tuple[str, ...]

    @property
    def splits_groups(self) -> bool:
        """Whether the query heads of one key head may lie on several devices."""
        return not any(KEY_HEADS in names for names in self.results)

    def size(self, name: str, operands: Sequence[Any]) -> int:
        """Length of an axis, from operands with ``shape``."""
        return next(x.shape[names.index(name)] for x, names in zip(operands, self.operands) if name in names)  # noqa: B905


Axes = tuple[str, ...]
"""Mesh axes that split one array axis, outermost first."""


@dataclass(frozen=True)
class Split:
    """Mesh axes by which each kind of array axis is split."""

    batch: Axes = ()
    query_heads: Axes = ()
    key_heads: Axes = ()

    def spec(self, names: str) -> P:
        """Partition spec of an array with these axes."""
        table = {BATCH: self.batch, QUERY_HEADS: self.query_heads, KEY_HEADS: self.key_heads}
        return P(*(_entry(table.get(name, ())) for name in names))


def _entry(axes: Axes) -> Any:
    return None if not axes else axes[0] if len(axes) == 1 else axes


def _axes(entry: Any) -> Axes:
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def choose_split(dimensions: Dimensions, operands: Sequence[Any], spec: P, axis_sizes: dict[str, int]) -> Split:
    """The split that follows the first operand's as far as the call allows.

    Args:
      dimensions: names of the axes.
      operands: with global ``shape``.
      spec: how the first operand is partitioned.
      axis_sizes: sizes of the mesh axes.

    Returns:
      A split in which every local call is a whole call: batch divisible, each device's query heads attend to that
      device's key heads.
    """
    names = dimensions.operands[0]
    entries = [*spec, *(None,) * (len(names) - len(spec))]
    batch = _divisible(_axes(entries[names.index(BATCH)]), dimensions.size(BATCH, operands), axis_sizes)
    heads = _axes(entries[names.index(QUERY_HEADS)])
    key_heads = dimensions.size(KEY_HEADS, operands)
    group = dimensions.size(QUERY_HEADS, operands) // key_heads
    for_keys = _divisible(heads, key_heads, axis_sizes)
    for_keys_size = functools.reduce(lambda n, axis: n * axis_sizes[axis], for_keys, 1)
    # The group's heads can be split only where a device has a single key head: its query heads are contiguous then.
    may_split_group = dimensions.splits_groups and for_keys_size == key_heads
    for_group = _divisible(heads[len(for_keys) :], group, axis_sizes) if may_split_group else ()
    return Split(batch, for_keys + for_group, for_keys)


def _divisible(axes: Axes, size: int, axis_sizes: dict[str, int]) -> Axes:
    """The longest prefix of ``axes`` whose product divides ``size``."""
    product = 1
    for count, axis in enumerate(axes):
        product *= axis_sizes[axis]
        if size % product:
            return axes[:count]
    return axes


def explicit_specs(dimensions: Dimensions, operands: Sequence[Any]) -> list[P]:
    """Partition specs of the results where mesh axes are of Explicit type, from the operands' avals."""
    sharding = operands[0].sharding
    split = choose_split(dimensions, operands, sharding.spec, dict(sharding.mesh.shape))
    return [split.spec(names) for names in dimensions.results]


def sharding_rule(dimensions: Dimensions, operands: Sequence[Any]) -> tuple[str, dict[str, Any]]:
    """Shardy's rule, and its keyword arguments: factors that must be replicated, sizes of the factors of ``n``.

    Shardy takes no compound with a factor of size 1, so ``n`` is ``k`` or ``g`` alone where the other is 1.
    """
    key_heads = dimensions.size(KEY_HEADS, operands)
    group = dimensions.size(QUERY_HEADS, operands) // key_heads
    heads = ("k",) if group == 1 else ("g",) if key_heads == 1 else ("k", "g")
    splittable = {BATCH}
    if "k" in heads:
        splittable.add("k")
    if dimensions.splits_groups:
        splittable.add("g")

    def factors(name: str) -> tuple[str, ...]:
        return heads if name == QUERY_HEADS else (name,)

    def axis(name: str) -> str:
        return f"({' '.join(factors(name))})" if len(factors(name)) > 1 else factors(name)[0]

    def text(arrays: tuple[str, ...]) -> str:
        return ", ".join(" ".join(map(axis, names)) for names in arrays)

    # Shardy wants special factors in the order in which the rule first names them.
    names = "".join(dimensions.operands + dimensions.results)
    order = dict.fromkeys(factor for name in names for factor in factors(name))
    arguments: dict[str, Any] = {"need_replication_factors": tuple(f for f in order if f not in splittable)}
    if len(heads) > 1:
        arguments["g"] = group
    return f"{text(dimensions.operands)} -> {text(dimensions.results)}", arguments


def partitioned(
    part: Callable[..., tuple[jax.Array, ...]], dimensions: Dimensions, operands: Sequence[Any]
) -> Callable[..., tuple[jax.Array, ...]]:
    """A call as a function that the partitioner splits.

    Args:
      part: ``part(split, *operands)``, the call on one device's part; ``Split()`` where nothing is split.
      dimensions: names of the axes.
      operands: avals of the whole call.
    """

    def split_call(mesh: Mesh, arg_shapes: Any, result_shapes: Any) -> Any:
        split = choose_split(dimensions, arg_shapes, arg_shapes[0].sharding.spec, dict(mesh.shape))

        def shardings(arrays: tuple[str, ...]) -> tuple[NamedSharding, ...]:
            return tuple(NamedSharding(mesh, split.spec(names)) for names in arrays)

        return mesh, functools.partial(part, split), shardings(dimensions.results), shardings(dimensions.operands)

    rule, factors = sharding_rule(dimensions, operands)
    # custom_partitioning takes no function with constants; those of a jitted one are its own.
    function = custom_partitioning(jax.jit(functools.partial(part, Split())))
    function.def_partition(partition=split_call, sharding_rule=rule, **factors)
    return function
