"""Launch plan of the split backward. Pure Python: no DSL, no JAX.

Buffers of the call: operands query, key, value, out, lse, dout, dlse (and batch_info), then results dquery, dkey,
dvalue, then the row statistics lse2 and delta.
"""

from __future__ import annotations

from collections.abc import Sequence

from jax_fa4.ffi.plan import Fill, Kernel, Parameter, Scalars
from jax_fa4.kernels.problem import ForwardProblem
from jax_fa4.kernels.sm90.backward.plan import (
    ELEMENT,
    clear_gradients,
    integers,
    is_empty,
    pointers,
    preprocess_kernel,
    team_size,
    tile_map,
)
from jax_fa4.kernels.sm90.backward_split.config import ROW_PADDING, KeyValueConfig, QueryConfig
from jax_fa4.kernels.spec import KernelSpec

TEAM_BYTES = 24 << 20
"""Streamed operands of the heads that are worked on at the same time: about half of the L2."""

QUERY, KEY, VALUE, OUT, LSE, DOUT, DLSE = range(7)


def kinds(problem: ForwardProblem) -> tuple[str, ...]:
    """Kinds of the kernels of one call, in order."""
    return ("backward_preprocess", "backward_key_value", "backward_query")


def scratch_shapes(specs: Sequence[KernelSpec], problem: ForwardProblem) -> dict[str, tuple[tuple[int, ...], str]]:
    """Scratch results after dquery, dkey, dvalue: name to (shape, dtype), in order. 8 bytes per query row and head."""
    rows = problem.batch * problem.heads * -(-problem.seqlen_q // ROW_PADDING) * ROW_PADDING
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
    return (
        preprocess_kernel(ROW_PADDING, (OUT, DOUT, LSE, DLSE, lse2, delta, None, batch_info), problem),
        _key_value(KeyValueConfig.of(specs[1]), problem, (dkey, dvalue), statistics),
        _query(QueryConfig.of(specs[2]), problem, dquery, statistics),
    )


def _key_value(
    config: KeyValueConfig, problem: ForwardProblem, results: tuple[int, int], statistics: tuple[int | None, ...]
) -> Kernel:
    q, k, m, n = problem.seqlen_q, problem.seqlen_k, config.tile_m, config.tile_n
    maps = (
        (QUERY, q, problem.heads, problem.head_dim, m),
        (KEY, k, problem.kv_heads, problem.head_dim, n),
        (VALUE, k, problem.kv_heads, problem.head_dim_v, n),
        (DOUT, q, problem.heads, problem.head_dim_v, m),
        (results[0], k, problem.kv_heads, problem.head_dim, n),
        (results[1], k, problem.kv_heads, problem.head_dim_v, n),
    )
    pairs = problem.batch * problem.kv_heads
    pair_bytes = problem.group * q * (problem.head_dim + problem.head_dim_v) * ELEMENT
    return Kernel(
        artefact=1,
        grid=(-(-k // n) * pairs, 1, 1),
        block=(config.threads, 1, 1),
        cluster=(1, 1, 1),
        shared_bytes=config.shared_bytes,
        parameters=_parameters(config.mask, problem, maps, statistics, pairs, pair_bytes),
    )


def _query(config: QueryConfig, problem: ForwardProblem, dquery: int, statistics: tuple[int | None, ...]) -> Kernel:
    q, k, m, n = problem.seqlen_q, problem.seqlen_k, config.tile_m, config.tile_n
    maps = (
        (QUERY, q, problem.heads, problem.head_dim, m),
        (KEY, k, problem.kv_heads, problem.head_dim, n),
        (VALUE, k, problem.kv_heads, problem.head_dim_v, n),
        (DOUT, q, problem.heads, problem.head_dim_v, m),
        (dquery, q, problem.heads, problem.head_dim, m),
    )
    pairs = problem.batch * problem.heads
    pair_bytes = -(-k * (problem.head_dim + problem.head_dim_v) * ELEMENT // problem.group)
    return Kernel(
        artefact=2,
        grid=(-(-q // m) * pairs, 1, 1),
        block=(config.threads, 1, 1),
        cluster=(1, 1, 1),
        shared_bytes=config.shared_bytes,
        parameters=_parameters(config.mask, problem, maps, statistics, pairs, pair_bytes),
    )


def _parameters(
    mask: str,
    problem: ForwardProblem,
    maps: tuple[tuple[int, int, int, int, int], ...],
    statistics: tuple[int | None, ...],
    pairs: int,
    pair_bytes: int,
) -> tuple[Parameter, ...]:
    parameters: list[Parameter] = []
    for tile in maps:
        parameters += tile_map(problem, *tile)
    parameters += pointers(*statistics)
    parameters += integers(problem.query_offset)
    if mask == "window":
        parameters += integers(problem.left, problem.right)
    parameters += [Scalars("f", (problem.scale,)), Scalars("f", (problem.scale_log2,))]
    parameters += integers(problem.group, pairs, team_size(pairs, TEAM_BYTES // pair_bytes))
    return tuple(parameters)
