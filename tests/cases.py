"""Named attention problems shared by the kernels' tests, and the numerical criterion they are held to.

A :class:`Case` is what varies between kernel variants and between launches of one; :func:`sample_cases` draws a fixed,
seeded subset of the full product in which every value of every axis occurs, so that suites of different length (CI,
long mode, GPU) see the same kind of coverage.
"""

from __future__ import annotations

import itertools
import random
import zlib
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

SHAPES = (
    (1, 1),
    (3, 3),
    (64, 1),
    (239, 1),
    (1, 239),
    (113, 203),
    (108, 256),
    (640, 128),
    (1023, 1024),
    (1024, 1023),
    (0, 5),
    (5, 0),
)
HEAD_DIMS = ((8, 8), (40, 40), (64, 64), (72, 72), (96, 96), (128, 128), (192, 192), (256, 256), (192, 128), (64, 128))
MASKS = ("none", "causal", "window", "causal_window", "lengths", "causal_lengths", "offset", "window_offset")
GROUPS = ("1", "4", "all")  # query heads per key head
DTYPES = ("bfloat16", "float16")


@dataclass(frozen=True)
class Case:
    """One attention problem: sequence lengths, head dims (d_qk, d_v), mask, query heads per key head, dtype."""

    lengths: tuple[int, int]
    head_dims: tuple[int, int]
    mask: str
    group: str
    dtype: str
    batch: int = 2

    @property
    def heads(self) -> tuple[int, int]:
        """Query heads and key heads."""
        return {"1": (2, 2), "4": (8, 2), "all": (6, 1)}[self.group]

    @property
    def seed(self) -> int:
        return zlib.crc32(self.name.encode())

    @property
    def name(self) -> str:
        (t, s), (d, d_v) = self.lengths, self.head_dims
        return f"T{t}-S{s}-d{d}x{d_v}-{self.mask}-g{self.group}-{self.dtype}"

    def mask_arguments(self) -> dict:
        """Keyword arguments of ``jax_fa4.attention`` for this case's mask."""
        t, s = self.lengths
        rng = np.random.default_rng(self.seed + 1)
        arguments: dict = {}
        if "causal" in self.mask:
            arguments["is_causal"] = True
        if "window" in self.mask:
            left, right = int(rng.integers(0, s + 2)), int(rng.integers(0, s + 2))
            arguments["local_window_size"] = (left, 0 if "causal" in self.mask else right)
        if "lengths" in self.mask:
            arguments["query_seq_lengths"] = rng.integers(0, t + 1, self.batch).astype(np.int32)
            arguments["key_value_seq_lengths"] = rng.integers(0, s + 1, self.batch).astype(np.int32)
        if "offset" in self.mask:
            arguments["query_offset"] = int(rng.integers(-3, s + 3))
            arguments.setdefault("is_causal", "window" not in self.mask)
        return arguments

    def operands(self, scale: float = 1.0) -> dict[str, jax.Array]:
        """query, key, value, and the cotangents of output and LSE; random normal, logits' spread set by ``scale``."""
        (t, s), (d, d_v), (n, k) = self.lengths, self.head_dims, self.heads
        rng = np.random.default_rng(self.seed)
        shapes = {
            "query": (self.batch, t, n, d),
            "key": (self.batch, s, k, d),
            "value": (self.batch, s, k, d_v),
            "out_cotangent": (self.batch, t, n, d_v),
        }
        arrays = {name: jnp.asarray(rng.standard_normal(shape), self.dtype) for name, shape in shapes.items()}
        if scale != 1:
            arrays["query"] = (arrays["query"].astype(jnp.float32) * scale).astype(self.dtype)
        arrays["lse_cotangent"] = jnp.asarray(rng.standard_normal((self.batch, n, t)), jnp.float32)
        return arrays


def sample_cases(
    count: int,
    *,
    seed: int = 0,
    shapes: tuple = SHAPES,
    head_dims: tuple = HEAD_DIMS,
    masks: tuple = MASKS,
    groups: tuple = GROUPS,
    dtypes: tuple = DTYPES,
) -> list[Case]:
    """``count`` distinct cases of the product, each value of each axis about equally often; fixed by ``seed``."""
    axes = (shapes, head_dims, masks, groups, dtypes)
    rng = random.Random(seed)
    columns = []
    for axis in axes:
        column = list(itertools.islice(itertools.cycle(axis), 4 * count))
        rng.shuffle(column)
        columns.append(column)
    distinct = dict.fromkeys(Case(*values) for values in zip(*columns, strict=True))
    return list(distinct)[:count]


