"""Sequence parallelism with the kernels on two GPUs, against unsharded attention in float64."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from tests.test_parallel import NAMES, STRATEGIES, expected, sharded_results

pytestmark = pytest.mark.skipif(jax.device_count() < 2, reason="needs two devices")


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    "mask, layout",
    [
        ("full", "contiguous"),
        ("causal", "zigzag"),
        ("causal", "contiguous"),
        ("window", "zigzag"),
        ("lengths", "zigzag"),
        ("traced_offset", "contiguous"),
    ],
)
def test_strategies(strategy: str, mask: str, layout: str) -> None:
    call, _ = sharded_results(strategy, mask, layout, 2, implementation="fa4", dtype="bfloat16")
    got = call()
    with jax.default_device(jax.devices("cpu")[0]):
        want = expected(mask)
    for name, x, y in zip(NAMES, got, want, strict=False):
        x, finite = np.asarray(x, np.float64), np.isfinite(y)
        np.testing.assert_array_equal(np.isfinite(x), finite, err_msg=name)
        error = np.sqrt(np.mean((x[finite] - y[finite]) ** 2))
        norm = np.sqrt(np.mean(y[finite] ** 2))
        assert error <= 0.01 * norm + 5e-4, f"{name}: {error:.2e} of {norm:.2e}"
    for _ in range(5):
        for x, y in zip(got, call(), strict=True):
            assert np.asarray(x).tobytes() == np.asarray(y).tobytes()
