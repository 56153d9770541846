"""Attention calls drawn at random, and their comparison with the float64 reference.

Any implementation can be put through it; :data:`Capabilities` says what it serves.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

from jax_fa4 import attention_with_lse
from tests import reference
from tests.quick import quick_jit

ARRAYS = ("query", "key", "value", "bias", "mask", "sinks", "scale", "query_offset", "query_seq_lengths")
ARRAYS += ("key_value_seq_lengths", "query_segment_ids", "key_value_segment_ids")
DIFFERENTIABLE = ("query", "key", "value", "bias", "sinks", "scale")
FEATURES = ("bias", "mask", "sinks", "scale", "is_causal", "local_window_size", "query_offset", "query_seq_lengths")
FEATURES += ("key_value_seq_lengths", "segment_ids", "logits_soft_cap")


@dataclass(frozen=True)
class Capabilities:
    """What an implementation serves: dtypes, sizes, and the names in FEATURES that it takes."""

    dtypes: tuple[str, ...] = ("float32", "float32", "float32", "bfloat16", "float16")
    lengths: tuple[int, ...] = (1, 2, 3, 8, 13, 16, 21)
    head_dims: tuple[int, ...] = (1, 4, 8, 12)
    features: tuple[str, ...] = FEATURES
    head_dim_v_differs: bool = True
    empty: bool = True


@dataclass
class Call:
    """Operands and cotangents as NumPy arrays (16-bit ones hold exactly representable float32 values)."""

    dtype: str
    operands: dict[str, Any]
    static: dict[str, Any]
    d_out: np.ndarray
    d_lse: np.ndarray
    differentiate: tuple[str, ...]
    described: str = field(default="", repr=False)

    def __repr__(self) -> str:
        shapes = {name: (x.shape, str(x.dtype)) for name, x in self.operands.items()}
        return f"Call({self.dtype}, {shapes}, {self.static}, {self.described})"


def _round(x: np.ndarray, dtype: str) -> np.ndarray:
    return np.asarray(jnp.asarray(x, jnp.float32).astype(dtype).astype(jnp.float32))


@st.composite
def calls(draw: Any, capabilities: Capabilities = Capabilities()) -> Call:
    """Strategy for :class:`Call`. Values come from a drawn seed, so that an example is small to print."""
    dtype = draw(st.sampled_from(capabilities.dtypes))
    batch, heads_k, group = draw(st.sampled_from([1, 2, 3])), draw(st.sampled_from([1, 2])), draw(st.integers(1, 3))
    length_q, length_k = draw(st.sampled_from(capabilities.lengths)), draw(st.sampled_from(capabilities.lengths))
    if capabilities.empty and draw(st.integers(0, 19)) == 0:
        batch, length_q, length_k = draw(st.sampled_from([(0, 3, 3), (2, 0, 3), (2, 3, 0)]))
    head_dim = draw(st.sampled_from(capabilities.head_dims))
    head_dim_v = draw(st.sampled_from(capabilities.head_dims)) if capabilities.head_dim_v_differs else head_dim
    seed = draw(st.integers(0, 2**31))
    size = draw(st.sampled_from([1.0, 1.0, 0.0, 8.0]))
    rng = np.random.default_rng(seed)
    heads = heads_k * group
    scores = (batch, heads, length_q, length_k)

    def normal(*shape: int) -> np.ndarray:
        return _round(rng.normal(size=shape), dtype)

    def chosen(name: str, odds: int = 3) -> bool:
        return name in capabilities.features and draw(st.integers(0, odds - 1)) == 0

    def broadcast(full: tuple[int, ...]) -> tuple[int, ...]:
        shape = tuple(n if keep else 1 for n, keep in zip(full, draw(st.tuples(*[st.booleans()] * 4)), strict=True))
        return shape[draw(st.integers(0, 3)) :] if draw(st.integers(0, 3)) == 0 else shape

    operands: dict[str, Any] = {
        "query": _round(normal(batch, length_q, heads, head_dim) * size, dtype),
        "key": normal(batch, length_k, heads_k, head_dim),
        "value": normal(batch, length_k, heads_k, head_dim_v),
    }
    static: dict[str, Any] = {}
    if chosen("bias"):
        operands["bias"] = rng.normal(size=broadcast(scores)).astype(np.float32)
        if draw(st.integers(0, 3)) == 0:
            operands["bias"][rng.random(operands["bias"].shape) < 0.3] = -np.inf
    if chosen("mask"):
        operands["mask"] = rng.random(broadcast(scores)) < draw(st.sampled_from([0.9, 0.5, 0.1, 0.0]))
    if chosen("sinks"):
        operands["sinks"] = rng.normal(size=heads).astype(np.float32)
    if chosen("scale"):
        operands["scale"] = np.float32(rng.uniform(0.1, 0.8))
    if chosen("is_causal"):
        static["is_causal"] = True
    if chosen("local_window_size"):
        static["local_window_size"] = draw(
            st.sampled_from([0, 1, 5, (0, 3), (3, 0), (None, 2), (4, None), (None, None), (40, 40)])
        )
    if chosen("query_offset"):
        if draw(st.booleans()):
            operands["query_offset"] = rng.integers(-length_q, length_k + 1, size=batch).astype(np.int32)
        else:
            static["query_offset"] = draw(st.integers(-12, 12))
    for name, length in (("query_seq_lengths", length_q), ("key_value_seq_lengths", length_k)):
        if chosen(name):
            operands[name] = rng.integers(0, length + 3, size=batch).astype(np.int32)
    if chosen("segment_ids"):
        ids = [rng.integers(0, 3, size=(batch, length)).astype(np.int32) for length in (length_q, length_k)]
        if draw(st.booleans()):
            ids = [np.sort(x, axis=1) for x in ids]
        operands["query_segment_ids"], operands["key_value_segment_ids"] = ids
    if chosen("logits_soft_cap"):
        static["logits_soft_cap"] = draw(st.sampled_from([0.5, 3.0, 50.0]))
    present = [name for name in DIFFERENTIABLE if name in operands]
    differentiate = tuple(present) if draw(st.integers(0, 3)) else (draw(st.sampled_from(present)),)
    return Call(
        dtype,
        operands,
        static,
        normal(batch, length_q, heads, head_dim_v),
        normal(batch, heads, length_q) if draw(st.booleans()) else np.zeros((batch, heads, length_q), np.float32),
        differentiate,
        f"seed={seed}, size={size}, differentiate={differentiate}",
    )


def cast(call: Call) -> dict[str, Any]:
    """The operands as the implementation gets them."""
    narrow = ("query", "key", "value")
    return {name: jnp.asarray(x, call.dtype) if name in narrow else jnp.asarray(x) for name, x in call.operands.items()}


def evaluate(call: Call, implementations: tuple[str, ...]) -> dict[str, Any]:
    """(out, lse, gradients by name) for each implementation, in one compiled program."""

    def one(implementation: str, operands: dict[str, Any]) -> Any:
        fixed = {name: x for name, x in operands.items() if name not in call.differentiate}

        def function(moving: dict[str, Any]) -> Any:
            return attention_with_lse(**fixed, **moving, **call.static, implementation=implementation)

        moving = {name: operands[name] for name in call.differentiate}
        (out, lse), pull = jax.vjp(function, moving)
        # A cotangent for the log-sum-exp of a row that sees nothing must change nothing either.
        return out, lse, pull((jnp.asarray(call.d_out, out.dtype), jnp.asarray(call.d_lse, lse.dtype)))[0]

    return quick_jit(lambda operands: {name: one(name, operands) for name in implementations})(cast(call))


def expected(call: Call) -> reference.Reference:
    """The float64 reference of a call."""
    return reference.attention(**call.operands, **call.static, d_out=call.d_out, d_lse=call.d_lse)


ROUNDING = {"float32": 2e-6, "bfloat16": 2**-8, "float16": 2**-11}
"""Relative error of one rounding to the dtype (float32: a few, for its exponentials)."""


def assert_matches(call: Call, result: Any, want: reference.Reference, factor: float = 4.0) -> None:
    """Elementwise error within ``factor`` roundings of the largest magnitude at play; never NaN."""
    out, lse, gradients = result
    rounding = factor * ROUNDING[call.dtype]
    value = call.operands["value"]
    _close("out", out, want.out, rounding * max(1.0, np.abs(value).max(initial=0)))
    seen = np.isfinite(want.lse)
    np.testing.assert_array_equal(np.isneginf(np.asarray(lse)), ~seen, err_msg="lse: rows that see nothing")
    largest = np.abs(want.lse[seen]).max(initial=1)
    _close("lse", np.asarray(lse)[seen], want.lse[seen], factor * ROUNDING["float32"] * 5 * largest)
    assert set(gradients) == set(call.differentiate)
    for name, got in gradients.items():
        operand = call.operands[name]
        assert got.shape == operand.shape, name
        assert got.dtype == (call.dtype if name in ("query", "key", "value") else operand.dtype), name
        # Terms of both signs cancel in a gradient, so that its error scales with the cotangents, the other operands
        # and the number of terms, not with the gradient itself.
        terms = np.sqrt(max(1, np.prod(want.lse.shape) / max(1, operand.size)))
        size = max(np.abs(want.gradients[name]).max(initial=0), _gradient_scale(call, name) * terms)
        _close(name, got, want.gradients[name], rounding * size)


def _gradient_scale(call: Call, name: str) -> float:
    """Magnitude of the terms that are summed in an operand's gradient."""

    def norm(x: np.ndarray) -> float:
        return float(np.sqrt((x.astype(np.float64) ** 2).sum(axis=-1)).max(initial=0))

    if name == "value":
        return norm(call.d_out[..., None])
    score = 2 * norm(call.d_out) * norm(call.operands["value"]) + float(np.abs(call.d_lse).max(initial=0))
    scale = float(call.operands.get("scale", 1 / np.sqrt(call.operands["query"].shape[-1])))
    factors = {
        "query": scale * norm(call.operands["key"]),
        "key": scale * norm(call.operands["query"]),
        "scale": norm(call.operands["query"]) * norm(call.operands["key"]),
    }
    return score * factors.get(name, 1.0)


def _close(name: str, got: Any, want: np.ndarray, tolerance: float) -> None:
    got = np.asarray(got).astype(np.float64)
    assert got.shape == want.shape, f"{name}: {got.shape} != {want.shape}"
    assert np.isfinite(got).all(), f"{name}: not finite"
    error = np.abs(got - want).max(initial=0)
    assert error <= tolerance, f"{name}: error {error:.3g} > {tolerance:.3g}"
