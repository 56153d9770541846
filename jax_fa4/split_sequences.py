"""Refuses operands whose sequence axis is split over a mesh, under ``jit`` too.

Attention of a split sequence needs a strategy (:mod:`jax_fa4.parallel`). Left to the partitioner, it would gather the
sequence on every device, silently. On Explicit mesh axes an array's type says how it is split, outside of ``jit`` the
array itself; on Auto axes only the partitioner knows, so that operands pass through a primitive of ours, an identity,
about which it asks. What it finds there comes from the program before the call: through the identity, as through the
attention, it carries no split of a sequence backwards, so that a caller may split results as he likes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax import Array
from jax._src import dispatch  # prim_requires_devices_during_lowering has no public name
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

whole_p = Primitive("jax_fa4_whole")
"""The identity of an array, whole along ``axis`` from here on, whatever split its users would like.

``operand`` names an operand, which may not come split. None: it may, and is gathered.
"""

SEQUENCE_AXIS = 1


def refuse_split(name: str, x: Array) -> Array:
    """``x``, (B, length, heads, head_dim), unchanged.

    Raises:
      ValueError: its sequence axis is split over a mesh, where type or array tell. Under ``jit`` with Auto axes the
        same message comes from the compiler, as a ``jax.errors.JaxRuntimeError``.
    """
    spec = jax.typeof(x).sharding.spec
    if not isinstance(x, jax.core.Tracer) and isinstance(x.sharding, NamedSharding):
        spec = x.sharding.spec
    if len(spec) > SEQUENCE_AXIS and spec[SEQUENCE_AXIS] is not None:
        raise ValueError(_message(name, spec[SEQUENCE_AXIS]))
    return _whole(x, name, SEQUENCE_AXIS)


def make_whole(x: Array, axis: int) -> Array:
    """``x`` unchanged; along ``axis`` the partitioner carries no split from its users to it."""
    return _whole(x, None, axis)


def _whole(x: Array, operand: str | None, axis: int) -> Array:
    types = jax.typeof(x).sharding.mesh.axis_types
    if AxisType.Manual in types or (types and AxisType.Auto not in types):
        return x  # the partitioner has nothing to decide, or (inside a shard_map over some axes) cannot be asked
    return whole_p.bind(x, operand=operand, axis=axis)


def _message(name: str, axes: Any) -> str:
    return (
        f"{name}: got its sequence axis split over mesh axis {axes!r}; expected at most batch and heads to be split. "
        "For a split sequence use jax_fa4.parallel: make_attention, or ring_attention, all_gather_attention or "
        "ulysses_attention inside jax.shard_map. To have the sequence gathered on every device, say so with "
        f"jax.lax.with_sharding_constraint on {name}"
    )


def _lower(ctx: mlir.LoweringRuleContext, x: Any, *, operand: str | None, axis: int) -> Sequence[Any]:
    if ctx.module_context.lowering_parameters.for_export:
        return [x]  # an exported program cannot carry what the partitioner would ask
    aval: Any = ctx.avals_in[0]

    def split_call(mesh: Mesh, arg_shapes: Any, result_shapes: Any) -> Any:
        spec = arg_shapes[0].sharding.spec
        entries = [*spec, *(None,) * (aval.ndim - len(spec))]
        if operand is not None and entries[axis] is not None:
            raise ValueError(_message(operand, entries[axis]))
        entries[axis] = None
        whole = NamedSharding(mesh, PartitionSpec(*entries))
        return mesh, lambda x: x, whole, (whole,)

    # Factors of their own for the axis on either side: no split passes from one to the other.
    before = [f"i{n}" for n in range(aval.ndim)]
    after = [f"o{n}" if n == axis else name for n, name in enumerate(before)]
    replicated = [after[axis]] if operand is not None else [before[axis], after[axis]]
    identity = custom_partitioning(lambda x: x)
    identity.def_partition(
        partition=split_call,
        sharding_rule=f"{' '.join(before)} -> {' '.join(after)}",
        need_replication_factors=tuple(replicated),
    )
    return mlir.lower_fun(identity, multiple_results=False)(ctx, x)


def _batch(operands: Sequence[Any], axes: Sequence[int], *, operand: str | None, axis: int) -> tuple[Any, int]:
    (x,), (mapped,) = operands, axes
    return whole_p.bind(x, operand=operand, axis=axis + (mapped <= axis)), mapped


whole_p.def_abstract_eval(lambda x, **_: x)
whole_p.def_impl(lambda x, **_: x)
ad.deflinear2(whole_p, lambda cotangent, *_, **__: [cotangent])
batching.primitive_batchers[whole_p] = _batch
mlir.register_lowering(whole_p, _lower)
dispatch.prim_requires_devices_during_lowering.add(whole_p)
