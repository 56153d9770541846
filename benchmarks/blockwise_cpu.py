"""Blockwise attention on the CPU: temporaries at long sequences, causal against full, and against plain XLA.

``python benchmarks/blockwise_cpu.py [--repeats R] [--markdown FILE]`` prints a table. Times are of value_and_grad with
respect to query, key and value, float32, B=1, N=2, D=64; the candidates take turns, so that a ratio compares runs made
under the same load, and the ratio given is the median of the ratios of the rounds.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jax_fa4 import attention

BATCH, HEADS, HEAD_DIM = 1, 2, 64
JAX_NN = "jax.nn.dot_product_attention"
Run = Callable[[], None]
Times = list[tuple[float, float]]
"""(wall-clock seconds, CPU seconds of the process) for each round."""


def build(length: int, implementation: str, causal: bool) -> tuple[Run, int]:
    """A compiled value_and_grad as a function of nothing, and its temporaries in bytes."""
    rng = np.random.default_rng(length)
    shape = (BATCH, length, HEADS, HEAD_DIM)
    query, key, value, weight = (jnp.asarray(rng.normal(size=shape), jnp.float32) for _ in range(4))

    def loss(query: jax.Array, key: jax.Array, value: jax.Array, weight: jax.Array) -> jax.Array:
        if implementation == JAX_NN:
            return (jax.nn.dot_product_attention(query, key, value, is_causal=causal) * weight).sum()
        return (attention(query, key, value, is_causal=causal, implementation=implementation) * weight).sum()

    operands = query, key, value, weight
    compiled = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2))).lower(*operands).compile()
    return lambda: jax.block_until_ready(compiled(*operands)), compiled.memory_analysis().temp_size_in_bytes


def compare(first: Run, second: Run, repeats: int) -> tuple[Times, Times]:
    """Times of each run, taking turns; one unmeasured round before."""
    times: tuple[Times, Times] = ([], [])
    for measured in [False] + [True] * repeats:
        for run, into in zip((first, second), times, strict=True):
            wall, cpu = time.perf_counter(), time.process_time()
            run()
            if measured:
                into.append((time.perf_counter() - wall, time.process_time() - cpu))
    return times


def row(what: str, target: str, first: Times, second: Times) -> list[str]:
    """The cells of one comparison."""
    wall, cpu = ([a[k] / b[k] for a, b in zip(first, second, strict=True)] for k in (0, 1))
    return [
        what,
        *(f"{statistics.median(x[0] for x in times):.3f} s" for times in (first, second)),
        f"{statistics.median(wall):.2f} ({min(wall):.2f} to {max(wall):.2f})",
        f"{min(first)[0] / min(second)[0]:.2f}",
        f"{statistics.median(cpu):.2f} ({min(cpu):.2f} to {max(cpu):.2f})",
        target,
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7, help="measured rounds")
    parser.add_argument("--markdown", type=Path, help="also append the tables to this file")
    arguments = parser.parse_args()
    lines = []

    def say(text: str) -> None:
        print(text, flush=True)
        lines.append(text)

    say("| value_and_grad, B=1 N=2 D=64 float32 | temporaries | target |")
    say("|---|---|---|")
    for length, implementation, causal in (
        (32768, "blockwise", False),
        (32768, "blockwise", True),
        (8192, "blockwise", False),
        (8192, "xla", False),
        (8192, JAX_NN, False),
    ):
        _, size = build(length, implementation, causal)
        target = "under 300 MB" if length == 32768 else ""
        say(f"| {implementation}, T=S={length}{', causal' if causal else ''} | {size / 1e6:.1f} MB | {target} |")
    say("")
    say("| compared | first, median | second, median | ratio: median (range) | of fastest | of CPU time | target |")
    say("|---|---|---|---|---|---|---|")
    causal, _ = build(8192, "blockwise", True)
    full, _ = build(8192, "blockwise", False)
    cells = row("blockwise T=8192: causal / full", "at most 0.60", *compare(causal, full, arguments.repeats))
    say(f"| {' | '.join(cells)} |")
    for length in (512, 1024, 2048, 4096):
        blockwise, _ = build(length, "blockwise", False)
        repeats = arguments.repeats if length > 1024 else 4 * arguments.repeats
        for name in ("xla", JAX_NN):
            plain, _ = build(length, name, False)
            target = "at most 1.00" if length == 4096 else ""
            cells = row(f"T={length}: blockwise / {name}", target, *compare(blockwise, plain, repeats))
            say(f"| {' | '.join(cells)} |")
    say("")
    load = ", ".join(f"{x:.1f}" for x in os.getloadavg())
    say(f"jax {jax.__version__}, {os.cpu_count()} CPUs, load average over 1, 5 and 15 minutes at the end: {load}.")
    if arguments.markdown:
        arguments.markdown.parent.mkdir(parents=True, exist_ok=True)
        with arguments.markdown.open("a") as file:
            file.write("\n".join(["", f"## jax {jax.__version__}", "", *lines]) + "\n")


if __name__ == "__main__":
    main()
