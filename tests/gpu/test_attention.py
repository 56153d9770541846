"""The kernels on the GPU at hand, through the public API, against attention written from its definition in float32."""

from __future__ import annotations

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_fa4
from jax_fa4.kernels import store
from tests import cases, rounded

FORWARD_CASES = cases.sample_cases(420, seed=1)
BACKWARD_CASES = cases.sample_cases(420, seed=2)
ABSOLUTE = {"bfloat16": 2e-3, "float16": 5e-4}  # covers results so small that both references round alike


def poison(bytes_: int = 1 << 28) -> None:
    """Fills freed device memory with NaN bit patterns, so that an unwritten output element shows."""
    block = jnp.full(bytes_ // 4, np.float32(np.nan))
    block.block_until_ready()
    block.delete()


def kernel(case: cases.Case, **extra):
    return functools.partial(jax_fa4.attention_with_lse, implementation="fa4", **{**case.mask_arguments(), **extra})


def references(case: cases.Case, operands: dict) -> tuple[dict, dict]:
    """Exact results, and those with a kernel's roundings."""
    arrays = [operands[n] for n in ("query", "key", "value")]
    arrays += [cases.visible(case), operands["out_cotangent"], operands["lse_cotangent"]]
    return rounded.attention(*arrays), rounded.attention(*arrays, rounding=jnp.dtype(case.dtype))


@pytest.mark.parametrize("case", FORWARD_CASES, ids=lambda c: c.name)
def test_forward(case: cases.Case) -> None:
    operands = case.operands()
    exact, low = references(case, operands)
    qkv = [operands[n] for n in ("query", "key", "value")]
    function = jax.jit(kernel(case)).lower(*qkv).compile()
    poison()
    out, lse = function(*qkv)
    assert out.dtype == case.dtype and lse.dtype == jnp.float32
    cases.assert_close("out", out, exact["out"], low["out"], absolute=ABSOLUTE[case.dtype], case=case.name)
    cases.assert_close("lse", lse, exact["lse"], exact["lse"], absolute=1e-4, case=case.name)


@pytest.mark.parametrize("case", BACKWARD_CASES, ids=lambda c: c.name)
def test_backward(case: cases.Case) -> None:
    operands = case.operands()
    exact, low = references(case, operands)
    with warnings.catch_warnings():
        warnings.simplefilter("error", jax_fa4.FallbackWarning)
        function = jax.jit(lambda o: cases.gradients(kernel(case), case, o)).lower(operands).compile()
    poison()
    got = function(operands)
    for name in ("d_query", "d_key", "d_value"):
        cases.assert_close(name, got[name], exact[name], low[name], absolute=4 * ABSOLUTE[case.dtype], case=case.name)
    mask = cases.visible(case)
    dead_rows, dead_keys = ~mask.any(-1), ~mask.any(-2)
    assert not np.asarray(got["d_query"], np.float32)[dead_rows].any()
    assert not np.asarray(got["d_key"], np.float32)[dead_keys].any()
    assert not np.asarray(got["d_value"], np.float32)[dead_keys].any()


@pytest.mark.parametrize("spread", [1.0, 30.0, 1000.0])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_large_logits(spread: float, head_dim: int) -> None:
    case = cases.Case((300, 520), (head_dim, head_dim), "causal", "1", "bfloat16")
    operands = case.operands(spread)
    # Ramp: each later key block has larger scores than the last, so that the running maximum keeps moving.
    ramp = jnp.linspace(0.1, 2.0, case.lengths[1])[None, :, None, None]
    operands["key"] = (operands["key"].astype(jnp.float32) * ramp).astype(case.dtype)
    exact, low = references(case, operands)
    out, lse = jax.jit(kernel(case))(*(operands[n] for n in ("query", "key", "value")))
    cases.assert_close("out", out, exact["out"], low["out"], absolute=2e-3, case=case.name)
    np.testing.assert_allclose(lse, exact["lse"], rtol=2e-6, atol=1e-4 * spread)


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize(
    "head_dim, mask, group",
    [
        (64, "none", "1"),
        (128, "causal", "1"),
        (128, "none", "4"),
        (256, "causal", "1"),
        (64, "causal", "all"),
        (256, "none", "1"),
    ],
)
def test_bitwise_repeatable(direction: str, head_dim: int, mask: str, group: str) -> None:
    """1,000 calls give the same bits while another stream keeps the GPU busy; so does another batch position."""
    case = cases.Case((1024, 1024), (head_dim, head_dim), mask, group, "bfloat16", batch=8)
    operands = {n: jnp.concatenate([x[:1], x[1:7], x[:1]]) for n, x in case.operands().items()}
    function = jax.jit(
        lambda o: (
            cases.gradients(kernel(case), case, o)
            if direction == "backward"
            else dict(zip(("out", "lse"), kernel(case)(o["query"], o["key"], o["value"]), strict=True))
        )
    )
    differs = jax.jit(
        lambda a, b: sum(
            jnp.sum(
                jax.lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")
                != jax.lax.bitcast_convert_type(y, f"uint{8 * y.dtype.itemsize}")
            )
            for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
        )
    )
    first = function(operands)
    for leaf in first.values():
        np.testing.assert_array_equal(np.asarray(leaf[0]), np.asarray(leaf[7]))
    noise = jnp.ones((2048, 2048), jnp.bfloat16)
    churn = jax.jit(lambda x: x @ x)
    count = jnp.zeros((), jnp.int32)
    for _ in range(1000):
        churn(noise)
        count += differs(first, function(operands))
    assert int(count) == 0


class RecordingStore:
    """The store in use, keeping the names of what was loaded from it."""

    def __init__(self, store):
        self._store = store
        self.names: set[str] = set()

    def load(self, spec):
        self.names.add(spec.name)
        return self._store.load(spec)

    def missing_reason(self, spec):
        return self._store.missing_reason(spec)


def test_one_artefact_serves_many_shapes() -> None:
    """Batch, lengths and head counts are run-time values: no further kernel for 20 combinations (N = K: no packing)."""
    recording = RecordingStore(store.default_store())
    previous = store.default_store()
    store.set_default_store(recording)
    try:
        rng = np.random.default_rng(0)
        for _ in range(20):
            b, t, s, k = (int(rng.integers(1, n)) for n in (4, 400, 400, 5))
            query, key = (jnp.asarray(rng.standard_normal((b, n, k, 64)), jnp.bfloat16) for n in (t, s))
            out = jax_fa4.attention(query, key, key, implementation="fa4")
            want = jax_fa4.attention(query, key, key, implementation="xla")
            np.testing.assert_allclose(np.asarray(out, np.float32), np.asarray(want, np.float32), atol=0.03)
    finally:
        store.set_default_store(previous)
    assert len(recording.names) == 1


def layers(function, x, weights):
    def layer(x, w):
        q, k, v = (jnp.einsum("btm,mnd->btnd", x, w[i]) for i in range(3))
        return x + jnp.einsum("btnd,mnd->btm", function(q, k, v), w[3]), None

    return jax.lax.scan(jax.checkpoint(layer), x, weights)[0]


@pytest.mark.parametrize("differentiate", [False, True])
def test_scan_remat_24_layers(differentiate: bool) -> None:
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((2, 256, 128)), jnp.bfloat16)
    weights = jnp.asarray(rng.standard_normal((24, 4, 128, 4, 64)) * 0.04, jnp.bfloat16)

    def run(implementation):
        function = functools.partial(jax_fa4.attention, is_causal=True, implementation=implementation)
        total = lambda x, w: (layers(function, x, w).astype(jnp.float32) ** 2).mean()  # noqa: E731
        return jax.jit(jax.grad(total, 1) if differentiate else functools.partial(layers, function))(x, weights)

    np.testing.assert_allclose(
        np.asarray(run("fa4"), np.float32), np.asarray(run("xla"), np.float32), rtol=0.1, atol=0.05
    )


@pytest.mark.parametrize("mapped", [(0, None, None), (None, 0, None), (None, None, 0), (0, 0, 0), (1, 2, None)])
def test_vmap(mapped: tuple) -> None:
    rng = np.random.default_rng(0)
    operands = []
    for axis in mapped:
        shape = [2, 130, 4, 64]
        if axis is not None:
            shape.insert(axis, 3)
        operands.append(jnp.asarray(rng.standard_normal(shape), jnp.bfloat16))

    def run(implementation):
        def total(*qkv):
            out, lse = jax_fa4.attention_with_lse(*qkv, is_causal=True, implementation=implementation)
            return (out.astype(jnp.float32) ** 2).sum() + (lse**2).sum() * 1e-2

        return jax.jit(jax.vmap(jax.value_and_grad(total, (0, 1, 2)), in_axes=mapped))(*operands)

    for got, expected in zip(jax.tree.leaves(run("fa4")), jax.tree.leaves(run("xla")), strict=True):
        np.testing.assert_allclose(np.asarray(got, np.float32), np.asarray(expected, np.float32), rtol=0.05, atol=0.1)
