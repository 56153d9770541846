"""Under jit, batch and heads partition without communication, on Auto and Explicit meshes, forward and backward."""

from __future__ import annotations

import functools
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_fa4
from jax_fa4.ffi import partition
from tests.quick import quick_jit

B, T, S, N, K, D = 4, 48, 64, 4, 2, 16
COLLECTIVE = re.compile(r"(all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(?:-start)?\(")

ROWS = P("data", None, "model", None)
"""How query, key and value are split."""


def features() -> dict[str, tuple[dict, dict]]:
    """name -> (array arguments with their partition specs, static arguments)."""
    rng = np.random.default_rng(0)
    ids = np.sort(rng.integers(0, 3, (B, S)), -1).astype(np.int32)
    return {
        "causal": ({}, {"is_causal": True}),
        "window": ({}, {"local_window_size": (10, 5)}),
        "lengths": (
            {
                "query_seq_lengths": (np.asarray([48, 20, 1, 30], np.int32), P("data")),
                "key_value_seq_lengths": (np.asarray([64, 10, 33, 50], np.int32), P("data")),
            },
            {"is_causal": True},
        ),
        "offset": ({"query_offset": (np.asarray([0, 3, -2, 16], np.int32), P("data"))}, {"is_causal": True}),
        "segments": (
            {"query_segment_ids": (ids[:, :T], P("data")), "key_value_segment_ids": (ids, P("data"))},
            {"logits_soft_cap": 5.0},
        ),
        "mask": ({"mask": (rng.random((B, 1, T, S)) < 0.7, P("data"))}, {}),
        "bias": ({"bias": (rng.standard_normal((B, N, T, S)).astype(np.float32), P("data", "model"))}, {}),
        "shared_bias": ({"bias": (rng.standard_normal((1, N, T, S)).astype(np.float32), P(None, "model"))}, {}),
        "sinks": ({"sinks": (rng.standard_normal(N).astype(np.float32), P("model"))}, {"is_causal": True}),
    }


REDUCED = {"shared_bias", "sinks"}
"""Features with an operand that is replicated over the batch axis: its gradient is summed over it, by an all-reduce."""


def total_and_gradients(implementation: str, static: dict):
    def total(floating, other):
        out, lse = jax_fa4.attention_with_lse(**floating, **other, **static, implementation=implementation)
        return (out**2).sum() + jnp.where(jnp.isneginf(lse), 0, jnp.sin(lse)).sum(), (out, lse)

    return jax.grad(total, has_aux=True)


def placements(feature: str) -> dict[str, tuple[np.ndarray, P]]:
    """All array arguments of a feature's call with their partition specs."""
    rng = np.random.default_rng(1)
    shapes = {"query": (B, T, N, D), "key": (B, S, K, D), "value": (B, S, K, D)}
    operands = {name: (rng.standard_normal(shape).astype(np.float32), ROWS) for name, shape in shapes.items()}
    return {**operands, **features()[feature][0]}


@functools.cache
def unsharded(feature: str) -> tuple:
    """Gradients, and (out, lse), of the same call on one device through plain XLA."""
    plain = {name: jnp.asarray(x) for name, (x, _) in placements(feature).items()}
    return quick_jit(total_and_gradients("xla", features()[feature][1]))(*split(plain))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
@pytest.mark.parametrize("feature", features())
@pytest.mark.parametrize("implementation", ["xla", "blockwise"])
def test_no_communication(implementation: str, feature: str, kind: AxisType) -> None:
    _, static = features()[feature]
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(kind,) * 2)
    everything = placements(feature)
    want = unsharded(feature)
    with jax.set_mesh(mesh):
        placed = {name: jax.device_put(x, NamedSharding(mesh, spec)) for name, (x, spec) in everything.items()}
        compiled = quick_jit(total_and_gradients(implementation, static)).lower(*split(placed)).compile()
        got = compiled(*split(placed))
    found = set(COLLECTIVE.findall(compiled.as_text()))
    assert found <= ({"all-reduce"} if feature in REDUCED else set()), f"unneeded communication: {found}"
    gradients, (out, _) = got
    assert out.sharding.spec[0] == "data" and out.sharding.spec[2] == "model"
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), atol=2e-5, rtol=2e-5)
    assert gradients["query"].sharding.is_equivalent_to(NamedSharding(mesh, ROWS), 4)


