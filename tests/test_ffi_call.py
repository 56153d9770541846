"""The primitive for planned calls: shapes, batching, manual and automatic partitioning, lowering for CUDA."""

import hashlib
import itertools
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_fa4.ffi import call as C
from jax_fa4.ffi.partition import Dimensions, Split, choose_split, sharding_rule
from jax_fa4.ffi.plan import ArtefactRef, Fill, Kernel, LaunchPlan, Tensor
from jax_fa4.ffi.register import TARGET_NAME
from jax_fa4.ffi.wire import decode


@dataclass(frozen=True)
class Cubin:
    cubin: bytes

    @property
    def sha256(self):
        return hashlib.sha256(self.cubin).hexdigest()


CUBIN = Cubin(bytes(range(256)) + b'"\\\0\n')


@dataclass(frozen=True)
class Weighted:
    """A stand-in with attention's axes: out[b,t,n,v] = factor * q.sum(h)[b,t,n] * v[b,:,k(n),v].sum(s) * info[b]."""

    factor: float
    arch: str | None = "sm_90a"

    dimensions = Dimensions(("btnh", "bskh", "bskv", "bi"), ("btnv", "bnt"))

    def results(self, operands):
        query, _, value, *_ = operands
        batch, length, heads, _ = query.shape
        return (
            jax.ShapeDtypeStruct((batch, length, heads, value.shape[-1]), query.dtype),
            jax.ShapeDtypeStruct((batch, heads, length), jnp.float32),
        )

    def plan(self, operands, target):
        assert target == C.Target("sm_90a")
        parameters = tuple(Tensor(i, tuple(x.shape)) for i, x in enumerate(operands))
        steps = (Fill(len(operands) + 2, 64), Kernel(0, (3, 1, 1), (128, 1, 1), (1, 1, 1), 1024, parameters))
        plan = LaunchPlan(steps, (ArtefactRef(CUBIN.sha256, "weighted"),))
        return C.Planned(plan, (CUBIN,), (jax.ShapeDtypeStruct((16,), jnp.float32),))

    def elsewhere(self, query, key, value, info=None):
        group = query.shape[2] // key.shape[2]
        weight = query.sum(-1) * self.factor
        if info is not None:
            weight = weight * info[:, 0, None, None]
        columns = jnp.repeat(value.sum(1), group, axis=1)
        rows = jnp.repeat(key.sum((1, 3)), group, axis=1)
        return weight[..., None] * columns[:, None], jnp.swapaxes(weight, 1, 2) * rows[..., None]


def arrays(batch=2, length=3, keys=5, heads=4, key_heads=2, dim=8, dim_v=6, info=True, seed=0):
    random = np.random.default_rng(seed)
    shapes = [(batch, length, heads, dim), (batch, keys, key_heads, dim), (batch, keys, key_heads, dim_v)]
    operands = [jnp.asarray(random.normal(size=shape), jnp.float32) for shape in shapes]
    return operands + [jnp.asarray(random.integers(1, 9, (batch, 4)), jnp.float32)] * info


def close(got, want):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), tuple(got), tuple(want))


@pytest.mark.parametrize("info", [True, False])
def test_call_equals_its_definition(info):
    operands = arrays(info=info)
    operation = Weighted(0.5)
    close(C.call(operation, *operands), operation.elsewhere(*operands))
    close(jax.jit(lambda *x: C.call(operation, *x))(*operands), operation.elsewhere(*operands))


@pytest.mark.parametrize(
    "mapped", [m for m in itertools.product([None, 0, -1], repeat=4) if any(a is not None for a in m)]
)
def test_vmap_over_any_subset_keeps_the_order(mapped):
    operation = Weighted(2.0)
    operands = []
    for axis, x in zip(mapped, arrays(), strict=True):
        many = jnp.stack([x + i for i in range(3)])
        operands.append(x if axis is None else jnp.moveaxis(many, 0, axis))
    got = jax.vmap(lambda *x: C.call(operation, *x), mapped)(*operands)
    want = jax.vmap(operation.elsewhere, mapped)(*operands)
    close(got, want)


