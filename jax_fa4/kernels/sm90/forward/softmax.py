"""(DSL) Online softmax on the score fragment of one warpgroup.

A thread holds two query rows (8 apart) of the 64 x tile_n scores: element e of its fragment is in row ``(e >> 1) & 1``
and in column ``8 * (e >> 2) + 2 * (lane % 4) + (e & 1)``. Four neighbouring lanes share a row.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr, range_constexpr

from jax_fa4.kernels.common import ptx

Fragment: TypeAlias = Any
"""A register tensor (``cute.Tensor`` of float32 unless said otherwise)."""

THREAD_ROWS = 2
RESCALE_THRESHOLD = -8.0
"""The running maximum may lag behind by this much (log2 units) before it moves: the exponentials stay below 2**8, the
sums use the same stale maximum, and the final division is exact (FlashAttention-4, conditional rescale)."""

OPTIMISTIC_LIMIT = 2.0**15
"""Largest sum of one thread's exponentials in a row that the optimistic path accepts: each of them is then finite in
float16 too, and the float32 sums stay far from overflow."""


def row_of(element: int) -> int:
    """Which of the thread's two rows an element of the fragment belongs to."""
    return (element >> 1) & 1


def column_of(element: int) -> int:
    """Column of an element relative to the thread's first one."""
    return 8 * (element >> 2) + (element & 1)


@cute.jit
def apply_limits(scores: Fragment, begin: tuple, end: tuple, has_begin: bool):
    """Sets scores of columns outside ``[begin[r], end[r])`` to -inf; the limits count from the thread's column 0."""
    for element in range_constexpr(cute.size(scores)):
        row = row_of(element)
        column = column_of(element)
        visible = end[row] > column
        if const_expr(has_begin):
            visible = visible & (begin[row] <= column)
        scores[element] = scores[element] if visible else -Float32.inf


def row_maximum(scores: Fragment, row: int) -> Float32:
    """Maximum over a row of the block (all four lanes get it)."""
    maximum = _maximum_of_thread(scores, row)
    for offset in (1, 2):
        maximum = cute.arch.fmax(maximum, cute.arch.shuffle_sync_bfly(maximum, offset=offset))
    return maximum


def _maximum_of_thread(scores: Fragment, row: int) -> Float32:
    """Maximum over this thread's elements of a row."""
    elements = [e for e in range(cute.size(scores)) if row_of(e) == row]
    # Two chains: the instruction's latency, not its rate, would bound one.
    partial = [scores[elements[0]], scores[elements[1]]]
    for index, element in enumerate(elements[2:]):
        partial[index % 2] = cute.arch.fmax(partial[index % 2], scores[element])
    return cute.arch.fmax(partial[0], partial[1])


def sum_over_lanes(value: Float32) -> Float32:
    """Sum over the four lanes that share a row."""
    for offset in (1, 2):
        value = value + cute.arch.shuffle_sync_bfly(value, offset=offset)
    return value


@cute.jit
def first_block(scores: Fragment, maxima: Fragment, sums: Fragment, scale_log2: Float32):
    """Softmax numerators of a tile's first block, in place; sets the running maxima and this thread's partial sums."""
    for row in range_constexpr(THREAD_ROWS):
        maximum = row_maximum(scores, row)
        maxima[row] = maximum
        sums[row] = _exponentials(scores, row, _reference(maximum), scale_log2)


@cute.jit
def next_block(scores: Fragment, maxima: Fragment, sums: Fragment, factors: Fragment, scale_log2: Float32):
    """Softmax numerators of a further block, in place; ``factors[r]`` is what earlier results of row r are scaled by.

    A factor is exactly 1 while the maximum has not grown past the threshold.
    """
    for row in range_constexpr(THREAD_ROWS):
        old = maxima[row]
        new = cute.arch.fmax(old, row_maximum(scores, row))
        # -inf for a first visible key (factor 0), NaN where no key is visible yet (then neither sum nor O matters).
        growth = (old - new) * scale_log2
        keep = growth >= RESCALE_THRESHOLD
        kept = old if keep else new
        factors[row] = Float32(1.0) if keep else ptx.exp2((old - _reference(new)) * scale_log2)
        maxima[row] = kept
        sums[row] = sums[row] * factors[row] + _exponentials(scores, row, _reference(kept), scale_log2)


