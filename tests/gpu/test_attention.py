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
from tests.gpu.busy import busy_stream
from tests.gpu.memory import call_poisoned, poison, within

FORWARD_CASES = cases.sample_cases(420, seed=1)
BACKWARD_CASES = cases.sample_cases(420, seed=2)
ABSOLUTE = {"bfloat16": 2e-3, "float16": 5e-4}  # covers results so small that both references round alike


def kernel(case: cases.Case, **extra):
    return functools.partial(jax_fa4.attention_with_lse, implementation="fa4", **{**case.mask_arguments(), **extra})


def references(case: cases.Case, operands: dict, gradients: bool = True) -> tuple[dict, dict]:
    """Exact results, and those with a kernel's roundings."""
    arrays = [operands[n] for n in ("query", "key", "value")] + [cases.visible(case)]
    if gradients:
        arrays += [operands["out_cotangent"], operands["lse_cotangent"]]
    return rounded.attention(*arrays), rounded.attention(*arrays, rounding=jnp.dtype(case.dtype))


@pytest.mark.parametrize("case", FORWARD_CASES, ids=lambda c: c.name)
def test_forward(case: cases.Case) -> None:
    operands = case.operands()
    exact, low = references(case, operands, gradients=False)
    qkv = [operands[n] for n in ("query", "key", "value")]
    lowered = jax.jit(kernel(case)).lower(*qkv)
    out, lse = call_poisoned(lowered.compile(), lowered.out_info, *qkv)
    assert out.dtype == case.dtype and lse.dtype == jnp.float32
    cases.assert_close("out", out, exact["out"], low["out"], absolute=ABSOLUTE[case.dtype], case=case.name)
    cases.assert_close("lse", lse, exact["lse"], exact["lse"], absolute=1e-4, case=case.name)


@pytest.mark.parametrize("case", BACKWARD_CASES, ids=lambda c: c.name)
def test_backward(case: cases.Case) -> None:
    operands = case.operands()
    exact, low = references(case, operands)
    with warnings.catch_warnings():
        warnings.simplefilter("error", jax_fa4.FallbackWarning)
        lowered = jax.jit(lambda o: cases.gradients(kernel(case), case, o)).lower(operands)
    got = call_poisoned(lowered.compile(), jax.tree.leaves(lowered.out_info), operands)
    for name in ("d_query", "d_key", "d_value"):
        assert got[name].dtype == case.dtype
        cases.assert_close(name, got[name], exact[name], low[name], absolute=4 * ABSOLUTE[case.dtype], case=case.name)
    mask = cases.visible(case)
    dead_rows, dead_keys = ~mask.any(-1), ~mask.any(-2)
    assert not np.asarray(got["d_query"], np.float32)[dead_rows].any()
    assert not np.asarray(got["d_key"], np.float32)[dead_keys].any()
    assert not np.asarray(got["d_value"], np.float32)[dead_keys].any()


def test_results_lie_in_poisoned_memory() -> None:
    """What the two tests above rely on; a case that misses the poison only warns."""
    hits = []
    for case in (BACKWARD_CASES[0], BACKWARD_CASES[1], BACKWARD_CASES[2]):
        operands = case.operands()
        lowered = jax.jit(lambda o, case=case: cases.gradients(kernel(case), case, o)).lower(operands)
        compiled = lowered.compile()
        spans = poison(jax.tree.leaves(lowered.out_info))
        hits += [within(x, spans) for x in jax.tree.leaves(jax.block_until_ready(compiled(operands)))]
    assert np.mean(hits) > 0.8, hits


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
    count = jnp.zeros((), jnp.int32)
    with busy_stream() as rounds:
        before = len(rounds)
        for _ in range(1000):
            count += differs(first, function(operands))
        assert int(count) == 0
        assert len(rounds) > before, "the other stream did nothing meanwhile"


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


def relative_error(got, exact) -> float:
    """Frobenius norm of the difference over that of ``exact``."""
    got, exact = (np.asarray(x, np.float64) for x in (got, exact))
    return float(np.linalg.norm(got - exact) / np.linalg.norm(exact))


def layers(function, x, weights):
    def layer(x, w):
        q, k, v = (jnp.einsum("btm,mnd->btnd", x, w[i]) for i in range(3))
        return x + jnp.einsum("btnd,mnd->btm", function(q, k, v), w[3]), None

    return jax.lax.scan(jax.checkpoint(layer), x, weights)[0]


@pytest.mark.parametrize("differentiate", [False, True])
def test_scan_remat_24_layers(differentiate: bool) -> None:
    """Not much farther from float32 than plain XLA in bfloat16 is, output and the gradient of each layer's weights."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((2, 256, 128)), jnp.bfloat16)
    weights = jnp.asarray(rng.standard_normal((24, 4, 128, 4, 64)) * 0.04, jnp.bfloat16)

    def run(implementation, dtype="bfloat16"):
        function = functools.partial(jax_fa4.attention, is_causal=True, implementation=implementation)
        total = lambda x, w: (layers(function, x, w).astype(jnp.float32) ** 2).mean()  # noqa: E731
        compiled = jax.jit(jax.grad(total, 1) if differentiate else functools.partial(layers, function))
        return compiled(x.astype(dtype), weights.astype(dtype))

    with jax.default_matmul_precision("highest"):
        exact = run("xla", "float32")
    ours, plain = run("fa4"), run("xla")
    for index in range(24 if differentiate else 1):
        part = (lambda a, i=index: a[i]) if differentiate else (lambda a: a)
        assert relative_error(part(ours), part(exact)) <= 1.5 * relative_error(part(plain), part(exact)) + 1e-3


@pytest.mark.parametrize("mapped", [(0, None, None), (None, 0, None), (None, None, 0), (0, 0, 0), (1, 2, None)])
def test_vmap(mapped: tuple) -> None:
    """vmap of value and gradient, for subsets of mapped operands, against float32."""
    rng = np.random.default_rng(0)
    operands = []
    for axis in mapped:
        shape = [2, 130, 4, 64]
        if axis is not None:
            shape.insert(axis, 3)
        operands.append(jnp.asarray(rng.standard_normal(shape), jnp.bfloat16))

    def run(implementation, dtype):
        def total(*qkv):
            out, lse = jax_fa4.attention_with_lse(*qkv, is_causal=True, implementation=implementation)
            return (out.astype(jnp.float32) ** 2).sum() + (lse**2).sum() * 1e-2

        function = jax.jit(jax.vmap(jax.value_and_grad(total, (0, 1, 2)), in_axes=mapped))
        return function(*(x.astype(dtype) for x in operands))

    with jax.default_matmul_precision("highest"):
        exact = run("xla", "float32")
    for got, expected in zip(jax.tree.leaves(run("fa4", "bfloat16")), jax.tree.leaves(exact), strict=True):
        assert got.shape == expected.shape
        assert relative_error(got, expected) < 0.02
