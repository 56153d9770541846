"""Launch of the main kernel on pairs of CTAs. Pure Python: no DSL, no JAX.

Buffers, scratch, and the two small kernels of a call are the single-CTA backward's: see ``backward.plan``.
"""

from __future__ import annotations

from dataclasses import replace

from jax_fa4.ffi.plan import SWIZZLE_64B, SWIZZLE_128B, SWIZZLE_NONE, TensorMap
from jax_fa4.kernels.problem import ForwardProblem
from jax_fa4.kernels.sm90.backward.plan import tile_map
from jax_fa4.kernels.sm90.backward.scratch import ScratchSizes
from jax_fa4.kernels.sm100.backward.config import BOX_COLUMNS, KEYS, ROWS, BackwardConfig
from jax_fa4.kernels.sm100.backward_pair.config import CTAS, HALF_ROWS, PairShape

VECTOR = 4
"""float32 elements of the scratch's unit: columns of one row."""


Rows = tuple[int, int, int, int]
"""(buffer, rows, heads, width) of a tensor (batch, rows, heads, width)."""


def column_maps(config: BackwardConfig, problem: ForwardProblem, query: Rows, key: Rows, dout: Rows) -> list[TensorMap]:
    """Maps of Q, K and dO by columns; each has half of them in a CTA."""
    shape = PairShape.of(config)
    swizzle = SWIZZLE_128B if shape.column_box == BOX_COLUMNS else SWIZZLE_64B

    def own_columns(tensor: Rows, rows: int) -> TensorMap:
        return replace(tile_map(problem, *tensor, rows)[0], box=(shape.column_box, rows, 1, 1), swizzle=swizzle)

    return [own_columns(query, shape.rows), own_columns(key, CTAS * KEYS), tile_map(problem, *dout, shape.rows)[0]]


def scratch_map(config: BackwardConfig, buffer: int, sizes: ScratchSizes) -> TensorMap:
    """The float32 scratch as vectors of all rows of a block (the inner dimension), of all columns of all blocks.

    A box is the rows of one CTA in the vectors that leave together.
    """
    inner = ROWS * VECTOR
    return TensorMap(
        buffer,
        "float32",
        dims=(inner, sizes.dq_accum // inner),
        strides=(inner * 4,),
        box=(HALF_ROWS * VECTOR, PairShape.of(config).piece_vectors),
        swizzle=SWIZZLE_NONE,
    )
