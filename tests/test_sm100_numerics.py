"""exp2 on the FMA units and conditional rescaling of the Blackwell forward: errors and adversarial inputs."""

from __future__ import annotations

import struct

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jax_fa4.kernels.compile import source_hash
from jax_fa4.kernels.sm100.forward.config import RESCALE_THRESHOLD
from tests.cases import Case
from tests.emulated import check, prepare
from tests.emulator.kernel_compiler import compile_many
from tests.emulator.launch import run_foreign
from tests.emulator.memory import GlobalMemory
from tests.emulator.ptx import parse

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl to compile the kernels")

ARCH = "sm_100f"
MAX_ERROR, MAX_ERROR_BFLOAT16 = 8.8e-5, 3.9e-3
"""Relative errors of the degree-3 polynomial that the FlashAttention-4 paper states: float32, and after rounding."""


def emulated_exp2(x: np.ndarray) -> np.ndarray:
    """exp2_fma of float32 values (a multiple of 256 of them) as the kernel computes it."""
    (ptx,) = compile_many("tests.emulator.kernels.sm100_exp2", ARCH, [{"sources": source_hash(ARCH)}])
    x = np.ascontiguousarray(x, np.float32)
    result = np.full_like(x, np.nan)
    memory = GlobalMemory()
    regions = [memory.add(name, array.view(np.uint8)) for name, array in (("x", x), ("result", result))]
    parameters = [struct.pack("<Q", region.base) for region in regions]
    run_foreign(ptx, next(iter(parse(ptx))), (x.size // 256, 1, 1), (128, 1, 1), (1, 1, 1), 0, parameters, memory)
    return result


def test_exp2_errors():
    x = np.linspace(-20.0, RESCALE_THRESHOLD, 1 << 15, dtype=np.float32)
    exact = np.exp2(x.astype(np.float64))
    got = emulated_exp2(x)
    error = np.abs(got / exact - 1)
    rounded = np.abs(got.astype(ml_dtypes.bfloat16).astype(np.float64) / exact - 1)
    hardware = np.abs(exact.astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float64) / exact - 1)
    print(f"float32: max {error.max():.3e} mean {error.mean():.3e}")
    print(f"bfloat16: max {rounded.max():.3e} mean {rounded.mean():.3e}, exact exp2 rounded: {hardware.max():.3e}")
    assert 8.0e-5 < error.max() <= MAX_ERROR * 1.01
    assert rounded.max() <= MAX_ERROR_BFLOAT16 * 1.01
    assert rounded.max() <= hardware.max() * 1.02
    assert rounded.mean() <= hardware.mean() * 1.01


def test_exp2_special_values():
    x = np.zeros(256, np.float32)
    integers = np.arange(-126, 9)
    x[: integers.size] = integers
    x[200:206] = (-np.inf, -1000.0, -127.0, -127.5, -126.99, np.nextafter(np.float32(0), np.float32(-1)))
    got = emulated_exp2(x)
    np.testing.assert_array_equal(got[: integers.size], np.exp2(integers.astype(np.float64)))
    assert np.all(got[200:204] == 0)
    assert 0 <= got[204] < 2.0**-126
    assert abs(got[205] - 1) < 1e-4


def adversarial(kind: str, case: Case) -> dict:
    """Operands whose scores stress the stale maximum."""
    rng = np.random.default_rng(5)
    (t, s), (d, d_v), (n, k) = case.lengths, case.head_dims, case.heads
    query = rng.standard_normal((case.batch, t, n, d)).astype(np.float32)
    key = rng.standard_normal((case.batch, s, k, d)).astype(np.float32)
    value = rng.standard_normal((case.batch, s, k, d_v)).astype(np.float32)
    if kind in ("steps below the threshold", "steps above the threshold"):
        # Blocks are visited from the last to the first: each one's maximum is higher by less, or more, than 2^8.
        query[:], key[:] = 0, 0
        query[..., 0] = d**0.5
        step = (0.9 if "below" in kind else 1.1) * RESCALE_THRESHOLD * np.log(2)
        key[..., 0] = step * ((s - 1 - np.arange(s)) // 128)[None, :, None] + rng.uniform(-0.1, 0, key.shape[:-1])
    elif kind == "large logits":
        query *= 30
    elif kind == "large negative logits":
        query = np.abs(query) * 30
        key = -np.abs(key)
    elif kind == "one-hot rows":
        query[..., :] = 0
        key[..., :] = 0
        query[..., 0] = 100 * d**0.5
        key[:, s // 3, :, 0] = 1
    elif kind == "constant":
        query[:], key[:], value[:] = 1, 1, 1
    arrays = {"query": query, "key": key, "value": value}
    return {name: jnp.asarray(x, case.dtype) for name, x in arrays.items()}


KINDS = (
    *("steps below the threshold", "steps above the threshold", "large logits", "large negative logits"),
    *("one-hot rows", "constant"),
)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("head_dim", [64, 256])
def test_adversarial_scores(kind, head_dim):
    case = Case((130, 600), (head_dim, head_dim), "causal_window", "1", "bfloat16", batch=1)
    if kind != "large logits":
        case = Case((130, 600), (head_dim, head_dim), "none", "1", "bfloat16", batch=1)
    arrays = adversarial(kind, case)
    out, lse, _ = prepare(case, ARCH, arrays, sm_count=1).run()
    # Scores of magnitude x carry float32 errors of about x * 2^-22, which is what the LSE may be off by.
    check(case, arrays, out, lse, lse_absolute=2e-4 if "large" not in kind else 2e-3)
