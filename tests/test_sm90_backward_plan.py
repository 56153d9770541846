"""Launch plans of the Hopper backward: steps and scratch for given shapes, and that the compiled entries take them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from jax_fa4.ffi.plan import Fill, Kernel, Scalars, TensorMap
from jax_fa4.kernels.artefact import Artefact, Parameter
from jax_fa4.kernels.compile import dsl_version
from jax_fa4.kernels.plans import backward_plan, backward_scratch, backward_specs
from jax_fa4.kernels.problem import ForwardProblem
from jax_fa4.kernels.sm90.backward.config import MainConfig
from jax_fa4.kernels.sm90.backward.plan import (
    PERSISTENT_CTAS,
    POSTPROCESS_THREADS,
    PREPROCESS_THREADS,
    BackwardBuffers,
    counts_turns,
    team_size,
)
from jax_fa4.kernels.sm90.backward.scratch import DqBlock, ScratchSizes
from jax_fa4.kernels.sm90.backward_split.config import SHARED_LIMIT, KeyValueConfig, QueryConfig
from tests.compiled import own_store


def make_problem(**fields) -> ForwardProblem:
    defaults = {
        "batch": 2, "seqlen_q": 300, "seqlen_k": 500, "heads": 8, "kv_heads": 2, "head_dim": 128, "head_dim_v": 128,
        "dtype": "bfloat16", "scale": 0.125,
    }  # fmt: skip
    return ForwardProblem(**{**defaults, **fields})


def make_artefacts(specs) -> list[Artefact]:
    """Artefacts whose entries have the kernels' parameters; their machine code is never run here."""
    artefacts = []
    for spec in specs:
        varlen = int(spec.varlen)
        counters = int(counts_turns(spec) if spec.kind == "backward_preprocess" else spec.deterministic)
        tickets = int(spec.kind == "backward_main" and MainConfig.of(spec).persistent)
        sizes, threads = {
            "backward_preprocess": ([8] * (6 + counters + varlen) + [4] * 3, PREPROCESS_THREADS),
            "backward_main": (
                [128, 16] * 6 + [8] * (3 + tickets + counters + varlen) + [4] * (8 if spec.mask == "window" else 6),
                MainConfig.threads,
            ),
            "backward_key_value": (
                [128, 16] * 6 + [8] * (2 + varlen) + [4] * (8 if spec.mask == "window" else 6),
                KeyValueConfig.threads,
            ),
            "backward_query": (
                [128, 16] * 5 + [8] * (2 + varlen) + [4] * (8 if spec.mask == "window" else 6),
                QueryConfig.threads,
            ),
            "backward_postprocess": ([8] * (2 + counters) + [4] * 4, POSTPROCESS_THREADS),
        }[spec.kind]
        parameters = tuple(Parameter(size, min(size, 64)) for size in sizes)
        artefacts.append(Artefact(spec, "entry", b"cubin", "", parameters, (threads, 1, 1), "s", "1"))
    return artefacts


def plan_of(problem: ForwardProblem, **flags):
    return backward_plan(make_artefacts(backward_specs("sm_90a", problem, **flags)), problem)


def test_three_kernels():
    problem = make_problem()
    pre, main, post = plan_of(problem, mask="causal").steps
    assert pre.grid == post.grid == (5 * 8 * 2, 1, 1)  # blocks of 64 rows, query heads, batch
    assert main.grid == (4 * 2 * 2, 1, 1)  # blocks of 128 keys, key heads, batch
    query, extents = main.parameters[:2]
    assert query == TensorMap(0, "bfloat16", (128, 300, 8, 2), (8 * 256, 256, 300 * 8 * 256), (64, 64, 1, 1), swizzle=3)
    assert extents == Scalars("iiii", (300, 128, 8, 2))
    dkey = main.parameters[8]
    assert dkey == TensorMap(8, "bfloat16", (128, 500, 2, 2), (2 * 256, 256, 500 * 2 * 256), (64, 128, 1, 1), swizzle=3)


def test_large_head_dims_take_two_main_kernels():
    problem = make_problem(head_dim=192, head_dim_v=128)
    pre, key_value, query = plan_of(problem, mask="window", deterministic=False).steps
    assert pre.grid == (6 * 8 * 2, 1, 1)  # blocks of 64 rows, padded to 384, query heads, batch
    assert query.grid == (3 * 8 * 2, 1, 1)  # blocks of 128 rows
    assert key_value.grid == (8 * 2 * 2, 1, 1)  # blocks of 64 keys, key heads, batch
    dquery = query.parameters[8]
    assert dquery == TensorMap(
        7, "bfloat16", (192, 300, 8, 2), (8 * 384, 384, 300 * 8 * 384), (64, 128, 1, 1), swizzle=3
    )
    specs = backward_specs("sm_90a", problem)
    rows = 2 * 8 * 384
    assert backward_scratch(specs, problem) == {"lse2": ((rows,), "float32"), "delta": ((rows,), "float32")}
    assert specs == backward_specs("sm_90a", problem, deterministic=False)


def test_teams_divide_the_pairs():
    assert [team_size(32, wanted) for wanted in (0, 3, 12, 40)] == [1, 2, 8, 32]
    assert team_size(13, 3) == 3  # a prime number of pairs has no useful divisor
    assert team_size(7, 3) == 7  # three teams: the last one's longest tiles would begin too late
    assert team_size(16, 1, least=2) == 2


