"""Launch plan of the Blackwell backward. Pure Python: no DSL, no JAX.

The buffers of a call, its scratch and the two small kernels are those of the Hopper backward; only the main kernel, and
the order of a dQ block's elements in the scratch, differ.
"""

from __future__ import annotations

from collections.abc import Sequence

from jax_fa4.ffi.plan import Fill, Kernel, Parameter, Scalars
from jax_fa4.kernels.problem import ForwardProblem
from jax_fa4.kernels.sm90.backward.plan import (
    BackwardBuffers,
    clear_gradients,
    integers,
    is_empty,
    kinds,
    pointers,
    postprocess_kernel,
    preprocess_buffers,
    preprocess_kernel,
    scratch_of,
    team_size,
    tile_map,
)
from jax_fa4.kernels.sm90.backward.scratch import ScratchSizes
from jax_fa4.kernels.sm100.backward.config import KEYS, ROWS, THREADS, BackwardConfig
from jax_fa4.kernels.sm100.backward.shared import SharedMap
from jax_fa4.kernels.sm100.backward_pair.config import PairShape
from jax_fa4.kernels.sm100.backward_pair.plan import column_maps, scratch_map
from jax_fa4.kernels.sm100.backward_pair.shared import PairMap
from jax_fa4.kernels.spec import KernelSpec

__all__ = ["backward_steps", "kinds", "scratch_shapes"]

TEAM_BYTES = 60 << 20
"""Q, dO and float32 dQ of the (batch, key head) pairs that are worked on at the same time: about half of the L2."""

LEAST_TEAM = 2
"""Pairs that are worked on at the same time however long they are: the first CTAs of a pair start behind each other."""


def scratch_shapes(specs: Sequence[KernelSpec], problem: ForwardProblem) -> dict[str, tuple[tuple[int, ...], str]]:
    """Scratch results of the call after dquery, dkey, dvalue: name to (shape, dtype), in order."""
    return scratch_of(_sizes(BackwardConfig.from_spec(specs[1]), problem), specs[1].deterministic)


def backward_steps(specs: Sequence[KernelSpec], problem: ForwardProblem) -> tuple[Kernel | Fill, ...]:
    """Steps of one call for the specs of :func:`kinds`, whose indices are the artefacts'.

    Without query rows or without keys the gradients are fills of zero.
    """
    main = specs[1]
    config = BackwardConfig.from_spec(main)
    buffers = BackwardBuffers.of(main.varlen, main.deterministic)
    if is_empty(problem):
        return clear_gradients(problem, buffers.dquery, buffers.dkey, buffers.dvalue)
    steps: list[Kernel | Fill] = []
    if not main.deterministic:
        steps.append(Fill(buffers.dq_accum, _sizes(config, problem).dq_accum * 4))
    steps += [
        preprocess_kernel(ROWS, preprocess_buffers(buffers), problem),
        _main(config, buffers, problem),
        postprocess_kernel(config.dq_block, buffers, problem),
    ]
    return tuple(steps)


def _sizes(config: BackwardConfig, problem: ForwardProblem) -> ScratchSizes:
    return ScratchSizes.of(problem.batch, problem.heads, problem.seqlen_q, config.dq_block)


def _main(config: BackwardConfig, b: BackwardBuffers, problem: ForwardProblem) -> Kernel:
    pairs = problem.batch * problem.kv_heads
    row_bytes = (config.columns + config.columns_v) * 2 + config.columns * 4
    pair_bytes = problem.group * problem.seqlen_q * row_bytes
    paired = config.ctas == 2
    grid = -(-problem.seqlen_k // (KEYS * config.ctas)) * config.ctas * pairs
    if grid >= 2**31:
        raise ValueError(f"{grid} key blocks; a launch takes fewer than 2**31")
    rows = PairShape.of(config).own_rows if paired else ROWS
    query = (b.query, problem.seqlen_q, problem.heads, problem.head_dim)
    key = (b.key, problem.seqlen_k, problem.kv_heads, problem.head_dim)
    value = (b.value, problem.seqlen_k, problem.kv_heads, problem.head_dim_v)
    dout = (b.dout, problem.seqlen_q, problem.heads, problem.head_dim_v)
    maps = (
        (*query, rows),
        (*key, KEYS),
        (*value, KEYS),
        (*dout, rows),
        (b.dkey, *key[1:], KEYS),
        (b.dvalue, *value[1:], KEYS),
    )
    # There are no coordinate tensors.
    parameters: list[Parameter] = [tile_map(problem, *tensor)[0] for tensor in maps]
    if paired:
        parameters += column_maps(config, problem, query, key, dout)
        parameters += [scratch_map(config, b.dq_accum, _sizes(config, problem))]
    parameters += pointers(b.lse2, b.delta, None if paired else b.dq_accum, b.turn, b.batch_info)
    parameters += integers(
        problem.seqlen_q,
        problem.seqlen_k,
        problem.kv_heads,
        problem.group,
        pairs,
        team_size(pairs, TEAM_BYTES // pair_bytes, LEAST_TEAM),
        problem.query_offset,
    )
    if config.mask == "window":
        parameters += integers(problem.left, problem.right)
    parameters += [Scalars("f", (problem.scale,)), Scalars("f", (problem.scale_log2,))]
    return Kernel(
        artefact=1,
        grid=(grid, 1, 1),
        block=(THREADS, 1, 1),
        cluster=(config.ctas, 1, 1),
        shared_bytes=(PairMap if paired else SharedMap).of(config).size,
        parameters=tuple(parameters),
    )
