"""Launch plan of the Hopper backward. Pure Python: no DSL, no JAX.

Buffers of the call: operands query, key, value, out, lse, dout, dlse (and batch_info), then results dquery, dkey,
dvalue, then the scratch that :func:`scratch_shapes` lists, in that order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jax_fa4.ffi.plan import SWIZZLE_128B, Fill, Kernel, Parameter, Scalars, Tensor, TensorMap
from jax_fa4.kernels.problem import ForwardProblem
from jax_fa4.kernels.sm90.backward.config import SWIZZLE_ROW, MainConfig
from jax_fa4.kernels.sm90.backward.scratch import DQ_CHUNKS, WARPGROUP, DqBlock, ScratchSizes
from jax_fa4.kernels.spec import KernelSpec

ELEMENT = 2
"""Bytes of a bfloat16 or float16 element."""

TEAM_BYTES = 48 << 20
"""Q, dO and float32 dQ of the heads that are worked on at the same time: about the size of the L2."""

PREPROCESS_THREADS = 128
POSTPROCESS_THREADS = DQ_CHUNKS * WARPGROUP
POSTPROCESS_PITCH_PADDING = 8
"""Elements between the rows of the postprocess kernel's shared tile, against bank conflicts."""


@dataclass(frozen=True)
class BackwardBuffers:
    """Buffer indices; ``batch_info`` and ``turn`` are None where the call has none."""

    query: int
    key: int
    value: int
    out: int
    lse: int
    dout: int
    dlse: int
    batch_info: int | None
    dquery: int
    dkey: int
    dvalue: int
    lse2: int
    delta: int
    dq_accum: int
    turn: int | None

    @classmethod
    def of(cls, varlen: bool, deterministic: bool) -> BackwardBuffers:
        result = 8 if varlen else 7
        return cls(
            query=0,
            key=1,
            value=2,
            out=3,
            lse=4,
            dout=5,
            dlse=6,
            batch_info=7 if varlen else None,
            dquery=result,
            dkey=result + 1,
            dvalue=result + 2,
            lse2=result + 3,
            delta=result + 4,
            dq_accum=result + 5,
            turn=result + 6 if deterministic else None,
        )


def kinds(problem: ForwardProblem) -> tuple[str, ...]:
    """Kinds of the kernels of one call, in order."""
    return ("backward_preprocess", "backward_main", "backward_postprocess")


def scratch_shapes(specs: Sequence[KernelSpec], problem: ForwardProblem) -> dict[str, tuple[tuple[int, ...], str]]:
    """Scratch results of the call after dquery, dkey, dvalue: name to (shape, dtype), in order.

    Per query row and head: ``8 + 4 * head_dim`` bytes (head_dim rounded up to 64), plus 8 bytes per block of rows.
    """
    main = specs[1]
    sizes = _sizes(main, problem)
    shapes: dict[str, tuple[tuple[int, ...], str]] = {
        "lse2": ((sizes.lse2,), "float32"),
        "delta": ((sizes.delta,), "float32"),
        "dq_accum": ((sizes.dq_accum,), "float32"),
    }
    if main.deterministic:
        shapes["turn"] = ((sizes.turn,), "int32")
    return shapes


def backward_steps(specs: Sequence[KernelSpec], problem: ForwardProblem) -> tuple[Kernel | Fill, ...]:
    """Steps of one call for the specs of :func:`kinds`, whose indices are the artefacts'.

    Without query rows or without keys the gradients are fills of zero.
    """
    main = specs[1]
    config = MainConfig.of(main)
    buffers = BackwardBuffers.of(main.varlen, main.deterministic)
    rows, keys = problem.batch * problem.seqlen_q, problem.batch * problem.seqlen_k
    if not rows or not keys:
        results = (
            (buffers.dquery, rows * problem.heads * problem.head_dim),
            (buffers.dkey, keys * problem.kv_heads * problem.head_dim),
            (buffers.dvalue, keys * problem.kv_heads * problem.head_dim_v),
        )
        return tuple(Fill(buffer, count * ELEMENT) for buffer, count in results if count)
    steps: list[Kernel | Fill] = []
    if not main.deterministic:
        steps.append(Fill(buffers.dq_accum, _sizes(main, problem).dq_accum * 4))
    steps += [
        _preprocess(config, buffers, problem),
        _main(config, buffers, problem),
        _postprocess(config, buffers, problem),
    ]
    return tuple(steps)