def split(arrays: dict) -> tuple[dict, dict]:
    """Differentiable arrays and the others."""
    floating = {n: x for n, x in arrays.items() if jnp.issubdtype(x.dtype, jnp.floating)}
    return floating, {n: x for n, x in arrays.items() if n not in floating}


MESSAGE = r"{}: got its sequence axis split over mesh axis 'seq'.*jax_fa4.parallel"


def with_a_split_sequence(operand: str, kind: AxisType) -> tuple[jax.sharding.Mesh, dict[str, jax.Array]]:
    """query, key and value on 8 devices; the batch of all is split, and the sequence of one."""
    mesh = jax.make_mesh((2, 4), ("data", "seq"), axis_types=(kind,) * 2)
    rng = np.random.default_rng(0)
    arrays = {name: jnp.asarray(rng.standard_normal((2, 8, 2, 4)), jnp.float32) for name in ("query", "key", "value")}
    specs = dict.fromkeys(arrays, P("data")) | {operand: P("data", "seq")}
    return mesh, {name: jax.device_put(x, NamedSharding(mesh, specs[name])) for name, x in arrays.items()}


@pytest.mark.parametrize("operand", ["query", "key"])
def test_a_split_sequence_is_refused_on_explicit_meshes(operand: str) -> None:
    mesh, arrays = with_a_split_sequence(operand, AxisType.Explicit)
    with jax.set_mesh(mesh), pytest.raises(ValueError, match=MESSAGE.format(operand)):
        jax_fa4.attention(**arrays)


@pytest.mark.parametrize("operand", ["query", "key", "value"])
def test_a_split_sequence_is_refused_outside_jit(operand: str) -> None:
    with pytest.raises(ValueError, match=MESSAGE.format(operand)):
        jax_fa4.attention(**with_a_split_sequence(operand, AxisType.Auto)[1])


@pytest.mark.parametrize("operand", ["query", "key", "value"])
@pytest.mark.parametrize("implementation", ["xla", "blockwise"])
def test_a_split_sequence_is_refused_under_jit(implementation: str, operand: str) -> None:
    """By the compiler, which alone knows on Auto axes; forward and gradient."""
    _, arrays = with_a_split_sequence(operand, AxisType.Auto)

    def total(arrays: dict) -> jax.Array:
        return jax_fa4.attention(**arrays, implementation=implementation, is_causal=True).sum()

    for function in (total, jax.grad(total)):
        with pytest.raises(jax.errors.JaxRuntimeError, match=MESSAGE.format(operand)):
            jax.jit(function).lower(arrays).compile()


@pytest.mark.parametrize("implementation", ["xla", "blockwise"])
def test_a_sequence_may_be_gathered_before_and_split_after(implementation: str) -> None:
    """A constraint on the operand says that gathering is meant; one on the result does not reach the operands."""
    mesh, arrays = with_a_split_sequence("query", AxisType.Auto)
    whole, split = NamedSharding(mesh, P("data")), NamedSharding(mesh, P("data", "seq"))

    def total(query: jax.Array, key: jax.Array, value: jax.Array) -> tuple[jax.Array, jax.Array]:
        query = jax.lax.with_sharding_constraint(query * 2, whole)
        out = jax_fa4.attention(query, key * 2, value, implementation=implementation, is_causal=True)
        out = jax.lax.with_sharding_constraint(out, split)
        return (jnp.sin(out) ** 2).sum(), out

    function = jax.jit(jax.grad(total, (0, 1, 2), has_aux=True))
    got = function(*arrays.values())
    assert got[1].sharding.is_equivalent_to(split, 4)
    plain = {name: jnp.asarray(np.asarray(x)) for name, x in arrays.items()}
    want = jax.grad(
        lambda *x: (jnp.sin(jax_fa4.attention(x[0] * 2, x[1] * 2, x[2], is_causal=True)) ** 2).sum(), (0, 1, 2)
    )(*plain.values())
    for x, y in zip(got[0], want, strict=True):
        np.testing.assert_allclose(x, y, atol=2e-5)


