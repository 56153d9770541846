"""The entrance for other projects' kernels: CUDA C++ compiled by nvcc, raw parameters, tensor maps; and its reports."""

import struct
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from tests.emulator.errors import DeadlockError, EmulatorError, RaceError, SyncError, UnsupportedError
from tests.emulator.launch import Options, run_foreign
from tests.emulator.memory import GlobalMemory
from tests.emulator.tma import TensorMap

PTX = (Path(__file__).parent / "emulator/foreign/gemm.ptx").read_text()
"""``gemm(a map, b map, c, bias, depth, {scale, columns, rows})``: c = (scale a b^T)^2 + bias; gemm.cu beside it."""
ROWS, COLUMNS, DEPTH, SCALE = 100, 30, 200, 0.25  # rows and columns that end inside a tile, depth inside a stage
TILE_M, TILE_N, TILE_K = 64, 16, 64
THREADS, STAGES, ALIGNMENT = 160, 2, 1024


def run(ptx: str = PTX, seed: int = 1, swizzle: int = 3, detect_races: bool = True) -> float:
    """Largest error of the kernel's result."""
    random = np.random.default_rng(0)
    a, b = (random.standard_normal((n, DEPTH)).astype(ml_dtypes.bfloat16) for n in (ROWS, COLUMNS))
    bias = random.standard_normal(2 * TILE_M).astype(np.float32)
    c = np.full((ROWS, COLUMNS), np.nan, np.float32)
    memory = GlobalMemory()
    inputs = [memory.add(name, x.reshape(-1).view(np.uint8), writable=False) for name, x in (("a", a), ("b", b))]
    places = [memory.add(name, x.reshape(-1).view(np.uint8)) for name, x in (("c", c), ("bias", bias))]
    maps = [
        TensorMap(region.base, "bfloat16", (DEPTH, n), (2 * DEPTH,), (TILE_K, tile), swizzle)
        for region, n, tile in zip(inputs, (ROWS, COLUMNS), (TILE_M, TILE_N), strict=True)
    ]
    parameters = [
        *maps,
        *(struct.pack("<Q", region.base) for region in places),
        struct.pack("<i", DEPTH),
        struct.pack("<fii", SCALE, COLUMNS, ROWS),
    ]
    grid = (-(-COLUMNS // TILE_N), -(-ROWS // TILE_M), 1)
    shared = STAGES * (TILE_M + TILE_N) * TILE_K * 2 + ALIGNMENT
    options = Options(seed=seed, detect_races=detect_races)
    run_foreign(ptx, "gemm", grid, (THREADS, 1, 1), (1, 1, 1), shared, parameters, memory, options)
    wanted = (SCALE * (a.astype(np.float64) @ b.astype(np.float64).T)) ** 2 + bias[:ROWS, None]
    return float(np.abs(c - wanted).max())


def changed(old: str, new: str, count: int = -1) -> str:
    assert old in PTX
    return PTX.replace(old, new, count)


@pytest.mark.parametrize("seed", range(6))
def test_nvcc_kernel_is_right(seed):
    assert run(seed=seed) < 1e-4


def test_wrong_swizzle_gives_wrong_numbers():
    assert run(swizzle=0) > 0.1


@pytest.mark.parametrize(
    "ptx, error",
    [
        (changed("wgmma.wait_group.sync.aligned 0;", ""), EmulatorError),  # released while it is being read
        (changed("mbarrier.arrive.shared::cta.b64 _", "// "), DeadlockError),
        (changed("wgmma.fence.sync.aligned;", ""), SyncError),
        (changed("fence.mbarrier_init.release.cluster;", ""), SyncError),
        (changed("bar.sync \t0;", ""), EmulatorError),
        (changed("cp.async.bulk.tensor.2d", "cp.async.bulk.tensor.3d"), UnsupportedError),
        (changed("fma.rn.f32", "fma3.rn.f32"), UnsupportedError),
        (changed("bar.sync \t0;", "call.uni (%r1), helper, (%r2);"), UnsupportedError),
    ],
    ids=["wait", "arrival", "fence", "initialisation", "barrier", "form", "opcode", "call"],
)
def test_faults_are_reported(ptx, error):
    with pytest.raises(error):
        run(ptx)


def test_a_buffer_read_too_early_is_a_race():
    early = changed("@done bra PASSED;", "bra PASSED;")
    with pytest.raises((RaceError, SyncError)):
        for seed in range(1, 6):
            run(early, seed=seed)


def test_parameters_are_checked():
    memory = GlobalMemory()
    with pytest.raises(EmulatorError, match="2 parameters given, gemm has 6"):
        run_foreign(PTX, "gemm", (1, 1, 1), (THREADS, 1, 1), (1, 1, 1), 0, [b"", b""], memory)
    with pytest.raises(EmulatorError, match="no entry missing; the module has gemm"):
        run_foreign(PTX, "missing", (1, 1, 1), (THREADS, 1, 1), (1, 1, 1), 0, [], memory)
