"""Arithmetic that the XLA implementations share: precision, scores, grouped heads."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from jax_fa4.config import AttentionConfig, Operands


def accumulator_dtype(dtype: DTypeLike) -> DTypeLike:
    """float32, or float64 for float64 operands."""
    return jnp.promote_types(dtype, jnp.float32)


def einsum(subscripts: str, a: Array, b: Array, dtype: DTypeLike) -> Array:
    """Matrix product accumulated and returned in ``dtype``.

    Operands of 32 bits and more keep their full precision on every platform; otherwise the platform's native product
    of the 16-bit operands is exact enough (products are exact, sums float32). The precision is given explicitly so
    that no global setting changes results.
    """
    precision = lax.Precision.HIGHEST if jnp.finfo(a.dtype).bits >= 32 else lax.Precision.DEFAULT
    return jnp.einsum(subscripts, a, b, precision=precision, preferred_element_type=dtype)


def scale_of(config: AttentionConfig, operands: Operands, dtype: DTypeLike) -> Array:
    """The softmax scale as a scalar of ``dtype``."""
    return jnp.asarray(config.scale if operands.scale is None else operands.scale, dtype)


def group_heads(x: Array, key_heads: int) -> Array:
    """(B, N|1, t, s) -> (B, K|1, G|1, t, s): splits a head axis so that it broadcasts against grouped scores."""
    batch, heads, rows, cols = x.shape
    if heads == 1:
        return x[:, :, None]
    return jnp.reshape(x, (batch, key_heads, heads // key_heads, rows, cols))
