"""Timing of jitted JAX functions on an accelerator: bursts of calls, interleaved between the functions compared.

A burst queues several calls without waiting and blocks once at its end, so that host dispatch overlaps device work.
Bursts of the functions under comparison alternate, so that a change of clock or temperature meets all of them alike.
The figure of a function is the median over its bursts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import jax
import numpy as np


@dataclass(frozen=True)
class Timing:
    """Seconds per call: median, and the spread as the 10th and 90th percentile over bursts."""

    median: float
    low: float
    high: float
    bursts: int


def _burst(function: Callable[[], object], calls: int) -> float:
    start = time.perf_counter()
    result = None
    for _ in range(calls):
        result = function()
    jax.block_until_ready(result)
    return (time.perf_counter() - start) / calls


def compare(
    functions: Mapping[str, Callable[[], object]],
    *,
    bursts: int = 15,
    burst_seconds: float = 0.02,
    min_calls: int = 3,
    max_calls: int = 100,
) -> dict[str, Timing]:
    """Times zero-argument functions side by side.

    Args:
      functions: name to function; each returns arrays of the device under test and is already compiled or compiles on
        its first call, which is not counted.
      bursts: number of bursts per function.
      burst_seconds: length aimed at for one burst; the number of calls in a burst follows from it.
      min_calls, max_calls: limits of the calls in a burst (the upper one bounds the memory that queued results hold).

    Returns:
      name to :class:`Timing`.
    """
    calls = {}
    for name, function in functions.items():
        jax.block_until_ready(function())
        once = _burst(function, 1)
        if once < burst_seconds:  # a call that takes longer warms up in one
            _burst(function, 3)
            once = _burst(function, 5)
        calls[name] = int(np.clip(round(burst_seconds / once), min_calls, max_calls))
    samples: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(bursts):
        for name, function in functions.items():
            samples[name].append(_burst(function, calls[name]))
    return {
        name: Timing(float(np.median(s)), float(np.percentile(s, 10)), float(np.percentile(s, 90)), len(s))
        for name, s in samples.items()
    }
