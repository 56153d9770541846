"""The kernels as an implementation: what reaches them, under every transformation, and what they refuse."""

import functools
import itertools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jax_fa4
from jax_fa4.ffi import register as launcher
from jax_fa4.ffi.call import Target, detect_target
from jax_fa4.ffi.plan import Fill, Kernel
from jax_fa4.ffi.wire import decode
from jax_fa4.implementations import base, fa4
from jax_fa4.kernels import plans, store
from jax_fa4.kernels.problem import ForwardProblem
from jax_fa4.kernels.select import forward_specs
from jax_fa4.kernels.spec import standard_specs
from jax_fa4.primitives import AttentionCall, BackwardOperation, ForwardOperation

from . import oracle
from .test_ffi_call import custom_call, custom_calls

NAME = "oracle"


@pytest.fixture(autouse=True)
def kernels():
    """The oracle as an implementation, and artefacts without machine code."""
    previous = store.default_store()
    store.set_default_store(oracle.OracleStore())
    base.register(fa4.emulated(oracle.execute, "sm_90a", NAME))
    yield
    base.unregister(NAME)
    store.set_default_store(previous)


def operands(batch=2, length=5, keys=7, heads=4, key_heads=2, dim=16, dim_v=8, dtype=jnp.bfloat16, seed=0):
    random = np.random.default_rng(seed)
    shapes = (batch, length, heads, dim), (batch, keys, key_heads, dim), (batch, keys, key_heads, dim_v)
    return [jnp.asarray(random.normal(size=shape), dtype) for shape in shapes]


def close(got, want, atol=2e-2):
    def check(a, b):
        np.testing.assert_allclose(np.asarray(a, np.float32), np.asarray(b, np.float32), rtol=2e-2, atol=atol)

    jax.tree.map(check, got, want)


