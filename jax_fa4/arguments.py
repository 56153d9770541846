"""Checks the arguments of an attention call and brings them into canonical form."""

from __future__ import annotations

import math
import numbers
import operator
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, core

from jax_fa4.config import MAX_POSITION, AttentionConfig, Operands


class Arguments(NamedTuple):
    """A checked call. ``batched`` tells whether query came with a batch axis."""

    config: AttentionConfig
    operands: Operands
    batched: bool


def _fail(name: str, came: str, allowed: str) -> ValueError:
    return ValueError(f"{name}: got {came}; expected {allowed}")


def _array(name: str, x: Any) -> Array:
    try:
        return jnp.asarray(x)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name}: got {type(x).__name__}; expected an array ({error})") from error


def _is_real(x: Array) -> bool:
    return bool(jnp.issubdtype(x.dtype, jnp.floating) or jnp.issubdtype(x.dtype, jnp.integer))


def _operand(name: str, x: Any, letters: str) -> Array:
    x = _array(name, x)
    if x.ndim not in (3, 4):
        raise _fail(name, f"{x.ndim} dimensions, shape {x.shape}", f"3 or 4: ({letters}) or, without batch, "
                    f"({letters[3:]})")  # fmt: skip
    if not jnp.issubdtype(x.dtype, jnp.floating) or jnp.finfo(x.dtype).bits < 16:
        raise _fail(name, f"dtype {x.dtype}", "float32, bfloat16, float16 or float64")
    return x if x.ndim == 4 else x[None]


def _score_shaped(name: str, x: Array, scores: tuple[int, int, int, int]) -> Array:
    """Prepends unit axes to a bias or mask and checks that it broadcasts to (B, N, T, S)."""
    shape = x.shape
    if x.ndim > 4:
        raise _fail(name, f"{x.ndim} dimensions, shape {shape}", f"at most 4, broadcastable to (B, N, T, S) = {scores}")
    x = jnp.reshape(x, (*(1,) * (4 - x.ndim), *shape))
    if any(have not in (1, want) for have, want in zip(x.shape, scores, strict=True)):
        raise _fail(name, f"shape {shape}", f"a shape broadcastable to (B, N, T, S) = {scores}")
    return x


def _lengths(name: str, x: Any, batch: int) -> Array | None:
    if x is None:
        return None
    x = _array(name, x)
    if x.shape != (batch,) or x.dtype != jnp.int32:
        raise _fail(name, f"shape {x.shape} and dtype {x.dtype}", f"shape (B,) = ({batch},) and dtype int32")
    return x


def _segment_ids(name: str, x: Any, batch: int, length: int, axis: str) -> Array:
    x = _array(name, x)
    if not jnp.issubdtype(x.dtype, jnp.integer):
        raise _fail(name, f"dtype {x.dtype}", "an integer dtype")
    if x.shape == (length,) and batch == 1:
        x = x[None]
    if x.shape != (batch, length):
        raise _fail(name, f"shape {x.shape}", f"shape (B, {axis}) = ({batch}, {length})")
    return x.astype(jnp.int32)


def _bound(name: str, x: Any) -> int | None:
    if x is None:
        return None
    try:
        value = operator.index(x)
    except TypeError:
        value = -1
    if isinstance(x, bool) or not 0 <= value <= MAX_POSITION:
        raise _fail(name, repr(x), f"an int in [0, {MAX_POSITION}], or None for no bound on that side")
    return value


def _window(local_window_size: Any, is_causal: bool) -> tuple[int | None, int | None]:
    """Left and right bounds; causal is a right bound of 0, and both intersect."""
    left = right = None
    name = "local_window_size"
    if isinstance(local_window_size, tuple | list):
        if len(local_window_size) != 2:
            raise _fail(name, repr(local_window_size), "an int or a pair (left, right)")
        left, right = (_bound(name, x) for x in local_window_size)
    elif local_window_size is not None:
        left = right = _bound(name, local_window_size)
    if is_causal:
        right = 0
    return left, right


def _flag(name: str, x: Any) -> bool:
    if not isinstance(x, bool | np.bool_):
        raise TypeError(f"{name}: got {type(x).__name__}; expected a Python bool (it must be static)")
    return bool(x)


def _scale(scale: Any, head_dim: int) -> tuple[float | None, Array | None]:
    """(static scale, traced scale): exactly one is not None."""
    if scale is None:
        return 1.0 / math.sqrt(head_dim), None
    if isinstance(scale, numbers.Real) and not isinstance(scale, bool):
        return float(scale), None
    array = _array("scale", scale)
    if array.shape != () or not _is_real(array):
        raise _fail("scale", f"shape {array.shape} and dtype {array.dtype}", "a real scalar")
    if isinstance(array, core.Tracer):
        return None, array if jnp.issubdtype(array.dtype, jnp.floating) else array.astype(jnp.float32)
    return float(array), None


def _offset(query_offset: Any, batch: int) -> tuple[int, Array | None]:
    """(static offset, traced or per-batch offset (B,))."""
    name = "query_offset"
    if not isinstance(query_offset, Array | np.ndarray):
        try:
            value = operator.index(query_offset)
        except TypeError:
            value = MAX_POSITION + 1
        if isinstance(query_offset, bool) or abs(value) > MAX_POSITION:
            raise _fail(name, repr(query_offset), f"an int in [{-MAX_POSITION}, {MAX_POSITION}] or an int32 array")
        return value, None
    array = _array(name, query_offset)
    if array.dtype != jnp.int32 or array.shape not in ((), (batch,)):
        raise _fail(name, f"shape {array.shape} and dtype {array.dtype}", f"int32 of shape () or (B,) = ({batch},)")
    return 0, jnp.broadcast_to(array, (batch,))


