"""Everything in this folder needs a Hopper or Blackwell GPU and is skipped where JAX finds none."""

from __future__ import annotations

from pathlib import Path

import jax
import pytest


def missing_gpu() -> str | None:
    """Why these tests cannot run here, or None."""
    try:
        device = jax.devices("gpu")[0]
    except RuntimeError as error:
        return f"no GPU: {str(error).splitlines()[0]}"
    capability = str(getattr(device, "compute_capability", "0.0"))
    if capability.split(".")[0] not in ("9", "10"):
        return f"{device.device_kind} has compute capability {capability}; the kernels need 9.0 or 10.x"
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    mine = [item for item in items if here in Path(item.path).parents]
    if mine and (reason := missing_gpu()) is not None:
        for item in mine:
            item.add_marker(pytest.mark.skip(reason=reason))