def visible(case: Case) -> np.ndarray:
    """Boolean (batch, T, S): which keys a query row attends to, written straight from the definition."""
    t, s = case.lengths
    arguments = case.mask_arguments()
    offset = arguments.get("query_offset", 0)
    row, column = np.arange(t)[:, None], np.arange(s)[None, :]
    mask = np.ones((case.batch, t, s), bool)
    if arguments.get("is_causal"):
        mask &= column <= row + offset
    if "local_window_size" in arguments:
        left, right = arguments["local_window_size"]
        mask &= (column >= row + offset - left) & (column <= row + offset + right)
    if "query_seq_lengths" in arguments:
        mask &= row < arguments["query_seq_lengths"][:, None, None]
        mask &= column < arguments["key_value_seq_lengths"][:, None, None]
    return mask


def plain_attention(
    query: jax.Array, key: jax.Array, value: jax.Array, mask: jax.Array, probability_dtype
) -> tuple[jax.Array, jax.Array]:
    """Attention from its definition in float32; probabilities rounded to ``probability_dtype`` before P·V.

    Fully masked rows give output 0 and LSE -inf. Returns out (B, T, N, D_v) float32 and lse (B, N, T) float32.
    """
    group = query.shape[2] // key.shape[2]
    q, k, v = (x.astype(jnp.float32) for x in (query, jnp.repeat(key, group, 2), jnp.repeat(value, group, 2)))
    logits = jnp.einsum("btnd,bsnd->bnts", q, k, precision="highest") / np.sqrt(query.shape[-1])
    logits = jnp.where(mask[:, None], logits, -jnp.inf)
    peak = jax.lax.stop_gradient(jnp.max(logits, -1, keepdims=True, initial=-1e30))
    weights = jnp.where(mask[:, None], jnp.exp(logits - peak), 0)
    total = weights.sum(-1)
    empty = total == 0
    lse = jnp.where(empty, -jnp.inf, jnp.log(jnp.where(empty, 1, total)) + peak[..., 0])
    rounded = weights.astype(probability_dtype).astype(jnp.float32)
    out = jnp.einsum("bnts,bsnd->btnd", rounded, v, precision="highest")
    return out / jnp.where(empty, 1, total).transpose(0, 2, 1)[..., None], lse


def gradients(function: Callable, case: Case, operands: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """out, lse and the gradients of query, key and value under the case's two cotangents.

    ``function(query, key, value)`` returns (out, lse). Rows whose LSE is -inf get a zero LSE cotangent here, since the
    derivative of a constant is 0 whatever multiplies it.
    """
    (out, lse), pullback = jax.vjp(function, operands["query"], operands["key"], operands["value"])
    lse_cotangent = jnp.where(jnp.isneginf(lse), 0, operands["lse_cotangent"])
    d_query, d_key, d_value = pullback((operands["out_cotangent"].astype(out.dtype), lse_cotangent))
    return {"out": out, "lse": lse, "d_query": d_query, "d_key": d_key, "d_value": d_value}


def assert_close(name: str, got, exact, low_precision, *, absolute: float, case: str) -> None:
    """max|got - exact| <= 2·max|low_precision - exact| + absolute, and the same of the relative Frobenius norm."""
    got, exact, low_precision = (np.asarray(x, np.float64) for x in (got, exact, low_precision))
    assert got.shape == exact.shape, f"{case}: {name} has shape {got.shape}, expected {exact.shape}"
    infinite = np.isneginf(exact)
    assert np.array_equal(np.isneginf(got), infinite), f"{case}: {name} is -inf in the wrong places"
    got, exact, low_precision = (np.where(infinite, 0, x) for x in (got, exact, low_precision))
    assert np.isfinite(got).all(), f"{case}: {name} has {np.size(got) - np.isfinite(got).sum()} non-finite elements"
    if got.size == 0:
        return
    error, bound = np.abs(got - exact).max(), 2 * np.abs(low_precision - exact).max() + absolute
    assert error <= bound, f"{case}: {name} is off by {error:.3e}, allowed {bound:.3e}"
    norm = np.linalg.norm(exact)
    allowed = 2 * np.linalg.norm(low_precision - exact) + absolute * np.sqrt(exact.size)
    assert np.linalg.norm(got - exact) <= allowed, f"{case}: {name}, norm {norm:.3e}: error above {allowed:.3e}"
