"""Which kernel serves a problem: the spec from shapes and flags. Pure Python."""

from __future__ import annotations

from jax_fa4.kernels.problem import ForwardProblem
from jax_fa4.kernels.spec import (
    FAST_EXP2_CAPABILITIES,
    LONG_QUERIES,
    KernelSpec,
    fast_exp2_spec,
    long_query_tile,
    padded_head_dims,
    pair_tile,
    sm100_pair_backward_tile,
)

BOX_ROWS = {"sm_90a": 64, "sm_100f": 128}
"""Query rows that one TMA box brings to a warpgroup; a packed box holds whole groups of query heads."""


BACKWARD_PAIR_KEYS = 1024
"""Keys from which the Blackwell backward runs on pairs of CTAs. A step of a pair takes 0.8 of a single CTA's time
(docs/sm100-backward.md: shared memory), but a pair has 256 keys: rounding up to them, and under a causal mask to whole
query blocks that see the pair's first key, costs up to an eighth at this length."""


def forward_specs(
    problem: ForwardProblem, *, arch: str, mask: str, varlen: bool, capability: str | None = None
) -> tuple[KernelSpec, ...]:
    """The forward kernels that serve a problem, the fastest first. Any one is right on every GPU of ``arch``.

    Args:
      problem: shapes and scalars.
      arch: "sm_90a" or "sm_100f".
      mask: "none", "causal" or "window".
      varlen: whether per-batch lengths and offsets are an operand.
      capability: compute capability of the GPU at hand, such as "10.3"; None where it is not known.

    Raises:
      UnsupportedSpecError: no kernel is built for it.
    """
    specs = _by_shape(problem, arch, mask, varlen)
    if capability not in FAST_EXP2_CAPABILITIES:
        return specs
    return tuple(x for spec in specs for x in (fast_exp2_spec(spec), spec) if x is not None)


def _by_shape(problem: ForwardProblem, arch: str, mask: str, varlen: bool) -> tuple[KernelSpec, ...]:
    """The kernels for a GPU that is like most of its architecture."""

    def spec(pack_gqa: bool) -> KernelSpec:
        return KernelSpec.create(
            arch=arch,
            kind="forward",
            dtype=problem.dtype,
            head_dim=problem.head_dim,
            head_dim_v=problem.head_dim_v,
            mask=mask,
            varlen=varlen,
            pack_gqa=pack_gqa,
        )

    single = spec(pack_gqa=False)
    if _packing_pays(problem, single.tile.m, BOX_ROWS[arch]):
        return spec(pack_gqa=True), single
    long_tile = long_query_tile(single)
    if long_tile is not None and problem.seqlen_q >= LONG_QUERIES:
        return single.with_tile(long_tile), single
    pair = pair_tile(single)
    if pair is not None and problem.seqlen_q > single.tile.m:
        return single.with_tile(pair), single
    return (single,)


def backward_on_pairs(problem: ForwardProblem, arch: str) -> bool:
    """Whether the problem's backward runs on pairs of CTAs."""
    padded = padded_head_dims(problem.head_dim, problem.head_dim_v)
    return (
        arch == "sm_100f" and problem.seqlen_k >= BACKWARD_PAIR_KEYS and sm100_pair_backward_tile(*padded) is not None
    )


def _packing_pays(problem: ForwardProblem, tile_m: int, box_rows: int) -> bool:
    """Whether tiles of whole groups are half as many as tiles of single heads, as for short queries."""
    if not 1 < problem.group <= box_rows:
        return False
    packed_tokens = box_rows // problem.group * (tile_m // box_rows)
    packed = problem.kv_heads * -(-problem.seqlen_q // packed_tokens)
    return 2 * packed <= problem.heads * -(-problem.seqlen_q // tile_m)
