"""Attention and its gradients in float64 NumPy, written from the definition.

One score matrix at a time, one softmax row with the sink as an extra column, the softmax's Jacobian written out. It
shares no code with the package.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np


@dataclass
class Reference:
    """out (B, T, N, Hv), lse (B, N, T), and gradients by operand name in the operands' shapes; all float64."""

    out: np.ndarray
    lse: np.ndarray
    gradients: dict[str, np.ndarray] = field(default_factory=dict)


def _f64(x):
    return None if x is None else np.asarray(x).astype(np.float64)


def visible_pairs(
    batch,
    length_q,
    length_k,
    *,
    is_causal=False,
    local_window_size=None,
    query_offset=0,
    query_seq_lengths=None,
    key_value_seq_lengths=None,
    query_segment_ids=None,
    key_value_segment_ids=None,
):
    """Boolean (B, T, S): which key each query may see, by the definition of each argument."""
    offsets = np.broadcast_to(np.asarray(query_offset), (batch,))
    visible = np.ones((batch, length_q, length_k), bool)
    window = (local_window_size,) * 2 if isinstance(local_window_size, int) else local_window_size
    for b in range(batch):
        for i in range(length_q):
            position = i + int(offsets[b])
            for j in range(length_k):
                ok = True
                if is_causal and j > position:
                    ok = False
                if window is not None:
                    left, right = window
                    if left is not None and position - j > left:
                        ok = False
                    if right is not None and j - position > right:
                        ok = False
                if query_seq_lengths is not None and i >= query_seq_lengths[b]:
                    ok = False
                if key_value_seq_lengths is not None and j >= key_value_seq_lengths[b]:
                    ok = False
                if query_segment_ids is not None and query_segment_ids[b, i] != key_value_segment_ids[b, j]:
                    ok = False
                visible[b, i, j] = ok
    return visible


def _unbroadcast(gradient, shape):
    """Sums a (B, N, T, S) gradient over the axes along which an operand of ``shape`` was broadcast."""
    padded = (1,) * (4 - len(shape)) + tuple(shape)
    for axis, size in enumerate(padded):
        if size == 1 and gradient.shape[axis] != 1:
            gradient = gradient.sum(axis=axis, keepdims=True)
        elif size == 1 and gradient.shape[axis] == 0:
            gradient = np.zeros(gradient.shape[:axis] + (1,) + gradient.shape[axis + 1 :])
    return gradient.reshape(shape)


def attention(
    query,
    key,
    value,
    bias=None,
    mask=None,
    *,
    scale=None,
    logits_soft_cap=None,
    sinks=None,
    d_out=None,
    d_lse=None,
    **who_sees_whom,
):
    """Arguments as ``jax_fa4.attention`` takes them, 4-D; cotangents (B, T, N, Hv) and (B, N, T) or None.

    Gradients are computed if ``d_out`` is given.
    """
    query, key, value, bias, sinks = (_f64(x) for x in (query, key, value, bias, sinks))
    batch, length_q, heads, head_dim = query.shape
    _, length_k, heads_k, head_dim_v = value.shape
    group = heads // heads_k
    scale = 1 / np.sqrt(head_dim) if scale is None else float(scale)
    seen = visible_pairs(batch, length_q, length_k, **who_sees_whom)
    shape = (batch, heads, length_q, length_k)
    full_bias = None if bias is None else np.broadcast_to(bias, shape)
    full_mask = None if mask is None else np.broadcast_to(np.asarray(mask), shape)

    out = np.zeros((batch, length_q, heads, head_dim_v))
    lse = np.full((batch, heads, length_q), -np.inf)
    gradients = {"query": np.zeros(query.shape), "key": np.zeros(key.shape), "value": np.zeros(value.shape)}
    gradients["scale"] = np.zeros(())
    gradients["sinks"] = np.zeros(heads)
    d_scores_all = np.zeros(shape)
    if d_out is not None:
        d_out = _f64(d_out)
        d_lse = np.zeros(lse.shape) if d_lse is None else _f64(d_lse)
    for b in range(batch):
        for n in range(heads):
            k = n // group
            products = query[b, :, n] @ key[b, :, k].T
            biased = products * scale
            if full_bias is not None:
                biased = biased + full_bias[b, n]
            scores, slope = biased, np.ones_like(biased)
            if logits_soft_cap is not None:
                scores = logits_soft_cap * np.tanh(biased / logits_soft_cap)
                slope = 1 / np.cosh(np.clip(biased / logits_soft_cap, -300, 300)) ** 2
            allowed = seen[b] if full_mask is None else seen[b] & full_mask[b, n]
            columns = np.where(allowed, scores, -np.inf)
            last = np.full((length_q, 1), -np.inf if sinks is None else sinks[n])
            columns = np.concatenate([columns, last], axis=1)
            top = columns.max(axis=1, keepdims=True)
            empty = np.isneginf(top)
            powers = np.exp(columns - np.where(empty, 0, top))
            total = powers.sum(axis=1, keepdims=True)
            probabilities = np.divide(powers, total, out=np.zeros_like(powers), where=~empty)
            with np.errstate(divide="ignore"):
                lse[b, n] = np.where(empty, -np.inf, np.where(empty, 0, top) + np.log(total))[:, 0]
            weights = probabilities[:, :-1]
            out[b, :, n] = weights @ value[b, :, k]
            if d_out is None:
                continue
            # Row-wise: d_columns = (diag(p) - p p^T) d_p + p d_lse; the sink's column has no value row.
            d_p = np.concatenate([d_out[b, :, n] @ value[b, :, k].T, np.zeros((length_q, 1))], axis=1)
            mean = (probabilities * d_p).sum(axis=1, keepdims=True)
            d_columns = probabilities * (d_p - mean + d_lse[b, n][:, None])
            d_biased = d_columns[:, :-1] * np.where(allowed, slope, 0)
            gradients["sinks"][n] += d_columns[:, -1].sum()
            gradients["value"][b, :, k] += weights.T @ d_out[b, :, n]
            gradients["query"][b, :, n] += scale * d_biased @ key[b, :, k]
            gradients["key"][b, :, k] += scale * d_biased.T @ query[b, :, n]
            gradients["scale"] += (d_biased * products).sum()
            d_scores_all[b, n] = d_biased
    if d_out is None:
        gradients = {}
    elif bias is not None:
        gradients["bias"] = _unbroadcast(d_scores_all, bias.shape)
    return Reference(out, lse, gradients)
