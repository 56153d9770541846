"""Small CuTe-DSL GEMMs for sm_100f, compiled here and run in the emulator: SS and TS, one CTA and pairs, multicast."""

import struct

import ml_dtypes
import numpy as np
import pytest

from tests.emulator.errors import RaceError
from tests.emulator.kernel_compiler import compile_many
from tests.emulator.launch import Options, run_foreign
from tests.emulator.memory import GlobalMemory
from tests.emulator.roofline import B200, cycles
from tests.emulator.tma import TensorMap

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl to compile the kernels")

SEEDS = (0, 1, 2)
K_TILE = 64
THREADS = 192
SWIZZLE_OF_BYTES = {32: 1, 64: 2, 128: 3}
DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}

SS = [
    {"m": 128, "n": 64},
    {"m": 128, "n": 256, "dtype": "float16"},
    {"m": 64, "n": 64},
    {"m": 128, "n": 128},
    {"m": 128, "n": 128, "a_major": "mn"},
    {"m": 128, "n": 64, "b_major": "mn"},
    {"m": 64, "n": 128, "a_major": "mn", "b_major": "mn", "dtype": "float16"},
    {"m": 128, "n": 64, "cluster": [2, 2]},
    {"m": 256, "n": 128, "ctas": 2, "cluster": [2, 1]},
    {"m": 128, "n": 64, "ctas": 2, "cluster": [2, 1]},
    {"m": 256, "n": 64, "ctas": 2, "cluster": [4, 2]},
    {"m": 256, "n": 256, "ctas": 2, "cluster": [2, 1], "a_major": "mn", "b_major": "mn"},
]
TS = [
    {"m": 128, "n": 64, "k": 128},
    {"m": 128, "n": 128, "k": 128},
    {"m": 128, "n": 128, "k": 64, "b_major": "k", "dtype": "float16"},
    {"m": 256, "n": 64, "k": 128, "ctas": 2},
    {"m": 256, "n": 128, "k": 64, "ctas": 2, "b_major": "k"},
]


def named(options: dict) -> str:
    return "-".join(f"{key}={value}" for key, value in options.items())


@pytest.fixture(scope="module")
def ss_ptx():
    return dict(zip(map(named, SS), compile_many("tests.emulator.kernels.sm100_gemm", "sm_100f", SS), strict=True))


@pytest.fixture(scope="module")
def ts_ptx():
    return dict(zip(map(named, TS), compile_many("tests.emulator.kernels.sm100_gemm_ts", "sm_100f", TS), strict=True))


def entry_of(ptx: str) -> str:
    (line,) = [line for line in ptx.splitlines() if ".entry" in line]
    return line.split(".entry")[1].strip().rstrip("(")


def operand(rng, rows: int, k: int, dtype: str, major: str) -> tuple[np.ndarray, np.ndarray]:
    """(buffer, its (rows, k) view): K-major or MN-major storage."""
    buffer = rng.standard_normal((rows, k) if major == "k" else (k, rows)).astype(DTYPES[dtype])
    return buffer, buffer if major == "k" else buffer.T


def tensor_map(base: int, dtype: str, rows: int, k: int, major: str, box_rows: int, box_k: int) -> TensorMap:
    """The map of one operand: boxes as wide as the swizzle (at most 128 bytes) along the contiguous dimension."""
    inner, outer = (k, rows) if major == "k" else (rows, k)
    box_inner, box_outer = (box_k, box_rows) if major == "k" else (box_rows, box_k)
    box_inner = min(box_inner, 64)
    return TensorMap(base, dtype, (inner, outer), (inner * 2,), (box_inner, box_outer), SWIZZLE_OF_BYTES[2 * box_inner])


def map_buffers(memory: GlobalMemory, **arrays: np.ndarray) -> list[int]:
    return [memory.add(name, array.reshape(-1).view(np.uint8)).base for name, array in arrays.items()]


def check(c: np.ndarray, a: np.ndarray, b: np.ndarray) -> None:
    want = a.astype(np.float64) @ b.astype(np.float64).T
    np.testing.assert_allclose(c, want, rtol=1e-5, atol=1e-4)