@pytest.mark.parametrize(
    "kind, split, mapped",
    [
        (AxisType.Auto, "batch", (0, None, None)),
        (AxisType.Auto, "mapped", (None, 0, 0)),
        (AxisType.Explicit, "batch", (0, 0, 0)),
        (AxisType.Explicit, "mapped", (0, None, None)),
    ],
)
def test_vmap_of_split_operands(kind: AxisType, split: str, mapped: tuple) -> None:
    """Batch or mapped axis split, gradients included: sums where an operand is shared, nothing is gathered."""
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(kind,) * 2)
    spec = P(None, "data", None, "model") if split == "batch" else P("data", None, None, "model")
    rng = np.random.default_rng(0)
    shapes = [(2, B, T, N, D), (2, B, S, K, D), (2, B, S, K, D), (N,)]
    arrays = [jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes]
    arrays = [x if axis == 0 else x[0] for axis, x in zip((*mapped, 0), arrays, strict=True)]
    specs = [spec if axis == 0 else P(*spec[1:]) for axis in mapped] + [P("model")]

    def total(implementation: str, query, key, value, sinks) -> jax.Array:
        def one(query, key, value):
            return jax_fa4.attention_with_lse(query, key, value, sinks=sinks, implementation=implementation)

        out, lse = jax.vmap(one, mapped)(query, key, value)
        return (out**2).sum() + jnp.sin(lse).sum()

    want = jax.jit(jax.grad(functools.partial(total, "xla"), (0, 1, 2, 3)))(*arrays)
    with jax.set_mesh(mesh):
        placed = [jax.device_put(x, NamedSharding(mesh, own)) for x, own in zip(arrays, specs, strict=True)]
        gradient = jax.jit(jax.grad(functools.partial(total, "blockwise"), (0, 1, 2, 3)))
        compiled = gradient.lower(*placed).compile()
        got = compiled(*placed)
    assert set(COLLECTIVE.findall(compiled.as_text())) <= {"all-reduce"}
    for x, y in zip(got, want, strict=True):
        np.testing.assert_allclose(x, y, atol=5e-5)


CACHED = """
import sys, jax, numpy as np, jax_fa4
from jax.sharding import AxisType, NamedSharding, PartitionSpec
jax.config.update("jax_num_cpu_devices", 2)
jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_remove_custom_partitioning_ptr_from_cache_key", True)
mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
x = jax.device_put(np.load(sys.argv[2]), NamedSharding(mesh, PartitionSpec("data")))
attend = lambda x: jax_fa4.attention(x, x, x, is_causal=sys.argv[4] == "causal", implementation="blockwise")
np.save(sys.argv[3], jax.jit(attend)(x))
"""


def test_jax_persistent_cache_serves_other_processes_and_keeps_masks_apart(tmp_path) -> None:
    """The call to be partitioned is named by what it computes, once its pointer is left out of the cache's keys."""
    cache, given, result = (tmp_path / name for name in ("cache", "given.npy", "result.npy"))
    x = np.random.default_rng(0).standard_normal((2, 32, 2, 16)).astype(np.float32)
    np.save(given, x)
    programs = []
    for mask in ("causal", "causal", "none"):
        subprocess.run([sys.executable, "-c", CACHED, *map(str, (cache, given, result)), mask], check=True, timeout=300)
        programs.append({path.name for path in cache.iterdir() if not path.name.endswith("-atime")})
        want = jax_fa4.attention(x, x, x, is_causal=mask == "causal", implementation="xla")
        np.testing.assert_allclose(np.load(result), want, atol=1e-5)
    assert programs[0] == programs[1]
    assert len(programs[2]) > len(programs[1])


def test_a_kernel_call_is_named_alike_in_every_lowering_and_unlike_others() -> None:
    """For the kernels on Auto axes, whose plans only a GPU's program contains."""
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    x = jax.ShapeDtypeStruct((2, 32, 2, 64), jnp.bfloat16, sharding=NamedSharding(mesh, P("data")))

    def names(**static) -> set[str]:
        def attend(x):
            return jax_fa4.attention(x, x, x, implementation="fa4:sm_90a", **static)

        text = jax.jit(attend).trace(x).lower(lowering_platforms=("cuda",)).as_text()
        return set(re.findall(r'jax_fa4 = "(\w+)"', text))

    causal = names(is_causal=True)
    assert len(causal) == 1
    assert causal == names(is_causal=True)
    others = [names(), names(is_causal=True, scale=0.5), names(local_window_size=8), names(local_window_size=9)]
    assert len(set().union(causal, *others)) == 5