CALLS = {
    "plain": {},
    "causal": {"is_causal": True},
    "offset": {"is_causal": True, "query_offset": 2},
    "negative offset": {"is_causal": True, "query_offset": -3},
    "window": {"local_window_size": (2, 1)},
    "left window": {"local_window_size": (2, None)},
    "causal window": {"local_window_size": 2, "is_causal": True},
    "scale": {"scale": 0.7},
    "negative scale": {"scale": -0.4},
    "zero scale": {"scale": 0.0},
    "lengths": {"query_seq_lengths": jnp.array([3, 5]), "key_value_seq_lengths": jnp.array([7, 2])},
    "one length": {"key_value_seq_lengths": jnp.array([0, 4]), "is_causal": True},
    "offsets": {"query_offset": jnp.array([2, -1]), "local_window_size": (3, 0)},
    "scalar offset": {"query_offset": jnp.array(3), "is_causal": True},
    "lengths and offset": {"key_value_seq_lengths": jnp.array([7, 2]), "query_offset": 2, "is_causal": True},
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("key_heads", [1, 2, 4])
def test_forward_reaches_the_kernel(name, key_heads):
    arrays = operands(key_heads=key_heads)
    got = jax_fa4.attention_with_lse(*arrays, **CALLS[name], implementation=NAME)
    close(got, jax_fa4.attention_with_lse(*arrays, **CALLS[name], implementation="xla"))


def test_float16_and_unbatched_operands():
    arrays = [x[0] for x in operands(dtype=jnp.float16)]
    got = jax_fa4.attention(*arrays, is_causal=True, implementation=NAME)
    assert got.dtype == jnp.float16 and got.ndim == 3
    close(got, jax_fa4.attention(*arrays, is_causal=True, implementation="xla"))


@pytest.mark.parametrize("name", CALLS)
def test_gradients_come_from_the_backward_kernels(name, recwarn):
    arrays = operands()

    def loss(implementation, *x):
        out, lse = jax_fa4.attention_with_lse(*x, **CALLS[name], implementation=implementation)
        return jnp.sum(jnp.sin(out.astype(jnp.float32))) + jnp.sum(jnp.cos(jnp.where(jnp.isinf(lse), 0, lse)))

    got, want = (jax.jit(jax.grad(functools.partial(loss, i), (0, 1, 2)))(*arrays) for i in (NAME, "xla"))
    close(got, want, atol=6e-2)
    assert not [w for w in recwarn if issubclass(w.category, jax_fa4.FallbackWarning)]


def test_gradients_of_large_head_dims_come_from_the_split_backward(recwarn):
    arrays = operands(dim=192, dim_v=136)

    def loss(implementation, *x):
        return jnp.sum(jax_fa4.attention(*x, is_causal=True, implementation=implementation).astype(jnp.float32) ** 2)

    got, want = (jax.grad(functools.partial(loss, i), (0, 1, 2))(*arrays) for i in (NAME, "xla"))
    close(got, want, atol=6e-2)
    assert not [w for w in recwarn if issubclass(w.category, jax_fa4.FallbackWarning)]


def test_missing_backward_is_blockwise_with_a_warning(monkeypatch):
    monkeypatch.setattr(plans, "_BACKWARD_PLANS", {})  # as on an architecture without backward kernels
    arrays = operands()

    def loss(implementation, *x):
        return jnp.sum(jax_fa4.attention(*x, is_causal=True, implementation=implementation).astype(jnp.float32) ** 2)

    with pytest.warns(jax_fa4.FallbackWarning, match="gradients of this call through XLA.*arch is 'sm_90a'"):
        got = jax.grad(functools.partial(loss, NAME), (0, 1, 2))(*arrays)
    close(got, jax.grad(functools.partial(loss, "xla"), (0, 1, 2))(*arrays), atol=6e-2)


def test_only_wanted_gradients_and_one_cotangent():
    query, key, value = operands()

    def loss(implementation, key):
        return jnp.sum(jax_fa4.attention_with_lse(query, key, value, implementation=implementation)[1])

    got, want = (jax.grad(functools.partial(loss, i))(key) for i in (NAME, "xla"))
    close(got, want)


SUBSETS = [m for m in itertools.product([None, 0], repeat=4) if any(axis is not None for axis in m)]


@pytest.mark.parametrize("mapped", SUBSETS)
def test_vmap_over_any_subset(mapped):
    lengths = jnp.array([7, 2])
    arrays = []
    for seed, (axis, x) in enumerate(zip(mapped, [*operands(), lengths], strict=True)):
        versions = [operands(seed=s)[seed] if seed < 3 else jnp.maximum(lengths - s, 0) for s in range(3)]
        arrays.append(x if axis is None else jnp.stack(versions))

    def function(implementation, query, key, value, lengths):
        return jax_fa4.attention_with_lse(
            query, key, value, key_value_seq_lengths=lengths, is_causal=True, implementation=implementation
        )

    got = jax.vmap(functools.partial(function, NAME), mapped)(*arrays)
    close(got, jax.vmap(functools.partial(function, "xla"), mapped)(*arrays))

    def loss(implementation, *x):
        out, lse = function(implementation, *x, arrays[3])
        return jnp.sum(out.astype(jnp.float32) ** 2) + jnp.sum(jnp.where(jnp.isinf(lse), 0, lse))

    if mapped[3] is None:
        gradients = (jax.vmap(jax.grad(functools.partial(loss, i), (0, 1, 2)), mapped[:3]) for i in (NAME, "xla"))
        got, want = (g(*arrays[:3]) for g in gradients)
        close(got, want, atol=0.15)


def test_scan_with_remat():
    arrays = operands(key_heads=4, keys=5, dim_v=16)

    def loss(implementation, x, key, value):
        @jax.checkpoint
        def layer(x, _):
            return x + jax_fa4.attention(x, key, value, is_causal=True, implementation=implementation), None

        return jnp.sum(jax.lax.scan(layer, x, None, length=3)[0].astype(jnp.float32))

    got, want = (jax.jit(jax.value_and_grad(functools.partial(loss, i)))(*arrays) for i in (NAME, "xla"))
    close(got, want, atol=0.1)


@pytest.mark.parametrize("replicated", [False, True])
def test_shard_map(replicated):
    if jax.device_count("cpu") < 4:
        pytest.skip("needs 4 CPU devices")
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))
    arrays = operands(batch=4)
    arrays[1:] = [x[:1] for x in arrays[1:]] if replicated else arrays[1:]
    spec = P() if replicated else P("x")

    def loss(implementation, *x):
        function = functools.partial(jax_fa4.attention, is_causal=True, implementation=implementation)
        sharded = jax.shard_map(function, mesh=mesh, in_specs=(P("x"), spec, spec), out_specs=P("x"))
        return jnp.sum(sharded(*x).astype(jnp.float32) ** 2)

    got, want = (jax.jit(jax.value_and_grad(functools.partial(loss, i), (0, 1, 2)))(*arrays) for i in (NAME, "xla"))
    close(got, want, atol=0.2)


def test_zero_lengths():
    for changes in ({"length": 0}, {"keys": 0}, {"batch": 0}):
        arrays = operands(**changes)
        got = jax_fa4.attention_with_lse(*arrays, implementation=NAME)
        close(got, jax_fa4.attention_with_lse(*arrays, implementation="xla"))


def reasons(name, *arrays, **kwargs):
    return " ".join(jax_fa4.supports(*arrays, **kwargs).reasons.get(name, ()))


