"""Implementations of attention: plain XLA, blockwise XLA, and the kernels."""

from jax_fa4.implementations import blockwise, fa4, xla
from jax_fa4.implementations.base import Implementation, register, registered, unregister

register(xla.IMPLEMENTATION)
register(blockwise.IMPLEMENTATION)
register(fa4.IMPLEMENTATION)
for _implementation in fa4.FOR_ARCHITECTURE:
    register(_implementation)

__all__ = ["Implementation", "register", "registered", "unregister"]