def test_nested_vmap_and_scan():
    operation = Weighted(2.0)
    operands = arrays(batch=12)
    nested = [x.reshape(2, 3, 2, *x.shape[1:]) for x in operands]
    function = jax.vmap(jax.vmap(lambda *x: C.call(operation, *x), out_axes=1))
    close([x.swapaxes(1, 2).reshape(12, *x.shape[3:]) if x.shape[1] == 2 else x for x in function(*nested)],
          operation.elsewhere(*operands))  # fmt: skip
    _, scanned = jax.lax.scan(
        lambda c, x: (c, C.call(operation, *x)), 0, [x.reshape(6, 2, *x.shape[1:]) for x in operands]
    )
    close([x.reshape(12, *x.shape[2:]) for x in scanned], operation.elsewhere(*operands))


def test_zero_sized_batch_under_vmap():
    out, lse = jax.vmap(lambda *x: C.call(Weighted(1.0), *x))(*[x[:0][None] for x in arrays()])
    assert (out.shape, lse.shape) == ((1, 0, 3, 4, 6), (1, 0, 4, 3))


needs_devices = pytest.mark.skipif(jax.device_count("cpu") < 8, reason="needs 8 CPU devices")


def divisible(spec, shape, mesh):
    """The spec without the mesh axes that an array of this shape cannot be placed by."""

    def fits(axes, size):
        names = axes if isinstance(axes, tuple) else (axes,)
        return axes is not None and size % np.prod([mesh.shape[name] for name in names]) == 0

    return P(*(axes if fits(axes, size) else None for axes, size in zip(spec, shape, strict=False)))


@needs_devices
@pytest.mark.parametrize("heads, key_heads", [(4, 4), (4, 2), (8, 1), (4, 1), (6, 3)])
@pytest.mark.parametrize(
    "spec", [P("x"), P(None, None, "y"), P("x", None, "y"), P(None, None, ("x", "y")), P(None, "x")]
)
def test_jit_over_a_mesh_splits_batch_and_heads(heads, key_heads, spec):
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    operands = arrays(batch=4, length=2, heads=heads, key_heads=key_heads)
    operation = Weighted(1.5)
    placed = [jax.device_put(operands[0], NamedSharding(mesh, divisible(spec, operands[0].shape, mesh))), *operands[1:]]
    function = jax.jit(lambda *x: C.call(operation, *x))
    close(function(*placed), operation.elsewhere(*operands))


@needs_devices
def test_partitioned_call_moves_nothing_when_batch_and_heads_agree():
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    operands = arrays(batch=4, heads=8, key_heads=4)
    split = NamedSharding(mesh, P("x", None, "y"))
    placed = [jax.device_put(x, split) for x in operands[:3]]
    placed.append(jax.device_put(operands[3], NamedSharding(mesh, P("x"))))
    operation = Weighted(1.5)
    compiled = jax.jit(lambda *x: C.call(operation, *x)).lower(*placed).compile()
    text = compiled.as_text()
    assert not any(name in text for name in ("all-gather", "all-reduce", "all-to-all", "collective-permute"))
    out, lse = compiled(*placed)
    close((out, lse), operation.elsewhere(*operands))
    assert out.sharding.spec == P("x", None, "y") or out.sharding.shard_shape(out.shape) == (2, 3, 2, 6)
    assert lse.sharding.shard_shape(lse.shape) == (2, 2, 3)


@needs_devices
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
@pytest.mark.parametrize("spec", [P(None, "x", None, "y"), P("x", None, None, "y")], ids=["batch", "mapped"])
@pytest.mark.parametrize("mapped", [(0, None, None, 0), (None, 0, 0, None)])
def test_vmap_of_split_operands_moves_nothing(kind, spec, mapped):
    """Whether the batch is split or the axis that vmap folds into it, and by whichever operands have that axis."""
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(kind,) * 2)
    operation = Weighted(2.0)
    function = jax.jit(lambda *x: jax.vmap(lambda *x: C.call(operation, *x), mapped)(*x))
    with jax.set_mesh(mesh):
        operands, placed = [], []
        for axis, x in zip(mapped, arrays(batch=4), strict=True):
            operands.append(x if axis is None else jnp.stack([x + i for i in range(4)]))
            own = spec if axis == 0 else spec[1:]
            heads = P(*own) if x.ndim == 4 else P(*own[: len(own) - 2])  # the last operand has no heads
            placed.append(jax.device_put(operands[-1], NamedSharding(mesh, heads)))
        compiled = function.lower(*placed).compile()
        out, lse = compiled(*placed)
    text = compiled.as_text()
    assert not any(name in text for name in ("all-gather", "all-reduce", "all-to-all", "collective-permute"))
    assert out.sharding.shard_shape(out.shape) == ((2, 4, 3, 2, 6) if spec[0] else (4, 2, 3, 2, 6))
    close((out, lse), jax.vmap(operation.elsewhere, mapped)(*operands))


