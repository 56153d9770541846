"""The Flax adapter against Flax's own attention, in linen and nnx modules and called directly."""

import functools
import subprocess
import sys

import flax.linen as nn
import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_fa4.flax import attention_fn, sharded_attention_fn

HEADS, WIDTH = 4, 32
TOLERANCE = {"float32": 2e-5, "bfloat16": 4e-2}


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


def close(got, want, dtype="float32"):
    assert got.dtype == want.dtype and got.shape == want.shape
    np.testing.assert_allclose(np.asarray(got, np.float32), np.asarray(want, np.float32), rtol=0, atol=TOLERANCE[dtype])


def linen_results(*inputs, mask=None, dtype=None, gradient=False, **options):
    """Output (and parameter gradients, as one vector) of a linen module with Flax's attention and with the adapter."""
    results = []
    for attention in (nn.dot_product_attention, attention_fn):
        layer = nn.MultiHeadDotProductAttention(HEADS, dtype=dtype, attention_fn=attention, **options)
        parameters = layer.init(jax.random.key(0), *inputs)

        def loss(parameters, layer=layer):
            out = layer.apply(parameters, *inputs, mask=mask)
            return jnp.sum(jnp.sin(out)), out

        results.append(jax.jit(jax.grad(loss, has_aux=True))(parameters) if gradient else (None, loss(parameters)[1]))
    return results


def nnx_results(*inputs, mask=None, is_causal=False, kv_width=None, gradient=False, **options):
    """As :func:`linen_results`, for nnx."""
    results = []
    for attention in (nnx.dot_product_attention, attention_fn):
        layer = nnx.MultiHeadAttention(
            HEADS, WIDTH, in_kv_features=kv_width, decode=False, attention_fn=attention, rngs=nnx.Rngs(0), **options
        )

        def loss(layer):
            out = layer(*inputs, mask=mask, is_causal=is_causal)
            return jnp.sum(jnp.sin(out)), out

        if gradient:
            gradients, out = nnx.jit(nnx.grad(loss, has_aux=True))(layer)
            results.append((nnx.to_pure_dict(gradients), out))
        else:
            results.append((None, loss(layer)[1]))
    return results


def check(results, dtype="float32"):
    (want_gradient, want), (got_gradient, got) = results
    close(got, want, dtype)
    want_gradient, got_gradient = (jax.flatten_util.ravel_pytree(g)[0] for g in (want_gradient, got_gradient))
    scale = jnp.max(jnp.abs(want_gradient), initial=1.0)
    close(got_gradient / scale, want_gradient / scale, dtype)


# A mask for each kind that Flax's helpers make; all of them leave every query a key.
MASKS = {
    "none": lambda batch, rows, columns: None,
    "float causal": lambda batch, rows, columns: nn.make_causal_mask(jnp.ones((*batch, rows))),
    "bool causal": lambda batch, rows, columns: nn.make_causal_mask(jnp.ones((*batch, rows)), dtype=bool),
    "float padding": lambda batch, rows, columns: nn.make_attention_mask(
        jnp.ones((*batch, rows)), jnp.broadcast_to(jnp.arange(columns) < 5, (*batch, columns))
    ),
    "combined": lambda batch, rows, columns: nn.combine_masks(
        nn.make_causal_mask(jnp.ones((*batch, rows))),
        nn.make_attention_mask(jnp.ones((*batch, rows)), normal(9, *batch, columns).at[..., 0].set(1) > 0),
    ),
    "rank 2": lambda batch, rows, columns: jnp.tril(jnp.ones((rows, columns), jnp.int32)),
}


@pytest.mark.parametrize(
    ("batch", "mask"), [*(((2,), mask) for mask in MASKS), ((), "combined"), ((2, 3), "combined"), ((2, 1, 3), "none")]
)
def test_linen_self_attention(batch, mask):
    x = normal(1, *batch, 7, WIDTH)
    check(linen_results(x, mask=MASKS[mask](batch, 7, 7), gradient=batch == (2, 3)))