@pytest.mark.parametrize(
    "arrays, kwargs, reason",
    [
        (operands(dtype=jnp.float32), {}, "the operands are float32, the kernels take bfloat16 and float16"),
        (operands(dim=20), {}, "head_dim is 20; the kernels take multiples of 8 from 8 to 256"),
        (operands(dim=264), {}, "head_dim is 264"),
        (operands(dim_v=12), {}, "head_dim_v is 12"),
        (operands(), {"bias": jnp.zeros((1, 1, 1, 7))}, "cannot take bias"),
        (operands(), {"mask": jnp.ones((1, 1, 1, 7), bool)}, "cannot take mask"),
        (operands(), {"sinks": jnp.zeros(4)}, "cannot take sinks"),
        (operands(), {"logits_soft_cap": 5.0}, "cannot take logits_soft_cap"),
        (operands(), {"scale": float("inf")}, "scale is inf, the kernels need a finite number"),
        (
            operands(),
            {"query_segment_ids": jnp.zeros((2, 5), int), "key_value_segment_ids": jnp.zeros((2, 7), int)},
            "cannot take query_segment_ids",
        ),
    ],
)
def test_reasons(arrays, kwargs, reason):
    assert reason in reasons("fa4", *arrays, **kwargs)
    with pytest.raises(ValueError, match="implementation='oracle' cannot serve this call") as error:
        jax_fa4.attention(*arrays, **kwargs, implementation=NAME)
    assert reason in str(error.value)


def test_traced_scale_is_a_reason():
    why = reasons("fa4", *operands(), scale=jax.ShapeDtypeStruct((), jnp.float32))
    assert "scale is an array or traced; the kernels need a Python number" in why


def test_missing_artefact_is_a_reason():
    class Empty(oracle.OracleStore):
        def missing_reason(self, spec):
            return f"no compiled kernel {spec.name}"

    store.set_default_store(Empty())
    assert "no compiled kernel forward_sm_90a_bfloat16_d64x64_causal" in reasons(
        "fa4:sm_90a", *operands(), is_causal=True
    )


def test_store_says_what_is_missing(tmp_path, monkeypatch):
    problem = ForwardProblem(2, 5, 7, 4, 4, 64, 64, "bfloat16", 0.125)
    (spec,) = forward_specs(problem, arch="sm_90a", mask="none", varlen=False)
    empty = store.ArtefactStore(cache=tmp_path, compile_missing=False)
    assert "python -m jax_fa4 compile --arch sm_90a" in empty.missing_reason(spec)
    artefact = oracle.OracleStore().load(spec)
    (tmp_path / store.artefact_filename(spec, "1")).write_bytes(artefact.to_bytes())
    monkeypatch.setattr(store.compiler, "dsl_version", lambda: None)
    assert empty.missing_reason(spec) is None


def test_named_implementation_does_not_lower_for_other_platforms():
    if jax.default_backend() != "cpu":
        pytest.skip("the default platform is not the CPU")
    with pytest.raises(ValueError, match="the kernels run on CUDA devices, not on 'cpu'"):
        jax_fa4.attention(*operands(), implementation="fa4")
    with pytest.raises(ValueError, match="lowered for a platform other than CUDA"):
        jax.jit(functools.partial(jax_fa4.attention, implementation="fa4:sm_90a")).lower(*operands())


@pytest.mark.parametrize("name", CALLS)
def test_export_for_cuda_on_this_machine(name):
    """Lowered without a GPU: the module carries plan and cubin, and survives serialisation."""
    arrays = operands()
    kwargs = {k: v for k, v in CALLS[name].items() if not isinstance(v, jax.Array)}
    traced = {k: v for k, v in CALLS[name].items() if isinstance(v, jax.Array)}

    @jax.jit
    def function(arrays, traced):
        return jax_fa4.attention_with_lse(*arrays, **kwargs, **traced, implementation="fa4:sm_90a")

    checks = [jax.export.DisabledSafetyCheck.custom_call(launcher.TARGET_NAME)]
    exported = jax.export.export(function, platforms=["cuda"], disabled_checks=checks)(arrays, traced)
    restored = jax.export.deserialize(exported.serialize())
    plan, cubins, results = custom_call(restored)
    (step,) = decode(plan).plan.steps
    assert isinstance(step, Kernel)
    assert cubins.startswith(b"cubin of forward_sm_90a_bfloat16_d64x64_")
    assert results == ["tensor<2x5x4x8xbf16>", "tensor<2x4x5xf32>"]
    assert len(decode(plan).buffer_bytes) == 5 + bool(traced)


