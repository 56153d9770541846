"""How a planned call is split over a mesh: by batch, by heads and by axes that ``vmap`` has added, nothing else.

Axes are named per operand and result (:class:`Dimensions`). Query heads are the compound of key heads and the group's
heads, ``n = k * g``, key head major: a mesh axis that splits query heads splits key heads alike as long as there are
enough of them, then the heads within a group, with key and value replicated over it. The latter not where a result has
key heads (a gradient): it would be a sum over devices.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental.custom_partitioning import custom_partitioning
from jax.experimental.xla_metadata import set_xla_metadata
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, jaxpr_as_fun
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

BATCH, QUERY_HEADS, KEY_HEADS = "b", "n", "k"
"""Names of the axes that may be split; every other name must be replicated."""

MAPPED = "0123456789"
"""Names of axes that ``vmap`` has added, the outermost last. They may be split too, like the batch."""


@dataclass(frozen=True)
class Dimensions:
    """Names of the axes of each operand and each result, e.g. ``("btnh", "bskh", "bskv")`` and ``("btnv", "bnt")``.

    One character an axis; ``b``, ``n``, ``k`` and digits as above. The first operand has all of ``b`` and ``n``.
    """

    operands: tuple[str, ...]
    results: tuple[str, ...]

    @property
    def splits_groups(self) -> bool:
        """Whether the query heads of one key head may lie on several devices."""
        return not any(KEY_HEADS in names for names in self.results)

    def under_vmap(self, batched: Sequence[bool] | None = None) -> Dimensions:
        """With one more axis in front of all results and of the ``batched`` operands (default: of all)."""
        name = next(name for name in MAPPED if not any(name in names for names in self.operands))
        batched = (True,) * len(self.operands) if batched is None else batched
        operands = (name + names if b else names for names, b in zip(self.operands, batched, strict=True))
        return Dimensions(tuple(operands), tuple(name + names for names in self.results))

    @property
    def mapped(self) -> tuple[str, ...]:
        """Names of the axes that ``vmap`` has added."""
        return tuple(name for name in MAPPED if any(name in names for names in self.operands))

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
    mapped: tuple[tuple[str, Axes], ...] = ()

    def spec(self, names: str) -> P:
        """Partition spec of an array with these axes."""
        table = {BATCH: self.batch, QUERY_HEADS: self.query_heads, KEY_HEADS: self.key_heads, **dict(self.mapped)}
        return P(*(_entry(table.get(name, ())) for name in names))


def _entry(axes: Axes) -> Any:
    return None if not axes else axes[0] if len(axes) == 1 else axes


def _axes(entry: Any) -> Axes:
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def choose_split(
    dimensions: Dimensions, operands: Sequence[Any], specs: Sequence[P], axis_sizes: dict[str, int]
) -> Split:
    """The split that follows the operands' as far as the call allows.

    Args:
      dimensions: names of the axes.
      operands: with global ``shape``.
      specs: how the operands are partitioned. The first decides on batch and heads; on each axis that ``vmap`` has
        added, the first that splits it.
      axis_sizes: sizes of the mesh axes.

    Returns:
      A split in which every local call is a whole call: batch divisible, each device's query heads attend to that
      device's key heads.
    """

    def axes_of(name: str, names: str, spec: P) -> Axes:
        position = names.find(name)
        return _axes(spec[position]) if 0 <= position < len(spec) else ()

    batch_axes, heads = (axes_of(name, dimensions.operands[0], specs[0]) for name in (BATCH, QUERY_HEADS))
    batch = _divisible(batch_axes, dimensions.size(BATCH, operands), axis_sizes)
    key_heads = dimensions.size(KEY_HEADS, operands)
    group = dimensions.size(QUERY_HEADS, operands) // key_heads
    for_keys = _divisible(heads, key_heads, axis_sizes)
    for_keys_size = functools.reduce(lambda n, axis: n * axis_sizes[axis], for_keys, 1)
    # The group's heads can be split only where a device has a single key head: its query heads are contiguous then.
    may_split_group = dimensions.splits_groups and for_keys_size == key_heads
    for_group = _divisible(heads[len(for_keys) :], group, axis_sizes) if may_split_group else ()
    used = {*batch, *for_keys, *for_group}
    mapped = []
    for name in dimensions.mapped:
        given = (axes_of(name, names, spec) for names, spec in zip(dimensions.operands, specs, strict=True))
        free = tuple(axis for axis in next(filter(None, given), ()) if axis not in used)
        axes = _divisible(free, dimensions.size(name, operands), axis_sizes)
        used.update(axes)
        if axes:
            mapped.append((name, axes))
    return Split(batch, for_keys + for_group, for_keys, tuple(mapped))


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
    specs = [x.sharding.spec for x in operands]
    split = choose_split(dimensions, operands, specs, dict(sharding.mesh.shape))
    return [split.spec(names) for names in dimensions.results]


def sharding_rule(dimensions: Dimensions, operands: Sequence[Any]) -> tuple[str, dict[str, Any]]:
    """Shardy's rule, and its keyword arguments: factors that must be replicated, sizes of the factors of ``n``.

    Shardy takes no compound with a factor of size 1, so ``n`` is ``k`` or ``g`` alone where the other is 1.
    """
    key_heads = dimensions.size(KEY_HEADS, operands)
    group = dimensions.size(QUERY_HEADS, operands) // key_heads
    heads = ("k",) if group == 1 else ("g",) if key_heads == 1 else ("k", "g")
    splittable = {BATCH, *map(_factor, dimensions.mapped)}
    if "k" in heads:
        splittable.add("k")
    if dimensions.splits_groups:
        splittable.add("g")

    # Every other axis has a factor of its own in each array: the partitioner carries no split of it from one to
    # another, such as that of a sequence which a caller splits in the results.
    numbers = itertools.count()

    def axis(name: str) -> tuple[str, ...]:
        if name == QUERY_HEADS:
            return heads
        factor = _factor(name)
        return (factor,) if factor in splittable or factor in heads else (f"{factor}{next(numbers)}",)

    rows = [[axis(name) for name in names] for names in dimensions.operands + dimensions.results]
    texts = [" ".join(f"({' '.join(fs)})" if len(fs) > 1 else fs[0] for fs in row) for row in rows]
    count = len(dimensions.operands)
    # Shardy wants special factors in the order in which the rule first names them.
    order = dict.fromkeys(factor for row in rows for fs in row for factor in fs)
    arguments: dict[str, Any] = {"need_replication_factors": tuple(f for f in order if f not in splittable)}
    if len(heads) > 1:
        arguments["g"] = group
    return f"{', '.join(texts[:count])} -> {', '.join(texts[count:])}", arguments


def _factor(name: str) -> str:
    """Shardy's factors have names that begin with a letter."""
    return f"m{name}" if name in MAPPED else name


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
        specs = [x.sharding.spec for x in arg_shapes]
        split = choose_split(dimensions, arg_shapes, specs, dict(mesh.shape))

        def shardings(arrays: tuple[str, ...]) -> tuple[NamedSharding, ...]:
            return tuple(NamedSharding(mesh, split.spec(names)) for names in arrays)

        return mesh, functools.partial(part, split), shardings(dimensions.results), shardings(dimensions.operands)

    rule, factors = sharding_rule(dimensions, operands)

    def function(*operands: jax.Array) -> tuple[jax.Array, ...]:
        jaxpr = jax.jit(functools.partial(part, Split())).trace(*operands).jaxpr
        # custom_partitioning takes no function with constants; those of a jitted one are its own.
        run = jaxpr_as_fun(jaxpr)
        whole = custom_partitioning(jax.jit(lambda *operands: tuple(run(*operands))))
        whole.def_partition(partition=split_call, sharding_rule=rule, **factors)
        with set_xla_metadata(jax_fa4=_digest(jaxpr, dimensions)):
            return whole(*operands)

    return function