def _soft_cap(cap: Any) -> float | None:
    if cap is None:
        return None
    if not isinstance(cap, numbers.Real) or isinstance(cap, bool):
        raise TypeError(f"logits_soft_cap: got {type(cap).__name__}; expected a Python number (it must be static)")
    value = float(cap)
    if not (math.isfinite(value) and value > 0):
        raise _fail("logits_soft_cap", repr(cap), "a finite number > 0, or None for no cap")
    return value


def check(
    query: Any,
    key: Any,
    value: Any,
    bias: Any,
    mask: Any,
    *,
    scale: Any,
    is_causal: Any,
    query_seq_lengths: Any,
    key_value_seq_lengths: Any,
    local_window_size: Any,
    query_segment_ids: Any,
    key_value_segment_ids: Any,
    logits_soft_cap: Any,
    sinks: Any,
    query_offset: Any,
    deterministic: Any,
) -> Arguments:
    """See :func:`jax_fa4.attention` for the arguments.

    Raises:
      ValueError, TypeError: an argument is illegal; names it, what came and what is allowed.
    """
    query = _array("query", query)
    q, k = _operand("query", query, "B, T, N, H"), _operand("key", key, "B, S, K, H")
    v = _operand("value", value, "B, S, K, Hv")
    batch, length_k, heads_k, head_dim = k.shape
    length_q, heads_q = q.shape[1], q.shape[2]
    for name, x in (("query", q), ("value", v)):
        if x.dtype != k.dtype:
            raise _fail(name, f"dtype {x.dtype}", f"the dtype of key, {k.dtype}")
    if q.shape[0] != batch or q.shape[3] != head_dim:
        raise _fail("query", f"shape {q.shape}", f"(B, T, N, H) with B = {batch} and H = {head_dim} of key {k.shape}")
    if v.shape[:3] != k.shape[:3]:
        raise _fail("value", f"shape {v.shape}", f"(B, S, K, Hv) with (B, S, K) = {k.shape[:3]} of key")
    if 0 in (heads_k, heads_q, head_dim, v.shape[3]):
        raise _fail("query, key, value", f"shapes {q.shape}, {k.shape}, {v.shape}", "at least one head and head_dim")
    if heads_q % heads_k:
        raise _fail("query", f"{heads_q} heads", f"a multiple of the {heads_k} heads of key and value")

    scores = (batch, heads_q, length_q, length_k)
    if mask is not None:
        mask = _array("mask", mask)
        if mask.dtype != jnp.bool_:
            raise _fail("mask", f"dtype {mask.dtype}", "bool (True attends); an additive mask goes into bias")
        mask = _score_shaped("mask", mask, scores)
    if bias is not None:
        bias = _array("bias", bias)
        if not _is_real(bias):
            raise _fail("bias", f"dtype {bias.dtype}", "a real number dtype; a boolean mask goes into mask")
        bias = _score_shaped("bias", bias, scores)
        if not jnp.issubdtype(bias.dtype, jnp.floating):
            bias = bias.astype(jnp.float32)
    if sinks is not None:
        sinks = _array("sinks", sinks)
        if sinks.shape != (heads_q,) or not jnp.issubdtype(sinks.dtype, jnp.floating):
            raise _fail(
                "sinks", f"shape {sinks.shape} and dtype {sinks.dtype}", f"floating of shape (N,) = ({heads_q},)"
            )
    if (query_segment_ids is None) != (key_value_segment_ids is None):
        absent = "query_segment_ids" if query_segment_ids is None else "key_value_segment_ids"
        raise _fail(absent, "None", "query_segment_ids and key_value_segment_ids together, or neither")
    if query_segment_ids is not None:
        query_segment_ids = _segment_ids("query_segment_ids", query_segment_ids, batch, length_q, "T")
        key_value_segment_ids = _segment_ids("key_value_segment_ids", key_value_segment_ids, batch, length_k, "S")

    static_scale, traced_scale = _scale(scale, head_dim)
    static_offset, traced_offset = _offset(query_offset, batch)
    left, right = _window(local_window_size, _flag("is_causal", is_causal))
    config = AttentionConfig(
        scale=static_scale,
        window_left=left,
        window_right=right,
        query_offset=static_offset,
        logits_soft_cap=_soft_cap(logits_soft_cap),
        deterministic=_flag("deterministic", deterministic),
    )
    operands = Operands(
        query=q,
        key=k,
        value=v,
        bias=bias,
        mask=mask,
        sinks=sinks,
        scale=traced_scale,
        query_offset=traced_offset,
        query_lengths=_lengths("query_seq_lengths", query_seq_lengths, batch),
        key_value_lengths=_lengths("key_value_seq_lengths", key_value_seq_lengths, batch),
        query_segment_ids=query_segment_ids,
        key_value_segment_ids=key_value_segment_ids,
    )
    return Arguments(config, operands, batched=query.ndim == 4)
