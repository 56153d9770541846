"""Launch plans of the Hopper forward: what they say for given shapes, and that the kernels' entries take them."""

from __future__ import annotations

import struct
from dataclasses import replace

import pytest

from jax_fa4.ffi.plan import Fill, Kernel, Scalars, Tensor, TensorMap
from jax_fa4.kernels.artefact import Artefact, ArtefactError, Parameter
from jax_fa4.kernels.plans import MINUS_INFINITY_BITS, forward_plan, parameter_bytes
from jax_fa4.kernels.problem import UNBOUNDED, ForwardProblem
from jax_fa4.kernels.select import forward_specs
from jax_fa4.kernels.sm90.forward.layout import SHARED_LIMIT, ForwardLayout
from jax_fa4.kernels.spec import MASKS, PADDED_HEAD_DIMS, KernelSpec, Tile, standard_specs

INTEGERS = [
    *("seqlen_q", "seqlen_k", "query_offset", "left", "right", "group", "box_tokens"),
    *("tiles_m", "heads", "batch_heads", "section", "total"),
]


def make_spec(**fields) -> KernelSpec:
    return KernelSpec.create(**{"arch": "sm_90a", "kind": "forward", "dtype": "bfloat16", "head_dim": 128, **fields})


def make_artefact(spec: KernelSpec) -> Artefact:
    """An artefact whose entry has the kernel's parameters; its machine code is never run here."""
    sizes = [128] * 4 + [8] * (2 if spec.varlen else 1) + [4] * 13
    parameters = tuple(Parameter(size, size) for size in sizes)
    return Artefact(spec, "entry", b"cubin", "", parameters, (ForwardLayout(spec).threads, 1, 1), "s", "1")


def make_problem(**fields) -> ForwardProblem:
    defaults = {
        "batch": 2, "seqlen_q": 300, "seqlen_k": 500, "heads": 8, "kv_heads": 2, "head_dim": 128, "head_dim_v": 128,
        "dtype": "bfloat16", "scale": 0.125,
    }  # fmt: skip
    return ForwardProblem(**{**defaults, **fields})


def kernel_of(spec: KernelSpec, problem: ForwardProblem, **options) -> Kernel:
    (step,) = forward_plan(make_artefact(spec), problem, **options).steps
    assert isinstance(step, Kernel)
    return step


def integers_of(kernel: Kernel) -> dict[str, int]:
    values = [p.values[0] for p in kernel.parameters if isinstance(p, Scalars) and p.format == "i"]
    return dict(zip(INTEGERS, values, strict=True))


def test_dense_plan():
    kernel = kernel_of(make_spec(), make_problem())
    query, key, value, out, lse, scale = kernel.parameters[:6]
    assert query == TensorMap(0, "bfloat16", (128, 300, 8, 2), (8 * 256, 256, 300 * 8 * 256), (64, 64, 1, 1), swizzle=3)
    assert key == TensorMap(1, "bfloat16", (128, 500, 2, 2), (2 * 256, 256, 500 * 2 * 256), (64, 128, 1, 1), swizzle=3)
    assert (value, out) == (replace(key, buffer=2), replace(query, buffer=3))
    assert lse == Tensor(4)
    assert scale == Scalars("f", (pytest.approx(0.125 * 1.4426950408889634),))
    values = integers_of(kernel)
    assert (values["tiles_m"], values["total"], values["section"], values["group"]) == (3, 48, 4, 4)
    assert kernel.grid == (48, 1, 1)
    assert (kernel.block, kernel.cluster) == ((384, 1, 1), (1, 1, 1))


def test_grid_is_at_most_one_block_per_multiprocessor():
    assert kernel_of(make_spec(), make_problem(), sm_count=7).grid == (7, 1, 1)


def test_packed_plan_puts_a_group_in_one_box():
    """8 heads of one group: 8 positions by 8 heads fill a warpgroup's 64 rows."""
    kernel = kernel_of(make_spec(pack_gqa=True), make_problem(kv_heads=1))
    query = kernel.parameters[0]
    assert query.dims == (128, 8, 300, 1, 2)
    assert query.strides == (256, 8 * 256, 8 * 256, 300 * 8 * 256)
    assert query.box == (64, 8, 8, 1, 1)
    values = integers_of(kernel)
    assert (values["box_tokens"], values["tiles_m"], values["heads"], values["total"]) == (8, 19, 1, 38)


def test_packed_group_that_does_not_divide_the_rows():
    kernel = kernel_of(make_spec(pack_gqa=True), make_problem(heads=10, kv_heads=2))
    assert kernel.parameters[0].box == (64, 5, 12, 1, 1)


def test_packed_group_larger_than_a_box_is_refused():
    with pytest.raises(ValueError, match=r"pack_gqa.*128"):
        kernel_of(make_spec(pack_gqa=True), make_problem(heads=128, kv_heads=1))


def test_varlen_plan_has_a_fourth_operand():
    kernel = kernel_of(make_spec(varlen=True), make_problem())
    assert [p.buffer for p in kernel.parameters if isinstance(p, Tensor)] == [5, 3]
    assert kernel.parameters[3].buffer == 4


@pytest.mark.parametrize(("head_dim", "chunk", "swizzle"), [(8, 64, 3), (64, 64, 3), (72, 32, 2), (136, 64, 3)])
def test_true_head_dim_is_in_the_map_and_padding_in_the_box(head_dim: int, chunk: int, swizzle: int):
    spec = make_spec(head_dim=head_dim)
    query = kernel_of(spec, make_problem(head_dim=head_dim, head_dim_v=head_dim)).parameters[0]
    assert (query.dims[0], query.box[0], query.swizzle) == (head_dim, chunk, swizzle)


