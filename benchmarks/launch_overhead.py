"""Host time of a call: jax_fa4 on a tiny problem next to an elementwise kernel of XLA, in microseconds.

    python benchmarks/launch_overhead.py [--rounds 200] [--implementation fa4] [--out TABLE.md]

Both functions take the same three arrays and give one of the same shape. Three programs of each: one call a jit; 64
calls one after another in one jit (elementwise ones kept apart by barriers); a scan of 64. For each, the time until the
call returns, which is what the caller's thread spends, and the time until the result is there, as the median of many
bursts that alternate between the two functions. With XLA's command buffers off and on, each in a process of its own.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import jax_fa4

SHAPE = (1, 64, 1, 64)
CALLS = 64
"""Calls within one program."""
COMMAND_BUFFERS = {"off": "", "on": "FUSION,CUBLAS,CUSTOM_CALL,WHILE"}
LIMIT_SECONDS = 240


def elementwise(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """One kernel of XLA on the same operands; the barrier keeps it from merging with its neighbours."""
    return jax.lax.optimization_barrier(query * key + value)


def programs(function: Callable) -> dict[str, Callable]:
    """The three programs of one function (query, key, value) -> array like query."""

    def repeated(query, key, value):
        for _ in range(CALLS):
            query = function(query, key, value)
        return query

    def scanned(query, key, value):
        return jax.lax.scan(lambda q, _: (function(q, key, value), None), query, length=CALLS)[0]

    return {"one call": function, f"{CALLS} calls": repeated, f"scan of {CALLS}": scanned}


def burst(function: Callable, operands: tuple, calls: int) -> tuple[float, float]:
    """Seconds per call until the call returned, and until the last result was there."""
    start = time.perf_counter()
    result = None
    for _ in range(calls):
        result = function(*operands)
    returned = time.perf_counter()
    jax.block_until_ready(result)
    return (returned - start) / calls, (time.perf_counter() - start) / calls


def measure(rounds: int, implementation: str) -> dict[str, dict[str, list[float]]]:
    """{program: {function: [median seconds per program run until return, until ready]}}."""
    rng = np.random.default_rng(0)
    operands = tuple(jnp.asarray(rng.standard_normal(SHAPE), jnp.bfloat16) for _ in range(3))

    def attention(query, key, value):
        return jax_fa4.attention(query, key, value, implementation=implementation)

    kinds = {"jax_fa4": programs(attention), "elementwise": programs(elementwise)}
    results: dict[str, dict[str, list[float]]] = {}
    for program in kinds["jax_fa4"]:
        compiled = {name: jax.jit(kind[program]) for name, kind in kinds.items()}
        if program == f"{CALLS} calls":
            kernels = compiled["elementwise"].lower(*operands).compile().as_text().count("fusion(")
            if kernels < CALLS:
                print(f"the elementwise calls were merged into {kernels} kernels", file=sys.stderr)
        calls = 20 if program == "one call" else 2
        for function in compiled.values():
            for _ in range(3):
                burst(function, operands, calls)
        samples: dict[str, list[tuple[float, float]]] = {name: [] for name in compiled}
        for _ in range(rounds):
            for name, function in compiled.items():
                samples[name].append(burst(function, operands, calls))
        results[program] = {name: np.median(s, axis=0).tolist() for name, s in samples.items()}
    return results


def child(kinds: str, arguments: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    """:func:`measure` in a fresh process with the given kinds of command buffers."""
    flags = f"--xla_gpu_enable_command_buffer={kinds} --xla_gpu_graph_min_graph_size=1"
    environment = {**os.environ, "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flags}"}
    command = [sys.executable, __file__, "--worker", "--rounds", str(arguments.rounds)]
    command += ["--implementation", arguments.implementation]
    reply = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, text=True, timeout=LIMIT_SECONDS, check=True
    )
    return json.loads(reply.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200, help="bursts of each function")
    parser.add_argument("--implementation", default="fa4")
    parser.add_argument("--out", type=Path, help="Markdown file to write")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        print(json.dumps(measure(arguments.rounds, arguments.implementation)))
        return
    lines = [
        "| command buffers | program | until | jax_fa4, us a call | elementwise, us a call | difference |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for setting, kinds in COMMAND_BUFFERS.items():
        for program, times in child(kinds, arguments).items():
            calls = 1 if program == "one call" else CALLS
            for index, until in enumerate(("return", "ready")):
                ours, theirs = (times[name][index] / calls * 1e6 for name in ("jax_fa4", "elementwise"))
                lines.append(f"| {setting} | {program} | {until} | {ours:.2f} | {theirs:.2f} | {ours - theirs:.2f} |")
                print(lines[-1], flush=True)
    device = jax.devices()[0]
    header = (
        f"{datetime.date.today()}, {device.device_kind}, jax {jax.__version__}, jax_fa4 {jax_fa4.__version__}; medians "
        f"of {arguments.rounds} bursts. Command: `python benchmarks/launch_overhead.py {' '.join(sys.argv[1:])}`.\n"
    )
    text = "\n".join([header, *lines, ""])
    print(text)
    if arguments.out is not None:
        arguments.out.write_text(text)


if __name__ == "__main__":
    main()
