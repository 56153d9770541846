"""Which implementation runs, what is said about it, and that a traced call suits the platform it is lowered for."""

import dataclasses
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_fa4 import FallbackWarning, attention, dispatch, supports
from jax_fa4.implementations import Implementation, base, blockwise, register, registered, unregister
from jax_fa4.implementations.numerics import accumulator_dtype

QUERY = jnp.asarray(np.random.default_rng(0).normal(size=(1, 5, 2, 4)), jnp.float32)
MARK = "erf_inv"
"""An operation that only the stand-in for the kernels uses, so that it can be found in a lowered program."""


def marked_forward(config, operands):
    out, lse = blockwise.forward(config, operands)
    return jax.lax.erf_inv(out * 0) + out, lse


def marked_backward(config, operands, out, lse, d_out, d_lse, wanted):
    return blockwise.backward(config, operands, out, lse, jax.lax.erf_inv(d_out * 0) + d_out, d_lse, wanted)


def no_masks(config, operands):
    return [] if operands.mask is None else ["a dense mask"]


@pytest.fixture
def registry():
    """Restores the registry."""
    saved = registered()
    yield
    for name in registered():
        unregister(name)
    for implementation in saved.values():
        register(implementation)


@pytest.fixture
def on_gpu(registry, monkeypatch):
    """A process that would have a GPU with kernels, as far as dispatch can tell."""
    register(Implementation("fa4", marked_forward, marked_backward, no_masks))
    monkeypatch.setattr(dispatch, "_has_cuda", lambda: True)
    monkeypatch.setattr(dispatch, "expected_platform", lambda operands: "cuda")


def shape(*sizes):
    return jax.ShapeDtypeStruct(sizes, jnp.float32)


def test_plain_for_few_scores_and_blockwise_for_many(monkeypatch):
    monkeypatch.setattr(dispatch, "_has_cuda", lambda: False)
    edge = shape(1, 1024, 1, 8)
    assert supports(edge, edge, edge).implementation == "xla"
    over = shape(1, 1025, 1, 8)
    assert supports(over, over, over).implementation == "blockwise"
    empty = shape(1, 0, 1, 8)
    assert supports(empty, edge, edge).implementation == "xla"


def test_support_tells_why_not():
    result = supports(QUERY, QUERY, QUERY, logits_soft_cap=3.0, implementation="cudnn")
    assert result.implementation is None
    assert any("logits_soft_cap" in reason for reason in result.reasons["cudnn"])
    assert result.reasons["blockwise"] == ()
    assert "logits_soft_cap" in str(result)
    result = supports(QUERY, QUERY, QUERY, implementation="blockwise")
    assert result.implementation == "blockwise" and "blockwise" not in result.reasons


def test_asking_for_kernels_without_gpu_says_why(registry):
    register(Implementation("fa4", marked_forward, marked_backward, no_masks, lambda platform: [f"not on {platform}"]))
    mask = jnp.ones((5, 5), bool)
    with pytest.raises(ValueError) as caught:
        attention(QUERY, QUERY, QUERY, mask=mask, implementation="fa4")
    assert "a dense mask" in str(caught.value) and "not on cpu" in str(caught.value)


def test_a_registered_implementation_can_be_named(registry):
    calls = []

    def forward(config, operands):
        calls.append(config)
        return blockwise.forward(config, operands)

    register(Implementation("emulated_test", forward, blockwise.backward))
    out = attention(QUERY, QUERY, QUERY, is_causal=True, implementation="emulated_test")
    np.testing.assert_allclose(out, attention(QUERY, QUERY, QUERY, is_causal=True), rtol=1e-5, atol=1e-6)
    assert calls[0].mask_kind == "causal"
    assert "emulated_test" in supports(QUERY, QUERY, QUERY).reasons
    unregister("emulated_test")
    with pytest.raises(ValueError, match="implementation must be"):
        attention(QUERY, QUERY, QUERY, implementation="emulated_test")