@cute.jit
def optimistic_block(
    scores: Fragment,
    probabilities: Fragment,
    maxima: Fragment,
    sums: Fragment,
    output: Fragment,
    scale_log2: Float32,
    dtype: Any,
):
    """Numerators of a further block without a mask, rounded into ``probabilities``, against the maxima as they are.

    Any reference near the maximum gives the exact softmax, so the maximum is not computed at all: the sum of the
    exponentials tells whether the reference has become too small. If so for a row of this warp (or if a row has seen
    no key yet), that row's maximum moves to the true one and earlier results are scaled; the scores are still there.
    Whether a row's maximum moves depends on that row alone.
    """
    found = cute.make_rmem_tensor(THREAD_ROWS, Float32)
    _probabilities(scores, probabilities, maxima, found, scale_log2, dtype)
    moves = Boolean(False)
    for row in range_constexpr(THREAD_ROWS):
        moves = moves | (found[row] > OPTIMISTIC_LIMIT) | (maxima[row] == -Float32.inf)
    if cute.arch.vote_any_sync(moves):
        factors = cute.make_rmem_tensor(THREAD_ROWS, Float32)
        for row in range_constexpr(THREAD_ROWS):
            largest = found[row]
            for offset in range_constexpr(1, 3):
                largest = cute.arch.fmax(largest, cute.arch.shuffle_sync_bfly(largest, offset=offset))
            old = maxima[row]
            kept = old
            factors[row] = Float32(1.0)
            if (largest > OPTIMISTIC_LIMIT) | (old == -Float32.inf):
                kept = cute.arch.fmax(old, _maximum_of_thread(scores, row))
            for offset in range_constexpr(1, 3):
                kept = cute.arch.fmax(kept, cute.arch.shuffle_sync_bfly(kept, offset=offset))
            if kept != old:
                factors[row] = ptx.exp2((old - _reference(kept)) * scale_log2)
            maxima[row] = kept
            sums[row] = sums[row] * factors[row]
        _probabilities(scores, probabilities, maxima, found, scale_log2, dtype)
        for element in range_constexpr(cute.size(output)):
            output[element] = output[element] * factors[row_of(element)]
    for row in range_constexpr(THREAD_ROWS):
        sums[row] = sums[row] + found[row]


def _probabilities(
    scores: Fragment,
    probabilities: Fragment,
    maxima: Fragment,
    found: Fragment,
    scale_log2: Float32,
    dtype: Any,
):
    """probabilities = 2**((scores - maxima) * scale_log2) rounded; ``found`` gets this thread's row sums of them."""
    packed = cute.recast_tensor(probabilities, Int32)
    shifts = [_reference(maxima[row]) * scale_log2 for row in range(THREAD_ROWS)]
    # Two chains of sums a row: the latency of the additions would bound one.
    partial: list[list] = [[], []]
    for pair in range(cute.size(scores) // 2):
        row = row_of(2 * pair)
        values = [ptx.exp2(scores[element] * scale_log2 - shifts[row]) for element in (2 * pair, 2 * pair + 1)]
        packed[pair] = ptx.pack_pair(values[0], values[1], dtype)
        partial[row] = [a + b for a, b in zip(partial[row], values, strict=True)] if partial[row] else values
    for row in range(THREAD_ROWS):
        found[row] = partial[row][0] + partial[row][1]


@cute.jit
def _reference(maximum: Float32) -> Float32:
    """The maximum to subtract: 0 for a row that sees no key, so that its exponentials are 0 and not NaN."""
    return Float32(0.0) if maximum == -Float32.inf else maximum


def _exponentials(scores: Fragment, row: int, maximum: Float32, scale_log2: Float32) -> Float32:
    """scores[row] = 2**((scores - maximum) * scale_log2) in place; returns this thread's sum of them."""
    elements = [e for e in range(cute.size(scores)) if row_of(e) == row]
    shift = maximum * scale_log2
    partial: list = [None, None]
    for index, element in enumerate(elements):
        value = ptx.exp2(scores[element] * scale_log2 - shift)
        scores[element] = value
        chain = index % 2
        partial[chain] = value if partial[chain] is None else partial[chain] + value
    return partial[0] + partial[1]


@cute.jit
def rescale(accumulator: Fragment, factors: Fragment):
    """accumulator *= factors, skipped by warps none of whose rows moved its maximum."""
    if cute.arch.vote_any_sync((factors[0] != Float32(1.0)) | (factors[1] != Float32(1.0))):
        for element in range_constexpr(cute.size(accumulator)):
            accumulator[element] = accumulator[element] * factors[row_of(element)]


def pack(scores: Fragment, probabilities: Fragment, dtype) -> None:
    """Rounds the numerators to ``dtype`` into the A fragment of the PV product (same element order as the scores)."""
    packed = cute.recast_tensor(probabilities, Int32)
    for pair in range(cute.size(scores) // 2):
        packed[pair] = ptx.pack_pair(scores[2 * pair], scores[2 * pair + 1], dtype)