# Flax's own attention takes no other rank of mask under nnx.
@pytest.mark.parametrize(
    ("batch", "mask"),
    [*(((2,), mask) for mask in MASKS if mask != "rank 2"), ((2, 3), "combined"), ((2, 1, 3), "none")],
)
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_nnx_self_attention(batch, mask, kv_heads):
    x = normal(1, *batch, 7, WIDTH)
    gradient = batch != (2,) and kv_heads == 2
    check(nnx_results(x, mask=MASKS[mask](batch, 7, 7), num_kv_heads=kv_heads, gradient=gradient))


@pytest.mark.parametrize("mask", ["none", "float padding"])
def test_nnx_causal_flag(mask):
    x = normal(1, 2, 7, WIDTH)
    made = MASKS[mask]((2,), 7, 7)
    # Flax's own attention wants the mask in full shape when the flag is on too.
    full = None if made is None else jnp.broadcast_to(made, (2, HEADS, 7, 7))
    check(nnx_results(x, mask=full, is_causal=True))


@pytest.mark.parametrize("mask", ["none", "float padding"])
def test_cross_attention(mask):
    x, memory = normal(1, 2, 5, WIDTH), normal(2, 2, 9, 24)
    check(linen_results(x, memory, mask=MASKS[mask]((2,), 5, 9)))
    check(nnx_results(x, memory, mask=MASKS[mask]((2,), 5, 9), kv_width=24))


def test_other_module_options():
    x = normal(1, 2, 7, WIDTH)
    check(linen_results(x, normalize_qk=True, qkv_features=64, out_features=8, precision=jax.lax.Precision.HIGHEST))
    check(nnx_results(x, normalize_qk=True, qkv_features=64, out_features=8, precision="highest"))
    check(linen_results(x, force_fp32_for_softmax=True))


def test_16_bit_computation():
    x = normal(1, 2, 7, WIDTH)
    check(linen_results(x, dtype=jnp.bfloat16), "bfloat16")
    check(nnx_results(x, dtype=jnp.bfloat16), "bfloat16")


def test_dropout_that_is_switched_off():
    x = normal(1, 2, 7, WIDTH)
    check(linen_results(x, dropout_rate=0.5, deterministic=True))
    check(nnx_results(x, dropout_rate=0.5, deterministic=True))


@pytest.mark.parametrize("batch", [(2,), (2, 3)], ids=str)
def test_linen_decode(batch):
    x = normal(1, *batch, 6, WIDTH)
    outputs = []
    for attention in (nn.dot_product_attention, attention_fn):
        layer = nn.MultiHeadDotProductAttention(HEADS, decode=True, attention_fn=attention)
        variables = layer.init(jax.random.key(0), x)
        step = jax.jit(functools.partial(layer.apply, mutable=["cache"]))
        steps = []
        for t in range(6):
            out, changed = step(variables, x[..., t : t + 1, :])
            variables = {**variables, **changed}
            steps.append(out)
        outputs.append(jnp.concatenate(steps, axis=-2))
    close(outputs[1], outputs[0])
    # Decoding is causal attention, one row at a time.
    parameters = {"params": variables["params"]}
    whole = nn.MultiHeadDotProductAttention(HEADS, attention_fn=functools.partial(attention_fn, is_causal=True))
    close(outputs[1], whole.apply(parameters, x))


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_nnx_decode(kv_heads):
    x = normal(1, 2, 6, WIDTH)
    outputs = []
    for attention in (nnx.dot_product_attention, attention_fn):
        layer = nnx.MultiHeadAttention(
            HEADS, WIDTH, num_kv_heads=kv_heads, decode=True, attention_fn=attention, rngs=nnx.Rngs(0)
        )
        layer.init_cache(x.shape)
        step = nnx.jit(lambda layer, token: layer(token))
        outputs.append(jnp.concatenate([step(layer, x[:, t : t + 1]) for t in range(6)], axis=1))
    close(outputs[1], outputs[0])
    close(outputs[1], layer(x, decode=False, is_causal=True))


