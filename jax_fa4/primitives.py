"""The kernels as JAX calls: one :class:`~jax_fa4.ffi.call.Operation` each.

What a kernel author provides: ``jax_fa4.kernels.select`` gives the KernelSpec for a problem, the artefact store its
compiled form, and ``jax_fa4.kernels.plans`` the launch plan; buffers of a plan are numbered operands first, then
results, then scratch. All of that happens when a call is lowered, for the shapes that it then has: after ``vmap`` has
folded its axis into the batch, and for one device's part of a partitioned call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jax_fa4.ffi.call import Planned, Target, call
from jax_fa4.ffi.host import Executor, run_on_host
from jax_fa4.ffi.partition import Dimensions
from jax_fa4.kernels.plans import forward_plan
from jax_fa4.kernels.problem import UNBOUNDED, ForwardProblem
from jax_fa4.kernels.select import forward_spec
from jax_fa4.kernels.store import default_store

BATCH_INFO_COLUMNS = 4
"""Columns of the operand batch_info, int32 (B, 4): query length, key length, query offset, 0."""


@dataclass(frozen=True)
class ForwardOperation:
    """Forward: operands query (B, T, N, H), key (B, S, K, H), value (B, S, K, Hv) and, if ``varlen``, batch_info.

    Results out (B, T, N, Hv) in query's dtype and lse (B, N, T) float32.

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

    @property
    def dimensions(self) -> Dimensions:
        return Dimensions(("btnh", "bskh", "bskv", *(("bi",) if self.varlen else ())), ("btnv", "bnt"))

    def problem(self, operands: Sequence[Any]) -> ForwardProblem:
        """The kernels' description of a call on operands with ``shape`` and ``dtype``."""
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

    def results(self, operands: Sequence[Any]) -> tuple[jax.ShapeDtypeStruct, ...]:
        query, _, value, *_ = operands
        batch, length, heads, _ = query.shape
        return (
            jax.ShapeDtypeStruct((batch, length, heads, value.shape[3]), query.dtype),
            jax.ShapeDtypeStruct((batch, heads, length), jnp.float32),
        )

    def plan(self, operands: Sequence[Any], target: Target) -> Planned:
        problem = self.problem(operands)
        artefact = default_store().load(forward_spec(problem, arch=target.arch, mask=self.mask, varlen=self.varlen))
        return Planned(forward_plan(artefact, problem, sm_count=target.multiprocessors), (artefact,))

    def elsewhere(self, *operands: Array) -> Sequence[Array]:
        if self.executor is None or self.arch is None:
            raise ValueError(
                "implementation='fa4' is being lowered for a platform other than CUDA, where its kernels cannot run; "
                "with implementation=None the same call picks an implementation by platform"
            )
        return run_on_host(self.executor, self.plan(operands, Target(self.arch)), self.results(operands), operands)


def forward(
    operation: ForwardOperation, query: Array, key: Array, value: Array, batch_info: Array | None = None
) -> tuple[Array, Array]:
    """Attention by the forward kernel.

    Args:
      operation: the static parameters.
      query, key, value: bfloat16 or float16, (B, T, N, H), (B, S, K, H), (B, S, K, Hv).
      batch_info: int32 (B, 4) if ``operation.varlen``, else None.

    Returns:
      out (B, T, N, Hv) and lse (B, N, T) float32, natural logarithm.
    """
    if operation.varlen != (batch_info is not None):
        raise ValueError("batch_info must be given exactly when the operation is varlen")
    operands = (query, key, value) if batch_info is None else (query, key, value, batch_info)
    out, lse = call(operation, *operands)
    return out, lse
