"""Attention and its gradients in NumPy float64 on whole arrays, optionally with the roundings of a 16-bit kernel.

Fast enough for lengths of a thousand. With a ``rounding`` dtype, the probabilities and dS are rounded to it before the
products that a kernel feeds with them, and the results at the end: what an ideal kernel of that precision would give,
which the criterion for kernels compares with.
"""

from __future__ import annotations

import numpy as np

NAMES = ("out", "lse", "d_query", "d_key", "d_value")


def attention(
    query, key, value, mask, out_cotangent=None, lse_cotangent=None, *, rounding=None
) -> dict[str, np.ndarray]:
    """out, lse, d_query, d_key and d_value, float64 (rounded to ``rounding``, lse excepted, where that is given).

    query (B, T, N, H), key (B, S, K, H), value (B, S, K, Hv), mask bool (B, T, S), cotangents of out (B, T, N, Hv) and
    of lse (B, N, T), without which there are no gradients; scale 1 / sqrt(H). Rows that see nothing: out 0, lse -inf,
    gradients 0.
    """

    def rounded(x: np.ndarray) -> np.ndarray:
        return x if rounding is None else x.astype(rounding).astype(np.float64)

    q, k, v = (np.asarray(x).astype(np.float64) for x in (query, key, value))
    b, _, n, h = q.shape
    heads_k = k.shape[2]
    group = n // heads_k
    scale = 1 / np.sqrt(h)

    def heads_first(x: np.ndarray) -> np.ndarray:
        return np.repeat(x, n // x.shape[2], axis=2).transpose(0, 2, 1, 3)

    q, k, v = map(heads_first, (q, k, v))
    scores = np.where(mask[:, None], q @ k.swapaxes(-1, -2) * scale, -np.inf)
    peak = scores.max(-1, keepdims=True, initial=-np.inf)
    weights = np.exp(scores - np.where(np.isneginf(peak), 0, peak))
    total = weights.sum(-1, keepdims=True)
    seen = total > 0
    safe = np.where(seen, total, 1)
    lse = np.where(seen, np.log(safe) + np.where(seen, peak, 0), -np.inf)[..., 0]
    out = rounded(weights) @ v / safe
    if out_cotangent is None:
        return {"lse": lse, "out": rounded(out.transpose(0, 2, 1, 3))}
    d_out = heads_first(np.asarray(out_cotangent).astype(np.float64))
    d_lse = np.asarray(lse_cotangent, np.float64)
    weights = weights / safe
    delta = (rounded(out) * d_out).sum(-1) - np.where(np.isneginf(lse), 0, d_lse)
    d_scores = rounded(weights * (d_out @ v.swapaxes(-1, -2) - delta[..., None]))

    def over_group(x: np.ndarray) -> np.ndarray:
        return x.reshape(b, heads_k, group, *x.shape[2:]).sum(2).transpose(0, 2, 1, 3)

    results = {
        "out": out.transpose(0, 2, 1, 3),
        "d_query": (d_scores @ k * scale).transpose(0, 2, 1, 3),
        "d_key": over_group(d_scores.swapaxes(-1, -2) @ q) * scale,
        "d_value": over_group(rounded(weights).swapaxes(-1, -2) @ d_out),
    }
    return {"lse": lse} | {name: rounded(x) for name, x in results.items()}
