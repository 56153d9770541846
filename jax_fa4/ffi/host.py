"""Planned calls on the host: an executor, for example an emulator, carries out the plan on NumPy arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from .call import Compiled, Planned
from .plan import LaunchPlan

Executor = Callable[[LaunchPlan, Mapping[str, Compiled], Sequence[np.ndarray]], None]
"""(plan, artefacts by SHA-256, buffers): carries out the plan, writing into the result buffers.

Buffers are C-contiguous arrays: the call's operands (read-only), its results, then the plan's scratch. Results and
scratch come filled with bytes of 0xFF, which is NaN in every floating format: nothing may rely on them."""


def run_on_host(
    executor: Executor, planned: Planned, results: Sequence[jax.ShapeDtypeStruct], operands: Sequence[jax.Array]
) -> Sequence[jax.Array]:
    """Stages a host callback that carries out a plan.

    Args:
      executor: see :data:`Executor`.
      planned: the plan for these operands.
      results: what the call returns.
      operands: traced arrays.

    Returns:
      The results.
    """
    artefacts = {artefact.sha256: artefact for artefact in planned.artefacts}

    def callback(*arrays: Any) -> list[np.ndarray]:
        inputs = [np.ascontiguousarray(x) for x in arrays]
        for x in inputs:
            x.flags.writeable = False
        outputs = [_poisoned(x) for x in (*results, *planned.scratch)]
        executor(planned.plan, artefacts, [*inputs, *outputs])
        return outputs[: len(results)]

    return jax.pure_callback(callback, list(results), *operands)


def _poisoned(like: jax.ShapeDtypeStruct) -> np.ndarray:
    array = np.empty(like.shape, like.dtype)
    array.reshape(-1).view(np.uint8).fill(0xFF)
    return array
