"""The kernels as JAX calls: one :class:`~jax_fa4.ffi.call.Operation` each.

What a kernel author provides: ``jax_fa4.kernels.select`` gives the KernelSpec for a problem, the artefact store its
compiled form, and ``jax_fa4.kernels.plans`` the launch plan; buffers of a plan are numbered operands first, then
results, then scratch. All of that happens when a call is lowered, for the shapes that it then has: after ``vmap`` has
folded its axis into the batch, and for one device's part of a partitioned call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jax_fa4.ffi.call import Planned, Target, call
from jax_fa4.ffi.host import Executor, run_on_host
from jax_fa4.ffi.partition import Dimensions
from jax_fa4.kernels.artefact import Artefact
from jax_fa4.kernels.plans import backward_plan, backward_scratch, backward_specs, forward_plan
from jax_fa4.kernels.problem import UNBOUNDED, ForwardProblem
from jax_fa4.kernels.select import forward_specs
from jax_fa4.kernels.spec import KernelSpec
from jax_fa4.kernels.store import default_store

BATCH_INFO_COLUMNS = 4
"""Columns of the operand batch_info, int32 (B, 4): query length, key length, query offset, 0."""


@dataclass(frozen=True)
class AttentionCall:
    """The static parameters that forward and backward of one call share.

    Attributes:
      scale: softmax scale, finite and not negative.
      mask: "none", "causal" (right bound 0) or "window" (bounds ``left`` and ``right``; None for an open side).
      query_offset: position of query row 0; not regarded with ``varlen``.
      varlen: whether batch_info is given.
      arch: architecture to compile for, or None for that of the CUDA device at hand.
      executor: carries out the plan on platforms other than CUDA (a test's emulator); needs ``arch``.
    """

    scale: float
    mask: str = "none"
    left: int | None = None
    right: int | None = None
    query_offset: int = 0
    varlen: bool = False
    arch: str | None = None
    executor: Executor | None = None

    def problem(self, operands: Sequence[Any]) -> ForwardProblem:
        """The kernels' description of a call from operands (``shape``, ``dtype``): query, key, value and more."""
        query, key, value, *_ = operands
        batch, seqlen_q, heads, head_dim = query.shape
        window = self.mask == "window"
        return ForwardProblem(
            batch=batch,
            seqlen_q=seqlen_q,
            seqlen_k=key.shape[1],
            heads=heads,
            kv_heads=key.shape[2],
            head_dim=head_dim,
            head_dim_v=value.shape[3],
            dtype=jnp.dtype(query.dtype).name,
            scale=self.scale,
            query_offset=0 if self.varlen else self.query_offset,
            left=self.left if window and self.left is not None else UNBOUNDED,
            right=self.right if window and self.right is not None else UNBOUNDED,
        )


@dataclass(frozen=True)
class ForwardOperation:
    """Forward: operands query (B, T, N, H), key (B, S, K, H), value (B, S, K, Hv) and, if varlen, batch_info.

    Results out (B, T, N, Hv) in query's dtype and lse (B, N, T) float32.
    """

    attention: AttentionCall

    @property
    def arch(self) -> str | None:
        return self.attention.arch

    @property
    def dimensions(self) -> Dimensions:
        return Dimensions(("btnh", "bskh", "bskv", *_info_axes(self.attention)), ("btnv", "bnt"))

    def results(self, operands: Sequence[Any]) -> tuple[jax.ShapeDtypeStruct, ...]:
        query, _, value, *_ = operands
        batch, length, heads, _ = query.shape
        return (
            jax.ShapeDtypeStruct((batch, length, heads, value.shape[3]), query.dtype),
            jax.ShapeDtypeStruct((batch, heads, length), jnp.float32),
        )

    def specs(self, operands: Sequence[Any], target: Target) -> tuple[KernelSpec, ...]:
        """Kernels of which any one serves, in order of preference; raises UnsupportedSpecError where none does."""
        call = self.attention
        return forward_specs(
            call.problem(operands),
            arch=target.arch,
            mask=call.mask,
            varlen=call.varlen,
            capability=target.capability,
        )

    def missing_reason(self, operands: Sequence[Any], target: Target) -> str | None:
        """Why no compiled kernel can be had, or None."""
        missing = [default_store().missing_reason(spec) for spec in self.specs(operands, target)]
        return None if None in missing else missing[-1]

    def plan(self, operands: Sequence[Any], target: Target) -> Planned:
        specs = self.specs(operands, target)
        spec = next((spec for spec in specs if default_store().missing_reason(spec) is None), specs[-1])
        artefact = default_store().load(spec)
        plan = forward_plan(artefact, self.attention.problem(operands), sm_count=target.multiprocessors)
        return Planned(plan, (artefact,))

    def elsewhere(self, *operands: Array) -> Sequence[Array]:
        return _on_host(self, *operands)


def _missing(specs: Sequence[KernelSpec]) -> str | None:
    """Why not all of the compiled kernels can be had, or None."""
    return next((reason for spec in specs if (reason := default_store().missing_reason(spec)) is not None), None)


@dataclass(frozen=True)
class BackwardOperation:
    """Backward: operands query, key, value, out, lse, d_out, d_lse (float32, like lse) and, if varlen, batch_info.

    Results: the gradients of query, key and value, in their shapes and dtypes.
    """

    attention: AttentionCall
    deterministic: bool = True

    @property
    def arch(self) -> str | None:
        return self.attention.arch

    @property
    def dimensions(self) -> Dimensions:
        operands = ("btnh", "bskh", "bskv", "btnv", "bnt", "btnv", "bnt", *_info_axes(self.attention))
        return Dimensions(operands, ("btnh", "bskh", "bskv"))

    def results(self, operands: Sequence[Any]) -> tuple[jax.ShapeDtypeStruct, ...]:
        return tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands[:3])

    def specs(self, operands: Sequence[Any], target: Target) -> tuple[KernelSpec, ...]:
        """Kernels of the call, all of them needed; raises UnsupportedSpecError where there are none for it.

        Where any order of additions will do, kernels that keep to one serve too: those are part of every release.
        """
        call = self.attention
        find = partial(backward_specs, target.arch, call.problem(operands), mask=call.mask, varlen=call.varlen)
        if not self.deterministic:
            unordered = find(deterministic=False)
            if _missing(unordered) is None:
                return unordered
        return find(deterministic=True)

    def missing_reason(self, operands: Sequence[Any], target: Target) -> str | None:
        """Why not all compiled kernels can be had, or None."""
        return _missing(self.specs(operands, target))

    def plan(self, operands: Sequence[Any], target: Target) -> Planned:
        problem = self.attention.problem(operands)
        specs = self.specs(operands, target)
        artefacts: tuple[Artefact, ...] = tuple(default_store().load(spec) for spec in specs)
        scratch = tuple(jax.ShapeDtypeStruct(*x) for x in backward_scratch(specs, problem).values())
        return Planned(backward_plan(artefacts, problem), artefacts, scratch)

    def elsewhere(self, *operands: Array) -> Sequence[Array]:
        return _on_host(self, *operands)


