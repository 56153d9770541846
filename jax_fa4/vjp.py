"""The differentiation rule that every implementation with its own backward shares.

Residuals are the operands, the output and its log-sum-exp: O(T + S). Output and log-sum-exp carry checkpoint names, so
that a rematerialization policy such as ``jax.checkpoint_policies.save_only_these_names(OUT_NAME, LSE_NAME)`` keeps them
and the forward does not run again in the backward pass.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero
from jax.sharding import AxisType, NamedSharding

from jax_fa4.config import DIFFERENTIABLE, AttentionConfig, Gradients, Operands
from jax_fa4.implementations.base import Implementation
from jax_fa4.split_sequences import make_whole, refuse_split
from jax_fa4.varying import vary, varying_axes

OUT_NAME = "jax_fa4_out"
"""Checkpoint name of the output."""
LSE_NAME = "jax_fa4_lse"
"""Checkpoint name of the log-sum-exp."""


def attend(implementation: Implementation, config: AttentionConfig, operands: Operands) -> tuple[Array, Array]:
    """(out, lse) by one implementation, differentiable in both.

    An implementation without a backward is differentiated by JAX; the others get the rule below. The sequence of query,
    key or value may not be split over a mesh (see :mod:`jax_fa4.split_sequences`).
    """
    operands = operands._replace(
        **{name: refuse_split(name, getattr(operands, name)) for name in ("query", "key", "value")}
    )
    if implementation.backward is None:
        out, lse = _forward(implementation, config, operands)
        return _named(make_whole(out, 1), make_whole(lse, 2))
    return _attend(implementation, config, _vary_alike(operands))


def _named(out: Array, lse: Array) -> tuple[Array, Array]:
    return checkpoint_name(out, OUT_NAME), checkpoint_name(lse, LSE_NAME)


def _vary_alike(operands: Operands) -> Operands:
    """Inside shard_map, makes every operand vary over all the axes over which one does (see :func:`vary`)."""
    leaves, tree = jax.tree.flatten(operands)
    return jax.tree.unflatten(tree, vary(varying_axes(operands), *leaves))


# The functions below are jitted so that an eager call is one compiled program, and so that a choice that depends on
# the platform is made for the devices on which the operands lie.
@functools.partial(jax.jit, static_argnums=(0, 1))
def _forward(implementation: Implementation, config: AttentionConfig, operands: Operands) -> tuple[Array, Array]:
    out, lse = implementation.forward(config, operands)
    if implementation.backward is None:
        return out, lse
    return _depend_on_all(out, operands), _depend_on_all(lse, operands)


@functools.partial(jax.jit, static_argnums=(0, 1, 7))
def _backward(
    implementation: Implementation,
    config: AttentionConfig,
    operands: Operands,
    out: Array,
    lse: Array,
    d_out: Array,
    d_lse: Array | None,
    wanted: frozenset[str],
) -> Gradients:
    assert implementation.backward is not None
    return implementation.backward(config, operands, out, lse, d_out, d_lse, wanted)


def _depend_on_all(result: Array, operands: Operands) -> Array:
    """``result`` unchanged, but an output of every operand as far as JAX can see.

    If only ``value`` is mapped by vmap, lse does not depend on the mapped axis; a custom_vjp output that is not mapped
    has its cotangent counted once for each element of the axis (or, in newer JAX, raises). The selection, which XLA
    removes, makes both outputs mapped as soon as any operand is.
    """

    def first(x: Array) -> Array:
        # An axis that an Explicit mesh splits cannot be cut to length 1.
        split = any(jax.typeof(x).sharding.spec)
        return x if split else lax.slice(x, (0,) * x.ndim, tuple(min(1, n) for n in x.shape))

    return jnp.where(True, result, sum(jnp.sum(first(x).astype(result.dtype)) for x in jax.tree.leaves(operands)))


def _split_like(gradient: Array, operand: Array) -> Array:
    """The gradient split over Explicit mesh axes as its operand is, however the call was split."""
    wanted = jax.typeof(operand).sharding
    if AxisType.Explicit not in wanted.mesh.axis_types or jax.typeof(gradient).sharding.spec == wanted.spec:
        return gradient
    return jax.sharding.reshard(gradient, NamedSharding(wanted.mesh, wanted.spec))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(implementation: Implementation, config: AttentionConfig, operands: Operands) -> tuple[Array, Array]:
    return _named(*_forward(implementation, config, operands))


@jax.tree_util.register_static
@dataclass(frozen=True)
class _Wanted:
    """Names of the operands whose gradient is used; static, so that the backward can skip the others."""

    names: frozenset[str]


def _attend_fwd(
    implementation: Implementation, config: AttentionConfig, primals: Operands
) -> tuple[tuple[Array, Array], Any]:
    names = (name for name in DIFFERENTIABLE if getattr(primals, name) is not None)
    wanted = _Wanted(frozenset(name for name in names if getattr(primals, name).perturbed))
    operands = jax.tree.map(lambda primal: primal.value, primals, is_leaf=lambda x: hasattr(x, "perturbed"))
    # Not through the function above: a rematerialization policy does not see names inside another custom_vjp call.
    out, lse = _named(*_forward(implementation, config, operands))
    return (out, lse), (operands, out, lse, wanted)


def _attend_bwd(
    implementation: Implementation, config: AttentionConfig, residuals: Any, cotangents: tuple[Any, Any]
) -> tuple[Operands]:
    operands, out, lse, wanted = residuals
    d_out, d_lse = cotangents
    if isinstance(d_out, SymbolicZero):
        d_out = jnp.zeros_like(out)
    if isinstance(d_lse, SymbolicZero):
        d_lse = None
    else:
        # The LSE of a row that sees nothing is a constant; what a function of -inf has as derivative may be NaN.
        d_lse = jnp.where(lse == -jnp.inf, 0, d_lse)
    gradients = _backward(implementation, config, operands, out, lse, d_out, d_lse, wanted.names)
    gradients = gradients._replace(
        **{name: _split_like(getattr(gradients, name), getattr(operands, name)) for name in wanted.names}
    )
    absent = Operands(*(None,) * len(Operands._fields))  # type: ignore[arg-type]
    return (absent._replace(**gradients._asdict()),)


_attend.defvjp(_attend_fwd, _attend_bwd, symbolic_zeros=True)
