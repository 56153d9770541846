"""The Blackwell backward kernels, executed from their PTX: sampled problems, any schedule, same bits."""

from __future__ import annotations

import numpy as np
import pytest

from tests.cases import Case, sample_cases
from tests.compiled import require_kernels
from tests.emulated import mask_kind
from tests.emulator.attention import ForwardCase
from tests.emulator.attention_backward import assert_right, inputs, run_backward, specs_of
from tests.emulator.launch import Options

require_kernels()

ARCH = "sm_100f"
SHORT = ((1, 1), (3, 3), (64, 1), (239, 1), (1, 239), (113, 203), (108, 256), (300, 128), (0, 5), (5, 0))
"""Shapes of the core set; the long mode adds those of ``tests.cases.SHAPES``."""

HEAD_DIMS = ((8, 8), (64, 64), (104, 104), (128, 128), (200, 200))
MASKS = ("none", "causal", "window", "causal_lengths")
DTYPES = ("bfloat16",)
LONG_HEAD_DIMS = (
    *HEAD_DIMS,
    (40, 40),
    (72, 72),
    (96, 96),
    (64, 128),
    (128, 64),
    (24, 88),
    (192, 128),
    (192, 192),
    (256, 256),
)
"""Compiling kernels takes most of the core set's time: three padded head dims, four kinds of mask, one dtype."""

CORE, LONG = 40, 300
CORE_PAIR_PROBLEMS = 4
SEEDS, LONG_SEEDS = 4, 20


def emulated_case(case: Case) -> ForwardCase:
    """The same problem for the emulator's harness."""
    arguments = case.mask_arguments()
    mask, left, right = mask_kind(arguments)
    offset = arguments.get("query_offset", 0)
    lengths = None
    if "query_seq_lengths" in arguments:
        pairs = zip(arguments["query_seq_lengths"], arguments["key_value_seq_lengths"], strict=True)
        lengths = tuple((int(q), int(k), offset) for q, k in pairs)
    (t, s), (d, d_v), (n, k) = case.lengths, case.head_dims, case.heads
    return ForwardCase(t, s, d, d_v, case.batch, n, k, mask, left, right, offset, lengths, dtype=case.dtype, arch=ARCH)


CORE_SET = {
    "d64": ForwardCase(270, 300, 64, heads=2, kv_heads=1, arch=ARCH),
    "d64-causal": ForwardCase(300, 300, 64, heads=2, mask="causal", arch=ARCH),
    "d128": ForwardCase(270, 300, 128, arch=ARCH),
    "d128-causal": ForwardCase(300, 300, 128, heads=2, kv_heads=1, mask="causal", arch=ARCH),
    "d128-window-float16": ForwardCase(300, 270, 128, mask="window", left=90, right=40, dtype="float16", arch=ARCH),
    "d64x128-lengths": ForwardCase(
        260, 290, 64, 128, batch=3, mask="causal", lengths=((260, 290, 30), (130, 1, 0), (0, 200, 0)), arch=ARCH
    ),
    "d96x64": ForwardCase(140, 400, 96, 64, arch=ARCH),
    "d192x128-causal": ForwardCase(200, 300, 192, 128, mask="causal", query_offset=60, arch=ARCH),
    "d192-window": ForwardCase(200, 270, 192, heads=2, kv_heads=1, mask="window", left=90, right=40, arch=ARCH),
    "d256": ForwardCase(200, 270, 256, heads=2, kv_heads=1, arch=ARCH),
    "d256x192-lengths": ForwardCase(150, 200, 256, 192, batch=2, lengths=((150, 130, 0), (70, 200, 0)), arch=ARCH),
}
"""Problems whose CTAs take several steps and whose dQ blocks take several key blocks: every barrier and every turn goes
through many phases."""

PAIR_SET = {
    "dense": ForwardCase(270, 300, 128, arch=ARCH),
    "causal": ForwardCase(200, 400, 128, heads=2, kv_heads=1, mask="causal", query_offset=200, arch=ARCH),
    "window-float16": ForwardCase(300, 600, 128, mask="window", left=90, right=40, dtype="float16", arch=ARCH),
    "causal-lengths": ForwardCase(
        260, 530, 128, batch=3, mask="causal", lengths=((260, 530, 300), (130, 1, 0), (0, 200, 0)), arch=ARCH
    ),
    "window-lengths": ForwardCase(
        260, 530, 120, 80, 2, 4, 2, "window", 100, 5, lengths=((260, 530, 300), (130, 401, -20)), arch=ARCH
    ),
    "d96": ForwardCase(140, 400, 96, arch=ARCH),
    "d72x128": ForwardCase(140, 400, 72, 128, heads=3, kv_heads=1, arch=ARCH),
    "one": ForwardCase(1, 1, 128, arch=ARCH),
    "d192x128": ForwardCase(200, 300, 192, 128, arch=ARCH),
    "d192x128-causal": ForwardCase(300, 520, 192, 128, heads=2, kv_heads=1, mask="causal", query_offset=180, arch=ARCH),
    "d176x120-window-lengths": ForwardCase(
        260, 530, 176, 120, 2, 4, 2, "window", 100, 5, lengths=((260, 530, 300), (130, 401, -20)), arch=ARCH
    ),
    "d192x128-float16": ForwardCase(65, 130, 192, 128, dtype="float16", arch=ARCH),
}
"""Problems for the kernel on pairs of CTAs, which calls get for many keys only: one pair and several, odd numbers of
key blocks and even, a second CTA without keys, pairs without steps."""