def test_causal_decoding_step_is_refused():
    x = normal(1, 2, 6, WIDTH)
    layer = nn.MultiHeadDotProductAttention(
        HEADS, decode=True, attention_fn=functools.partial(attention_fn, is_causal=True)
    )
    variables = layer.init(jax.random.key(0), x)
    with pytest.raises(ValueError, match="decoding step"):
        layer.apply(variables, x[:, :1], mutable=["cache"])


def test_dropout_is_refused():
    x = normal(1, 2, 7, WIDTH)
    layer = nn.MultiHeadDotProductAttention(HEADS, dropout_rate=0.1, attention_fn=attention_fn)
    with pytest.raises(NotImplementedError, match=r"dropout_rate=0\.1.*deterministic=False"):
        layer.init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, x, deterministic=False)
    layer = nnx.MultiHeadAttention(
        HEADS, WIDTH, dropout_rate=0.1, decode=False, attention_fn=attention_fn, rngs=nnx.Rngs(0)
    )
    with pytest.raises(NotImplementedError, match="dropout_rate"):
        layer(x, deterministic=False)


def test_sown_weights_are_refused():
    x = normal(1, 2, 7, WIDTH)
    layer = nn.MultiHeadDotProductAttention(HEADS, attention_fn=attention_fn)
    with pytest.raises(NotImplementedError, match="module"):
        layer.init(jax.random.key(0), x, sow_weights=True)
    layer = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, attention_fn=attention_fn, rngs=nnx.Rngs(0))
    with pytest.raises(NotImplementedError, match="module"):
        layer(x, sow_weights=True)


def test_custom_einsums_are_refused():
    x = normal(1, 2, 7, WIDTH)
    layer = nn.MultiHeadDotProductAttention(
        HEADS,
        qk_attn_weights_einsum_cls=lambda: jnp.einsum,
        attn_weights_value_einsum_cls=lambda: jnp.einsum,
        attention_fn=attention_fn,
    )
    with pytest.raises(NotImplementedError, match="qk_attn_weights_einsum"):
        layer.init(jax.random.key(0), x)


QUERY, KEY, VALUE = normal(1, 2, 5, 4, 8), normal(2, 2, 9, 2, 8), normal(3, 2, 9, 2, 16)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"precision": jax.lax.DotAlgorithmPreset.BF16_BF16_F32}, NotImplementedError, "precision"),
        ({"precision": "sloppy"}, NotImplementedError, "precision"),
        ({"einsum_dot_general": jax.lax.dot_general}, NotImplementedError, "einsum_dot_general"),
        ({"input_positions": jnp.arange(5)}, NotImplementedError, "input_positions"),
        ({"dtype": jnp.int32}, TypeError, "dtype"),
        ({"no_such_argument": 1}, TypeError, "no_such_argument"),
        ({"mask": jnp.ones((2, 4, 5, 8))}, ValueError, r"mask must broadcast.*\(2, 4, 5, 9\).*\(2, 4, 5, 8\)"),
        ({"mask": jnp.ones((1, 2, 4, 5, 9))}, ValueError, "mask must broadcast"),
        ({"bias": jnp.ones((3, 1, 1, 1))}, ValueError, "bias must broadcast"),
        ({"key": KEY[0]}, ValueError, "same rank"),
        ({"key": KEY[:1], "value": VALUE[:1]}, ValueError, "batch dimensions"),
        ({"query": QUERY[0, 0], "key": KEY[0, 0], "value": VALUE[0, 0]}, ValueError, "rank"),
    ],
)
def test_refused_arguments(arguments, error, words):
    with pytest.raises(error, match=words):
        attention_fn(**{"query": QUERY, "key": KEY, "value": VALUE, **arguments})


