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

TEAM_BYTES = {"none": 24 << 20, "causal": 32 << 20, "window": 24 << 20}
"""Q, dO and float32 dQ of the (batch, key head) pairs that are worked on at the same time, by mask: about half of the
L2. Fewer pairs would make CTAs of one pair wait for each other more, more would miss in the L2 (measured on an
H200)."""

PERSISTENT_CTAS = 132
"""CTAs of a persistent main kernel, one for each multiprocessor of an H100 or H200 (fewer or more are right too)."""

LEAST_TEAM = 2
"""Pairs that are worked on at the same time however long they are: the first CTAs of a pair start behind each other."""

LEAST_TEAMS = 4
"""Teams, unless there is one only: the longest tiles of a causal mask begin with their team, the last team's late."""

PREPROCESS_THREADS = 128
PREPROCESS_ROWS = 64
"""Query rows of one CTA of the preprocess kernel: every padding is a multiple."""

POSTPROCESS_THREADS = DQ_CHUNKS * WARPGROUP
POSTPROCESS_PITCH_PADDING = 8
"""Elements between the rows of the postprocess kernel's shared tile, against bank conflicts."""


@dataclass(frozen=True)
class BackwardBuffers:
    """Buffer indices; ``batch_info``, ``turn`` and ``counter`` are None where the call has none."""

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
    counter: int | None

    @classmethod
    def of(cls, varlen: bool, deterministic: bool, counter: bool = False) -> BackwardBuffers:
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
            counter=result + 6 + deterministic if counter else None,
        )


def kinds(problem: ForwardProblem) -> tuple[str, ...]:
    """Kinds of the kernels of one call, in order."""
    return ("backward_preprocess", "backward_main", "backward_postprocess")


def counts_turns(preprocess: KernelSpec) -> bool:
    """Whether the preprocess kernel of this spec clears the counters ``turn``."""
    return preprocess.deterministic and bool(preprocess.tile.option("turns"))


def scratch_shapes(specs: Sequence[KernelSpec], problem: ForwardProblem) -> dict[str, tuple[tuple[int, ...], str]]:
    """Scratch results of the call after dquery, dkey, dvalue: name to (shape, dtype), in order.

    Per query row and head: ``8 + 4 * head_dim`` bytes (head_dim rounded up to 64), plus 8 bytes per block of rows.
    """
    shapes = scratch_of(_sizes(specs[1], problem), specs[1].deterministic)
    return {**shapes, "counter": ((1,), "int32")} if MainConfig.of(specs[1]).persistent else shapes


def scratch_of(sizes: ScratchSizes, deterministic: bool) -> dict[str, tuple[tuple[int, ...], str]]:
    """Scratch buffers of these sizes: name to (shape, dtype), in the order of :class:`BackwardBuffers`."""
    shapes: dict[str, tuple[tuple[int, ...], str]] = {
        "lse2": ((sizes.lse2,), "float32"),
        "delta": ((sizes.delta,), "float32"),
        "dq_accum": ((sizes.dq_accum,), "float32"),
    }
    if deterministic:
        shapes["turn"] = ((sizes.turn,), "int32")
    return shapes


def backward_steps(specs: Sequence[KernelSpec], problem: ForwardProblem) -> tuple[Kernel | Fill, ...]:
    """Steps of one call for the specs of :func:`kinds`, whose indices are the artefacts'.

    Without query rows or without keys the gradients are fills of zero.
    """
    main = specs[1]
    config = MainConfig.of(main)
    buffers = BackwardBuffers.of(main.varlen, main.deterministic, config.persistent)
    if is_empty(problem):
        return clear_gradients(problem, buffers.dquery, buffers.dkey, buffers.dvalue)
    steps: list[Kernel | Fill] = [] if buffers.counter is None else [Fill(buffers.counter, 4)]
    if not main.deterministic:
        steps.append(Fill(buffers.dq_accum, _sizes(main, problem).dq_accum * 4))
    steps += [
        preprocess_kernel(config.tile_m, preprocess_buffers(buffers), problem),
        _main(config, buffers, problem),
        postprocess_kernel(config.dq_block, buffers, problem),
    ]
    return tuple(steps)


def is_empty(problem: ForwardProblem) -> bool:
    """Whether there are no query rows or no keys."""
    return 0 in (problem.batch, problem.seqlen_q, problem.seqlen_k)


def clear_gradients(problem: ForwardProblem, dquery: int, dkey: int, dvalue: int) -> tuple[Fill, ...]:
    """Fills of zero for those results that have elements."""
    rows, keys = problem.batch * problem.seqlen_q, problem.batch * problem.seqlen_k
    results = (
        (dquery, rows * problem.heads * problem.head_dim),
        (dkey, keys * problem.kv_heads * problem.head_dim),
        (dvalue, keys * problem.kv_heads * problem.head_dim_v),
    )
    return tuple(Fill(buffer, count * ELEMENT) for buffer, count in results if count)


def preprocess_buffers(b: BackwardBuffers) -> tuple[int | None, ...]:
    """What :func:`preprocess_kernel` takes."""
    return (b.out, b.dout, b.lse, b.dlse, b.lse2, b.delta, b.turn, b.batch_info)


