"""Under jit, batch and heads partition without communication, on Auto and Explicit meshes, forward and backward."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_fa4

B, T, S, N, K, D = 4, 48, 64, 4, 2, 16
COLLECTIVE = re.compile(r"(all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(?:-start)?\(")

ROWS = P("data", None, "model", None)
"""How query, key and value are split."""


def features() -> dict[str, tuple[dict, dict]]:
    """name -> (array arguments with their partition specs, static arguments)."""
    rng = np.random.default_rng(0)
    ids = np.sort(rng.integers(0, 3, (B, S)), -1).astype(np.int32)
    return {
        "causal": ({}, {"is_causal": True}),
        "window": ({}, {"local_window_size": (10, 5)}),
        "lengths": (
            {
                "query_seq_lengths": (np.asarray([48, 20, 1, 30], np.int32), P("data")),
                "key_value_seq_lengths": (np.asarray([64, 10, 33, 50], np.int32), P("data")),
            },
            {"is_causal": True},
        ),
        "offset": ({"query_offset": (np.asarray([0, 3, -2, 16], np.int32), P("data"))}, {"is_causal": True}),
        "segments": (
            {"query_segment_ids": (ids[:, :T], P("data")), "key_value_segment_ids": (ids, P("data"))},
            {"logits_soft_cap": 5.0},
        ),
        "mask": ({"mask": (rng.random((B, 1, T, S)) < 0.7, P("data"))}, {}),
        "bias": ({"bias": (rng.standard_normal((B, N, T, S)).astype(np.float32), P("data", "model"))}, {}),
        "shared_bias": ({"bias": (rng.standard_normal((1, N, T, S)).astype(np.float32), P(None, "model"))}, {}),
        "sinks": ({"sinks": (rng.standard_normal(N).astype(np.float32), P("model"))}, {"is_causal": True}),
    }


REDUCED = {"shared_bias", "sinks"}
"""Features with an operand that is replicated over the batch axis: its gradient is summed over it, by an all-reduce."""


def total_and_gradients(implementation: str, static: dict):
    def total(floating, other):
        out, lse = jax_fa4.attention_with_lse(**floating, **other, **static, implementation=implementation)
        return (out**2).sum() + jnp.where(jnp.isneginf(lse), 0, jnp.sin(lse)).sum(), (out, lse)

    return jax.grad(total, has_aux=True)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
@pytest.mark.parametrize("feature", features())
@pytest.mark.parametrize("implementation", ["xla", "blockwise"])
def test_no_communication(implementation: str, feature: str, kind: AxisType) -> None:
    arrays, static = features()[feature]
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(kind,) * 2)
    rng = np.random.default_rng(1)
    shapes = {"query": (B, T, N, D), "key": (B, S, K, D), "value": (B, S, K, D)}
    operands = {name: (rng.standard_normal(shape).astype(np.float32), ROWS) for name, shape in shapes.items()}
    everything = {**operands, **arrays}
    plain = {name: jnp.asarray(x) for name, (x, _) in everything.items()}
    want = split_call(total_and_gradients("xla", static), plain)
    with jax.set_mesh(mesh):
        placed = {name: jax.device_put(x, NamedSharding(mesh, spec)) for name, (x, spec) in everything.items()}
        function = total_and_gradients(implementation, static)
        got = split_call(function, placed)
        text = jax.jit(function).lower(*split(placed)).compile().as_text()
    found = set(COLLECTIVE.findall(text))
    assert found <= ({"all-reduce"} if feature in REDUCED else set()), f"unneeded communication: {found}"
    gradients, (out, _) = got
    assert out.sharding.spec[0] == "data" and out.sharding.spec[2] == "model"
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), atol=2e-5, rtol=2e-5)
    assert gradients["query"].sharding.is_equivalent_to(NamedSharding(mesh, ROWS), 4)


def split(arrays: dict) -> tuple[dict, dict]:
    """Differentiable arrays and the others."""
    floating = {n: x for n, x in arrays.items() if jnp.issubdtype(x.dtype, jnp.floating)}
    return floating, {n: x for n, x in arrays.items() if n not in floating}


def split_call(function, arrays: dict):
    return jax.jit(function)(*split(arrays))


@pytest.mark.parametrize("operand", ["query", "key"])
def test_a_split_sequence_is_refused_on_explicit_meshes(operand: str) -> None:
    mesh = jax.make_mesh((2,), ("seq",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        whole = jax.device_put(jnp.zeros((1, 8, 2, 4)), NamedSharding(mesh, P()))
        arrays = dict.fromkeys(("query", "key", "value"), whole)
        arrays[operand] = jax.device_put(jnp.zeros((1, 8, 2, 4)), NamedSharding(mesh, P(None, "seq")))
        with pytest.raises(ValueError, match=rf"{operand}: got its sequence axis split over mesh axis 'seq'.*parallel"):
            jax_fa4.attention(**arrays)
