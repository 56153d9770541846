"""TMA + wgmma GEMMs compiled by the CuTe DSL give the right product in the emulator."""

import struct

import ml_dtypes
import numpy as np
import pytest

from tests.emulator import launch, tma
from tests.emulator.kernel_compiler import compile_many
from tests.emulator.memory import GlobalMemory
from tests.emulator.ptx import parse

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl to compile the kernels")

DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}


def multiply(ptx, a, b, majors, dtype, tile, seed):
    """Runs the kernel over A (M, K) and B (N, K); returns (C, report)."""
    memory = GlobalMemory()
    tile_m, tile_n, tile_k = tile
    parameters, buffers = [], []
    for name, matrix, major, rows in (("a", a, majors[0], tile_m), ("b", b, majors[1], tile_n)):
        stored = np.ascontiguousarray(matrix if major == "k" else matrix.T)
        region = memory.add(name, stored.reshape(-1).view(np.uint8), writable=False)
        inner = stored.shape[1]
        span = min(64, tile_k if major == "k" else rows)
        box = (span, rows) if major == "k" else (span, tile_k)
        swizzle = {64: 3, 32: 2, 16: 1}[span]
        parameters.append(tma.TensorMap(region.base, dtype, stored.shape[::-1], (inner * 2,), box, swizzle))
        parameters.append(struct.pack("<ii", *matrix.shape))
        buffers.append(stored)
    c = np.full((a.shape[0], b.shape[0]), np.nan, np.float32)
    region = memory.add("c", c.reshape(-1).view(np.uint8))
    parameters += [struct.pack("<QiiQ", region.base, *c.shape, c.shape[1]), b"\0"]
    grid = (c.shape[0] // tile_m, c.shape[1] // tile_n, 1)
    shared = 1024 + 3 * (tile_m + tile_n) * tile_k * 2 + 2048
    report = launch.run_foreign(
        ptx, next(iter(parse(ptx))), grid, (384, 1, 1), (1, 1, 1), shared, parameters, memory, launch.Options(seed=seed)
    )
    return c, report


CASES = [
    {"major_a": a, "major_b": b, "dtype": dtype, "tile_n": tile_n, "tile_k": tile_k}
    for dtype, tile_n, tile_k in (("bfloat16", 128, 64), ("float16", 64, 32), ("bfloat16", 256, 16))
    for a, b in ("kk", "km", "mk", "mm")
]


@pytest.fixture(scope="module")
def compiled():
    return compile_many("tests.emulator.kernels.gemm_sm90", "sm_90a", CASES)


@pytest.mark.parametrize("number", range(len(CASES)), ids=lambda n: "-".join(map(str, CASES[n].values())))
def test_gemm_all_majors(compiled, number):
    case = CASES[number]
    dtype, tile_n, tile_k = case["dtype"], case["tile_n"], case["tile_k"]
    majors = case["major_a"] + case["major_b"]
    generator = np.random.default_rng(5)
    m, n, k = 256, 256, 5 * tile_k + 8
    a, b = (generator.standard_normal(s).astype(DTYPES[dtype]) for s in ((m, k), (n, k)))
    expected = a.astype(np.float64) @ b.astype(np.float64).T
    for seed in range(4):
        c, report = multiply(compiled[number], a, b, majors, dtype, (128, tile_n, tile_k), seed)
        np.testing.assert_allclose(c, expected, atol=2e-5 * np.sqrt(k))
        assert report.counters["mma_flop"] == 2 * m * n * 6 * tile_k
