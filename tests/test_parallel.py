"""Sequence parallelism on 8 CPU devices against unsharded attention in float64."""

from __future__ import annotations

import functools
import inspect
import itertools
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jax_fa4
from jax_fa4 import parallel
from jax_fa4.parallel import gather
from tests.quick import quick_jit

STRATEGIES = {
    "ring": parallel.ring_attention,
    "all_gather": parallel.all_gather_attention,
    "ulysses": parallel.ulysses_attention,
}
LENGTH = 64
BATCH = 2
HEADS = (8, 4)


def masks(length: int = LENGTH, batch: int = BATCH) -> dict[str, dict]:
    """Keyword arguments by name; global arrays."""
    rng = np.random.default_rng(0)
    ids = np.sort(rng.integers(0, 4, (batch, length)), -1).astype(np.int32)
    lengths = {
        "query_seq_lengths": np.asarray([length - 5, 20][:batch], np.int32),
        "key_value_seq_lengths": np.asarray([length // 2, length - 9][:batch], np.int32),
    }
    return {
        "full": {},
        "causal": {"is_causal": True},
        "window": {"local_window_size": (9, 3)},
        "causal_window": {"is_causal": True, "local_window_size": (20, 0)},
        "segments": {"query_segment_ids": ids, "key_value_segment_ids": ids, "is_causal": True},
        "lengths": {**lengths, "is_causal": True},
        "offset": {"is_causal": True, "query_offset": -7},
        "traced_offset": {"is_causal": True, "query_offset": np.asarray([11, -30][:batch], np.int32)},
        "soft_cap": {"logits_soft_cap": 2.0, "is_causal": True},
        "sinks": {"sinks": np.linspace(-2, 2, HEADS[0]).astype(np.float32), "local_window_size": (15, 0)},
    }


@functools.cache
def operands(seed: int = 0, heads: tuple[int, int] = HEADS, length: int = LENGTH) -> tuple[np.ndarray, ...]:
    """query, key, value, and cotangents of out and lse, float64."""
    rng = np.random.default_rng(seed)
    n, k = heads
    shapes = [(BATCH, length, n, 16), (BATCH, length, k, 16), (BATCH, length, k, 8), (BATCH, length, n, 8)]
    return (*(rng.standard_normal(s) for s in shapes), rng.standard_normal((BATCH, n, length)))


def results(function, qkv, cotangents, sinks=None):
    """out, lse and gradients of query, key, value (and sinks)."""
    wrt = (*qkv, sinks) if sinks is not None else qkv
    (out, lse), pullback = jax.vjp(function, *wrt)
    d_lse = jnp.where(jnp.isneginf(lse), 0, cotangents[1]).astype(lse.dtype)
    return out, lse, *pullback((cotangents[0].astype(out.dtype), d_lse))


@functools.cache
def expected(mask: str, heads: tuple[int, int] = HEADS) -> list[np.ndarray]:
    """Unsharded, plain XLA, float64."""
    options = dict(masks()[mask])
    sinks = options.pop("sinks", None)
    with jax.enable_x64(True):
        q, k, v, d_out, d_lse = map(jnp.asarray, operands(heads=heads))

        def function(q, k, v, *rest):
            extra = {"sinks": rest[0]} if rest else {}
            return jax_fa4.attention_with_lse(q, k, v, implementation="xla", **options, **extra)

        sink = None if sinks is None else jnp.asarray(sinks, jnp.float64)
        return [np.asarray(x) for x in results(function, (q, k, v), (d_out, d_lse), sink)]


def sharded_results(strategy, mask, layout, devices, implementation=None, heads=HEADS, dtype="float32", jit=quick_jit):
    """A function that gives the same through shard_map (arrays reordered to the layout and back), and its HLO text."""
    options = dict(masks()[mask])
    mesh = jax.make_mesh((devices,), ("seq",), axis_types=(jax.sharding.AxisType.Auto,))
    order = functools.partial(parallel.to_layout, devices=devices, layout=layout)
    back = functools.partial(parallel.from_layout, devices=devices, layout=layout)
    q, k, v, d_out, d_lse = (jnp.asarray(x, dtype) for x in operands(heads=heads))
    qkv = [order(x) for x in (q, k, v)]
    arrays = {n: options.pop(n) for n in list(options) if isinstance(options[n], np.ndarray)}
    sinks = jnp.asarray(arrays.pop("sinks")) if "sinks" in arrays else None
    arrays = {n: order(jnp.asarray(x)) if n.endswith("ids") else jnp.asarray(x) for n, x in arrays.items()}
    specs = {n: P(None, "seq") if n.endswith("ids") else P() for n in arrays}
    token = P(None, "seq")

    @functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(*(token,) * 3, P(), specs),
        out_specs=(token, P(None, None, "seq")),
    )
    def function(q, k, v, sinks, arrays):
        extra = {} if sinks is None else {"sinks": sinks}
        return STRATEGIES[strategy](
            q, k, v, axis_name="seq", layout=layout, implementation=implementation, return_lse=True,
            **options, **arrays, **extra,
        )  # fmt: skip

    def run(qkv, sinks, arrays, cotangents):
        call = lambda q, k, v, *s: function(q, k, v, s[0] if s else None, arrays)  # noqa: E731
        return results(call, qkv, cotangents, sinks)

    cotangents = (order(d_out), order(d_lse, axis=2))
    compiled = jit(run).lower(qkv, sinks, arrays, cotangents).compile()

    def call() -> list[jax.Array]:
        out, lse, d_q, d_k, d_v, *d_sinks = compiled(qkv, sinks, arrays, cotangents)
        return [back(out), back(lse, axis=2), back(d_q), back(d_k), back(d_v), *d_sinks]

    return call, compiled.as_text()


NAMES = ("out", "lse", "d_query", "d_key", "d_value", "d_sinks")


def assert_matches(got, want, tolerance=3e-5) -> None:
    for name, x, y in zip(NAMES, got, want, strict=False):
        np.testing.assert_allclose(np.asarray(x, np.float64), y, atol=tolerance, rtol=tolerance, err_msg=name)


LAYOUTS, DEVICES = ("contiguous", "zigzag"), (2, 4, 8)
ALL = list(itertools.product(STRATEGIES, masks(), LAYOUTS, DEVICES))
SHORT = [
    (strategy, mask, LAYOUTS[(i + j) % len(LAYOUTS)], DEVICES[(i + j) % len(DEVICES)])
    for (i, strategy), (j, mask) in itertools.product(enumerate(STRATEGIES), enumerate(masks()))
]
"""One combination in six, in which any two values of different axes meet."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """The long mode has every combination."""
    if "combination" in metafunc.fixturenames:
        chosen = ALL if metafunc.config.getoption("--long") else SHORT
        metafunc.parametrize("combination", chosen, ids=lambda case: "-".join(map(str, case)))


def test_short_mode_has_every_pair_of_values() -> None:
    def pairs(cases):
        return {pair for case in cases for pair in itertools.combinations(enumerate(case), 2)}

    assert pairs(SHORT) == pairs(ALL)


def test_matches_unsharded(combination) -> None:
    strategy, mask, layout, devices = combination
    got, _ = sharded_results(strategy, mask, layout, devices)
    assert_matches(got(), expected(mask))


@pytest.mark.parametrize("heads", [(8, 1), (8, 2), (8, 8)])
def test_ulysses_with_any_number_of_key_heads(heads) -> None:
    got, _ = sharded_results("ulysses", "causal", "zigzag", 4, heads=heads)
    assert_matches(got(), expected("causal", heads))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_plain_xla_implementation(strategy) -> None:
    got, _ = sharded_results(strategy, "causal_window", "zigzag", 2, implementation="xla")
    assert_matches(got(), expected("causal_window"))


COLLECTIVES = {
    "ring": {"collective-permute"},
    "all_gather": {"all-gather", "reduce-scatter"},
    "ulysses": {"all-to-all"},
}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_only_the_collectives_that_the_strategy_needs(strategy) -> None:
    _, text = sharded_results(strategy, "causal", "zigzag", 4)
    kinds = "all-gather|all-reduce|reduce-scatter|collective-permute|all-to-all|collective-broadcast"
    found = set(re.findall(rf"= [^=]*? ({kinds})(?:-start)?\(", text))
    assert found == COLLECTIVES[strategy]


def test_all_gather_in_groups_of_heads(monkeypatch) -> None:
    """As large operands are gathered: one collective for the keys and one for the values of each group."""
    heads = []

    def chunks(call, config, operands, placement, original=gather._chunks):
        heads.append((operands.query.shape[2], operands.key.shape[2]))
        return original(call, config, operands, placement)

    monkeypatch.setattr(gather, "GROUP_BYTES", 1)
    monkeypatch.setattr(gather, "_chunks", chunks)
    got, text = sharded_results("all_gather", "sinks", "zigzag", 2)
    assert heads == [(2, 1)] * 4
    assert_matches(got(), expected("sinks"))
    found = set(re.findall(r" (all-gather|all-reduce|reduce-scatter|collective-permute|all-to-all)(?:-start)?\(", text))
    assert found == COLLECTIVES["all_gather"] | {"all-reduce"}  # of the sinks' gradient


def test_all_gather_in_groups_of_heads_without_queries(monkeypatch) -> None:
    """The third group's transfer waits for the first group's attention, which has no rows here."""
    monkeypatch.setattr(gather, "GROUP_BYTES", 1)
    mesh = jax.make_mesh((2,), ("seq",), axis_types=(jax.sharding.AxisType.Auto,))
    attend = parallel.make_attention(mesh, sequence_axis="seq", strategy="all_gather", implementation="blockwise")
    out = jax.jit(attend)(jnp.zeros((1, 0, 4, 16)), jnp.ones((1, 8, 4, 16)), jnp.ones((1, 8, 4, 16)))
    assert out.shape == (1, 0, 4, 16)


def permutes(window: tuple) -> list[int]:
    """Number of edges of each collective-permute of a forward."""
    mesh = jax.make_mesh((8,), ("seq",), axis_types=(jax.sharding.AxisType.Auto,))
    x = jnp.zeros((1, 128, 1, 8))
    function = jax.shard_map(
        functools.partial(parallel.ring_attention, axis_name="seq", is_causal=True, local_window_size=window),
        mesh=mesh,
        in_specs=P(None, "seq"),
        out_specs=P(None, "seq"),
    )
    text = jax.jit(function).lower(x, x, x).as_text()
    return [
        len(m.split("], ["))
        for m in re.findall(r"collective_permute.*?source_target_pairs = dense<\[\[(.*?)\]\]>", text)
    ]


def test_windowed_ring_does_not_send_what_nobody_needs() -> None:
    # Pieces of 16 tokens: a window of 10 reaches one piece back; K and V together make one transfer of 7 edges.
    assert permutes((10, 0)) == [7]
    assert permutes((None, 0)) == [7, 6, 5, 4, 3, 2, 1]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_bitwise_repeatable(strategy) -> None:
    call, _ = sharded_results(strategy, "causal", "zigzag", 4, dtype="bfloat16", jit=jax.jit)
    first = [np.asarray(x).tobytes() for x in call()]
    for _ in range(20):
        assert [np.asarray(x).tobytes() for x in call()] == first


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("replicated", [s for n in range(4) for s in itertools.combinations("qkv", n)], ids="".join)
def test_gradients_of_replicated_operands(strategy, replicated) -> None:
    """Each operand either has its batch split over a second axis or is the same on all of that axis' devices."""
    mesh = jax.make_mesh((2, 2), ("data", "seq"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    rng = np.random.default_rng(0)
    wide, narrow = (2, 16, 4, 8), (1, 16, 4, 8)
    qkv = [jnp.asarray(rng.standard_normal(narrow if n in replicated else wide), jnp.float32) for n in "qkv"]
    weight = jnp.asarray(rng.standard_normal(wide), jnp.float32)
    specs = tuple(P(None if n in replicated else "data", "seq") for n in "qkv")
    call = functools.partial(STRATEGIES[strategy], axis_name="seq", is_causal=True)
    function = jax.shard_map(
        lambda q, k, v, w: jax.lax.psum((call(q, k, v) * w).sum(), ("data", "seq")),
        mesh=mesh,
        in_specs=(*specs, P("data", "seq")),
        out_specs=P(),
    )

    def unsharded(q, k, v, w):
        return (jax_fa4.attention(*(jnp.broadcast_to(x, wide) for x in (q, k, v)), is_causal=True) * w).sum()

    got = jax.jit(jax.grad(function, (0, 1, 2)))(*qkv, weight)
    want = jax.jit(jax.grad(unsharded, (0, 1, 2)))(*qkv, weight)
    for name, x, y in zip("qkv", got, want, strict=True):
        np.testing.assert_allclose(x, y, atol=2e-5, err_msg=f"gradient of {name}, replicated: {replicated}")


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_nested_in_data_and_model_with_scan_remat_and_vmap(strategy) -> None:
    """data x model x seq in one mesh, through make_attention, under scan and remat, and under vmap."""
    mesh = jax.make_mesh((2, 2, 2), ("data", "model", "seq"), axis_types=(jax.sharding.AxisType.Auto,) * 3)
    attend = parallel.make_attention(
        mesh, batch_axes="data", head_axis="model", sequence_axis="seq", strategy=strategy, layout="zigzag"
    )
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((3, 2, 16, 4, 8)), jnp.float32)

    def chain(attention, layout):
        def total(x):
            x = layout(x)
            step = jax.checkpoint(lambda h, _: (attention(h, h, h, is_causal=True), None))
            return (jax.lax.scan(step, x, None, length=2)[0] ** 2).sum()

        return total

    order = functools.partial(parallel.to_layout, devices=2, layout="zigzag")
    plain = functools.partial(jax_fa4.attention, implementation="xla")
    got = jax.jit(jax.grad(chain(attend, order)))(x[0])
    want = jax.jit(jax.grad(chain(plain, lambda x: x)))(x[0])
    np.testing.assert_allclose(got, want, atol=1e-4)
    got = jax.jit(jax.vmap(jax.grad(chain(attend, order))))(x)
    want = jax.jit(jax.vmap(jax.grad(chain(plain, lambda x: x))))(x)
    np.testing.assert_allclose(got, want, atol=1e-4)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_explicit_mesh_axes(strategy) -> None:
    mesh = jax.make_mesh((2, 2), ("data", "seq"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    sharding = jax.sharding.NamedSharding(mesh, P("data", "seq"))
    x = jnp.asarray(np.random.default_rng(0).standard_normal((2, 8, 2, 4)), jnp.float32)
    with jax.set_mesh(mesh):
        attend = parallel.make_attention(mesh, batch_axes="data", sequence_axis="seq", strategy=strategy)
        got = jax.jit(jax.grad(lambda x: (attend(x, x, x, is_causal=True) ** 2).sum()))(jax.device_put(x, sharding))
        assert got.sharding.is_equivalent_to(sharding, 4)
    want = jax.grad(lambda x: (jax_fa4.attention(x, x, x, is_causal=True) ** 2).sum())(x)
    np.testing.assert_allclose(got, want, atol=2e-5)


def test_make_attention_without_sequence_axis_has_no_communication() -> None:
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    attend = parallel.make_attention(mesh, batch_axes="data", head_axis="model", return_lse=True)
    q, k, v, *_ = (jnp.asarray(x, jnp.float32) for x in operands())
    options = {"is_causal": True, "sinks": jnp.linspace(-1, 1, 8), "key_value_seq_lengths": jnp.asarray([30, 64])}
    compiled = jax.jit(functools.partial(attend, **options)).lower(q, k, v).compile()
    assert not re.search(r"all-gather|all-reduce|all-to-all|collective-permute", compiled.as_text())
    got = compiled(q, k, v)
    want = jax_fa4.attention_with_lse(q, k, v, implementation="xla", **options)
    for x, y in zip(got, want, strict=True):
        np.testing.assert_allclose(x, y, atol=1e-5)


def test_illegal_arguments() -> None:
    mesh = jax.make_mesh((4,), ("seq",), axis_types=(jax.sharding.AxisType.Auto,))
    x = jnp.zeros((1, 32, 2, 8))

    def call(strategy, x=x, **options):
        function = functools.partial(STRATEGIES[strategy], **{"axis_name": "seq", **options})
        return jax.shard_map(function, mesh=mesh, in_specs=P(None, "seq"), out_specs=P(None, "seq"))(x, x, x)

    with pytest.raises(ValueError, match="axis_name: got 'seq', which is no mesh axis"):
        parallel.ring_attention(x, x, x, axis_name="seq")
    with pytest.raises(ValueError, match="layout: got 'spiral'"):
        call("ring", layout="spiral")
    with pytest.raises(ValueError, match="query: a device holds 1 tokens"):
        call("ring", layout="zigzag", x=x[:, :4])
    with pytest.raises(TypeError, match="unexpected keyword argument 'bias'"):
        call("all_gather", bias=jnp.zeros(()))
    with pytest.raises(TypeError, match="unexpected keyword argument 'mask'"):
        parallel.make_attention(mesh, sequence_axis="seq")(x, x, x, mask=jnp.ones((), bool))
    with pytest.raises(ValueError, match="got 2 heads, axis size 4"):
        call("ulysses")
    with pytest.raises(ValueError, match="implementation: got 'cudnn'"):
        call("ring", implementation="cudnn")
    with pytest.raises(ValueError, match="sequence_axis: got 'model'; the mesh has the axes"):
        parallel.make_attention(mesh, sequence_axis="model")
    with pytest.raises(ValueError, match="head_axis: got 'seq', which batch_axes has already"):
        parallel.make_attention(mesh, batch_axes="seq", head_axis="seq")
    with pytest.raises(ValueError, match="strategy: got 'star'"):
        parallel.make_attention(mesh, sequence_axis="seq", strategy="star")
    with pytest.raises(ValueError, match=r"query: length 30 of shape \(1, 30, 2, 8\) does not divide by the 4 devices"):
        parallel.make_attention(mesh, sequence_axis="seq")(x[:, :30], x, x)


EXPORTED = """
import sys
import jax
jax.config.update("jax_num_cpu_devices", 8)
import jax.numpy as jnp
import numpy as np
exported = jax.export.deserialize(open(sys.argv[1], "rb").read())
mesh = jax.make_mesh((4,), ("seq",), axis_types=(jax.sharding.AxisType.Auto,))
sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "seq"))
x = jax.device_put(jnp.asarray(np.load(sys.argv[2])), sharding)
np.save(sys.argv[3], np.asarray(jax.jit(exported.call)(x, x, x)))
"""


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_exported_function_runs_in_a_fresh_process(strategy, tmp_path) -> None:
    mesh = jax.make_mesh((4,), ("seq",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = P(None, "seq")
    function = jax.jit(
        jax.shard_map(
            functools.partial(STRATEGIES[strategy], axis_name="seq", is_causal=True),
            mesh=mesh,
            in_specs=spec,
            out_specs=spec,
        ),
        in_shardings=jax.sharding.NamedSharding(mesh, spec),
    )
    x = jnp.asarray(operands(heads=(4, 4))[0], jnp.float32)
    program, given, result = (tmp_path / name for name in ("program", "x.npy", "out.npy"))
    program.write_bytes(jax.export.export(function)(x, x, x).serialize())
    np.save(given, np.asarray(x))
    command = [sys.executable, "-c", EXPORTED, *map(str, (program, given, result))]
    subprocess.run(command, check=True, timeout=300)
    np.testing.assert_array_equal(np.load(result), np.asarray(function(x, x, x)))


def test_the_keywords_are_those_of_attention() -> None:
    """Same names, same defaults, in all of them: no signature falls behind."""
    mesh = jax.make_mesh((1,), ("seq",), axis_types=(jax.sharding.AxisType.Auto,))
    own = {"axis_name", "layout", "return_lse", "implementation"}
    want = inspect.signature(jax_fa4.attention).parameters
    for function in (*STRATEGIES.values(), parallel.make_attention(mesh)):
        parameters = {n: p.default for n, p in inspect.signature(function).parameters.items() if n not in own}
        assert parameters == {n: want[n].default for n in parameters}
        assert set(want) - set(parameters) == {"bias", "mask", "return_residual", "implementation"}