def _sizes(main: KernelSpec, problem: ForwardProblem) -> ScratchSizes:
    return ScratchSizes.of(problem.batch, problem.heads, problem.seqlen_q, MainConfig.of(main).dq_block)


def _pointers(*buffers: int | None) -> list[Parameter]:
    return [Tensor(buffer) for buffer in buffers if buffer is not None]


def _ints(*values: int) -> list[Parameter]:
    return [Scalars("i", (value,)) for value in values]


def _row_block_grid(config: MainConfig, problem: ForwardProblem) -> tuple[int, int, int]:
    return (-(-problem.seqlen_q // config.tile_m) * problem.heads * problem.batch, 1, 1)


def _preprocess(config: MainConfig, b: BackwardBuffers, problem: ForwardProblem) -> Kernel:
    return Kernel(
        artefact=0,
        grid=_row_block_grid(config, problem),
        block=(PREPROCESS_THREADS, 1, 1),
        cluster=(1, 1, 1),
        shared_bytes=0,
        parameters=(
            *_pointers(b.out, b.dout, b.lse, b.dlse, b.lse2, b.delta, b.turn, b.batch_info),
            *_ints(problem.seqlen_q, problem.heads, problem.head_dim_v),
        ),
    )


def _main(config: MainConfig, b: BackwardBuffers, problem: ForwardProblem) -> Kernel:
    pairs = problem.batch * problem.kv_heads
    pair_bytes = (
        problem.group * problem.seqlen_q * ((config.head_dim + config.head_dim_v) * ELEMENT + config.head_dim * 4)
    )
    pairs_together = min(pairs, max(1, TEAM_BYTES // pair_bytes))
    maps = (
        (b.query, problem.seqlen_q, problem.heads, problem.head_dim, config.tile_m),
        (b.key, problem.seqlen_k, problem.kv_heads, problem.head_dim, config.tile_n),
        (b.value, problem.seqlen_k, problem.kv_heads, problem.head_dim_v, config.tile_n),
        (b.dout, problem.seqlen_q, problem.heads, problem.head_dim_v, config.tile_m),
        (b.dkey, problem.seqlen_k, problem.kv_heads, problem.head_dim, config.tile_n),
        (b.dvalue, problem.seqlen_k, problem.kv_heads, problem.head_dim_v, config.tile_n),
    )
    parameters: list[Parameter] = []
    for buffer, rows, heads, width, box_rows in maps:
        head_bytes = width * ELEMENT
        parameters += [
            TensorMap(
                buffer,
                problem.dtype,
                dims=(width, rows, heads, problem.batch),
                strides=(heads * head_bytes, head_bytes, rows * heads * head_bytes),
                box=(SWIZZLE_ROW, box_rows, 1, 1),
                swizzle=SWIZZLE_128B,
            ),
            Scalars("iiii", (rows, width, heads, problem.batch)),
        ]
    parameters += _pointers(b.lse2, b.delta, b.dq_accum, b.turn, b.batch_info)
    parameters += _ints(problem.query_offset)
    if config.mask == "window":
        parameters += _ints(problem.left, problem.right)
    parameters += [Scalars("f", (problem.scale,)), Scalars("f", (problem.scale_log2,))]
    parameters += _ints(problem.group, pairs, pairs_together)
    return Kernel(
        artefact=1,
        grid=(-(-problem.seqlen_k // config.tile_n) * pairs, 1, 1),
        block=(config.threads, 1, 1),
        cluster=(1, 1, 1),
        shared_bytes=config.shared_bytes,
        parameters=tuple(parameters),
    )


def _postprocess(config: MainConfig, b: BackwardBuffers, problem: ForwardProblem) -> Kernel:
    return Kernel(
        artefact=2,
        grid=_row_block_grid(config, problem),
        block=(POSTPROCESS_THREADS, 1, 1),
        cluster=(1, 1, 1),
        shared_bytes=postprocess_shared_bytes(config.dq_block),
        parameters=(
            *_pointers(b.dq_accum, b.turn, b.dquery),
            Scalars("f", (problem.scale,)),
            *_ints(problem.seqlen_q, problem.heads, problem.head_dim),
        ),
    )


def postprocess_shared_bytes(block: DqBlock) -> int:
    """Dynamic shared memory of the postprocess kernel: the rounded block with padded rows."""
    return block.tile_m * (block.head_dim + POSTPROCESS_PITCH_PADDING) * ELEMENT
