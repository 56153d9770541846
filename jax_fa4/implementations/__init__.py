"""Implementations of attention: plain XLA, blockwise XLA, and the kernels."""

from jax_fa4.implementations import blockwise, xla
from jax_fa4.implementations.base import Implementation, register, registered, unregister

register(xla.IMPLEMENTATION)
register(blockwise.IMPLEMENTATION)

__all__ = ["Implementation", "register", "registered", "unregister"]