def _digest(jaxpr: ClosedJaxpr, dimensions: Dimensions) -> str:
    """Names a call by what it computes, the same in every process with the same sources of this package.

    In the program, a call to be partitioned is only a pointer into this process. JAX's persistent compilation cache
    leaves it out of its keys where ``jax_remove_custom_partitioning_ptr_from_cache_key`` is set, and would take calls
    that differ in their mask alone for one another if nothing else in the program told them apart. The sources stand
    for what the call becomes when it is split and lowered, after an upgrade too.
    """
    digest = hashlib.sha256(f"{dimensions}\n{re.sub(r' at 0x[0-9a-f]+', '', str(jaxpr))}".encode())
    digest.update(_sources())
    for constant in _constants(jaxpr.jaxpr, jaxpr.consts):
        digest.update(np.asarray(constant).tobytes())
    return digest.hexdigest()


@functools.cache
def _sources() -> bytes:
    """SHA-256 of the package's Python files, names and contents."""
    root = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.digest()


def _constants(jaxpr: Jaxpr, constants: Sequence[Any]) -> Iterator[Any]:
    """Constants of a jaxpr and of those within it, of which its text shows shapes only."""
    yield from constants
    for equation in jaxpr.eqns:
        yield from (x.val for x in equation.invars if isinstance(x, Literal))
        for parameter in jax.tree.leaves(list(equation.params.values())):
            if isinstance(parameter, ClosedJaxpr):
                yield from _constants(parameter.jaxpr, parameter.consts)
            elif isinstance(parameter, Jaxpr):
                yield from _constants(parameter, ())
