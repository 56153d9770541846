"""Splits an implementation written for one device over a mesh: by batch and by heads, without communication.

On Explicit mesh axes the operands' types say how they are split, and ``jax.shard_map`` runs one part on each device. On
Auto axes only the partitioner knows, so it is given a rule (``custom_partitioning``, through
:mod:`jax_fa4.ffi.partition`, which the kernels use too). The gradient of an operand that has no batch or no heads, such
as a bias shared by the batch or the sinks, is summed over the mesh axes that split those.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import Array, lax
from jax.custom_batching import custom_vmap
from jax.sharding import AxisType, NamedSharding

from jax_fa4.config import DIFFERENTIABLE, AttentionConfig, Gradients, Operands
from jax_fa4.ffi.partition import BATCH, KEY_HEADS, QUERY_HEADS, Dimensions, Split, choose_split, partitioned
from jax_fa4.implementations.base import Backward, Forward
from jax_fa4.varying import vary, varying_axes

AXES = {
    "query": "bTnh",
    "key": "bSkh",
    "value": "bSkv",
    "bias": "bnTS",
    "mask": "bnTS",
    "sinks": "n",
    "scale": "",
    "query_offset": "b",
    "query_lengths": "b",
    "key_value_lengths": "b",
    "query_segment_ids": "bT",
    "key_value_segment_ids": "bS",
}
"""Names of the axes of each operand, as :class:`~jax_fa4.ffi.partition.Dimensions` has them."""
OUT_AXES, LSE_AXES = "bTnv", "bnT"

BROADCAST = dict(zip("bnTS", "wxyz", strict=True))
"""Name of an axis of length 1 that stands for a longer one: it is not split."""

Local = Callable[..., tuple[Array, ...]]
"""(split, *operands) -> results, on one device's parts."""


def split_forward(local: Forward) -> Forward:
    """The forward for operands that may be split over a mesh."""

    def forward(config: AttentionConfig, operands: Operands) -> tuple[Array, Array]:
        names, arrays = _present(operands)

        def part(split: Split, *arrays: Array) -> tuple[Array, ...]:
            return local(config, operands._replace(**dict(zip(names, arrays, strict=True))))

        out, lse = _run(part, Dimensions(_axes(operands, names), (OUT_AXES, LSE_AXES)), arrays)
        return out, lse

    return forward


def split_backward(local: Backward) -> Backward:
    """The backward for operands that may be split over a mesh."""

    def backward(
        config: AttentionConfig,
        operands: Operands,
        out: Array,
        lse: Array,
        d_out: Array,
        d_lse: Array | None,
        wanted: frozenset[str],
    ) -> Gradients:
        names, arrays = _present(operands)
        axes = dict(zip(names, _axes(operands, names), strict=True))
        results = [name for name in DIFFERENTIABLE if name in wanted]
        extra = [out, lse, d_out] if d_lse is None else [out, lse, d_out, d_lse]
        extra_axes = [OUT_AXES, LSE_AXES, OUT_AXES, LSE_AXES][: len(extra)]

        def part(split: Split, *arrays: Array) -> tuple[Array, ...]:
            own = operands._replace(**dict(zip(names, arrays, strict=False)))
            out, lse, d_out, *rest = arrays[len(names) :]
            gradients = local(config, own, out, lse, d_out, rest[0] if rest else None, wanted)
            return tuple(_summed(getattr(gradients, name), axes[name], split) for name in results)

        dimensions = Dimensions((*axes.values(), *extra_axes), tuple(axes[name] for name in results))
        return Gradients(**dict(zip(results, _run(part, dimensions, [*arrays, *extra]), strict=True)))

    return backward


def _present(operands: Operands) -> tuple[list[str], list[Array]]:
    present = {name: x for name, x in operands._asdict().items() if x is not None}
    return list(present), list(present.values())


def _axes(operands: Operands, names: Sequence[str]) -> tuple[str, ...]:
    """Axis names of the operands, those that broadcast replaced (only bias and mask have any)."""

    def one(name: str) -> str:
        if name not in ("bias", "mask"):
            return AXES[name]
        lengths = zip(AXES[name], getattr(operands, name).shape, strict=True)
        return "".join(BROADCAST[axis] if length == 1 else axis for axis, length in lengths)

    return tuple(one(name) for name in names)


def _summed(gradient: Array, axes: str, split: Split) -> Array:
    """A gradient summed over the mesh axes along which its operand is whole."""
    over = () if BATCH in axes else split.batch
    if QUERY_HEADS not in axes:
        heads = split.key_heads if KEY_HEADS in axes else ()
        over += tuple(axis for axis in split.query_heads if axis not in heads)
    return lax.psum(gradient, over) if over else gradient


def _run(part: Local, dimensions: Dimensions, arrays: Sequence[Array]) -> tuple[Array, ...]:
    mesh = jax.typeof(arrays[0]).sharding.mesh
    if AxisType.Manual in mesh.axis_types and AxisType.Explicit not in mesh.axis_types:
        return part(Split(), *arrays)

    @custom_vmap
    def run(*arrays: Array) -> tuple[Array, ...]:
        if AxisType.Explicit in mesh.axis_types:
            return _run_explicit(part, dimensions, arrays)
        return partitioned(part, dimensions, arrays)(*arrays)

    @run.def_vmap
    def mapped(size: int, batched: list[bool], *arrays: Array) -> tuple[Any, Any]:
        # Partitioning rules cannot be batched: the mapped axis becomes one of the call's own, and may be split.
        axes = [0 if b else None for b in batched]

        def mapped_part(split: Split, *arrays: Array) -> tuple[Array, ...]:
            return jax.vmap(functools.partial(part, split), in_axes=axes)(*arrays)

        results = _run(mapped_part, dimensions.under_vmap(batched), arrays)
        return results, tuple(True for _ in results)

    return run(*arrays)


def _run_explicit(part: Local, dimensions: Dimensions, arrays: Sequence[Array]) -> tuple[Array, ...]:
    mesh = jax.typeof(arrays[0]).sharding.mesh
    specs = [jax.typeof(x).sharding.spec for x in arrays]
    split = choose_split(dimensions, arrays, specs, dict(mesh.shape))
    # None named means all: under vmap, the mesh to map over may have fewer axes than the arrays' types.
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True)) if AxisType.Manual in mesh.axis_types else {}
    run = jax.shard_map(
        functools.partial(part, split),
        in_specs=tuple(split.spec(axes) for axes in dimensions.operands),
        out_specs=tuple(split.spec(axes) for axes in dimensions.results),
        axis_names={name for name, kind in kinds.items() if kind != AxisType.Manual},
        check_vma=False,  # no differentiation passes through here, and the sums are explicit
    )
    wanted = (NamedSharding(mesh, split.spec(axes)) for axes in dimensions.operands)
    results = run(*(jax.sharding.reshard(x, want) for x, want in zip(arrays, wanted, strict=True)))
    return tuple(vary(varying_axes(arrays), *results))  # over the axes of a shard_map around this one
