"""Launch plan of the split Blackwell backward. Pure Python: no DSL, no JAX.

Buffers and scratch are those of the split Hopper backward, with row statistics padded to blocks of 128 rows.
"""

from __future__ import annotations

from collections.abc import Sequence

from jax_fa4.ffi.plan import Fill, Kernel, Parameter, Scalars
from jax_fa4.kernels.problem import ForwardProblem
from jax_fa4.kernels.sm90.backward.plan import (
    clear_gradients,
    integers,
    is_empty,
    pointers,
    preprocess_kernel,
    team_size,
    tile_map,
)
from jax_fa4.kernels.sm90.backward_split.plan import DLSE, DOUT, KEY, LSE, OUT, QUERY, VALUE, kinds
from jax_fa4.kernels.sm100.backward_split.config import RESIDENT, STREAMED, THREADS, SplitConfig
from jax_fa4.kernels.sm100.backward_split.maps import SharedMap
from jax_fa4.kernels.spec import KernelSpec

__all__ = ["backward_steps", "kinds", "scratch_shapes"]

TEAM_BYTES = 60 << 20
"""Streamed operands of the heads that are worked on at the same time: about half of the L2."""


def scratch_shapes(specs: Sequence[KernelSpec], problem: ForwardProblem) -> dict[str, tuple[tuple[int, ...], str]]:
    """Scratch results after dquery, dkey, dvalue: name to (shape, dtype), in order. 8 bytes per query row and head."""
    rows = problem.batch * problem.heads * -(-problem.seqlen_q // RESIDENT) * RESIDENT
    return {"lse2": ((rows,), "float32"), "delta": ((rows,), "float32")}


def backward_steps(specs: Sequence[KernelSpec], problem: ForwardProblem) -> tuple[Kernel | Fill, ...]:
    """Steps of one call for the specs of :func:`kinds`, whose indices are the artefacts'."""
    varlen = specs[1].varlen
    batch_info = DLSE + 1 if varlen else None
    dquery = DLSE + 2 if varlen else DLSE + 1
    dkey, dvalue, lse2, delta = dquery + 1, dquery + 2, dquery + 3, dquery + 4
    if is_empty(problem):
        return clear_gradients(problem, dquery, dkey, dvalue)
    statistics = (lse2, delta, batch_info)
    query = (QUERY, problem.seqlen_q, problem.heads, problem.head_dim)
    dout = (DOUT, problem.seqlen_q, problem.heads, problem.head_dim_v)
    key = (KEY, problem.seqlen_k, problem.kv_heads, problem.head_dim)
    value = (VALUE, problem.seqlen_k, problem.kv_heads, problem.head_dim_v)
    key_maps = (key, value, query, dout, (dkey, *key[1:]), (dvalue, *value[1:]))
    query_maps = (query, dout, key, value, (dquery, *query[1:]))
    streamed = problem.seqlen_q * problem.group * (problem.head_dim + problem.head_dim_v) * 2
    keys = -(-problem.seqlen_k * (problem.head_dim + problem.head_dim_v) * 2 // problem.group)
    return (
        preprocess_kernel(RESIDENT, (OUT, DOUT, LSE, DLSE, lse2, delta, None, batch_info), problem),
        _kernel(1, specs[1], problem, key_maps, statistics, streamed),
        _kernel(2, specs[2], problem, query_maps, statistics, keys),
    )


def _kernel(
    artefact: int,
    spec: KernelSpec,
    problem: ForwardProblem,
    tensors: tuple[tuple[int, int, int, int], ...],
    statistics: tuple[int | None, ...],
    streamed_bytes: int,
) -> Kernel:
    """One side; ``tensors`` are resident x and y, streamed z and w, then gradients; (buffer, rows, heads, width)."""
    config = SplitConfig.from_spec(spec)
    _, rows, heads, _ = tensors[0]
    pairs = problem.batch * heads
    grid = -(-rows // RESIDENT) * pairs * config.parts
    if grid >= 2**31:
        raise ValueError(f"{grid} blocks; a launch takes fewer than 2**31")
    box_rows = (RESIDENT, RESIDENT, STREAMED, STREAMED, RESIDENT, RESIDENT)
    parameters: list[Parameter] = [
        tile_map(problem, *tensor, size)[0] for tensor, size in zip(tensors, box_rows, strict=False)
    ]
    parameters += pointers(*statistics)
    parameters += integers(
        problem.seqlen_q,
        problem.seqlen_k,
        problem.kv_heads,
        problem.group,
        pairs,
        team_size(pairs, TEAM_BYTES // streamed_bytes),
        problem.query_offset,
    )
    if config.mask == "window":
        parameters += integers(problem.left, problem.right)
    parameters += [Scalars("f", (problem.scale,)), Scalars("f", (problem.scale_log2,))]
    return Kernel(
        artefact=artefact,
        grid=(grid, 1, 1),
        block=(THREADS, 1, 1),
        cluster=(1, 1, 1),
        shared_bytes=SharedMap.of(config).size,
        parameters=tuple(parameters),
    )
