"""attention() on the CPU through the kernels themselves: their PTX in the emulator, under JAX's transformations."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_fa4
from jax_fa4.implementations import base, fa4
from jax_fa4.kernels import select, store
from tests.compiled import own_store, require_kernels
from tests.emulator.launch import executor

require_kernels()

NAME = "emulated"


def emulate(plan, artefacts, buffers):
    """See :data:`jax_fa4.ffi.host.Executor`: operands are the buffers that cannot be written."""
    operands = sum(not x.flags.writeable for x in buffers)
    executor(plan, [artefacts[reference.sha256].ptx for reference in plan.artefacts], buffers, operands)


@pytest.fixture(autouse=True, params=["sm_90a", "sm_100f"])
def emulated(request):
    previous = store.default_store()
    store.set_default_store(own_store())
    base.register(fa4.emulated(emulate, request.param, NAME))
    yield
    base.unregister(NAME)
    store.set_default_store(previous)


def operands(batch=2, length=20, keys=33, heads=2, key_heads=1, dim=64, seed=0):
    random = np.random.default_rng(seed)
    shapes = (batch, length, heads, dim), (batch, keys, key_heads, dim), (batch, keys, key_heads, dim)
    return [jnp.asarray(random.normal(size=shape), jnp.bfloat16) for shape in shapes]


def close(got, want, atol):
    def check(a, b):
        np.testing.assert_allclose(np.asarray(a, np.float32), np.asarray(b, np.float32), rtol=2e-2, atol=atol)

    jax.tree.map(check, got, want)


@pytest.mark.parametrize(
    "kwargs",
    [
        {},
        {"is_causal": True, "query_offset": 13},
        {"is_causal": True, "query_seq_lengths": jnp.array([20, 3]), "key_value_seq_lengths": jnp.array([0, 30])},
    ],
    ids=["plain", "causal", "lengths"],
)
def test_forward_in_jit(kwargs):
    arrays = operands()
    got = jax.jit(functools.partial(jax_fa4.attention_with_lse, **kwargs, implementation=NAME))(*arrays)
    close(got, jax_fa4.attention_with_lse(*arrays, **kwargs, implementation="xla"), 1e-2)


def test_vmap():
    query, key, value = operands(batch=3)
    function = functools.partial(jax_fa4.attention_with_lse, is_causal=True)
    axes = (0, None, 0)
    arrays = query[:, None], key[:1], value[:, None]
    got, want = (jax.vmap(functools.partial(function, implementation=i), axes)(*arrays) for i in (NAME, "xla"))
    close(got, want, 1e-2)


def test_shard_map():
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))
    function = functools.partial(jax_fa4.attention, is_causal=True, implementation=NAME)
    sharded = jax.shard_map(function, mesh=mesh, in_specs=P("x"), out_specs=P("x"))
    arrays = operands()
    close(jax.jit(sharded)(*arrays), jax_fa4.attention(*arrays, is_causal=True, implementation="xla"), 1e-2)


def test_scan():
    query, key, value = operands(batch=2)

    def body(carry, x, implementation):
        out = jax_fa4.attention(carry[None], x[0][None], x[1][None], is_causal=True, implementation=implementation)[0]
        return out, out

    def run(implementation):
        return jax.jit(lambda *x: jax.lax.scan(functools.partial(body, implementation=implementation), x[0], x[1:]))

    got, want = (run(i)(query[0], key, value)[1] for i in (NAME, "xla"))
    close(got, want, 2e-2)


@pytest.mark.filterwarnings("error:jax_fa4 computes the gradients")
@pytest.mark.parametrize("is_causal", [False, True])
def test_gradients(is_causal):
    arrays = operands()

    def loss(implementation, *x):
        out, lse = jax_fa4.attention_with_lse(*x, is_causal=is_causal, implementation=implementation)
        return jnp.sum(jnp.sin(out.astype(jnp.float32))) + jnp.sum(jnp.cos(lse))

    got, want = (jax.jit(jax.grad(functools.partial(loss, i), (0, 1, 2)))(*arrays) for i in (NAME, "xla"))
    close(got, want, 3e-2)


@pytest.mark.parametrize("operand", ["query", "key"])
def test_a_split_sequence_is_refused_under_jit(operand):
    """Rather than gathered silently; forward and gradient."""
    mesh = jax.make_mesh((2,), ("seq",), axis_types=(AxisType.Auto,))
    arrays = dict(zip(("query", "key", "value"), operands(), strict=True))
    arrays["key"], arrays["value"] = (
        jnp.pad(arrays[name], ((0, 0), (0, 1), (0, 0), (0, 0))) for name in ("key", "value")
    )
    arrays = {name: jax.device_put(x, NamedSharding(mesh, P())) for name, x in arrays.items()}
    arrays[operand] = jax.device_put(arrays[operand], NamedSharding(mesh, P(None, "seq")))

    def total(arrays):
        return jax_fa4.attention(**arrays, implementation=NAME).sum()

    for function in (total, jax.grad(total)):
        with pytest.raises(
            jax.errors.JaxRuntimeError, match=f"{operand}: got its sequence axis split.*jax_fa4.parallel"
        ):
            jax.jit(function).lower(arrays).compile()


def test_ring_on_four_devices():
    """Forward and backward of ring attention, every chunk pair by the kernels: dK and dV travel home in float32."""
    from jax_fa4 import parallel

    query, key, value = operands(batch=1, length=64, keys=64)
    mesh = jax.make_mesh((4,), ("seq",), axis_types=(AxisType.Auto,))
    attend = parallel.make_attention(mesh, sequence_axis="seq", strategy="ring", implementation=NAME)

    def total(function, *qkv):
        return (function(*qkv, is_causal=True).astype(jnp.float32) ** 2).sum()

    got = jax.jit(jax.value_and_grad(functools.partial(total, attend), (0, 1, 2)))(query, key, value)
    plain = functools.partial(jax_fa4.attention, implementation="xla")
    want = jax.value_and_grad(functools.partial(total, plain), (0, 1, 2))(query, key, value)
    close(got, want, 0.1)


def assert_gradients_in_vmap_and_scan(dim: int):
    """Forward and backward kernels under jit, inside vmap (one operand unmapped) and inside scan."""
    query, key, value = operands(batch=3, length=24, keys=24, dim=dim)

    def loss(implementation, query, key, value):
        function = functools.partial(jax_fa4.attention_with_lse, is_causal=True, implementation=implementation)

        def body(carry, x):
            out, lse = function(carry[None], key, x[None])
            return out[0], jnp.sum(jnp.cos(lse))

        mapped, _ = jax.vmap(function, (0, None, 0))(query[:, None], key, value[:, None])
        last, totals = jax.lax.scan(body, query[0], value)
        return jnp.sum(jnp.sin(mapped.astype(jnp.float32))) + jnp.sum(last.astype(jnp.float32)) + jnp.sum(totals)

    arrays = query, key[:1], value
    got, want = (jax.jit(jax.grad(functools.partial(loss, i), (0, 1, 2)))(*arrays) for i in (NAME, "xla"))
    close(got, want, 5e-2)


@pytest.mark.filterwarnings("error:jax_fa4 computes the gradients")
def test_gradients_in_vmap_and_scan():
    assert_gradients_in_vmap_and_scan(dim=64)


@pytest.mark.filterwarnings("error:jax_fa4 computes the gradients")
@pytest.mark.parametrize("emulated", ["sm_100f"], indirect=True)
def test_gradients_by_pairs_of_ctas(monkeypatch):
    """The kernel that calls with many keys get."""
    monkeypatch.setattr(select, "BACKWARD_PAIR_KEYS", 1)
    assert_gradients_in_vmap_and_scan(dim=128)