def run_ss(ptx: str, options: dict, seed: int, k: int = 256, tensor_fences: bool = False):
    """Runs a grid of one cluster; returns (report, c, a view, b view)."""
    o = {"dtype": "bfloat16", "ctas": 1, "a_major": "k", "b_major": "k", "cluster": [1, 1], **options}
    cluster_m, cluster_n = o["cluster"]
    m, n = o["m"] * cluster_m // o["ctas"], o["n"] * cluster_n
    rng = np.random.default_rng(seed)
    a, a_view = operand(rng, m, k, o["dtype"], o["a_major"])
    b, b_view = operand(rng, n, k, o["dtype"], o["b_major"])
    c = np.full((m, n), np.nan, np.float32)
    memory = GlobalMemory()
    base_a, base_b, base_c = map_buffers(memory, a=a, b=b, c=c)
    # A CTA loads its rows divided by the number of CTAs that receive the same rows by multicast.
    rows_a = o["m"] // o["ctas"] // cluster_n
    rows_b = o["n"] // o["ctas"] // (cluster_m // o["ctas"])
    parameters = [
        bytes(32 * o["ctas"]),
        tensor_map(base_a, o["dtype"], m, k, o["a_major"], rows_a, K_TILE),
        struct.pack("<ii", m, k),
        tensor_map(base_b, o["dtype"], n, k, o["b_major"], rows_b, K_TILE),
        struct.pack("<ii", n, k),
        struct.pack("<Qiiq", base_c, m, n, n),
    ]
    grid, cluster = (cluster_m, cluster_n, 1), (cluster_m, cluster_n, 1)
    run_options = Options(seed=seed, tensor_fences=tensor_fences)
    report = run_foreign(
        ptx, entry_of(ptx), grid, (THREADS, 1, 1), cluster, 180 * 1024, parameters, memory, run_options
    )
    return report, c, a_view, b_view


@pytest.mark.parametrize("options", SS, ids=named)
@pytest.mark.parametrize("seed", SEEDS)
def test_operands_in_shared_memory(ss_ptx, options, seed):
    report, c, a, b = run_ss(ss_ptx[named(options)], options, seed)
    check(c, a, b)
    assert report.counters["mma_flop"] == 2 * a.size * b.shape[0]


def run_ts(ptx: str, options: dict, seed: int):
    """Runs one tile; returns (report, c, a, b view)."""
    o = {"dtype": "bfloat16", "ctas": 1, "b_major": "mn", **options}
    m, n, k = o["m"], o["n"], o["k"]
    rng = np.random.default_rng(seed)
    a, _ = operand(rng, m, k, o["dtype"], "k")
    b, b_view = operand(rng, n, k, o["dtype"], o["b_major"])
    c = np.full((m, n), np.nan, np.float32)
    memory = GlobalMemory()
    base_a, base_b, base_c = map_buffers(memory, a=a, b=b, c=c)
    parameters = [
        bytes(32 * o["ctas"]),
        struct.pack("<Qiiq", base_a, m, k // 2, k // 2),
        tensor_map(base_b, o["dtype"], n, k, o["b_major"], n // o["ctas"], k),
        struct.pack("<ii", n, k),
        struct.pack("<Qiiq", base_c, m, n, n),
    ]
    cluster = (o["ctas"], 1, 1)
    run_options = Options(seed=seed, tensor_fences=True)
    report = run_foreign(
        ptx, entry_of(ptx), cluster, (THREADS, 1, 1), cluster, 100 * 1024, parameters, memory, run_options
    )
    return report, c, a, b_view


@pytest.mark.parametrize("options", TS, ids=named)
@pytest.mark.parametrize("seed", SEEDS)
def test_a_in_tensor_memory(ts_ptx, options, seed):
    report, c, a, b = run_ts(ts_ptx[named(options)], options, seed)
    check(c, a, b)
    # B alone comes from shared memory, A from tensor memory.
    assert report.counters["mma_shared_bytes"] == b.nbytes
    assert report.counters["tmem_mma_a_bytes"] == a.nbytes
    assert report.counters["tmem_store_bytes"] == a.nbytes


def test_cycles_of_an_attention_tile(ss_ptx, ts_ptx):
    """S = Q K^T (both from shared memory) and O = P V (P in tensor memory), 128 x 128 x 128 each, on B200's rates."""
    scores, *_ = run_ss(ss_ptx[named({"m": 128, "n": 128})], {"m": 128, "n": 128}, 0, k=128)
    options = {"m": 128, "n": 128, "k": 128}
    output, *_ = run_ts(ts_ptx[named(options)], options, 0)
    first, second = cycles(scores, B200), cycles(output, B200)
    assert first.mma + second.mma == 1024
    assert first.shared_mma + second.shared_mma == 768


def test_pipelines_without_tensor_fences_are_reported_on_request(ss_ptx):
    """CuTe-DSL pipelines rely on mbarriers alone: accepted by default, a race when PTX's fences are required."""
    with pytest.raises(RaceError, match="tensor memory"):
        run_ss(ss_ptx[named(SS[0])], SS[0], 0, tensor_fences=True)
