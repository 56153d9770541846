"""Illegal input raises while tracing, and names the argument, what came and what is allowed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_fa4
from jax_fa4 import attention, attention_with_lse, supports

B, T, S, N, K, H = 2, 3, 5, 4, 2, 8


def f32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def i32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.int32)


GOOD = {"query": f32(B, T, N, H), "key": f32(B, S, K, H), "value": f32(B, S, K, H)}
HALF = jax.ShapeDtypeStruct((B, T, N, H), jnp.bfloat16)
INTEGER = jax.ShapeDtypeStruct((B, T, N, H), jnp.int32)
SEGMENTS = {"query_segment_ids": i32(B, T), "key_value_segment_ids": i32(B, S)}
SWAPPED = {"query_segment_ids": i32(B, T), "key_value_segment_ids": i32(B, T)}

# name: (changed arguments, error, what its message must contain)
CASES = {
    "query rank 2": ({"query": f32(T, H)}, ValueError, ["query", "(3, 8)", "3 or 4"]),
    "query rank 5": ({"query": f32(1, B, T, N, H)}, ValueError, ["query", "(1, 2, 3, 4, 8)", "3 or 4"]),
    "query integer": ({"query": INTEGER}, ValueError, ["query", "int32", "bfloat16"]),
    "query not an array": ({"query": "abc"}, TypeError, ["query", "str", "array"]),
    "dtypes differ": ({"query": HALF}, ValueError, ["query", "bfloat16", "float32"]),
    "batch differs": ({"query": f32(3, T, N, H)}, ValueError, ["query", "(3, 3, 4, 8)", "B = 2"]),
    "head dim differs": ({"query": f32(B, T, N, 4)}, ValueError, ["query", "(2, 3, 4, 4)", "H = 8"]),
    "value length differs": ({"value": f32(B, 4, K, H)}, ValueError, ["value", "(2, 4, 2, 8)", "(2, 5, 2)"]),
    "value heads differ": ({"value": f32(B, S, 1, H)}, ValueError, ["value", "(2, 5, 1, 8)"]),
    "heads do not divide": ({"query": f32(B, T, 3, H)}, ValueError, ["query", "3 heads", "multiple of the 2"]),
    "no head": ({"query": f32(B, T, 0, H)}, ValueError, ["query", "(2, 3, 0, 8)", "at least one head"]),
    "mask float": ({"mask": f32(B, 1, T, S)}, ValueError, ["mask", "float32", "bool", "bias"]),
    "mask shape": ({"mask": np.ones((B, 2, T, S), bool)}, ValueError, ["mask", "(2, 2, 3, 5)", "(2, 4, 3, 5)"]),
    "mask rank": ({"mask": np.ones((1, B, 1, T, S), bool)}, ValueError, ["mask", "5 dimensions", "at most 4"]),
    "bias bool": ({"bias": np.ones((T, S), bool)}, ValueError, ["bias", "bool", "mask"]),
    "bias complex": ({"bias": np.ones((T, S), np.complex64)}, ValueError, ["bias", "complex64", "real"]),
    "bias shape": ({"bias": f32(B, N, T, 4)}, ValueError, ["bias", "(2, 4, 3, 4)", "(2, 4, 3, 5)"]),
    "scale vector": ({"scale": f32(H)}, ValueError, ["scale", "(8,)", "scalar"]),
    "scale bool": ({"scale": True}, ValueError, ["scale", "bool", "real scalar"]),
    "causal array": ({"is_causal": jnp.array(True)}, TypeError, ["is_causal", "bool"]),
    "causal number": ({"is_causal": 1}, TypeError, ["is_causal", "int", "bool"]),
    "query lengths shape": ({"query_seq_lengths": i32(3)}, ValueError, ["query_seq_lengths", "(3,)", "(2,)"]),
    "query lengths dtype": ({"query_seq_lengths": f32(B)}, ValueError, ["query_seq_lengths", "float32", "int32"]),
    "key lengths scalar": ({"key_value_seq_lengths": i32()}, ValueError, ["key_value_seq_lengths", "()", "(2,)"]),
    "window negative": ({"local_window_size": -1}, ValueError, ["local_window_size", "-1", "None"]),
    "window negative side": ({"local_window_size": (3, -1)}, ValueError, ["local_window_size", "-1", "None"]),
    "window float": ({"local_window_size": 1.5}, ValueError, ["local_window_size", "1.5", "int"]),
    "window bool": ({"local_window_size": True}, ValueError, ["local_window_size", "True", "int"]),
    "window triple": ({"local_window_size": (1, 2, 3)}, ValueError, ["local_window_size", "(1, 2, 3)", "pair"]),
    "window too large": ({"local_window_size": 2**40}, ValueError, ["local_window_size", str(2**40)]),
    "implementation": ({"implementation": "triton"}, ValueError, ["implementation", "'triton'", "blockwise", "cudnn"]),
    "one segment argument": ({"query_segment_ids": i32(B, T)}, ValueError, ["key_value_segment_ids", "together"]),
    "segments shape": (SWAPPED, ValueError, ["key_value_segment_ids", "(2, 5)"]),
    "segments dtype": ({**SEGMENTS, "query_segment_ids": f32(B, T)}, ValueError, ["query_segment_ids", "float32"]),
    "cap zero": ({"logits_soft_cap": 0.0}, ValueError, ["logits_soft_cap", "0.0", "> 0"]),
    "cap infinite": ({"logits_soft_cap": float("inf")}, ValueError, ["logits_soft_cap", "inf", "None"]),
    "cap array": ({"logits_soft_cap": f32()}, TypeError, ["logits_soft_cap", "static"]),
    "sinks shape": ({"sinks": f32(K)}, ValueError, ["sinks", "(2,)", "(4,)"]),
    "sinks dtype": ({"sinks": i32(N)}, ValueError, ["sinks", "int32", "floating"]),
    "offset float": ({"query_offset": 0.5}, ValueError, ["query_offset", "0.5", "int"]),
    "offset shape": ({"query_offset": i32(3)}, ValueError, ["query_offset", "(3,)", "(2,)"]),
    "offset dtype": ({"query_offset": f32()}, ValueError, ["query_offset", "float32", "int32"]),
    "offset too large": ({"query_offset": 2**30}, ValueError, ["query_offset", str(2**30)]),
    "deterministic": ({"deterministic": None}, TypeError, ["deterministic", "NoneType", "bool"]),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_illegal_argument(case):
    changed, error, words = CASES[case]
    given = {**GOOD, **changed}
    traced = {name: x for name, x in given.items() if isinstance(x, jax.ShapeDtypeStruct)}
    static = {name: x for name, x in given.items() if name not in traced}
    for function in (attention, attention_with_lse):
        with pytest.raises(error) as caught:
            jax.eval_shape(lambda arrays, function=function: function(**arrays, **static), traced)
        for word in words:
            assert word in str(caught.value)
    with pytest.raises(error):
        supports(**given)


# Mistakes that jax.nn.dot_product_attention refuses too, with the same type of error.
SHARED = ("batch differs", "head dim differs", "value length differs", "heads do not divide", "dtypes differ")
SHARED += ("mask float", "query lengths shape", "query lengths dtype", "implementation", "query rank 5")


@pytest.mark.parametrize("case", SHARED)
def test_jax_refuses_the_same(case):
    changed, error, _ = CASES[case]
    given = {**GOOD, **changed}
    traced = {name: x for name, x in given.items() if isinstance(x, jax.ShapeDtypeStruct)}
    static = {name: x for name, x in given.items() if name not in traced}
    with pytest.raises(error):
        jax.eval_shape(lambda arrays: jax.nn.dot_product_attention(**arrays, **static), traced)


def test_every_argument_of_jax_is_there():
    import inspect

    ours = inspect.signature(attention).parameters
    for name, parameter in inspect.signature(jax.nn.dot_product_attention).parameters.items():
        assert ours[name].kind == parameter.kind and ours[name].default == parameter.default, name


def test_cudnn_lists_each_argument_it_cannot_take():
    query = jnp.ones((B, T, N, H))
    with pytest.raises(ValueError) as caught:
        attention(query, query, query, sinks=jnp.ones(N), logits_soft_cap=3.0, query_offset=1, implementation="cudnn")
    for word in ("sinks", "logits_soft_cap", "query_offset", "deterministic=False"):
        assert word in str(caught.value)
    with pytest.raises(ValueError, match="log-sum-exp"):
        attention_with_lse(query, query, query, deterministic=False, implementation="cudnn")


def test_cudnn_hands_over(monkeypatch):
    """What reaches jax.nn; cuDNN itself needs a GPU."""
    seen = {}
    real = jax.nn.dot_product_attention

    def stand_in(*args, **kwargs):
        seen.update(kwargs)
        return real(*args, **{**kwargs, "implementation": "xla"})

    monkeypatch.setattr(jax.nn, "dot_product_attention", stand_in)
    rng = np.random.default_rng(0)
    query, key, value = (jnp.asarray(rng.normal(size=(T, N, H)), jnp.float32) for _ in range(3))
    out, residual = attention(query, key, value, local_window_size=(2, None), is_causal=True, scale=0.5,
                              deterministic=False, return_residual=True, implementation="cudnn")  # fmt: skip
    assert seen["implementation"] == "cudnn" and seen["local_window_size"] == (2, 0) and seen["is_causal"]
    want = attention(query, key, value, local_window_size=(2, 0), scale=0.5, return_residual=True)
    np.testing.assert_allclose(out, want[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(residual, want[1], rtol=1e-5, atol=1e-6)


def test_public_names():
    assert set(jax_fa4.__all__) >= {"attention", "attention_with_lse", "supports", "Support", "FallbackWarning"}