def test_direct_call():
    """Grouped heads, another value width, a bias and a mask of low rank, mixed dtypes, extra batch dimensions."""
    bias, mask = normal(4, 4, 5, 9), normal(5, 5, 9) > -1
    want = nnx.dot_product_attention(QUERY, KEY, VALUE[..., :8], bias[None], jnp.broadcast_to(mask, (2, 4, 5, 9)))
    got = attention_fn(np.asarray(QUERY), KEY, VALUE, bias, mask)
    assert got.shape == (2, 5, 4, 16)
    close(got[..., :8], want)
    got = attention_fn(QUERY[:, None, None], KEY[:, None, None], VALUE[:, None, None], bias, mask)
    close(got[:, 0, 0, :, :, :8], want)
    mixed = attention_fn(QUERY, KEY.astype(jnp.bfloat16), VALUE.astype(jnp.float16))
    assert mixed.dtype == jnp.float32
    assert attention_fn(QUERY, KEY, VALUE, dtype=jnp.bfloat16).dtype == jnp.bfloat16
    assert attention_fn(*(jnp.ones((2, 3, 1, 8), int),) * 3).dtype == jnp.float32


@pytest.mark.parametrize("mask_batch", [(2, 3), (1, 1), (2, 1), (1, 3), (3,), ()], ids=str)
def test_mask_batch_dimensions_broadcast(mask_batch):
    x = normal(1, 2, 3, 5, HEADS, 8)
    mask = (normal(2, *mask_batch, 1, 5, 5) > -0.5).at[..., 0].set(True)
    bias = normal(3, *mask_batch, HEADS, 1, 5)
    full = nn.dot_product_attention(x, x, x, bias=bias, mask=mask)
    close(attention_fn(x, x, x, bias, mask), full)


def test_options_by_partial():
    """What the modules do not pass reaches the attention."""
    x = normal(1, 2, 7, HEADS, 8)
    scores = jnp.einsum("bqhd,bkhd->bhqk", x, x) * 0.3
    scores = 2 * jnp.tanh(scores / 2)
    distance = jnp.arange(7)[:, None] - jnp.arange(7)
    weights = jax.nn.softmax(jnp.where((distance >= 0) & (distance <= 2), scores, -jnp.inf))
    want = jnp.einsum("bhqk,bkhd->bqhd", weights, x)
    options = {"scale": 0.3, "logits_soft_cap": 2.0, "local_window_size": (2, 0), "deterministic_gradients": False}
    for implementation in (None, "xla", "blockwise"):
        close(functools.partial(attention_fn, implementation=implementation, **options)(x, x, x), want)
    with pytest.raises(ValueError, match="implementation"):
        attention_fn(x, x, x, implementation="no such one")


def test_rows_without_a_key_are_zero():
    x = normal(1, 2, 5, HEADS, 8)
    mask = jnp.ones((2, 1, 5, 5)).at[:, :, 3].set(0)
    out = attention_fn(x, x, x, mask=mask)
    assert not np.any(out[:, 3]) and np.all(np.isfinite(out))


def test_flax_is_not_imported():
    code = "import sys, jax_fa4.flax; sys.exit(any(name.split('.')[0] == 'flax' for name in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_sharded_attention_fn_in_nnx():
    """A module whose sequence is split over four devices gives what it gives unsplit, and refuses mask arrays."""
    from jax_fa4 import parallel

    mesh = jax.make_mesh((4,), ("seq",), axis_types=(jax.sharding.AxisType.Auto,))
    attend = parallel.make_attention(mesh, sequence_axis="seq", strategy="all_gather")
    x = jnp.asarray(np.random.default_rng(0).standard_normal((2, 16, 8)), jnp.float32)

    def layer(attention_fn):
        return nnx.MultiHeadAttention(2, 8, attention_fn=attention_fn, decode=False, rngs=nnx.Rngs(0))

    split = layer(sharded_attention_fn(attend, local_window_size=(5, 0)))
    whole = layer(functools.partial(attention_fn, local_window_size=(5, 0)))
    np.testing.assert_allclose(split(x, is_causal=True), whole(x, is_causal=True), atol=1e-5)
    with pytest.raises(NotImplementedError, match="mask is not supported"):
        split(x, mask=jnp.ones((2, 1, 16, 16), bool))
