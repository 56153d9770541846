"""Poisoned device memory: what a kernel leaves unwritten in its results shows as NaN, not as earlier values."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence

import jax
import numpy as np

COPIES = 3
TEMPORARIES = 1 << 26  # bytes poisoned for scratch


class UnpoisonedWarning(UserWarning):
    """A result came to lie in memory that :func:`poison` had not reached."""


def poison(results: Sequence[jax.ShapeDtypeStruct]) -> list[tuple[int, int]]:
    """Fills free device memory with NaN bit patterns, first of all what the allocator would give to ``results``.

    The allocator takes the smallest free piece that fits, so that blocks of the results' sizes get what the results
    themselves get after the blocks are freed. Returns the (start, end) addresses that were filled.
    """
    sizes = [math.prod(x.shape) * np.dtype(x.dtype).itemsize for x in results] * COPIES + [TEMPORARIES]
    # All bits set is NaN in every floating format. Copies from the host: nothing is compiled for them.
    blocks = [jax.device_put(np.full(size, 0xFF, np.uint8)) for size in sizes if size]
    jax.block_until_ready(blocks)
    spans = [(block.unsafe_buffer_pointer(), block.unsafe_buffer_pointer() + block.nbytes) for block in blocks]
    for block in blocks:
        block.delete()
    return spans


def within(array: jax.Array, spans: list[tuple[int, int]]) -> bool:
    """Whether all of an array lies in ``spans`` (which may adjoin)."""
    start, end = array.unsafe_buffer_pointer(), array.unsafe_buffer_pointer() + array.nbytes
    for low, high in sorted(spans):
        if low <= start < high:
            start = high
    return start >= end


def call_poisoned(compiled: Callable, results: Sequence[jax.ShapeDtypeStruct], *operands: object, tries: int = 3):
    """The compiled function's results, all of them in memory that was poisoned before the call.

    Warns with :class:`UnpoisonedWarning` where ``tries`` calls did not bring that about.
    """
    got = None
    for _ in range(tries):
        del got
        spans = poison(results)
        got = jax.block_until_ready(compiled(*operands))
        if all(within(x, spans) for x in jax.tree.leaves(got)):
            return got
    warnings.warn("results outside of the poisoned memory", UnpoisonedWarning, stacklevel=2)
    return got
