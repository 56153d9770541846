"""A JAX primitive for calls that a LaunchPlan carries out. Knows nothing of attention.

What is called is an :class:`Operation`, the primitive's only parameter. It gives the results' shapes, and the plan for
concrete shapes on a target; everything else is the same for all of them and lives here: abstract evaluation (with
manual and explicit mesh axes), batching, partitioning, and the lowering to the custom call.

Every operand and every result of an operation has the batch as its first axis, and batch entries are independent. So
``vmap`` puts the mapped axis in front of the batch, for all operands and results, and it is folded into the batch where
one device's part of the call is known: folded earlier, a split of the inner of the two could not be stated.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax._src import dispatch  # prim_requires_devices_during_lowering has no public name
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir
from jax.sharding import AxisType

from jax_fa4.varying import vary, varying_axes

from . import partition
from .plan import LaunchPlan
from .register import TARGET_NAME, register, unavailable_reason
from .wire import encode


class Compiled(Protocol):
    """What a call needs of a compiled kernel."""

    @property
    def sha256(self) -> str: ...

    @property
    def cubin(self) -> bytes: ...


@dataclass(frozen=True)
class Target:
    """The device to plan for.

    ``arch`` as in KernelSpec ("sm_90a", "sm_100f"). ``multiprocessors``: their number; ``capability``: the compute
    capability, such as "10.3". Both None where no device is at hand.
    """

    arch: str
    multiprocessors: int | None = None
    capability: str | None = None


@dataclass(frozen=True)
class Planned:
    """A plan with all it refers to. Buffers: the call's operands, its results, then ``scratch``."""

    plan: LaunchPlan
    artefacts: tuple[Compiled, ...]
    scratch: tuple[jax.ShapeDtypeStruct, ...] = ()


class Operation(Protocol):
    """One kind of call with its static parameters. Must be hashable; equal operations share compilations."""

    @property
    def arch(self) -> str | None:
        """Architecture to compile for, or None for that of the CUDA devices at hand when the call is lowered."""

    @property
    def dimensions(self) -> partition.Dimensions:
        """Names of the axes of all operands and results."""

    def results(self, operands: Sequence[Any]) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Shapes and dtypes of the results for operands with ``shape`` and ``dtype``."""

    def plan(self, operands: Sequence[Any], target: Target) -> Planned:
        """The plan for concrete shapes on a target. Errors are raised to the user, at lowering."""

    def elsewhere(self, *operands: jax.Array) -> Sequence[jax.Array]:
        """The call as JAX operations, for platforms other than CUDA; raises where there is none."""


def call(operation: Operation, *operands: jax.Array) -> tuple[jax.Array, ...]:
    """Calls an operation.

    Args:
      operation: what to call.
      operands: arrays, batch first.

    Returns:
      The results in the operation's order.
    """
    return tuple(kernel_call_p.bind(*vary(varying_axes(operands), *operands), operation=operation, mapped=0))


def detect_target() -> Target:
    """The CUDA devices of this process.

    Raises:
      ValueError: there are none, or the kernels are for none of them.
    """
    try:
        device = jax.local_devices(backend="cuda")[0]
    except RuntimeError as error:
        raise ValueError(
            "kernels are compiled for the architecture of the CUDA devices at hand, and JAX sees none here; to lower "
            f"for a GPU elsewhere, name its architecture (for attention: implementation='fa4:sm_90a'): {error}"
        ) from error
    capability = str(getattr(device, "compute_capability", ""))
    arch = arch_of(capability)
    if arch is None:
        raise ValueError(f"{device.device_kind} has compute capability {capability}; the kernels are for 9.0 and 10.x")
    return Target(arch, getattr(device, "core_count", None) or None, capability)


def arch_of(capability: str) -> str | None:
    """Architecture of our kernels for a compute capability such as "9.0", or None."""
    if capability == "9.0":
        return "sm_90a"
    return "sm_100f" if capability.startswith("10.") else None


kernel_call_p = Primitive("jax_fa4_kernel_call")
"""Operands and results of an :class:`Operation`, with ``mapped`` axes in front of the batch. Partitioned over mesh axes
that JAX manages."""

local_call_p = Primitive("jax_fa4_local_call")
"""The same on one device; what :data:`kernel_call_p` becomes when lowered."""

kernel_call_p.multiple_results = True
local_call_p.multiple_results = True
dispatch.prim_requires_devices_during_lowering.add(kernel_call_p)


def _fold(shape: tuple[int, ...], mapped: int) -> tuple[int, ...]:
    """The shape with ``mapped`` axes folded into the batch."""
    return (math.prod(shape[: mapped + 1]), *shape[mapped + 1 :])


def _dimensions(operation: Operation, mapped: int) -> partition.Dimensions:
    dimensions = operation.dimensions
    for _ in range(mapped):
        dimensions = dimensions.under_vmap()
    return dimensions


def _abstract_eval(*operands: Any, operation: Operation, mapped: int = 0) -> list[Any]:
    first = operands[0]
    results = operation.results([jax.core.ShapedArray(_fold(x.shape, mapped), x.dtype) for x in operands])
    specs = partition.explicit_specs(_dimensions(operation, mapped), operands)
    return [
        first.update(
            shape=(*first.shape[: mapped + 1], *result.shape[1:]),
            dtype=jnp.dtype(result.dtype),
            weak_type=False,
            sharding=first.sharding.update(spec=spec),
        )
        for result, spec in zip(results, specs, strict=True)
    ]


@functools.partial(jax.jit, static_argnums=(0, 1))
def _run(operation: Operation, mapped: int, *operands: jax.Array) -> list[jax.Array]:
    return kernel_call_p.bind(*operands, operation=operation, mapped=mapped)


def _impl(*operands: jax.Array, operation: Operation, mapped: int) -> list[jax.Array]:
    return _run(operation, mapped, *operands)


def _batch(
    operands: Sequence[Any], axes: Sequence[int | None], *, operation: Operation, mapped: int
) -> tuple[list[Any], list[int]]:
    size = next(x.shape[axis] for x, axis in zip(operands, axes, strict=True) if axis is not None)

    def in_front(x: Any, axis: int | None) -> Any:
        return jnp.broadcast_to(x, (size, *x.shape)) if axis is None else jnp.moveaxis(x, axis, 0)

    moved = [in_front(x, axis) for x, axis in zip(operands, axes, strict=True)]
    results = kernel_call_p.bind(*vary(varying_axes(moved), *moved), operation=operation, mapped=mapped + 1)
    return results, [0] * len(results)


def _lower(ctx: mlir.LoweringRuleContext, *operands: Any, operation: Operation, mapped: int) -> Any:
    part = functools.partial(_local_call, operation, mapped)
    avals: Sequence[Any] = ctx.avals_in
    types = set(avals[0].sharding.mesh.axis_types)
    if AxisType.Manual in types and len(types) > 1:
        # Inside a shard_map over some of the axes the partitioner cannot be asked: along the others the call is whole.
        lowered = mlir.lower_fun(functools.partial(part, partition.Split()), multiple_results=True)
    else:
        partitioned = partition.partitioned(part, _dimensions(operation, mapped), avals)
        lowered = mlir.lower_fun(partitioned, multiple_results=True)
    if AxisType.Explicit not in types:
        return lowered(ctx, *operands)
    return _without_mesh(lowered, ctx, *operands)


def _without_mesh(lowered: Any, ctx: mlir.LoweringRuleContext, *operands: Any) -> Any:
    """Lowers with types that know no mesh, whatever mesh the caller has set: for one device's part of a call."""
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
        avals: Sequence[Any] = ctx.avals_in
        return lowered(ctx.replace(avals_in=[jax.core.ShapedArray(x.shape, x.dtype) for x in avals]), *operands)


