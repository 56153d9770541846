"""Attention for Flax: ``attention_fn`` for ``linen.MultiHeadDotProductAttention`` and ``nnx.MultiHeadAttention``.

    layer = nnx.MultiHeadAttention(..., attention_fn=jax_fa4.flax.attention_fn)
    layer = nn.MultiHeadDotProductAttention(..., attention_fn=jax_fa4.flax.attention_fn)

Flax itself is not imported. What the modules hand over was read off flax 0.12 and rules the signature below: linen
passes only the keywords that a function's signature *names* (one that took ``**kwargs`` would lose the mask and the
dropout in silence), nnx passes all of its keywords. So everything that changes the result is named here, and either
served or refused. linen's ``force_fp32_for_softmax`` is not named: the softmax is always in float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from jax_fa4.api import attention

SOWN = "attention weights are never formed, so they cannot be sown: call with sow_weights=False"
POSITIONS = "apply rotary positions to query and key before they come here"
PRODUCTS = "the products are computed by jax_fa4"


def attention_fn(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    broadcast_dropout: bool = True,
    dropout_rng: jax.Array | None = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: DTypeLike | None = None,
    precision: Any = None,
    module: Any = None,
    is_causal: bool = False,
    input_positions: ArrayLike | None = None,
    einsum_dot_general: Any = None,
    qk_attn_weights_einsum: Any = None,
    attn_weights_value_einsum: Any = None,
    implementation: str | None = None,
    scale: float | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    logits_soft_cap: float | None = None,
    deterministic_gradients: bool = True,
) -> jax.Array:
    """Dot-product attention with the calling convention of Flax's ``dot_product_attention``.

    Choose what the modules do not pass with ``functools.partial(attention_fn, implementation="fa4")``; a linen module
    that is causal should use ``partial(attention_fn, is_causal=True)`` rather than ``nn.make_causal_mask``, because a
    mask array must be read and costs the kernels their block skipping.

    Differs from Flax's default: a query row whose keys are all masked gives 0 (Flax averages the values), the softmax
    is in float32 for every dtype, and heads may be grouped under linen too.

    Args:
        query: (batch..., T, N, H), with any number of batch dimensions, also none.
        key: (batch..., S, K, H) with N a multiple of K.
        value: (batch..., S, K, Hv).
        bias: broadcastable to (batch..., N, T, S), added to the scaled scores.
        mask: broadcastable to (batch..., N, T, S), of any dtype: 0 or False hides a key, all else shows it.
        broadcast_dropout, dropout_rng: say how dropout would be drawn; of no effect without dropout, as in Flax.
        dropout_rate, deterministic: dropout is refused: ``dropout_rate > 0`` needs ``deterministic=True``.
        dtype: of the computation and the result; None promotes the operands to a common floating dtype.
        precision: None or a ``jax.lax.Precision`` (or its name): a lower bound, products are always those of HIGHEST.
        module: must be None (a Flax module passes itself to have the attention weights sown; they are never formed).
        is_causal: query i sees keys j <= i; intersected with ``mask``.
        input_positions, einsum_dot_general, qk_attn_weights_einsum, attn_weights_value_einsum: must be None.
        implementation, scale, local_window_size, logits_soft_cap: as in :func:`jax_fa4.attention`.
        deterministic_gradients: ``deterministic`` of :func:`jax_fa4.attention` (Flax's word means "no dropout").

    Returns:
        (batch..., T, N, Hv) in the computation's dtype.

    Raises:
        NotImplementedError: dropout, sown weights, custom einsums, positions or a dot algorithm were asked for.
        ValueError: ranks, batch dimensions or shapes do not fit, or a causal or windowed call has one query and several
            keys: that is a decoding step, whose query is not at position 0.
        TypeError: ``dtype`` is not a floating dtype.
    """
    del broadcast_dropout, dropout_rng
    _refuse_dropout(dropout_rate, deterministic)
    _refuse(
        module=(module, SOWN),
        input_positions=(input_positions, POSITIONS),
        einsum_dot_general=(einsum_dot_general, PRODUCTS),
        qk_attn_weights_einsum=(qk_attn_weights_einsum, PRODUCTS),
        attn_weights_value_einsum=(attn_weights_value_einsum, PRODUCTS),
    )
    query, key, value = _promote(query, key, value, dtype)
    _check_precision(precision)
    batch = _batch_shape(query, key, value)
    scores = (*batch, query.shape[-2], query.shape[-3], key.shape[-3])
    if (is_causal or local_window_size is not None) and query.shape[-3] == 1 and key.shape[-3] > 1:
        raise ValueError(
            f"is_causal={is_causal}, local_window_size={local_window_size} with one query and {key.shape[-3]} keys:"
            " the query would stand at position 0 and see key 0 at most. A decoding step needs only the mask of the"
            " module's cache"
        )
    out = attention(
        _flatten(query, 3),
        _flatten(key, 3),
        _flatten(value, 3),
        None if bias is None else _flatten_scores(bias, "bias", scores),
        None if mask is None else _flatten_scores(mask, "mask", scores).astype(bool),
        scale=scale,
        is_causal=is_causal,
        local_window_size=local_window_size,
        implementation=implementation,
        logits_soft_cap=logits_soft_cap,
        deterministic=deterministic_gradients,
    )
    return out.reshape(*batch, *out.shape[1:])


def sharded_attention_fn(attend: Callable[..., jax.Array], **options: Any) -> Callable[..., jax.Array]:
    """An ``attention_fn`` for Flax's modules whose sequence, batch or heads are split over a mesh.

    Args:
        attend: what :func:`jax_fa4.parallel.make_attention` returned.
        **options: what the modules do not pass, for ``attend``: for example ``local_window_size``.

    Returns:
        A function with the calling convention of :func:`attention_fn`. It takes causal masking and one batch dimension;
        it raises NotImplementedError for ``bias`` and ``mask`` arrays, and like :func:`attention_fn` for the rest.
    """

    def attention_fn(
        query: ArrayLike,
        key: ArrayLike,
        value: ArrayLike,
        bias: ArrayLike | None = None,
        mask: ArrayLike | None = None,
        *,
        broadcast_dropout: bool = True,
        dropout_rng: jax.Array | None = None,
        dropout_rate: float = 0.0,
        deterministic: bool = False,
        dtype: DTypeLike | None = None,
        precision: Any = None,
        module: Any = None,
        is_causal: bool = False,
        input_positions: ArrayLike | None = None,
        einsum_dot_general: Any = None,
        qk_attn_weights_einsum: Any = None,
        attn_weights_value_einsum: Any = None,
    ) -> jax.Array:
        del broadcast_dropout, dropout_rng
        _refuse_dropout(dropout_rate, deterministic)
        dense = "a split sequence takes is_causal, not an array of the scores' shape"
        _refuse(
            bias=(bias, dense),
            mask=(mask, dense),
            module=(module, SOWN),
            input_positions=(input_positions, POSITIONS),
            einsum_dot_general=(einsum_dot_general, PRODUCTS),
            qk_attn_weights_einsum=(qk_attn_weights_einsum, PRODUCTS),
            attn_weights_value_einsum=(attn_weights_value_einsum, PRODUCTS),
        )
        _check_precision(precision)
        return attend(*_promote(query, key, value, dtype), is_causal=is_causal, **options)

    return attention_fn


def _refuse_dropout(dropout_rate: float, deterministic: bool) -> None:
    if dropout_rate > 0.0 and not deterministic:
        raise NotImplementedError(
            f"dropout_rate={dropout_rate} with deterministic=False: jax_fa4 has no attention dropout;"
            " set dropout_rate=0 in the module or call it with deterministic=True"
        )


def _refuse(**arguments: tuple[Any, str]) -> None:
    for name, (value, advice) in arguments.items():
        if value is not None:
            raise NotImplementedError(f"{name} is not supported, got {type(value).__name__}: {advice}")


def _promote(*operands_and_dtype: Any) -> tuple[jax.Array, ...]:
    """Casts all operands to ``dtype`` (the last argument) or, if it is None, to their common floating dtype."""
    *operands, dtype = operands_and_dtype
    if dtype is None:
        dtype = jnp.result_type(*operands)
        if not jnp.issubdtype(dtype, jnp.floating):
            dtype = jnp.promote_types(dtype, jnp.float32)
    if not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(f"dtype must be a floating dtype, got {jnp.dtype(dtype).name}")
    return tuple(jnp.asarray(operand, dtype) for operand in operands)


def _check_precision(precision: Any) -> None:
    """Accepts what jax_fa4 always delivers: 32-bit operands are multiplied in full precision, 16-bit ones exactly."""
    for one in precision if isinstance(precision, tuple) else (precision,):
        try:
            served = one is None or jax.lax.Precision(one) in jax.lax.Precision
        except ValueError:
            served = False
        if not served:
            raise NotImplementedError(
                f"precision={precision!r} is not supported: products are always those of Precision.HIGHEST;"
                " None and every jax.lax.Precision are accepted"
            )


def _batch_shape(query: jax.Array, key: jax.Array, value: jax.Array) -> tuple[int, ...]:
    shapes = f"query {query.shape}, key {key.shape}, value {value.shape}"
    if not query.ndim == key.ndim == value.ndim or query.ndim < 3:
        raise ValueError(f"query, key and value must have the same rank, 3 or more; got {shapes}")
    if not query.shape[:-3] == key.shape[:-3] == value.shape[:-3]:
        raise ValueError(f"query, key and value must have the same batch dimensions (all but the last 3); got {shapes}")
    return query.shape[:-3]


def _flatten(x: jax.Array, kept: int) -> jax.Array:
    """Makes one dimension of all but the last ``kept`` ones."""
    if x.ndim == kept + 1:
        return x
    return x.reshape(math.prod(x.shape[:-kept]), *x.shape[-kept:])


def _flatten_scores(x: ArrayLike, name: str, scores: tuple[int, ...]) -> jax.Array:
    """Turns a mask or bias that broadcasts to ``scores`` (batch..., N, T, S) into (B|1, N|1, T|1, S|1)."""
    x = jnp.asarray(x)
    padded = (1,) * (len(scores) - x.ndim) + x.shape
    if len(padded) != len(scores) or any(size not in (1, full) for size, full in zip(padded, scores, strict=True)):
        raise ValueError(f"{name} must broadcast to (batch..., heads, queries, keys) = {scores}, got shape {x.shape}")
    x = x.reshape(padded)
    batch = padded[:-3]
    if batch != scores[:-3] and any(size != 1 for size in batch):
        x = jnp.broadcast_to(x, scores[:-3] + padded[-3:])
    return _flatten(x, 3)