@pytest.mark.parametrize("fields", [{"seqlen_k": 0}, {"batch": 0}, {"seqlen_q": 0}])
def test_empty_problems_launch_no_kernel(fields: dict):
    problem = make_problem(**fields)
    steps = forward_plan(make_artefact(make_spec()), problem).steps
    if problem.out_bytes:
        assert steps == (Fill(3, problem.out_bytes), Fill(4, problem.lse_bytes, pattern=MINUS_INFINITY_BITS))
        assert struct.unpack("<f", struct.pack("<I", MINUS_INFINITY_BITS))[0] == -float("inf")
    else:
        assert steps == ()


def test_zero_scale_is_replaced_by_a_harmless_one():
    scale = kernel_of(make_spec(), make_problem(scale=0.0)).parameters[5].values[0]
    assert 0 < scale < 1e-25


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"scale": -1.0}, "scale is -1.0"),
        ({"scale": float("nan")}, "scale is nan"),
        ({"heads": 7}, "heads is 7"),
        ({"left": UNBOUNDED + 1}, "left is"),
        ({"query_offset": -UNBOUNDED - 1}, "query_offset is"),
    ],
)
def test_bad_problems_are_named(fields: dict, message: str):
    with pytest.raises(ValueError, match=message):
        make_problem(**fields)


@pytest.mark.parametrize("fields", [{"head_dim": 64}, {"head_dim_v": 256}, {"dtype": "float16"}])
def test_artefact_must_serve_the_problem(fields: dict):
    with pytest.raises(ValueError, match="does not serve"):
        forward_plan(make_artefact(make_spec()), make_problem(**fields))


def test_entry_with_other_parameters_is_refused():
    made = make_artefact(make_spec())
    with pytest.raises(ArtefactError, match="parameters of"):
        forward_plan(replace(made, parameters=made.parameters[:-1]), make_problem())
    with pytest.raises(ArtefactError, match="block"):
        forward_plan(replace(made, threads=(128, 1, 1)), make_problem())


@pytest.mark.parametrize(("batch", "pairs"), [(2, 24), (1, 12)])
def test_causal_tiles_come_in_pairs(batch: int, pairs: int):
    """Three tiles of each of two heads are three pairs."""
    kernel = kernel_of(make_spec(mask="causal"), make_problem(batch=batch))
    values = integers_of(kernel)
    assert (values["tiles_m"], values["total"], kernel.grid) == (3, 2 * pairs, (pairs, 1, 1))


def test_an_odd_head_has_no_partner():
    kernel = kernel_of(make_spec(mask="causal"), make_problem(batch=1, heads=3, kv_heads=3))
    assert integers_of(kernel)["total"] == 2 * 3 * 2


def test_run_time_lengths_leave_tiles_to_the_hardware():
    """8192 keys of 2 x 128 bfloat16 take 4 MiB: six key/value heads of four query heads each share 24 MiB."""
    problem = make_problem(batch=4, heads=32, kv_heads=8, seqlen_k=8192)
    kernel = kernel_of(make_spec(mask="causal", varlen=True), problem)
    values = integers_of(kernel)
    assert values["section"] == 24
    assert kernel.grid == (values["total"], 1, 1) == (3 * 128, 1, 1)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("head_dim", "head_dim_v"), PADDED_HEAD_DIMS)
def test_tiles_fit(head_dim: int, head_dim_v: int, mask: str):
    spec = make_spec(head_dim=head_dim, head_dim_v=head_dim_v, mask=mask)
    layout = ForwardLayout(spec)
    layout.check()
    assert layout.shared_bytes <= SHARED_LIMIT
    for offset in (layout.q_offset, layout.k_offset, layout.v_offset, layout.q_bytes, layout.k_bytes, layout.v_bytes):
        assert offset % 1024 == 0  # the swizzle pattern repeats every 1024 bytes of address


@pytest.mark.parametrize(("seqlen_q", "tiles_m"), [(2047, 128), (2048, 192)])
def test_long_queries_prefer_taller_tiles(seqlen_q: int, tiles_m: int):
    """The last spec is the one that every release has; a preferred one fits the same problems."""
    problem = make_problem(seqlen_q=seqlen_q, heads=2)
    specs = forward_specs(problem, arch="sm_90a", mask="none", varlen=False)
    assert specs[0].tile.m == tiles_m
    assert specs[-1] == make_spec()
    for spec in specs:
        ForwardLayout(spec).check()
        assert spec in standard_specs(["sm_90a"], ["forward"])
        kernel_of(spec, problem)


@pytest.mark.parametrize("tile", [Tile(96, 128), Tile(128, 100), Tile(128, 256, 4)])
def test_impossible_tiles_are_refused(tile: Tile):
    with pytest.raises(ValueError, match=r"tile"):
        ForwardLayout(make_spec(tile=tile)).check()


@pytest.mark.parametrize("fields", [{}, {"varlen": True, "mask": "window", "pack_gqa": True}])
def test_compiled_entry_takes_the_plan(tmp_path, fields: dict):
    """The real compiler: parameter sizes, order and block size as the plan has them, and no register spills in it."""
    pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")
    from jax_fa4.kernels.compile import compile_spec

    spec = make_spec(head_dim=64, **fields)
    made = compile_spec(spec)
    kernel = kernel_of(spec, make_problem(head_dim=64, head_dim_v=64))
    assert [parameter_bytes(p) for p in kernel.parameters] == [p.size for p in made.parameters]
    assert [p.size for p in make_artefact(spec).parameters] == [p.size for p in made.parameters]
    assert made.threads == kernel.block
    assert ".local" not in made.ptx
