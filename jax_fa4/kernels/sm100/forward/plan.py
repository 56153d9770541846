"""Launch plan of the Blackwell forward. Pure Python: no DSL, no JAX."""

from __future__ import annotations

from jax_fa4.ffi.plan import SWIZZLE_128B, Kernel, Parameter, Scalars, Tensor, TensorMap
from jax_fa4.kernels.artefact import Artefact
from jax_fa4.kernels.problem import ForwardProblem
from jax_fa4.kernels.sm100.forward.config import BOX_COLUMNS, ROWS, ForwardConfig
from jax_fa4.kernels.sm100.forward.shared import SharedMap

ELEMENT = 2
"""Bytes of a bfloat16 or float16."""

SECTION_BYTES = 48 << 20
"""K and V of the heads whose tiles are interleaved: well under the 126 MB of L2, as Q and O stream through it."""

MIN_SCALE_LOG2 = 2.0**-100
"""Stands in for a scale of 0: the kernel multiplies masked scores (-inf) by the scale. Any score below 2**80 times it
changes no exponential."""


def forward_kernel(artefact: Artefact, problem: ForwardProblem, sm_count: int) -> Kernel:
    """The kernel launch for one problem with at least one query row and one key.

    Raises ValueError for a group of query heads that does not fit a packed tile, or more tiles than a grid has.
    """
    spec = artefact.spec
    config = ForwardConfig.from_spec(spec)
    packed, ctas = config.pack_gqa, config.ctas
    if packed and problem.group > ROWS:
        raise ValueError(
            f"a kernel with pack_gqa takes up to {ROWS} query heads per key/value head, not {problem.group}"
        )
    box_tokens = ROWS // problem.group if packed else ROWS
    tiles_m = -(-problem.seqlen_q // (box_tokens * config.q_stages * config.ctas))
    heads = problem.kv_heads if packed else problem.heads
    batch_heads = problem.batch * heads
    total = tiles_m * batch_heads
    if total >= 2**31:
        raise ValueError(f"{total} query tiles; a launch takes fewer than 2**31")
    buffers = problem.buffers(spec.varlen)
    parameters: list[Parameter] = [
        _row_map(problem, packed, buffers.query, problem.head_dim, box_tokens),
        _key_map(problem, buffers.key, problem.head_dim, config.k_keys),
        _key_map(problem, buffers.value, problem.head_dim_v, config.v_keys_per_chunk),
        _row_map(problem, packed, buffers.out, problem.head_dim_v, box_tokens),
        Tensor(buffers.out),
        Tensor(buffers.lse),
    ]
    if buffers.batch_info is not None:
        parameters.append(Tensor(buffers.batch_info))
    integers = (
        problem.group,
        box_tokens,
        problem.seqlen_q,
        problem.seqlen_k,
        problem.query_offset,
        problem.left,
        problem.right,
        tiles_m,
        heads,
        batch_heads,
        _section(problem, spec.mask, packed, batch_heads),
        total,
        problem.head_dim_v,
    )
    parameters += [Scalars("i", (value,)) for value in integers]
    parameters.append(Scalars("f", (max(problem.scale_log2, MIN_SCALE_LOG2),)))
    static = spec.mask == "none" and not spec.varlen and not config.launch_control
    return Kernel(
        artefact=0,
        # Tiles of one length: persistent CTAs. Others: one CTA a tile, so that the hardware gives the next tile to
        # whichever SM is free (with cluster launch control, to a CTA that runs already).
        grid=(ctas * (min(total, sm_count // ctas) if static else total), 1, 1),
        block=(config.threads, 1, 1),
        cluster=(ctas, 1, 1),
        shared_bytes=SharedMap.of(config).size,
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


def _row_map(problem: ForwardProblem, packed: bool, buffer: int, width: int, box_tokens: int) -> TensorMap:
    """Q or O, (batch, tokens, heads, width), as (width, heads of a group, tokens, groups, batch): one tile's box.

    Without packing every head is a group of its own.
    """
    inner = problem.group if packed else 1
    head = width * ELEMENT
    token = problem.heads * head
    return TensorMap(
        buffer,
        problem.dtype,
        (width, inner, problem.seqlen_q, problem.heads // inner, problem.batch),
        (head, token, inner * head, problem.seqlen_q * token),
        (BOX_COLUMNS, inner, box_tokens, 1, 1),
        SWIZZLE_128B,
    )


def _key_map(problem: ForwardProblem, buffer: int, width: int, keys: int) -> TensorMap:
    """K or V, (batch, keys, kv_heads, width): boxes of ``keys`` keys."""
    head = width * ELEMENT
    token = problem.kv_heads * head
    return TensorMap(
        buffer,
        problem.dtype,
        (width, problem.seqlen_k, problem.kv_heads, problem.batch),
        (token, head, problem.seqlen_k * token),
        (BOX_COLUMNS, keys, 1, 1),
        SWIZZLE_128B,
    )
