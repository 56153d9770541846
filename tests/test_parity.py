"""The arguments shared with jax.nn.dot_product_attention mean the same."""

import functools

import jax
import numpy as np
import pytest

from jax_fa4 import attention

IMPLEMENTATIONS = ("xla", "blockwise")
B, T, S, N, K, H = 2, 7, 9, 4, 2, 8


def draw(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).normal(size=shape).astype(np.float32)


QUERY, KEY, VALUE = draw(B, T, N, H), draw(B, S, K, H), draw(B, S, K, H, seed=1)
# Every row keeps key 0, so that no row is fully masked (there, jax.nn averages value by design).
MASK = np.random.default_rng(2).random((B, N, T, S)) < 0.5
MASK[..., 0] = True
CASES = {
    "plain": {},
    "scale": {"scale": 0.7},
    "causal": {"is_causal": True},
    "bias_full": {"bias": draw(B, N, T, S)},
    "bias_head": {"bias": draw(1, N, 1, S)},
    "bias_2d": {"bias": draw(T, S)},
    "mask_full": {"mask": MASK},
    "mask_one_head": {"mask": MASK[:, :1]},
    "mask_2d": {"mask": MASK[0, 0]},
    "key_lengths": {"key_value_seq_lengths": np.array([4, 9], np.int32)},
    "query_lengths": {"query_seq_lengths": np.array([3, 7], np.int32)},
    "window_pair": {"local_window_size": (2, 1)},
    "window_int": {"local_window_size": 3},
    "window_causal": {"local_window_size": (2, 4), "is_causal": True},
}


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("case", CASES)
def test_output_residual_and_gradients(case, implementation):
    kwargs = CASES[case]

    def run(function, **more):
        def loss(query, key, value):
            out = function(query, key, value, **kwargs, **more)
            return (out * draw(*out.shape, seed=3)).sum(), out

        # Compiling is nearly all of the time.
        options = {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else None

        @functools.partial(jax.jit, compiler_options=options)
        def all_at_once():
            (_, out), gradients = jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)(QUERY, KEY, VALUE)
            residual = function(QUERY, KEY, VALUE, return_residual=True, **kwargs, **more)[1]
            return out, residual, gradients

        return all_at_once()

    out, residual, gradients = run(attention, implementation=implementation)
    want_out, want_residual, want_gradients = run(jax.nn.dot_product_attention)
    np.testing.assert_allclose(out, want_out, rtol=1e-5, atol=1e-5)
    assert residual.shape == (B, T, N) and residual.dtype == want_residual.dtype
    seen = np.isfinite(residual)  # a padded query row has -inf here and a large negative number in jax.nn
    assert (want_residual[~seen] < -1e30).all()
    np.testing.assert_allclose(residual[seen], want_residual[seen], rtol=1e-5, atol=1e-5)
    for got, want in zip(gradients, want_gradients, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
