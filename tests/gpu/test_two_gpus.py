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
    got, want = call(), expected(mask)
    for name, x, y in zip(NAMES, got, want, strict=False):
        difference = np.abs(np.asarray(x, np.float64) - y)
        norm = np.linalg.norm(np.where(np.isfinite(y), y, 0)) / np.sqrt(y.size)
        error = np.sqrt(np.nanmean(np.where(np.isfinite(y), difference, 0) ** 2))
        assert error <= 0.02 * norm + 1e-3, f"{name}: {error:.2e} of {norm:.2e}"
    again = call()
    for x, y in zip(got, again, strict=True):
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()