def test_a_kernel_call_is_named_after_the_sources_too(monkeypatch) -> None:
    """A program of another version is not taken from the cache."""
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    x = jax.ShapeDtypeStruct((2, 32, 2, 16), jnp.float32, sharding=NamedSharding(mesh, P("data")))

    def name() -> list[str]:
        def attend(x):
            return jax_fa4.attention(x, x, x, implementation="blockwise")

        jax.clear_caches()
        return re.findall(r'jax_fa4 = "(\w+)"', jax.jit(attend).lower(x).as_text())

    now = name()
    monkeypatch.setattr(partition, "_sources", lambda: b"another version")
    assert len(now) == 1 and name() != now


def floating(mesh, specs: dict) -> tuple[list, list]:
    """Query, key, sinks and bias: plain, and placed on a mesh."""
    rng = np.random.default_rng(0)
    shapes = {"query": (B, T, N, D), "key": (B, T, K, D), "sinks": (N,), "bias": (B, N, T, T)}
    plain = [jnp.asarray(rng.standard_normal(shapes[name]), jnp.float32) for name in specs]
    return plain, [jax.device_put(x, NamedSharding(mesh, s)) for x, s in zip(plain, specs.values(), strict=True)]


def losses(implementation: str, query, key, sinks, bias=None) -> jax.Array:
    """One number a batch entry, of out and LSE."""
    out, lse = jax_fa4.attention_with_lse(
        query, key, key, is_causal=True, sinks=sinks, bias=bias, implementation=implementation
    )
    return (out**2).sum((1, 2, 3)) + jnp.sin(lse).sum((1, 2))


@pytest.mark.parametrize(
    "query, key, sinks, bias",
    [
        (P("data", None, "model"), P("data", None, "model"), P(), P()),
        (P("data", None, "model"), P(), P("model"), P()),
        (P("data"), P("data", None, "model"), P("model"), P("data", "model")),
        (P(), P("data", None, "model"), P("model"), P("data", "model")),
    ],
)
def test_explicit_gradients_are_split_like_their_operands(query, key, sinks, bias) -> None:
    """Not like the call, which follows the query."""
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    plain, placed = floating(mesh, {"query": query, "key": key, "sinks": sinks, "bias": bias})

    def gradient(implementation: str):
        return jax.jit(jax.grad(lambda *x: losses(implementation, *x).sum(), (0, 1, 2, 3)))

    with jax.set_mesh(mesh):
        got = gradient("blockwise")(*placed)
        assert [jax.typeof(x).sharding.spec for x in got] == [jax.typeof(x).sharding.spec for x in placed]
    for x, want in zip(got, gradient("xla")(*plain), strict=True):
        np.testing.assert_allclose(x, want, atol=5e-5)


@pytest.mark.parametrize("model", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("spec", [ROWS, P("data")], ids=["heads", "batch"])
def test_inside_a_shard_map_over_some_of_the_axes(model: AxisType, spec: P) -> None:
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto, model))
    plain, placed = floating(mesh, {"query": spec, "key": spec, "sinks": P()})

    def total(*x):
        run = functools.partial(losses, "blockwise")
        specs = (P("data"), P("data"), P())
        return jax.shard_map(run, in_specs=specs, out_specs=P("data"), axis_names={"data"})(*x).sum()

    with jax.set_mesh(mesh):
        got = jax.jit(jax.grad(total, (0, 1, 2)))(*placed)
    want = jax.grad(lambda *x: losses("xla", *x).sum(), (0, 1, 2))(*plain)
    for x, y in zip(got, want, strict=True):
        np.testing.assert_allclose(x, y, atol=5e-5)


def test_kernels_inside_a_shard_map_over_some_of_the_axes() -> None:
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    x = jax.ShapeDtypeStruct((2, 32, 2, 64), jnp.bfloat16, sharding=NamedSharding(mesh, P("data", None, "model")))

    def attend(x):
        return jax_fa4.attention(x, x, x, implementation="fa4:sm_90a")

    with jax.set_mesh(mesh):
        some = jax.shard_map(attend, in_specs=P("data"), out_specs=P("data"), axis_names={"data"})
        text = jax.jit(some).trace(x).lower(lowering_platforms=("cuda",)).as_text()
    assert "jax_fa4_launch" in text and "CustomSPMDPartitioning" not in text
