"""Launch plan of the Hopper forward. Pure Python: no DSL, no JAX."""

from __future__ import annotations

from jax_fa4.ffi.plan import SWIZZLE_64B, SWIZZLE_128B, Kernel, Parameter, Scalars, Tensor, TensorMap
from jax_fa4.kernels.artefact import Artefact
from jax_fa4.kernels.problem import ForwardProblem
from jax_fa4.kernels.sm90.forward.layout import ELEMENT, ROWS, ForwardLayout

SECTION_BYTES = 24 << 20
"""K and V of the heads that causal tiles are interleaved over: about half of the L2, as the rest streams through."""

MIN_SCALE_LOG2 = 2.0**-100
"""Stands in for a scale of 0: the kernel multiplies masked scores (-inf) by the scale. Any score below 2**80 times it
changes no exponential."""


def forward_kernel(spec_artefact: Artefact, problem: ForwardProblem, sm_count: int) -> Kernel:
    """The kernel launch for one problem with at least one query row and one key.

    One CTA per multiprocessor takes a fixed share of the tiles. Where lengths are known only at run time, shares could
    differ much: then each tile has a CTA, and the hardware's scheduler evens them out.
    """
    spec = spec_artefact.spec
    layout = ForwardLayout(spec)
    group = problem.group
    if spec.pack_gqa and group > ROWS:
        raise ValueError(f"a kernel with pack_gqa takes up to {ROWS} query heads per key/value head, not {group}")
    box_tokens = ROWS // group if spec.pack_gqa else ROWS
    tile_tokens = box_tokens * layout.warpgroups
    tiles_m = -(-problem.seqlen_q // tile_tokens)
    heads = problem.kv_heads if spec.pack_gqa else problem.heads
    batch_heads = problem.batch * heads
    pairs = tiles_m * -(-batch_heads // 2)
    total = 2 * pairs if layout.paired else tiles_m * batch_heads
    if total >= 2**31:
        raise ValueError(f"{total} query tiles; a launch takes fewer than 2**31")
    buffers = problem.buffers(spec.varlen)
    parameters: list[Parameter] = [
        _row_map(problem, spec.pack_gqa, buffers.query, problem.head_dim, layout.chunk, box_tokens),
        _key_map(problem, buffers.key, problem.head_dim, layout.chunk, spec.tile.n),
        _key_map(problem, buffers.value, problem.head_dim_v, layout.chunk_v, spec.tile.n),
        _row_map(problem, spec.pack_gqa, buffers.out, problem.head_dim_v, layout.chunk_v, box_tokens),
        Tensor(buffers.lse),
    ]
    if buffers.batch_info is not None:
        parameters.append(Tensor(buffers.batch_info))
    parameters.append(Scalars("f", (max(problem.scale_log2, MIN_SCALE_LOG2),)))
    integers = (
        problem.seqlen_q,
        problem.seqlen_k,
        problem.query_offset,
        problem.left,
        problem.right,
        group,
        box_tokens,
        tiles_m,
        heads,
        batch_heads,
        _section(problem, spec.mask, spec.pack_gqa, batch_heads),
        total,
    )
    parameters += [Scalars("i", (value,)) for value in integers]
    return Kernel(
        artefact=0,
        grid=(total if spec.varlen else min(pairs if layout.paired else total, sm_count), 1, 1),
        block=(layout.threads, 1, 1),
        cluster=(1, 1, 1),
        shared_bytes=layout.shared_bytes,
        parameters=tuple(parameters),
    )


def _section(problem: ForwardProblem, mask: str, packed: bool, batch_heads: int) -> int:
    """(batch, head) pairs whose tiles are interleaved; see :mod:`jax_fa4.kernels.common.tile_order`."""
    heads_per_kv_head = 1 if packed else problem.group
    kv_heads = 1
    if mask == "causal":
        bytes_per_kv_head = problem.seqlen_k * (problem.head_dim + problem.head_dim_v) * ELEMENT
        kv_heads = max(1, SECTION_BYTES // bytes_per_kv_head)
    return min(batch_heads, kv_heads * heads_per_kv_head)


def _row_map(problem: ForwardProblem, packed: bool, buffer: int, width: int, chunk: int, box_tokens: int) -> TensorMap:
    """Q or O, (batch, tokens, heads, width): boxes of one warpgroup's rows by one chunk of columns."""
    head = width * ELEMENT
    token = problem.heads * head
    batch = problem.seqlen_q * token
    if packed:
        dims: tuple[int, ...] = (width, problem.group, problem.seqlen_q, problem.kv_heads, problem.batch)
        strides: tuple[int, ...] = (head, token, problem.group * head, batch)
        box: tuple[int, ...] = (chunk, problem.group, box_tokens, 1, 1)
    else:
        dims = (width, problem.seqlen_q, problem.heads, problem.batch)
        strides = (token, head, batch)
        box = (chunk, box_tokens, 1, 1)
    return TensorMap(buffer, problem.dtype, dims, strides, box, _swizzle(chunk))


def _key_map(problem: ForwardProblem, buffer: int, width: int, chunk: int, tile_n: int) -> TensorMap:
    """K or V, (batch, keys, kv_heads, width): boxes of one block of keys by one chunk of columns."""
    head = width * ELEMENT
    token = problem.kv_heads * head
    return TensorMap(
        buffer,
        problem.dtype,
        (width, problem.seqlen_k, problem.kv_heads, problem.batch),
        (token, head, problem.seqlen_k * token),
        (chunk, tile_n, 1, 1),
        _swizzle(chunk),
    )


def _swizzle(chunk: int) -> int:
    return SWIZZLE_128B if chunk == 64 else SWIZZLE_64B