@needs_devices
def test_explicit_mesh_axes():
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(AxisType.Explicit,) * 2)
    operands = arrays(batch=4, heads=8, key_heads=4)
    operation = Weighted(1.5)
    with jax.set_mesh(mesh):
        placed = [jax.device_put(x, NamedSharding(mesh, P("x", None, "y"))) for x in operands[:3]]
        placed.append(jax.device_put(operands[3], NamedSharding(mesh, P("x"))))

        @jax.jit
        def function(*x):
            out, lse = C.call(operation, *x)
            assert jax.typeof(out).sharding.spec == P("x", None, "y", None)
            assert jax.typeof(lse).sharding.spec == P("x", "y", None)
            return out, lse

        close(function(*placed), operation.elsewhere(*operands))


@needs_devices
def test_shard_map_with_mixed_variation():
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))
    operands = arrays(batch=4)
    operation = Weighted(1.5)
    # Query varies over the axis, key and value are replicated.
    operands[1:] = [x[:1] for x in operands[1:]]
    function = jax.shard_map(
        lambda *x: C.call(operation, *x), mesh=mesh, in_specs=(P("x"), P(), P(), P()), out_specs=P("x")
    )
    want = [operation.elsewhere(operands[0][i : i + 1], *operands[1:]) for i in range(4)]
    close(jax.jit(function)(*operands), [jnp.concatenate(x) for x in zip(*want, strict=True)])


@pytest.mark.parametrize(
    "heads, key_heads, spec, want",
    [
        (8, 8, P("x", None, "y"), Split(("x",), ("y",), ("y",))),
        (8, 2, P(("x", "y")), Split(("x",), (), ())),  # batch 2 takes one axis only
        (8, 2, P(None, None, ("x", "y")), Split((), ("x", "y"), ("x",))),
        (8, 2, P(None, None, "y"), Split((), (), ())),  # 4 devices, 2 key heads: no whole call for each
        (8, 1, P(None, None, "y"), Split((), ("y",), ())),
        (6, 1, P(None, None, "y"), Split((), (), ())),
        (8, 8, P(None, "x", None, "y"), Split()),  # sequence and head_dim are never split
    ],
)
def test_choose_split(heads, key_heads, spec, want):
    operands = [
        jax.ShapeDtypeStruct((2, 4, heads, 8), jnp.float32),
        *[jax.ShapeDtypeStruct((2, 4, key_heads, 8), jnp.float32)] * 2,
    ]
    assert choose_split(Weighted.dimensions, operands, [spec, P(), P(), P()], {"x": 2, "y": 4}) == want


def test_sharding_rule_for_shardy():
    rule, factors = sharding_rule(Dimensions(("btnh", "bskh", "bskv"), ("btnv", "bnt")), arrays(heads=6, key_heads=3))
    assert rule == "b t0 (k g) h1, b s2 k h3, b s4 k v5 -> b t6 (k g) v7, b (k g) t8"
    replicated = ("t0", "h1", "s2", "h3", "s4", "v5", "t6", "v7", "t8")
    assert factors == {"g": 2, "need_replication_factors": replicated}
    rule, factors = sharding_rule(
        Dimensions(("btnh", "bskh", "bskv"), ("btnv", "bnt")).under_vmap((True, False, True)).under_vmap(),
        [x[None, None] if i != 1 else x[None] for i, x in enumerate(arrays(heads=3, key_heads=3, info=False))],
    )
    assert rule == "m1 m0 b t0 k h1, m1 b s2 k h3, m1 m0 b s4 k v5 -> m1 m0 b t6 k v7, m1 m0 b k t8"
    assert factors == {"need_replication_factors": replicated}


