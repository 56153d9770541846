"""Plain attention in XLA: the whole score matrix at once.

Any JAX transformation applies: forward mode, reverse mode, second derivatives. Memory is O(B * N * T * S).
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax

from jax_fa4.config import AttentionConfig, Operands, dims_of
from jax_fa4.implementations.base import Implementation
from jax_fa4.implementations.numerics import accumulator_dtype, einsum, group_heads, scale_of
from jax_fa4.masks import mask_of


def forward(config: AttentionConfig, operands: Operands) -> tuple[Array, Array]:
    """See :data:`jax_fa4.implementations.base.Forward`."""
    dims = dims_of(operands)
    batch, rows, heads, cols = dims.batch, dims.query_length, dims.query_heads, dims.key_length
    dtype = accumulator_dtype(operands.query.dtype)
    query = jnp.reshape(operands.query, (batch, rows, dims.key_heads, dims.group, dims.head_dim))
    scores = einsum("btkgh,bskh->bkgts", query, operands.key, dtype) * scale_of(config, operands, dtype)
    if operands.bias is not None:
        scores = scores + group_heads(operands.bias, dims.key_heads).astype(dtype)
    if config.logits_soft_cap is not None:
        scores = config.logits_soft_cap * jnp.tanh(scores / config.logits_soft_cap)
    visible = mask_of(config, operands).visible(0, rows, 0, cols)
    if visible is not None:
        scores = jnp.where(group_heads(visible, dims.key_heads), scores, -jnp.inf)

    # The maximum only shifts the exponents: no derivative passes through it. A row that sees nothing has maximum
    # -inf; 0 in its place keeps -inf - -inf = NaN out of the primal and of every derivative.
    maximum = jnp.max(lax.stop_gradient(scores), axis=-1, initial=-jnp.inf)
    sinks = None
    if operands.sinks is not None:
        sinks = jnp.reshape(operands.sinks.astype(dtype), (1, dims.key_heads, dims.group, 1))
        maximum = jnp.maximum(maximum, lax.stop_gradient(sinks))
    maximum = jnp.where(maximum == -jnp.inf, 0, maximum)
    weights = jnp.exp(scores - maximum[..., None])
    total = jnp.sum(weights, axis=-1)
    if sinks is not None:
        total = total + jnp.exp(sinks - maximum)
    seen = total > 0
    total = jnp.where(seen, total, 1)
    lse = jnp.where(seen, maximum + jnp.log(total), -jnp.inf)
    weights = (weights / total[..., None]).astype(operands.value.dtype)
    out = einsum("bkgts,bskh->btkgh", weights, operands.value, dtype)
    out = jnp.reshape(out, (batch, rows, heads, dims.head_dim_v)).astype(operands.query.dtype)
    return out, jnp.reshape(lse, (batch, heads, rows))


IMPLEMENTATION = Implementation(name="xla", forward=forward, backward=None)