def packs(heads, key_heads, length):
    problem = ForwardProblem(1, length, 512, heads, key_heads, 64, 64, "bfloat16", 0.125)
    specs = forward_specs(problem, arch="sm_90a", mask="none", varlen=False)
    assert not specs[-1].pack_gqa
    return len(specs) == 2 and specs[0].pack_gqa


def test_short_grouped_queries_are_packed():
    assert packs(8, 1, 1) and packs(8, 2, 16) and packs(64, 1, 1)
    assert not packs(8, 8, 1) and not packs(8, 1, 4096) and not packs(128, 1, 1) and not packs(4, 2, 256)


@pytest.mark.parametrize("capability, emulates", [("10.0", True), ("10.3", False), (None, True)])
@pytest.mark.parametrize("dim, causal, length", [(64, False, 300), (128, False, 300), (128, True, 300), (96, False, 3)])
def test_gpus_with_fast_exponentials_get_kernels_without_emulated_ones(capability, emulates, dim, causal, length):
    """What is chosen at lowering is by the device's compute capability; every choice is part of a release."""
    operation = ForwardOperation(AttentionCall(scale=0.5, mask="causal" if causal else "none"))
    structs = [jax.ShapeDtypeStruct((2, n, 4, dim), jnp.bfloat16) for n in (length, 300, 300)]
    specs = operation.specs(structs, Target("sm_100f", 148, capability))
    assert bool(specs[0].tile.option("exp2fma")) == emulates
    assert set(specs) <= set(standard_specs(["sm_100f"], ["forward"]))

    class OnlyOrdinary(oracle.OracleStore):
        def missing_reason(self, spec):
            return None if spec.tile.option("exp2fma") else "not shipped"

    store.set_default_store(OnlyOrdinary())
    assert operation.missing_reason(structs, Target("sm_100f", 148, capability)) is None


def test_the_capability_comes_from_the_device(monkeypatch):
    device = SimpleNamespace(compute_capability="10.3", core_count=160, device_kind="B300")
    monkeypatch.setattr(jax, "local_devices", lambda backend: [device])
    assert detect_target() == Target("sm_100f", 160, "10.3")


def test_without_the_packed_kernel_the_plain_one_serves():
    class Released(oracle.OracleStore):
        def missing_reason(self, spec):
            return "not shipped" if spec.pack_gqa else None

    store.set_default_store(Released())
    arrays = operands(length=1, heads=8, key_heads=1)
    close(jax_fa4.attention(*arrays, implementation=NAME), jax_fa4.attention(*arrays, implementation="xla"))


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100f"])
@pytest.mark.parametrize("dim", [64, 256])
@pytest.mark.parametrize("released_only", [False, True])
def test_any_order_never_needs_what_no_release_has(arch, dim, released_only):
    released = {spec.name for spec in standard_specs([arch], ["backward_preprocess", "backward_main"])}

    class Store(oracle.OracleStore):
        def missing_reason(self, spec):
            return "not shipped" if released_only and not spec.deterministic else None

    store.set_default_store(Store())
    call = AttentionCall(scale=0.5, mask="none")
    structs = [jax.ShapeDtypeStruct((1, 8, 2, dim), jnp.bfloat16)] * 3
    specs = BackwardOperation(call, deterministic=False).specs(structs, Target(arch))
    unordered = [not spec.deterministic for spec in specs]
    assert any(unordered) == (arch == "sm_100f" and dim == 64 and not released_only)
    assert any(unordered) or specs[0].name in released
    assert BackwardOperation(call, deterministic=False).missing_reason(structs, Target(arch)) is None


def test_backward_export_carries_all_kernels_and_scratch():
    arrays = operands()

    def loss(*x):
        return jnp.sum(jax_fa4.attention(*x, is_causal=True, implementation="fa4:sm_90a").astype(jnp.float32))

    checks = [jax.export.DisabledSafetyCheck.custom_call(launcher.TARGET_NAME)]
    exported = jax.export.export(jax.jit(jax.grad(loss)), platforms=["cuda"], disabled_checks=checks)(*arrays)
    forward, backward = custom_calls(exported)
    decoded = decode(backward[0])
    assert [a.entry for a in decoded.plan.artefacts] == ["entry"] * 3
    assert [type(step) for step in decoded.plan.steps] == [Fill, Kernel, Kernel, Kernel]
    assert backward[1].count(b"cubin of backward_") == 3
    assert backward[2][:3] == ["tensor<2x5x4x16xbf16>", "tensor<2x7x2x16xbf16>", "tensor<2x7x2x8xbf16>"]
    assert len(backward[2]) == 8 and len(forward[2]) == 2
