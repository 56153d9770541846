"""Launch of the main kernel on pairs of CTAs. Pure Python: no DSL, no JAX.

Buffers, scratch, and the two small kernels of a call are the single-CTA backward's: see ``backward.plan``.
"""

from __future__ import annotations

from jax_fa4.ffi.plan import SWIZZLE_NONE, TensorMap
from jax_fa4.kernels.sm90.backward.scratch import ScratchSizes
from jax_fa4.kernels.sm100.backward.config import ROWS
from jax_fa4.kernels.sm100.backward_pair.config import HALF_ROWS, PIECE_VECTORS

VECTOR = 4
"""float32 elements of the scratch's unit: columns of one row."""


def scratch_map(buffer: int, sizes: ScratchSizes) -> TensorMap:
    """The float32 scratch as vectors of all rows of a block (the inner dimension), of all columns of all blocks.

    A box is the rows of one CTA in the vectors that leave together.
    """
    inner = ROWS * VECTOR
    return TensorMap(
        buffer,
        "float32",
        dims=(inner, sizes.dq_accum // inner),
        strides=(inner * 4,),
        box=(HALF_ROWS * VECTOR, PIECE_VECTORS),
        swizzle=SWIZZLE_NONE,
    )