CORE_PAIRS = ("dense", "causal", "d192x128")
PAIR_HEAD_DIMS = ((72, 72), (96, 96), (104, 104), (128, 128), (128, 64), (192, 128), (136, 128))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """The long mode has more problems and more schedules."""
    long = metafunc.config.getoption("--long")
    if "sampled" in metafunc.fixturenames:
        cases = sample_cases(CORE, shapes=SHORT, head_dims=HEAD_DIMS, masks=MASKS, dtypes=DTYPES)
        cases += sample_cases(LONG, seed=1, head_dims=LONG_HEAD_DIMS) if long else []
        metafunc.parametrize("sampled", list(dict.fromkeys(cases)), ids=lambda case: case.name)
    if "sampled_for_pairs" in metafunc.fixturenames:
        cases = sample_cases(LONG // 2, seed=2, head_dims=PAIR_HEAD_DIMS) if long else []
        cases += sample_cases(
            CORE_PAIR_PROBLEMS, seed=3, shapes=SHORT, head_dims=((128, 128),), masks=MASKS[:2], dtypes=DTYPES
        )
        metafunc.parametrize("sampled_for_pairs", list(dict.fromkeys(cases)), ids=lambda case: case.name)
    if "on_pairs" in metafunc.fixturenames:
        metafunc.parametrize("on_pairs", PAIR_SET if long else CORE_PAIRS)
    if "unordered" in metafunc.fixturenames:
        named = {name: (CORE_SET[name], None) for name in ("d64", "d128-causal")}
        named |= {f"pairs-{name}": (case, True) for name, case in PAIR_SET.items()} if long else {}
        metafunc.parametrize("unordered", named.values(), ids=named)
    if "seeds" in metafunc.fixturenames:
        metafunc.parametrize("seeds", [range(1, 1 + (LONG_SEEDS if long else SEEDS))], ids=["seeds"])


def test_problem(sampled):
    case = emulated_case(sampled)
    given = inputs(case)
    assert_right(case, given, run_backward(case, given, Options(seed=sampled.seed % 1000)))


def test_problem_on_pairs(sampled_for_pairs):
    case = emulated_case(sampled_for_pairs)
    given = inputs(case)
    assert_right(case, given, run_backward(case, given, Options(seed=sampled_for_pairs.seed % 1000), pair=True))


def assert_same_bits(case: ForwardCase, seeds, pair: bool | None = None) -> None:
    """The gradients are right, and the same under every schedule."""
    given = inputs(case)
    first = run_backward(case, given, Options(seed=0, tensor_fences=True), pair=pair)
    assert_right(case, given, first)
    for seed in seeds:
        other = run_backward(case, given, Options(seed=seed, tensor_fences=True), pair=pair)
        for a, b in zip(first.gradients, other.gradients, strict=True):
            assert a.tobytes() == b.tobytes(), f"seed {seed}"


@pytest.mark.parametrize("name", CORE_SET)
def test_any_schedule_gives_the_same_bits(name, seeds):
    assert_same_bits(CORE_SET[name], seeds)


def test_any_schedule_gives_the_same_bits_on_pairs(on_pairs, seeds):
    assert_same_bits(PAIR_SET[on_pairs], seeds, pair=True)


def test_calls_with_many_keys_get_pairs():
    for seqlen_k, *head_dims, ctas in (
        (1023, 192, 128, 1),
        (1024, 192, 128, 2),
        (1024, 192, 192, 1),
        (1024, 64, 64, 1),
        (1024, 96, 96, 2),
        (1023, 128, 128, 1),
        (1024, 128, 128, 2),
    ):
        case = ForwardCase(100, seqlen_k, *head_dims, arch=ARCH)
        assert specs_of(case)[1].tile.option("ctas", 1) == ctas
    given = inputs(case)
    assert_right(case, given, run_backward(case, given, Options(seed=1)))


def test_unordered_sums_differ_by_rounding_only(unordered, seeds):
    case, pair = unordered
    given = inputs(case)
    for seed in seeds:
        assert_right(case, given, run_backward(case, given, Options(seed=seed), deterministic=False, pair=pair))


def test_rows_and_keys_that_meet_nothing_get_exact_zeros():
    case = ForwardCase(200, 300, 64, mask="window", left=0, right=0, query_offset=150, arch=ARCH)
    given = inputs(case)
    result = run_backward(case, given, Options(seed=1))
    assert_right(case, given, result)
    _, dkey, dvalue = result.gradients
    for gradient in (dkey, dvalue):
        assert not gradient[:, :150].any()
    case = ForwardCase(200, 100, 64, mask="causal", query_offset=-120, arch=ARCH)
    dquery = run_backward(case, inputs(case), Options(seed=2)).gradients[0].astype(np.float32)
    assert not dquery[:, :120].any()
    assert dquery[:, 121:].any()
