"""JAX transformations of the call: each must give what the untransformed call gives."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_fa4 import attention, attention_with_lse
from jax_fa4.implementations import blockwise
from jax_fa4.vjp import LSE_NAME, OUT_NAME
from tests.quick import quick_jit

IMPLEMENTATIONS = ("xla", "blockwise")
B, T, S, N, K, H, HV = 2, 6, 7, 4, 2, 4, 3
COPIES = 3
NAMES = ("query", "key", "value", "bias", "sinks", "key_value_seq_lengths")
FLOATING = NAMES[:5]
SHAPES = {"query": (B, T, N, H), "key": (B, S, K, H), "value": (B, S, K, HV), "bias": (1, N, 1, S), "sinks": (N,)}


@pytest.fixture(autouse=True, scope="module")
def small_tiles():
    saved = blockwise.TILE_LIMITS
    jax.clear_caches()
    blockwise.TILE_LIMITS = (4, 4)
    yield
    blockwise.TILE_LIMITS = saved
    jax.clear_caches()


def draw(*shape, seed=0):
    return jnp.asarray(np.random.default_rng([seed, *shape]).normal(size=shape), jnp.float32)


def operands(copies=None):
    lead = () if copies is None else (copies,)
    drawn = {name: draw(*lead, *shape, seed=k) for k, (name, shape) in enumerate(SHAPES.items())}
    lengths = jnp.asarray(np.random.default_rng(9).integers(0, S + 1, size=(*lead, B)), jnp.int32)
    return {**drawn, "key_value_seq_lengths": lengths}


def weighted(implementation, arrays, weights):
    """A scalar that depends on out and, differently, on lse; rows that see nothing do not occur (sinks)."""
    out, lse = attention_with_lse(**arrays, is_causal=True, implementation=implementation)
    return (out * weights[0]).sum() + (lse * weights[1]).sum()


WEIGHTS = (draw(COPIES, B, T, N, HV, seed=7), draw(COPIES, B, N, T, seed=8))


def split_gradient(implementation):
    """Gradient by the floating operands of one unmapped call, compiled once."""

    def gradient(arrays, weights):
        fixed = {"key_value_seq_lengths": arrays["key_value_seq_lengths"]}
        moving = {name: arrays[name] for name in FLOATING}
        return jax.grad(lambda x: weighted(implementation, {**x, **fixed}, weights))(moving)

    return gradient


single_gradient = quick_jit(split_gradient("xla"))


SUBSETS = [s for n in (1, 2, 3) for s in itertools.combinations(("query", "key", "value"), n)]
SUBSETS += [("bias",), ("sinks",), ("key_value_seq_lengths",), NAMES]


@pytest.mark.parametrize("subset", SUBSETS, ids="+".join)
def test_vmap_over_any_operands(subset):
    """Gradients through a mapped call, and a mapped gradient, for operands that are mapped and that are not.

    An output that does not depend on the mapped operands (lse, when only value is mapped) is where a custom rule's
    cotangent gets counted too often.
    """
    many, one = operands(COPIES), operands()
    arrays = {name: many[name] if name in subset else one[name] for name in NAMES}
    axes = {name: 0 if name in subset else None for name in NAMES}
    parts = []
    for k in range(COPIES):
        slices = {name: x[k] if name in subset else x for name, x in arrays.items()}
        parts.append(single_gradient(slices, tuple(w[k] for w in WEIGHTS)))

    def total(moving, fixed):
        per_copy = jax.vmap(lambda a, w: weighted("blockwise", a, w), in_axes=(axes, 0))
        return per_copy({**moving, **fixed}, WEIGHTS).sum()

    @quick_jit
    def both(arrays):
        moving = {name: arrays[name] for name in FLOATING}
        fixed = {"key_value_seq_lengths": arrays["key_value_seq_lengths"]}
        mapped = jax.vmap(split_gradient("blockwise"), in_axes=(axes, 0))
        return jax.grad(total)(moving, fixed), mapped(arrays, WEIGHTS)

    got, mapped = both(arrays)
    for name in FLOATING:
        stacked = jnp.stack([part[name] for part in parts])
        want = stacked if name in subset else stacked.sum(axis=0)
        np.testing.assert_allclose(got[name], want, rtol=2e-4, atol=2e-5, err_msg=name)

    for name in FLOATING:
        want = jnp.stack([part[name] for part in parts])
        np.testing.assert_allclose(mapped[name], want, rtol=2e-4, atol=2e-5, err_msg=name)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_vmapped_outputs_for_mapped_value_only(implementation):
    arrays = operands()
    values = operands(COPIES)["value"]
    rest = {name: x for name, x in arrays.items() if name != "value"}
    out, lse = jax.vmap(lambda v: attention_with_lse(value=v, **rest, implementation=implementation))(values)
    for k in range(COPIES):
        want = attention_with_lse(value=values[k], **rest, implementation="xla")
        np.testing.assert_allclose(out[k], want[0], rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(lse[k], want[1], rtol=1e-5, atol=1e-5)


def test_jacrev():
    rest = {name: x for name, x in operands().items() if name != "key"}

    def function(implementation):
        return lambda key: attention_with_lse(key=key, **rest, implementation=implementation)

    got = quick_jit(jax.jacrev(function("blockwise")))(operands()["key"])
    want = quick_jit(jax.jacfwd(function("xla")))(operands()["key"])
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_checkpoint_keeps_what_its_policy_names():
    gradient = split_gradient("blockwise")
    arrays, weights = operands(), tuple(w[0] for w in WEIGHTS)
    want = quick_jit(gradient)(arrays, weights)
    policy = jax.checkpoint_policies.save_only_these_names(OUT_NAME, LSE_NAME)
    # The forward runs once if out and lse are kept, and again in the backward pass if they are not.
    for given, forwards in ((policy, 1), (None, 2)):

        def loss(moving, fixed, given=given):
            body = jax.checkpoint(lambda x: weighted("blockwise", {**x, **fixed}, weights), policy=given)
            return body(moving)

        fixed = {"key_value_seq_lengths": arrays["key_value_seq_lengths"]}
        moving = {name: arrays[name] for name in FLOATING}
        got = quick_jit(jax.grad(loss))(moving, fixed)
        for name in FLOATING:
            np.testing.assert_allclose(got[name], want[name], rtol=1e-5, atol=1e-6)
        assert str(jax.make_jaxpr(jax.grad(loss))(moving, fixed)).count("name=_forward") == forwards


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_scan_over_layers(implementation):
    layers = draw(3, N * HV, H, seed=4)
    arrays = operands()

    def layer(x, weight):
        out = attention(x, arrays["key"], arrays["value"], is_causal=True, implementation=implementation)
        return jnp.tanh(out.reshape(B, T, N * HV) @ weight)[:, :, None] + x, None

    def scanned(layers):
        return (jax.lax.scan(layer, arrays["query"], layers)[0] ** 2).sum()

    def unrolled(layers):
        x = arrays["query"]
        for weight in layers:
            x, _ = layer(x, weight)
        return (x**2).sum()

    got, want = quick_jit(jax.grad(scanned))(layers), quick_jit(jax.grad(unrolled))(layers)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_export_round_trip(implementation):
    arrays, weights = operands(), tuple(w[0] for w in WEIGHTS)
    function = jax.jit(split_gradient(implementation))
    blob = jax.export.export(function)(arrays, weights).serialize()
    got = jax.export.deserialize(blob).call(arrays, weights)
    want = function(arrays, weights)
    for name in FLOATING:
        np.testing.assert_array_equal(got[name], want[name])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_runs_twice_bitwise_alike(implementation):
    arrays, weights = operands(), tuple(w[0] for w in WEIGHTS)
    function = quick_jit(split_gradient(implementation))
    first, second = function(arrays, weights), function(arrays, weights)
    for name in FLOATING:
        np.testing.assert_array_equal(first[name], second[name])


@pytest.mark.parametrize("implementation", [None, *IMPLEMENTATIONS])
def test_numpy_inputs_and_missing_batch_axis(implementation):
    arrays = {name: np.asarray(x) for name, x in operands().items()}
    out, lse = attention_with_lse(**arrays, implementation=implementation)
    one = {name: x[1] if name in ("query", "key", "value") else x for name, x in arrays.items()}
    one["key_value_seq_lengths"] = arrays["key_value_seq_lengths"][1:]
    out1, lse1 = attention_with_lse(**one, implementation=implementation)
    assert out1.shape == (T, N, HV) and lse1.shape == (N, T)
    np.testing.assert_allclose(out1, out[1], rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(lse1, lse[1], rtol=1e-6, atol=1e-6)
    # Each operand may leave its batch axis out on its own, as in jax.nn.
    mixed = attention(one["query"], one["key"][None], one["value"], implementation=implementation)
    assert mixed.shape == (T, N, HV)


@pytest.mark.parametrize("implementation", [None, *IMPLEMENTATIONS])
@pytest.mark.parametrize("sizes", [(0, 3, 3), (2, 0, 3), (2, 3, 0)], ids=["no batch", "no query", "no key"])
def test_empty_shapes(sizes, implementation):
    batch, length_q, length_k = sizes
    query, key = jnp.ones((batch, length_q, N, H)), jnp.ones((batch, length_k, K, H))
    value, sinks = jnp.ones((batch, length_k, K, HV)), jnp.arange(N, dtype=jnp.float32)

    def function(query, key, value, sinks):
        return attention_with_lse(query, key, value, sinks=sinks, implementation=implementation)

    (out, lse), pull = jax.vjp(function, query, key, value, sinks)
    assert out.shape == (batch, length_q, N, HV) and not out.any()
    np.testing.assert_array_equal(lse, np.broadcast_to(np.arange(N)[None, :, None], lse.shape))
    d_query, d_key, d_value, d_sinks = pull((jnp.ones_like(out), jnp.ones_like(lse)))
    assert not any(x.any() for x in (d_query, d_key, d_value))
    np.testing.assert_array_equal(d_sinks, np.full(N, batch * length_q))
    _, lse = attention_with_lse(query, key, value, implementation=implementation)
    assert np.isneginf(lse).all()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_rows_that_see_nothing(implementation):
    arrays = operands()
    mask = jnp.ones((B, 1, T, S), bool).at[0, :, 2].set(False).at[1].set(False)

    def function(query, key, value):
        return attention_with_lse(query, key, value, mask=mask, implementation=implementation)

    (out, lse), pull = jax.vjp(function, arrays["query"], arrays["key"], arrays["value"])
    assert not out[0, 2].any() and not out[1].any() and out[0, 0].any()
    assert np.isneginf(lse[0, :, 2]).all() and np.isneginf(lse[1]).all() and np.isfinite(lse[0, :, 0]).all()
    gradients = pull((jnp.ones_like(out), jnp.ones_like(lse)))
    assert all(np.isfinite(x).all() for x in gradients)
    assert not gradients[0][0, 2].any() and not any(x[1].any() for x in gradients)


def test_forward_mode_and_second_derivatives_of_plain_xla():
    """In float64 against central differences of the gradient; fully masked rows and a soft cap included."""
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        query, key = rng.normal(size=(1, 3, 2, 2)), rng.normal(size=(1, 4, 1, 2))
        value, direction = rng.normal(size=(1, 4, 1, 2)), rng.normal(size=(1, 3, 2, 2))
        mask = np.ones((3, 4), bool)
        mask[1] = False

        @jax.jit
        def loss(query):
            out, lse = attention_with_lse(query, key, value, mask=mask, logits_soft_cap=2.0, implementation="xla")
            assert out.dtype == lse.dtype == jnp.float64
            return (out**2).sum() + (jnp.where(jnp.isfinite(lse), lse, 0) ** 2).sum()

        gradient = jax.jit(jax.grad(loss))
        step = 1e-5
        tangent = jax.jvp(loss, (query,), (direction,))[1]
        change = (loss(query + step * direction) - loss(query - step * direction)) / (2 * step)
        np.testing.assert_allclose(tangent, change, rtol=1e-7)
        np.testing.assert_allclose(tangent, (gradient(query) * direction).sum(), rtol=1e-12)
        second = jax.jit(jax.grad(lambda q: (gradient(q) * direction).sum()))(query)
        change = (gradient(query + step * direction) - gradient(query - step * direction)) / (2 * step)
        np.testing.assert_allclose(second, change, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_traced_offset_and_scale(implementation):
    arrays = operands()

    @jax.jit
    def step(offset, scale):
        return attention(arrays["query"], arrays["key"], arrays["value"], scale=scale, is_causal=True,
                         query_offset=offset, implementation=implementation)  # fmt: skip

    for offset, scale in ((0, 0.5), (1, 0.25), (-2, 1.0)):
        want = attention(arrays["query"], arrays["key"], arrays["value"], scale=scale, is_causal=True,
                         query_offset=offset, implementation="xla")  # fmt: skip
        np.testing.assert_allclose(step(jnp.int32(offset), scale), want, rtol=1e-5, atol=1e-6)
    assert step._cache_size() == 1