def _info_axes(call: AttentionCall) -> tuple[str, ...]:
    return ("bi",) if call.varlen else ()


def _on_host(operation: ForwardOperation | BackwardOperation, *operands: Array) -> Sequence[Array]:
    executor, arch = operation.attention.executor, operation.arch
    if executor is None or arch is None:
        raise ValueError(
            "implementation='fa4' is being lowered for a platform other than CUDA, where its kernels cannot run; with "
            "implementation=None the same call picks an implementation by platform"
        )
    return run_on_host(executor, operation.plan(operands, Target(arch)), operation.results(operands), operands)


def forward(
    attention: AttentionCall, query: Array, key: Array, value: Array, batch_info: Array | None = None
) -> tuple[Array, Array]:
    """Attention by the forward kernel.

    Args:
      attention: the static parameters.
      query, key, value: bfloat16 or float16, (B, T, N, H), (B, S, K, H), (B, S, K, Hv).
      batch_info: int32 (B, 4) if ``attention.varlen``, else None.

    Returns:
      out (B, T, N, Hv) and lse (B, N, T) float32, natural logarithm.
    """
    out, lse = call(ForwardOperation(attention), query, key, value, *_info(attention, batch_info))
    return out, lse


def backward(
    attention: AttentionCall,
    query: Array,
    key: Array,
    value: Array,
    out: Array,
    lse: Array,
    d_out: Array,
    d_lse: Array | None,
    batch_info: Array | None = None,
    *,
    deterministic: bool = True,
) -> tuple[Array, Array, Array]:
    """Gradients by the backward kernels.

    Args:
      attention, query, key, value, batch_info: as given to :func:`forward`.
      out, lse: what it returned.
      d_out: cotangent of out, (B, T, N, Hv), of any floating dtype.
      d_lse: cotangent of lse, (B, N, T), or None for zero.
      deterministic: whether the gradients must be bitwise the same, run after run.

    Returns:
      Gradients of query, key and value.
    """
    d_lse = jnp.zeros_like(lse) if d_lse is None else d_lse.astype(jnp.float32)
    operands = (query, key, value, out, lse, d_out.astype(query.dtype), d_lse, *_info(attention, batch_info))
    d_query, d_key, d_value = call(BackwardOperation(attention, deterministic), *operands)
    return d_query, d_key, d_value


def _info(attention: AttentionCall, batch_info: Array | None) -> tuple[Array, ...]:
    if attention.varlen != (batch_info is not None):
        raise ValueError("batch_info must be given exactly when the call is varlen")
    return () if batch_info is None else (batch_info,)