def test_gradients_by_key_head_are_never_split_within_a_group():
    backward = Dimensions(("btnh", "bskh", "bskv"), ("btnh", "bskh", "bskv"))
    sizes = {"x": 2, "y": 4}
    for heads, key_heads, want in (
        (8, 2, Split((), ("x",), ("x",))),
        (8, 1, Split()),
        (8, 8, Split((), ("x", "y"), ("x", "y"))),
    ):
        shapes = [jax.ShapeDtypeStruct((2, 4, n, 8), jnp.float32) for n in (heads, key_heads, key_heads)]
        assert choose_split(backward, shapes, [P(None, None, ("x", "y")), P(), P()], sizes) == want
    _, factors = sharding_rule(backward, arrays(heads=6, key_heads=3))
    assert factors["g"] == 2 and {"b", "k"}.isdisjoint(replicated := factors["need_replication_factors"])
    assert "g" in replicated
    rule, factors = sharding_rule(backward, arrays(heads=6, key_heads=1))
    assert rule.startswith("b t0 g h1, b s2 k3 h4, ") and {"g", "k3"} < set(factors["need_replication_factors"])


def exported_call(operation, *operands):
    """The custom call in the module lowered for CUDA on this machine: (attributes, module text)."""
    allowed = [jax.export.DisabledSafetyCheck.custom_call(TARGET_NAME)]
    exported = jax.export.export(
        jax.jit(lambda *x: C.call(operation, *x)), platforms=["cuda"], disabled_checks=allowed
    )(*operands)
    restored = jax.export.deserialize(exported.serialize())
    assert restored.mlir_module_serialized == exported.mlir_module_serialized
    return custom_call(restored)


def custom_calls(exported):
    """(plan, cubins, result types) of each of our custom calls in an exported module, in order."""
    from jax._src.interpreters import mlir
    from jax._src.lib.mlir import ir

    found = []

    def visit(op):
        if op.name == "stablehlo.custom_call" and op.attributes["call_target_name"].value == TARGET_NAME:
            config = op.attributes["mhlo.backend_config"]
            types = [str(result.type) for result in op.results]
            found.append((config["plan"].value_bytes, config["cubins"].value_bytes, types))
        return ir.WalkResult.ADVANCE

    with mlir.make_ir_context():
        mlir.ir.Module.parse(exported.mlir_module()).operation.walk(visit)
    return found


def custom_call(exported):
    (found,) = custom_calls(exported)
    return found


def test_lowering_for_cuda_carries_plan_and_cubins_through_export():
    operands = arrays()
    plan, cubins, results = exported_call(Weighted(0.5), *operands)
    assert cubins == CUBIN.cubin
    decoded = decode(plan)
    assert decoded.plan.artefacts == (ArtefactRef(CUBIN.sha256, "weighted"),)
    assert decoded.plan.steps[1].parameters[0] == Tensor(0, (2, 3, 4, 8))
    assert decoded.buffer_bytes == (768, 640, 480, 32, 576, 96, 64)
    assert results == ["tensor<2x3x4x6xf32>", "tensor<2x4x3xf32>", "tensor<16xf32>"]


def test_vmapped_lowering_plans_for_the_folded_batch():
    operands = [jnp.stack([x] * 5) for x in arrays()]
    allowed = [jax.export.DisabledSafetyCheck.custom_call(TARGET_NAME)]
    function = jax.jit(jax.vmap(lambda *x: C.call(Weighted(0.5), *x)))
    plan, _, _ = custom_call(jax.export.export(function, platforms=["cuda"], disabled_checks=allowed)(*operands))
    assert decode(plan).plan.steps[1].parameters[0] == Tensor(0, (10, 3, 4, 8))


def test_lowering_for_cuda_without_device_or_architecture_is_explained():
    if C._has_cuda_device():
        pytest.skip("this process has a CUDA device")
    with pytest.raises(ValueError, match="name its architecture"):
        exported_call(replace(Weighted(0.5), arch=None), *arrays())


def test_architectures():
    assert [C.arch_of(c) for c in ("9.0", "10.0", "10.3", "8.0", "12.0", "")] == [
        "sm_90a",
        "sm_100f",
        "sm_100f",
        None,
        None,
        None,
    ]