def test_persistent_ctas_draw_from_a_counter():
    """Head dims up to 64: at most one CTA a multiprocessor, and a counter that starts at zero in every call."""
    problem = make_problem(batch=4, heads=16, kv_heads=16, head_dim=64, head_dim_v=64, seqlen_k=2000)
    specs = backward_specs("sm_90a", problem)
    clear, _, main, _ = backward_plan(make_artefacts(specs), problem).steps
    *_, (name, (shape, dtype)) = backward_scratch(specs, problem).items()
    assert (name, shape, dtype) == ("counter", (1,), "int32")
    assert clear == Fill(7 + 3 + len(backward_scratch(specs, problem)) - 1, 4)
    assert main.grid == (PERSISTENT_CTAS, 1, 1)
    few = replace(problem, batch=1, heads=1, kv_heads=1)
    assert backward_plan(make_artefacts(specs), few).steps[2].grid == (16, 1, 1)


def test_scratch_is_padded_once_and_documented():
    problem = make_problem()
    shapes = backward_scratch(backward_specs("sm_90a", problem), problem)
    rows = 2 * 8 * 320
    assert shapes == {
        "lse2": ((rows,), "float32"),
        "delta": ((rows,), "float32"),
        "dq_accum": ((rows * 128,), "float32"),
        "turn": ((2 * 8 * 5 * 2,), "int32"),
    }


def test_buffers_follow_operands_then_results():
    assert BackwardBuffers.of(varlen=False, deterministic=True).turn == 13
    varlen = BackwardBuffers.of(varlen=True, deterministic=False)
    assert (varlen.batch_info, varlen.dquery, varlen.turn) == (7, 8, None)


@pytest.mark.parametrize(
    ("empty", "cleared"),
    [("seqlen_q", {8: 500 * 512, 9: 500 * 512}), ("seqlen_k", {7: 300 * 2048})],
)
def test_nothing_to_attend_clears_gradients(empty, cleared):
    plan = plan_of(make_problem(batch=1, **{empty: 0}))
    assert plan.artefacts == ()
    assert {step.buffer: step.size for step in plan.steps} == cleared
    assert all(isinstance(step, Fill) and step.pattern == 0 for step in plan.steps)


def unordered(specs):
    """The same kernels without the order of additions."""
    return tuple(replace(spec, deterministic=False) for spec in specs)


def test_accumulator_is_cleared_only_where_nothing_orders_the_additions():
    problem = make_problem()
    assert all(isinstance(step, Kernel) for step in plan_of(problem).steps)
    specs = unordered(backward_specs("sm_90a", problem))
    assert isinstance(backward_plan(make_artefacts(specs), problem).steps[0], Fill)
    assert "turn" not in backward_scratch(specs, problem)


def test_the_ordered_kernels_serve_calls_that_need_no_order():
    problem = make_problem()
    assert backward_specs("sm_90a", problem, deterministic=False) == backward_specs("sm_90a", problem)


def test_foreign_artefacts_are_refused():
    artefacts = make_artefacts(backward_specs("sm_90a", make_problem()))
    with pytest.raises(ValueError, match="do not serve"):
        backward_plan(artefacts, make_problem(head_dim=64, head_dim_v=64))
    with pytest.raises(ValueError, match="do not serve"):
        backward_plan(artefacts[::-1], make_problem())


@pytest.mark.parametrize("dims", [(d, dv) for d in (64, 128, 192, 256) for dv in (64, 128, 192, 256)])
def test_shared_memory_fits(dims):
    problem = make_problem(head_dim=dims[0], head_dim_v=dims[1])
    for step in plan_of(problem).steps:
        assert isinstance(step, Fill) or step.shared_bytes <= SHARED_LIMIT


def test_dq_block_covers_each_element_once():
    for block in (DqBlock(64, 128), DqBlock(128, 64)):
        assert block.thread_elements * 128 * 2 == block.elements == block.tile_m * block.head_dim
    with pytest.raises(ValueError, match="tile_m 96"):
        DqBlock(96, 64)
    assert ScratchSizes.of(1, 1, 0, DqBlock(64, 128)).dq_accum == 0


@pytest.mark.skipif(dsl_version() is None, reason="needs the kernel compiler, nvidia-cutlass-dsl")
@pytest.mark.parametrize(
    "flags",
    [{"mask": "window", "varlen": True}, {"mask": "causal", "ordered": False}, {"head_dim": 256}],
    ids=["window-varlen", "causal-unordered", "split"],
)
def test_compiled_entries_take_the_plan(flags):
    flags = dict(flags)
    problem = make_problem(head_dim=flags.pop("head_dim", 128))
    ordered = flags.pop("ordered", True)
    specs = backward_specs("sm_90a", problem, **flags)
    artefacts = [own_store().load(spec) for spec in (specs if ordered else unordered(specs))]
    plan = backward_plan(artefacts, problem)
    assert len([step for step in plan.steps if isinstance(step, Kernel)]) == 3
    made = make_artefacts([artefact.spec for artefact in artefacts])
    assert [a.threads for a in made] == [a.threads for a in artefacts]
    with pytest.raises(ValueError, match="do not serve"):
        backward_plan(artefacts, replace(problem, dtype="float16"))
