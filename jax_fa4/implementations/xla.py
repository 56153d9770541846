"""Plain attention in XLA: the whole score matrix at once.

Any JAX transformation applies: forward mode, reverse mode, second derivatives. Memory is O(B * N * T * S).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jax_fa4.config import AttentionConfig, Operands, dims_of
from jax_fa4.implementations.base import Implementation
from jax_fa4.implementations.numerics import accumulator_dtype, einsum, group_heads, scale_of
from jax_fa4.masks import mask_of


@jax.custom_jvp
def _softmax(scores: Array, sinks: Array | None) -> tuple[Array, Array]:
    """Weights along the last axis and their log-sum-exp; a sink, one more column, joins the sum only.

    Differentiated by its own rule, in terms of its outputs: the backward pass then holds and reads one array of the
    scores' size. The rule calls the function, so that it can be differentiated again.
    """
    maximum = jnp.max(scores, axis=-1, initial=-jnp.inf)
    if sinks is not None:
        maximum = jnp.maximum(maximum, sinks)
    # A row that sees nothing has maximum -inf; 0 in its place keeps -inf - -inf = NaN out.
    maximum = jnp.where(maximum == -jnp.inf, 0, maximum)
    powers = jnp.exp(scores - maximum[..., None])
    total = jnp.sum(powers, axis=-1)
    if sinks is not None:
        total = total + jnp.exp(sinks - maximum)
    seen = total > 0
    total = jnp.where(seen, total, 1)
    return powers / total[..., None], jnp.where(seen, maximum + jnp.log(total), -jnp.inf)


@_softmax.defjvp
def _softmax_jvp(primals: tuple[Array, Array | None], tangents: tuple[Array, Any]) -> tuple[Any, Any]:
    scores, sinks = primals
    d_scores, d_sinks = tangents
    weights, lse = _softmax(scores, sinks)
    d_lse = jnp.sum(weights * d_scores, axis=-1)
    if sinks is not None:
        d_lse = d_lse + jnp.exp(sinks - jnp.where(lse == -jnp.inf, jnp.inf, lse)) * d_sinks
    return (weights, lse), (weights * (d_scores - d_lse[..., None]), d_lse)


def forward(config: AttentionConfig, operands: Operands) -> tuple[Array, Array]:
    """See :data:`jax_fa4.implementations.base.Forward`."""
    dims = dims_of(operands)
    batch, rows, heads, cols = dims.batch, dims.query_length, dims.query_heads, dims.key_length
    dtype = accumulator_dtype(operands.query.dtype)
    # Heads come before rows, so that only the small operands are transposed, never the scores.
    query = jnp.reshape(operands.query, (batch, rows, dims.key_heads, dims.group, dims.head_dim))
    query = jnp.transpose(query, (0, 2, 3, 1, 4))
    key, value = (jnp.transpose(x, (0, 2, 1, 3)) for x in (operands.key, operands.value))
    scores = einsum("bkgth,bksh->bkgts", query, key, dtype) * scale_of(config, operands, dtype)
    if operands.bias is not None:
        scores = scores + group_heads(operands.bias, dims.key_heads).astype(dtype)
    if config.logits_soft_cap is not None:
        scores = config.logits_soft_cap * jnp.tanh(scores / config.logits_soft_cap)
    visible = mask_of(config, operands).visible(0, rows, 0, cols)
    if visible is not None:
        scores = jnp.where(group_heads(visible, dims.key_heads), scores, -jnp.inf)
    sinks = None
    if operands.sinks is not None:
        sinks = jnp.reshape(operands.sinks.astype(dtype), (1, dims.key_heads, dims.group, 1))
    weights, lse = _softmax(scores, sinks)
    out = einsum("bkgts,bksh->bkgth", weights.astype(value.dtype), value, dtype)
    out = jnp.reshape(out, (batch, heads, rows, dims.head_dim_v))
    return jnp.transpose(out, (0, 2, 1, 3)).astype(operands.query.dtype), jnp.reshape(lse, (batch, heads, rows))


IMPLEMENTATION = Implementation(name="xla", forward=forward, backward=None)