def _local_call(
    operation: Operation, mapped: int, split: partition.Split, *operands: jax.Array
) -> tuple[jax.Array, ...]:
    if not mapped:
        return tuple(local_call_p.bind(*operands, operation=operation))
    leading = operands[0].shape[: mapped + 1]
    folded = (jnp.reshape(x, _fold(x.shape, mapped)) for x in operands)
    results = local_call_p.bind(*folded, operation=operation)
    return tuple(jnp.reshape(x, (*leading, *x.shape[1:])) for x in results)


def _lower_local_elsewhere(ctx: mlir.LoweringRuleContext, *operands: Any, operation: Operation) -> Any:
    return _without_mesh(mlir.lower_fun(operation.elsewhere, multiple_results=True), ctx, *operands)


def _lower_local_cuda(ctx: mlir.LoweringRuleContext, *operands: Any, operation: Operation) -> Any:
    target = detect_target() if operation.arch is None else Target(operation.arch)
    if _has_cuda_device():
        register()  # raises if the library is missing; a machine that only lowers for another does without
    avals_out = [*ctx.avals_out]
    planned = operation.plan(ctx.avals_in, target)
    avals_out += [jax.core.ShapedArray(x.shape, x.dtype) for x in planned.scratch]
    sizes = [math.prod(x.shape) * x.dtype.itemsize for x in (*ctx.avals_in, *avals_out)]
    plan, cubins = encode(planned.plan, sizes, {artefact.sha256: artefact.cubin for artefact in planned.artefacts})
    lowered = jax.ffi.ffi_lowering(TARGET_NAME)(ctx.replace(avals_out=avals_out), *operands, plan=plan, cubins=cubins)
    return lowered[: len(ctx.avals_out)]


def _has_cuda_device() -> bool:
    try:
        return bool(jax.local_devices(backend="cuda"))
    except RuntimeError:
        return False


# Registered as soon as this module is there, not only when a call is lowered: a program that was exported elsewhere
# and is run here lowers nothing.
unavailable_reason()

for _primitive in (kernel_call_p, local_call_p):
    _primitive.def_abstract_eval(_abstract_eval)
kernel_call_p.def_impl(_impl)
batching.primitive_batchers[kernel_call_p] = _batch
mlir.register_lowering(kernel_call_p, _lower)
mlir.register_lowering(local_call_p, _lower_local_elsewhere)
mlir.register_lowering(local_call_p, _lower_local_cuda, platform="cuda")