def test_kernels_are_chosen_when_the_program_is_lowered_for_cuda(on_gpu):
    """One traced call, forward and backward: kernels for CUDA, XLA for the CPU."""
    assert supports(QUERY, QUERY, QUERY).implementation == "fa4"
    gradient = jax.jit(jax.grad(lambda q: attention(q, q, q, is_causal=True).sum()))
    traced = gradient.trace(QUERY)
    cuda = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert cuda.count(MARK) >= 2 and MARK not in traced.lower().as_text()
    want = jax.grad(lambda q: attention(q, q, q, is_causal=True, implementation="xla").sum())(QUERY)
    np.testing.assert_allclose(gradient(QUERY), want, rtol=1e-5, atol=1e-5)
    # Eager calls and mapped ones choose alike.
    eager = jax.grad(lambda q: jax.vmap(lambda k: attention(q, k, k, is_causal=True).sum())(q[None]).sum())(QUERY)
    np.testing.assert_allclose(eager, want, rtol=1e-5, atol=1e-5)


def test_fallback_on_a_gpu_warns_once_for_each_site_and_reason(on_gpu):
    mask = jnp.ones((5, 5), bool)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(3):
            attention(QUERY, QUERY, QUERY, mask=mask)
        attention(QUERY, QUERY, QUERY, mask=mask)
    assert [w.category for w in caught] == [FallbackWarning] * 2
    assert all("a dense mask" in str(w.message) and w.filename == __file__ for w in caught)
    assert caught[0].lineno != caught[1].lineno
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attention(QUERY, QUERY, QUERY)  # served by the kernels
        attention(QUERY, QUERY, QUERY, mask=mask, implementation="blockwise")  # asked for


def test_no_warning_where_no_kernel_could_run(registry, monkeypatch):
    register(Implementation("fa4", marked_forward, marked_backward, no_masks, lambda platform: ["too old a GPU"]))
    monkeypatch.setattr(dispatch, "_has_cuda", lambda: True)
    monkeypatch.setattr(dispatch, "expected_platform", lambda operands: "cuda")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attention(QUERY, QUERY, QUERY, mask=jnp.ones((5, 5), bool))
    assert "too old a GPU" in supports(QUERY, QUERY, QUERY).reasons["fa4"]


def test_only_wanted_gradients_are_computed(registry):
    """A bias that nobody differentiates costs no gradient of the scores' size."""
    asked = []

    def backward(*arguments):
        asked.append(arguments[-1])
        return blockwise.backward(*arguments)

    register(Implementation("recording", blockwise.forward, backward))
    bias = jnp.ones((5, 5))
    jax.grad(lambda q: attention(q, QUERY, QUERY, bias=bias, implementation="recording").sum())(QUERY)
    jax.grad(lambda b: attention(QUERY, QUERY, QUERY, bias=b, implementation="recording").sum())(bias)
    assert asked == [frozenset({"query"}), frozenset({"bias"})]


def test_forward_mode_needs_plain_xla():
    def function(q):
        return attention(q, q, q, implementation="blockwise")

    with pytest.raises(TypeError, match="custom_vjp"):
        jax.jvp(function, (QUERY,), (QUERY,))


def test_every_field_of_the_gradients_is_an_operand():
    from jax_fa4.config import DIFFERENTIABLE, Gradients, Operands

    assert Gradients._fields == DIFFERENTIABLE and set(DIFFERENTIABLE) < set(Operands._fields)
    assert dataclasses.is_dataclass(base.Implementation)


def test_float32_is_computed_in_float32():
    """Every matrix product asks for full precision, whatever the global default is."""
    assert accumulator_dtype(jnp.bfloat16) == jnp.float32
    with jax.default_matmul_precision("bfloat16"):
        for implementation in ("xla", "blockwise"):
            gradient = jax.grad(lambda q, name=implementation: attention(q, q, q, implementation=name).sum())
            text = jax.jit(gradient).lower(QUERY).as_text()
            products = [line for line in text.splitlines() if "stablehlo.dot_general" in line]
            assert len(products) >= 5 and all("HIGHEST, HIGHEST" in line for line in products)
