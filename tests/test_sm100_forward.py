"""The Blackwell forward, executed from its PTX in the emulator, against the definition of attention."""

from __future__ import annotations

from dataclasses import replace

import pytest

from jax_fa4.kernels.spec import sm100_pair_tile
from tests.cases import Case, sample_cases
from tests.compiled import require_kernels
from tests.emulated import check, prepare, ramped
from tests.emulator.launch import Options

require_kernels()

ARCH = "sm_100f"
SHORT = ((1, 1), (3, 3), (64, 1), (239, 1), (1, 239), (113, 203), (108, 256), (300, 128), (0, 5), (5, 0))
"""Shapes of the core set; the long mode adds those of ``tests.cases.SHAPES``."""

CORE_HEAD_DIMS = ((8, 8), (64, 64), (104, 104), (128, 128), (192, 128), (256, 256))
CORE_MASKS = ("none", "causal", "window", "causal_lengths", "window_offset")
"""Compiling kernels takes most of the core set's time: four padded head dims, four kinds of mask."""

CORE, LONG = 60, 400
SEEDS, LONG_SEEDS = 3, 20


def packs(case: Case) -> bool:
    """Half of the grouped cases run with the heads of a group packed into the rows of a tile."""
    return case.group != "1" and case.seed % 2 == 0


def run(case: Case, seed: int, growth: float = 0.0, **options) -> None:
    arrays = case.operands()
    if growth:
        arrays = ramped(arrays, growth)
    launch = prepare(case, ARCH, arrays, pack_gqa=packs(case), **options)
    out, lse, _ = launch.run(Options(seed=seed, tensor_fences=True))
    check(case, arrays, out, lse)


RACING = (
    (Case((300, 400), (64, 64), "none", "1", "bfloat16"), 0.0),
    (Case((300, 400), (128, 128), "causal", "1", "bfloat16"), 0.0),
    (Case((300, 400), (128, 128), "none", "1", "float16", batch=1), 1.0),
    (Case((300, 400), (192, 128), "none", "1", "bfloat16", batch=1), 1.0),
    (Case((200, 400), (192, 192), "none", "1", "bfloat16", batch=1), 1.0),
    (Case((200, 300), (256, 256), "causal", "1", "bfloat16", batch=1), 0.0),
    (Case((50, 300), (128, 128), "causal_lengths", "4", "bfloat16"), 0.0),
)
"""Problems whose CTAs take several tiles of several key blocks: every barrier goes through many phases."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """The long mode has more problems and more schedules."""
    long = metafunc.config.getoption("--long")
    if "sampled" in metafunc.fixturenames:
        cases = sample_cases(CORE, shapes=SHORT, head_dims=CORE_HEAD_DIMS, masks=CORE_MASKS)
        cases += sample_cases(LONG, seed=1) if long else []
        metafunc.parametrize("sampled", list(dict.fromkeys(cases)), ids=lambda case: case.name)
    if "seed" in metafunc.fixturenames:
        metafunc.parametrize("seed", range(1, 1 + (LONG_SEEDS if long else SEEDS)))


def test_problem(sampled):
    run(sampled, seed=sampled.seed % 1000, sm_count=3)


PAIRED = (
    (Case((600, 300), (128, 128), "none", "1", "bfloat16", batch=1), 1.0),
    (Case((700, 300), (192, 128), "none", "1", "float16", batch=1), 0.0),
    (Case((300, 300), (256, 256), "causal", "1", "bfloat16", batch=1), 0.0),
    (Case((40, 300), (128, 128), "causal_lengths", "4", "bfloat16"), 0.0),
)
"""The same for pairs of CTAs, where products, arrivals and bytes cross from one to the other."""


@pytest.mark.parametrize(("case", "growth"), PAIRED, ids=lambda value: getattr(value, "name", None))
def test_pairs(case, growth, seed):
    run(case, seed, growth, sm_count=2, tile=sm100_pair_tile(*case.head_dims))


LAUNCH_CONTROL = (
    Case((700, 300), (64, 64), "none", "1", "bfloat16", batch=1),
    Case((300, 300), (256, 256), "causal_lengths", "1", "bfloat16", batch=3),
)


@pytest.mark.parametrize("case", LAUNCH_CONTROL, ids=lambda case: case.name)
def test_cluster_launch_control(case, seed):
    """Two CTAs run at a time and take over the others of the grid."""
    plain = prepare(case, ARCH, case.operands()).artefact.spec.tile
    tile = replace(plain, options=(("clc", 1), *plain.options))
    arrays = case.operands()
    launch = prepare(case, ARCH, arrays, tile=tile)
    out, lse, report = launch.run(Options(seed=seed, tensor_fences=True, resident=2))
    check(case, arrays, out, lse)
    (kernel,) = launch.plan.steps
    assert report.counters["clusters_cancelled"] == kernel.grid[0] - 2


@pytest.mark.parametrize(("case", "growth"), RACING, ids=lambda value: getattr(value, "name", None))
def test_any_schedule(case, growth, seed):
    run(case, seed, growth, sm_count=1)
