"""``python -m jax_fa4 bench``: a quick measurement of one shape, next to what JAX has.

The peer is cuDNN through ``jax.nn`` on CUDA devices, ``jax.nn`` itself elsewhere. For tables of many shapes see the
repository's ``benchmarks`` folder.
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_fa4

BURSTS = 7
"""Bursts of queued calls for each function; those of all functions alternate, and a median is taken."""
MAX_CALLS = 100
"""Calls in a burst at most."""


def _positive(text: str) -> int:
    value = int(text) if text.isdecimal() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}; expected a whole number from 1 up")
    return value


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 600:
        raise argparse.ArgumentTypeError(f"got {text!r}; expected seconds, more than 0 and at most 600")
    return value


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Adds the ``bench`` subcommand; its ``run`` default is :func:`run`."""
    parser = subparsers.add_parser("bench", help="measure one shape here, next to what JAX has")
    parser.add_argument("--batch", type=_positive, default=2)
    parser.add_argument("--seq-len", type=_positive, default=2048, help="queries, and keys unless --kv-len is given")
    parser.add_argument("--kv-len", type=_positive)
    parser.add_argument("--heads", type=_positive, default=16, help="query heads")
    parser.add_argument("--kv-heads", type=_positive, help="key heads (default: as many as query heads)")
    parser.add_argument("--head-dim", type=_positive, default=128)
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--window", type=_positive, metavar="KEYS", help="each query sees so many keys up to its own")
    parser.add_argument("--implementation", help="of jax_fa4 (default: what it chooses)")
    parser.add_argument("--forward", action="store_true", help="leave the gradients out")
    parser.add_argument("--seconds", type=_seconds, default=1.0, help="to spend on each function (default %(default)s)")
    parser.set_defaults(run=functools.partial(run, parser))


@dataclass(frozen=True)
class Shape:
    """The call to measure."""

    batch: int
    queries: int
    keys: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: str
    causal: bool
    window: int | None

    @property
    def arguments(self) -> dict[str, Any]:
        """Mask arguments, the same for jax.nn and for jax_fa4."""
        window = {} if self.window is None else {"local_window_size": (self.window - 1, 0)}
        return {"is_causal": self.causal or self.window is not None, **window}

    @property
    def forward_flop(self) -> float:
        """Operations on the visible scores, two products of 2 · head_dim each."""
        row = np.arange(self.queries)
        seen = np.minimum(row + 1, self.keys) if self.causal or self.window else np.full(self.queries, self.keys)
        if self.window is not None:
            seen = seen - np.clip(row + 1 - self.window, 0, seen)
        return 4.0 * self.batch * self.heads * self.head_dim * float(seen.sum())

    def operands(self) -> tuple[jax.Array, ...]:
        """query, key, value and a cotangent of the output, random normal."""
        rows = (self.batch, self.queries, self.heads, self.head_dim)
        columns = (self.batch, self.keys, self.kv_heads, self.head_dim)
        seeds = jax.random.split(jax.random.key(0), 4)
        shapes = zip(seeds, (rows, columns, columns, rows), strict=True)
        return tuple(jax.random.normal(seed, shape, jnp.dtype(self.dtype)) for seed, shape in shapes)