def _sizes(main: KernelSpec, problem: ForwardProblem) -> ScratchSizes:
    return ScratchSizes.of(problem.batch, problem.heads, problem.seqlen_q, MainConfig.of(main).dq_block)


def pointers(*buffers: int | None) -> list[Parameter]:
    return [Tensor(buffer) for buffer in buffers if buffer is not None]


def integers(*values: int) -> list[Parameter]:
    return [Scalars("i", (value,)) for value in values]


def _row_block_grid(tile_m: int, problem: ForwardProblem) -> tuple[int, int, int]:
    return (-(-problem.seqlen_q // tile_m) * problem.heads * problem.batch, 1, 1)


def preprocess_kernel(padding: int, buffers: tuple[int | None, ...], problem: ForwardProblem) -> Kernel:
    """Launch of artefact 0, with rows padded to a multiple of ``padding``.

    ``buffers``: out, dout, lse, dlse, lse2, delta, turn or None, batch_info or None.
    """
    rows = -(-problem.seqlen_q // padding) * padding
    return Kernel(
        artefact=0,
        grid=(rows // PREPROCESS_ROWS * problem.heads * problem.batch, 1, 1),
        block=(PREPROCESS_THREADS, 1, 1),
        cluster=(1, 1, 1),
        shared_bytes=0,
        parameters=(*pointers(*buffers), *integers(problem.seqlen_q, problem.heads, problem.head_dim_v)),
    )


def tile_map(
    problem: ForwardProblem, buffer: int, rows: int, heads: int, width: int, box_rows: int
) -> tuple[TensorMap, Scalars]:
    """Parameters of one TMA atom on a (batch, rows, heads, width) buffer: its map and its coordinate tensor."""
    head_bytes = width * ELEMENT
    return (
        TensorMap(
            buffer,
            problem.dtype,
            dims=(width, rows, heads, problem.batch),
            strides=(heads * head_bytes, head_bytes, rows * heads * head_bytes),
            box=(SWIZZLE_ROW, box_rows, 1, 1),
            swizzle=SWIZZLE_128B,
        ),
        Scalars("iiii", (rows, width, heads, problem.batch)),
    )


def team_size(pairs: int, wanted: int, least: int = 1) -> int:
    """(batch, head) pairs in a team: the largest divisor of ``pairs`` up to ``wanted`` (at least ``least``), since a
    smaller last team would leave multiprocessors idle; where divisors are rare, ``wanted`` itself. All of them where
    that would make fewer than :data:`LEAST_TEAMS` teams."""
    wanted = min(pairs, max(least, wanted))
    divisor = max(size for size in range(1, wanted + 1) if pairs % size == 0)
    size = divisor if 2 * divisor > wanted else wanted
    return size if pairs >= LEAST_TEAMS * size else pairs


def _main(config: MainConfig, b: BackwardBuffers, problem: ForwardProblem) -> Kernel:
    pairs = problem.batch * problem.kv_heads
    pair_bytes = (
        problem.group * problem.seqlen_q * ((config.head_dim + config.head_dim_v) * ELEMENT + config.head_dim * 4)
    )
    tiles = -(-problem.seqlen_k // config.tile_n) * pairs
    pairs_together = team_size(pairs, TEAM_BYTES[config.mask] // pair_bytes, LEAST_TEAM)
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
        parameters += tile_map(problem, buffer, rows, heads, width, box_rows)
    parameters += pointers(b.lse2, b.delta, b.dq_accum, b.counter, b.turn, b.batch_info)
    parameters += integers(problem.query_offset)
    if config.mask == "window":
        parameters += integers(problem.left, problem.right)
    parameters += [Scalars("f", (problem.scale,)), Scalars("f", (problem.scale_log2,))]
    parameters += integers(problem.group, pairs, pairs_together)
    return Kernel(
        artefact=1,
        grid=(min(tiles, PERSISTENT_CTAS) if config.persistent else tiles, 1, 1),
        block=(config.threads, 1, 1),
        cluster=(1, 1, 1),
        shared_bytes=config.shared_bytes,
        parameters=tuple(parameters),
    )


def postprocess_kernel(block: DqBlock, b: BackwardBuffers, problem: ForwardProblem) -> Kernel:
    """Launch of artefact 2: from blocks of the scratch to dQ."""
    return Kernel(
        artefact=2,
        grid=_row_block_grid(block.tile_m, problem),
        block=(POSTPROCESS_THREADS, 1, 1),
        cluster=(1, 1, 1),
        shared_bytes=postprocess_shared_bytes(block),
        parameters=(
            *pointers(b.dq_accum, b.turn, b.dquery),
            Scalars("f", (problem.scale,)),
            *integers(problem.seqlen_q, problem.heads, problem.head_dim),
        ),
    )


def postprocess_shared_bytes(block: DqBlock) -> int:
    """Dynamic shared memory of the postprocess kernel: the rounded block with padded rows."""
    return block.tile_m * (block.head_dim + POSTPROCESS_PITCH_PADDING) * ELEMENT
