"""``python -m jax_fa4 info``: versions, devices, kernels at hand, and which implementation typical calls would get."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import jax_fa4
from jax_fa4.ffi import register
from jax_fa4.kernels import store
from jax_fa4.kernels.spec import ARCHITECTURES

DISTRIBUTIONS = ("jax", "jaxlib", "numpy", "flax", "nvidia-cutlass-dsl")
"""Distributions whose versions matter when something does not work."""

BLACKWELL_NOTE = (
    "the sm_100f kernels have been executed in the test suite's emulator and not yet on a Blackwell GPU; "
    "a report of `python -m jax_fa4 selftest` from one is welcome"
)


def _call(
    shape: tuple[int, int, int, int], *, key: tuple[int, int] | None = None, dtype: Any = jnp.bfloat16, **arguments: Any
) -> dict[str, Any]:
    """Arguments of a call: query of ``shape`` (B, T, N, H), key and value of ``key`` = (S, K), else like query."""
    batch, length, heads, head_dim = shape
    memory = (batch, *(key or (length, heads)), head_dim)
    return {
        "query": jax.ShapeDtypeStruct(shape, dtype),
        "key": jax.ShapeDtypeStruct(memory, dtype),
        "value": jax.ShapeDtypeStruct(memory, dtype),
        **arguments,
    }


def typical_calls() -> dict[str, dict[str, Any]]:
    """Arguments of :func:`jax_fa4.supports` for calls that models make, by a line that describes them."""
    training = (2, 4096, 16, 128)
    bias = jax.ShapeDtypeStruct((1, 16, 4096, 4096), jnp.float32)
    return {
        "causal training, bfloat16, head_dim 128": _call(training, is_causal=True),
        "the same with 8 query heads for each key head": _call((2, 4096, 64, 128), key=(4096, 8), is_causal=True),
        "the same with a window of 1024 keys": _call(training, is_causal=True, local_window_size=(1023, 0)),
        "the same with a float32 bias": _call(training, is_causal=True, bias=bias),
        "the same in float32": _call(training, dtype=jnp.float32, is_causal=True),
        "full attention, float16, head_dim 64": _call((4, 2048, 16, 64), dtype=jnp.float16),
        "full attention, bfloat16, head_dim 256": _call((1, 2048, 8, 256)),
        "small full attention, float32, head_dim 64": _call((1, 128, 4, 64), dtype=jnp.float32),
        "decoding, 1 query, 4096 keys": _call((8, 1, 32, 128), key=(4096, 8)),
    }


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Adds the ``info`` subcommand; its ``run`` default is :func:`run`."""
    parser = subparsers.add_parser("info", help="versions, devices, and which implementation would run and why")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Prints the report and returns 0."""
    facts = collect()
    print(json.dumps(facts, indent=1) if arguments.json else text(facts))
    return 0


def collect() -> dict[str, Any]:
    """The report as plain data."""
    calls = {name: jax_fa4.supports(**arguments) for name, arguments in typical_calls().items()}
    return {
        "versions": {
            "jax_fa4": jax_fa4.__version__,
            "python": platform.python_version(),
            **{name: _version(name) for name in DISTRIBUTIONS},
        },
        "devices": [_device(device) for device in jax.devices()],
        "launcher": register.unavailable_reason() or "ready",
        "kernels": {
            "shipped": _count(store.BUNDLED),
            "cache": _count(store.default_cache()),
            "cache_folder": str(store.default_cache()),
            "note": BLACKWELL_NOTE,
        },
        "calls": {
            name: {"implementation": support.implementation, "reasons": dict(support.reasons)}
            for name, support in calls.items()
        },
    }


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _device(device: jax.Device) -> dict[str, Any]:
    return {
        "id": device.id,
        "platform": device.platform,
        "kind": device.device_kind,
        "compute_capability": getattr(device, "compute_capability", None),
    }


def _count(folder: Path) -> dict[str, int]:
    """Number of artefacts in a folder by architecture; the architecture is part of a kernel's name."""
    names = [path.name for path in folder.glob(f"*{store.SUFFIX}")]
    return {arch: sum(arch in name for name in names) for arch in ARCHITECTURES}


def text(facts: dict[str, Any]) -> str:
    """The report for people."""
    lines = ["versions"]
    lines += [f"  {name:<20}{version or 'not installed'}" for name, version in facts["versions"].items()]
    lines += ["devices"]
    for device in facts["devices"]:
        capability = device["compute_capability"]
        suffix = f", compute capability {capability}" if capability else ""
        lines.append(f"  {device['platform']}:{device['id']:<5} {device['kind']}{suffix}")
    lines += ["kernels", f"  launcher: {facts['launcher']}"]
    kernels = facts["kernels"]
    lines.append(f"  shipped with the package: {_counts(kernels['shipped'])}")
    lines.append(f"  compiled here: {_counts(kernels['cache'])} in {kernels['cache_folder']}")
    lines.append(f"  note: {kernels['note']}")
    lines += ["calls and what serves them"]
    for name, call in facts["calls"].items():
        lines.append(f"  {name}: {call['implementation']}")
        if call["implementation"] != "fa4":
            lines += [f"    not fa4: {reason}" for reason in call["reasons"]["fa4"]]
    return "\n".join(lines)


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} for {arch}" for arch, count in counts.items())