def run(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    """Measures and prints the table; returns 0, or 1 where jax_fa4 cannot run the call."""
    kv_heads = arguments.heads if arguments.kv_heads is None else arguments.kv_heads
    if arguments.heads % kv_heads:
        parser.error(f"--heads: got {arguments.heads}; expected a multiple of the {kv_heads} key heads")
    keys = arguments.seq_len if arguments.kv_len is None else arguments.kv_len
    shape = Shape(
        arguments.batch,
        arguments.seq_len,
        keys,
        arguments.heads,
        kv_heads,
        arguments.head_dim,
        arguments.dtype,
        arguments.causal,
        arguments.window,
    )
    operands = shape.operands()
    ours = dict(shape.arguments, implementation=arguments.implementation)
    try:
        support = jax_fa4.supports(*operands[:3], **ours)
    except ValueError as error:
        parser.error(f"--implementation: {error}")
    if support.implementation is None:
        why = "; ".join(support.reasons[arguments.implementation])
        print(
            f"jax_fa4 bench: implementation {arguments.implementation!r} cannot run this call: {why}", file=sys.stderr
        )
        return 1
    cuda = jax.default_backend() in ("gpu", "cuda")
    peer = dict(shape.arguments, implementation="cudnn" if cuda else "xla")
    functions = {
        f"jax_fa4 ({support.implementation})": functools.partial(jax_fa4.attention, **ours),
        f"jax.nn ({peer['implementation']})": functools.partial(jax.nn.dot_product_attention, **peer),
    }
    directions = {"forward": False} if arguments.forward else {"forward": False, "forward and gradients": True}
    columns: dict[str, dict[str, float | str]] = {name: {} for name in functions}
    for direction, gradients in directions.items():
        programs: dict[str, Callable[[], object]] = {}
        for name, function in functions.items():
            program = functools.partial(
                jax.jit(_with_gradients(function) if gradients else _forward(function)), *operands
            )
            try:
                jax.block_until_ready(program())  # compiles
            except Exception as error:  # a peer need not take every call; ours does, as said above
                if name.startswith("jax_fa4"):
                    raise
                columns[name][direction] = str(error).strip().splitlines()[0]
            else:
                programs[name] = program
        for name, seconds in compare(programs, arguments.seconds).items():
            columns[name][direction] = seconds
    print("\n".join(table(shape, columns)))
    return 0


def _forward(function: Callable) -> Callable:
    return lambda query, key, value, cotangent: function(query, key, value)


def _with_gradients(function: Callable) -> Callable:
    def both(query: jax.Array, key: jax.Array, value: jax.Array, cotangent: jax.Array) -> Any:
        out, pullback = jax.vjp(function, query, key, value)
        return out, pullback(cotangent)

    return both


def compare(programs: dict[str, Callable[[], object]], seconds: float) -> dict[str, float]:
    """Median seconds per call of compiled programs over bursts that alternate between them."""

    def burst(program: Callable[[], object], calls: int) -> float:
        start = time.perf_counter()
        jax.block_until_ready([program() for _ in range(calls)][-1])
        return (time.perf_counter() - start) / calls

    calls = {}
    for name, program in programs.items():
        calls[name] = int(np.clip(seconds / BURSTS / burst(program, 1), 1, MAX_CALLS))
    samples: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(BURSTS):
        for name, program in programs.items():
            samples[name].append(burst(program, calls[name]))
    return {name: float(np.median(times)) for name, times in samples.items()}


def table(shape: Shape, columns: dict[str, dict[str, float | str]]) -> list[str]:
    """Lines for people: milliseconds and TFLOP/s (gradients count 2.5 times the forward), or why there are none."""
    device = jax.devices()[0]
    mask = ", causal" if shape.causal else ""
    mask += "" if shape.window is None else f", window {shape.window}"
    lines = [
        f"{device.platform} ({device.device_kind}), jax {jax.__version__}, jax_fa4 {jax_fa4.__version__}",
        f"batch {shape.batch}, {shape.queries} queries, {shape.keys} keys, {shape.heads} heads ({shape.kv_heads} of "
        f"keys), head_dim {shape.head_dim}, {shape.dtype}{mask}",
    ]
    for direction in next(iter(columns.values())):
        flop = shape.forward_flop * (1 if direction == "forward" else 3.5)
        lines.append(direction)
        for name, results in columns.items():
            result = results[direction]
            text = (
                f"not run: {result}"
                if isinstance(result, str)
                else f"{result * 1e3:10.3f} ms {flop / result / 1e12:10.3f} TFLOP/s"
            )
            lines.append(f"  {name:<22}{text}")
    return lines
