"""Sequence parallelism on the GPUs of one host: per-GPU TFLOP/s next to one GPU's, memory, and hidden transfer time.

    python benchmarks/parallel.py --out TABLE.md --csv ROWS.csv --trace FOLDER    # two GPUs: about two minutes
    python benchmarks/parallel.py --lengths 131072 262144 524288 1048576 --heads 16/16 64/8 --mask causal full \
        --repeat 20 --plan                                                        # says how long the real run takes

For P devices and length T one row gives a strategy's TFLOP/s per GPU, and that of one GPU alone at the same work per
GPU, which is length T / sqrt(P), measured in turns with the strategies. FLOP counts as in benchmarks/attention.py
(backward 2.5 times the forward). bfloat16, batch 1, random normal input; causal runs use the zigzag layout. Memory is
what XLA's programs hold on one device: operands, results and temporaries. At the shortest length only: ``--trace``
profiles one call of each strategy and reports which share of the transfers' time lies under compute (there transfers
weigh most), results are compared with one GPU's on the whole arrays, and ``--repeat`` asks for the same bits again.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import functools
import itertools
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import overlap
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from timing import compare

import jax_fa4
from jax_fa4 import parallel

GIB = 2**30
DIRECTIONS = ("forward", "both")
BURST_SECONDS = 0.2
"""Of calls queued behind each other: dispatch to several GPUs takes a millisecond, which a program of many layers pays
once."""

ALONE = "one GPU"
COLUMNS = {
    "strategy": "strategy",
    "direction": "direction",
    "mask": "mask",
    "heads": "heads",
    "devices": "GPUs",
    "length": "T",
    "milliseconds": "ms",
    "tflops": "TFLOP/s per GPU",
    "alone_length": "T on one GPU",
    "alone_tflops": "TFLOP/s of one GPU",
    "ratio": "ratio",
    "gib": "GiB per GPU",
    "transfer_ms": "transfer ms",
    "hidden": "hidden",
    "difference": "difference",
    "same_bits": "same bits",
}
"""Names in the CSV file and headings in the table."""


class Problem(NamedTuple):
    """What is computed, whatever the strategy."""

    direction: str
    mask: str
    heads: tuple[int, int]
    length: int
    head_dim: int

    @property
    def causal(self) -> bool:
        return self.mask == "causal"

    @property
    def flop(self) -> float:
        """Floating-point operations of one call."""
        forward = 4.0 * self.heads[0] * self.length**2 * self.head_dim / (2 if self.causal else 1)
        return forward * (3.5 if self.direction == "both" else 1.0)

    @property
    def layout(self) -> str:
        return "zigzag" if self.causal else "contiguous"

    def shapes(self) -> list[tuple[int, ...]]:
        """query, key, value and the cotangent of the output."""
        n, k = self.heads
        return [(1, self.length, h, self.head_dim) for h in (n, k, k, n)]

    def function(self, attend: Callable) -> Callable:
        """(out,) or (out, gradients) of query, key, value and the cotangent."""
        masked = functools.partial(attend, is_causal=self.causal)

        def forward(query, key, value, cotangent):
            return (masked(query, key, value),)

        def both(query, key, value, cotangent):
            out, pullback = jax.vjp(masked, query, key, value)
            return out, *pullback(cotangent)

        return forward if self.direction == "forward" else both


def mesh_of(devices: Sequence[jax.Device]) -> Mesh:
    """A mesh with the single axis ``seq``."""
    return jax.make_mesh((len(devices),), ("seq",), axis_types=(AxisType.Auto,), devices=devices)


def draw(problem: Problem, mesh: Mesh) -> tuple[jax.Array, ...]:
    """Operands split over ``seq``, drawn on the devices that hold them."""
    sharding = NamedSharding(mesh, P(None, "seq"))

    def normal(seed: jax.Array) -> tuple[jax.Array, ...]:
        keys = jax.random.split(jax.random.key(seed), 4)
        return tuple(jax.random.normal(k, s, jnp.bfloat16) for k, s in zip(keys, problem.shapes(), strict=True))

    return jax.jit(normal, out_shardings=(sharding,) * 4)(0)


def compiled(problem: Problem, attend: Callable, mesh: Mesh, in_flight: int | None) -> jax.stages.Compiled:
    """The program for operands split over ``seq``; ``in_flight`` as the option."""
    sharding = NamedSharding(mesh, P(None, "seq"))
    abstract = [jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=sharding) for shape in problem.shapes()]
    options = None if in_flight is None else {"xla_gpu_experimental_parallel_collective_overlap_limit": in_flight}
    return jax.jit(problem.function(attend)).lower(*abstract).compile(compiler_options=options)


def gib(program: jax.stages.Compiled) -> float:
    """Memory that a program holds on each of its devices, GiB."""
    memory = program.memory_analysis()
    if memory is None:
        return math.nan
    sizes = (memory.argument_size_in_bytes, memory.output_size_in_bytes, memory.temp_size_in_bytes)
    return (sum(sizes) - memory.alias_size_in_bytes) / GIB


@jax.jit
def same_bits(a: Sequence[jax.Array], b: Sequence[jax.Array]) -> jax.Array:
    """Whether two results agree in every bit."""
    equal = [
        (jax.lax.bitcast_convert_type(x, jnp.uint16) == jax.lax.bitcast_convert_type(y, jnp.uint16)).all()
        for x, y in zip(a, b, strict=True)
    ]
    return jnp.stack(equal).all()


@jax.jit
def differences(a: Sequence[jax.Array], b: Sequence[jax.Array]) -> jax.Array:
    """Root mean square of the difference over that of ``b``, the largest of all arrays."""

    def one(x: jax.Array, y: jax.Array) -> jax.Array:
        x, y = x.astype(jnp.float32), y.astype(jnp.float32)
        return jnp.sqrt(((x - y) ** 2).mean() / (y**2).mean())

    return jnp.stack([one(x, y) for x, y in zip(a, b, strict=True)]).max()


def link_lines(mesh: Mesh, megabytes: int) -> list[str]:
    """Bandwidth of the collectives that the strategies use: what one device sends in one direction, GB/s."""
    count = mesh.size
    length = megabytes * 2**20 // 2 // 128 // count * count
    x = jax.device_put(jnp.ones((count * length, 128), jnp.bfloat16), NamedSharding(mesh, P("seq")))
    ring = [(i, (i + 1) % count) for i in range(count)]
    kinds: dict[str, tuple[Callable, float]] = {
        "ppermute": (lambda x: jax.lax.ppermute(x, "seq", ring), 1.0),
        "all_gather": (lambda x: jax.lax.all_gather(x, "seq", tiled=True)[:length] + 1, count - 1.0),
        "psum_scatter": (lambda x: jax.lax.psum_scatter(x, "seq", tiled=True), (count - 1.0) / count),
        "all_to_all": (lambda x: jax.lax.all_to_all(x, "seq", 0, 0, tiled=True), (count - 1.0) / count),
    }
    lines = []
    for name, (body, share) in kinds.items():
        run = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("seq"), out_specs=P("seq")))
        seconds = compare({name: functools.partial(run, x)}, bursts=5, burst_seconds=0.05)[name].median
        sent = share * x.nbytes / count
        rate = f"{seconds * 1e3:.3f} ms, {sent / seconds / 1e9:.0f} GB/s"
        lines.append(f"{name}: {sent / 2**20:.0f} MiB sent by each GPU in {rate}")
    return lines


class Bench:
    """Compiles all programs side by side, then measures them."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        devices = jax.devices()[: arguments.devices]
        self.mesh, self.alone = mesh_of(devices), mesh_of(devices[:1])
        self.problems = [
            Problem(direction, mask, heads, length, arguments.head_dim)
            for heads, mask, direction, length in itertools.product(
                arguments.heads, arguments.mask, arguments.direction, sorted(arguments.lengths)
            )
        ]

    def reduced(self, problem: Problem) -> Problem:
        """The problem with the work of one of the devices."""
        length = problem.length / math.sqrt(self.mesh.size)
        return problem._replace(length=max(1, round(length / 256)) * 256)

    def attend(self, strategy: str, problem: Problem) -> Callable:
        """Attention of global arrays on all devices, or on one."""
        implementation = self.arguments.implementation
        if strategy == ALONE:
            return functools.partial(jax_fa4.attention, implementation=implementation)
        return parallel.make_attention(
            self.mesh, sequence_axis="seq", strategy=strategy, layout=problem.layout, implementation=implementation
        )

    def compile(self, problem: Problem) -> dict[str, jax.stages.Compiled]:
        """The programs of one problem by strategy, and :data:`ALONE`."""
        limit, reduced = self.arguments.in_flight, self.reduced(problem)
        programs = {s: compiled(problem, self.attend(s, problem), self.mesh, limit) for s in self.arguments.strategies}
        return {**programs, ALONE: compiled(reduced, self.attend(ALONE, reduced), self.alone, limit)}

    def plan(self, rate: float) -> float:
        """Seconds of the whole run but start and compilation, if each GPU does ``rate`` TFLOP/s."""
        total = 0.0
        for problem in self.problems:
            once = problem.flop / self.mesh.size / rate / 1e12 * (len(self.arguments.strategies) + 1)
            total += 2 * once + max(self.arguments.seconds, 2 * 3 * once)
            if problem.length == min(self.arguments.lengths):
                total += once * (self.arguments.repeat + self.mesh.size + 4)
        return total

    def rows(self) -> list[dict]:
        """Measures everything."""
        print(f"{len(self.problems)} problems; compiling", file=sys.stderr, flush=True)
        start = time.perf_counter()
        with ThreadPoolExecutor(self.arguments.jobs) as pool:
            waiting = [pool.submit(self.compile, problem) for problem in self.problems]
            found: list[dict] = []
            for problem, programs in zip(self.problems, waiting, strict=True):
                ready = programs.result()
                if problem == self.problems[0]:
                    for other in waiting:  # compilation would disturb the measurements
                        other.result()
                    print(f"compiled in {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)
                found += self.measure(problem, ready)
        return found

    def measure(self, problem: Problem, programs: dict[str, jax.stages.Compiled]) -> list[dict]:
        """One row for each strategy."""
        large, reduced = draw(problem, self.mesh), self.reduced(problem)
        small = draw(reduced, self.alone)
        calls = {name: functools.partial(p, *(small if name == ALONE else large)) for name, p in programs.items()}
        first = {name: _timed(call) for name, call in calls.items()}  # loads modules, opens connections
        once = sum(_timed(call) for call in calls.values())
        bursts = max(3, min(9, int(self.arguments.seconds / max(once, BURST_SECONDS * len(calls)))))
        timings = compare(calls, bursts=bursts, burst_seconds=BURST_SECONDS, min_calls=2, max_calls=16)
        alone = reduced.flop / timings[ALONE].median / 1e12
        whole = self.whole(problem, large) if problem.length == min(self.arguments.lengths) else None
        found = []
        for strategy in self.arguments.strategies:
            rate = problem.flop / self.mesh.size / timings[strategy].median / 1e12
            row = dict.fromkeys(COLUMNS, "") | {
                "strategy": strategy,
                "direction": problem.direction,
                "mask": problem.mask,
                "heads": "/".join(map(str, problem.heads)),
                "devices": self.mesh.size,
                "length": problem.length,
                "milliseconds": f"{timings[strategy].median * 1e3:.3f}",
                "tflops": f"{rate:.1f}",
                "alone_length": reduced.length,
                "alone_tflops": f"{alone:.1f}",
                "ratio": f"{rate / alone:.3f}",
                "gib": f"{gib(programs[strategy]):.2f}",
            }
            if whole is not None:
                row |= self.closer_look(problem, strategy, calls[strategy], whole)
            found.append(row)
            print(_line(row), f"first call {first[strategy]:.1f} s, {bursts} bursts", flush=True)
        return found

    def whole(self, problem: Problem, operands: Sequence[jax.Array]) -> list[jax.Array]:
        """One GPU's results on the whole arrays, in the layout of the split ones."""
        ordered = [parallel.from_layout(x, self.mesh.size, layout=problem.layout) for x in operands]
        placed = jax.device_put(ordered, NamedSharding(self.alone, P()))
        results = jax.jit(problem.function(self.attend(ALONE, problem)))(*placed)
        back = [parallel.to_layout(x, self.mesh.size, layout=problem.layout) for x in results]
        return jax.device_put(back, NamedSharding(self.mesh, P(None, "seq")))

    def closer_look(self, problem: Problem, strategy: str, call: Callable, whole: Sequence[jax.Array]) -> dict:
        """Difference from one GPU's results, the same bits again, and the profile."""
        result = call()
        found = {"difference": f"{float(differences(result, whole)):.1e}"}
        repeat = self.arguments.repeat
        if repeat:
            same = sum(bool(same_bits(result, call())) for _ in range(repeat))
            found["same_bits"] = f"{same} of {repeat}"
        if self.arguments.trace is not None:
            name = f"{strategy}-{problem.direction}-{problem.mask}-{problem.heads[0]}x{problem.heads[1]}"
            try:
                seen = overlap.profile(call, self.arguments.trace / name)
            except (ValueError, FileNotFoundError, KeyError) as error:  # the figures above are worth keeping
                print(f"no profile of {name}: {error!r}", file=sys.stderr, flush=True)
            else:
                found |= {"transfer_ms": f"{seen.transfer:.3f}", "hidden": f"{seen.share:.3f}"}
        return found


def _timed(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - start


def _line(row: dict) -> str:
    return f"| {' | '.join(str(row[name]) for name in COLUMNS)} |"


def heads_of(text: str) -> tuple[int, int]:
    """Reads "64/8"."""
    try:
        n, k = map(int, text.split("/"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"got {text!r}; expected QUERY_HEADS/KEY_HEADS, such as 64/8") from None
    if min(n, k) < 1 or n % k:
        raise argparse.ArgumentTypeError(f"got {text!r}; expected a multiple of the key heads")
    return n, k


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    strategies = ("ring", "all_gather", "ulysses")
    parser.add_argument("--strategies", nargs="+", choices=strategies, default=list(strategies))
    parser.add_argument("--lengths", nargs="+", type=int, default=[65536, 131072, 262144])
    parser.add_argument("--heads", nargs="+", type=heads_of, default=[(16, 16)], metavar="N/K")
    parser.add_argument("--mask", nargs="+", choices=("causal", "full"), default=["causal"])
    parser.add_argument("--direction", nargs="+", choices=DIRECTIONS, default=list(DIRECTIONS), help="default: each")
    parser.add_argument("--devices", type=int, default=None, help="how many to use (default: all)")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--implementation", default=None, help="as for jax_fa4.attention")
    parser.add_argument("--seconds", type=float, default=2.0, help="of measurement for each problem, if 3 bursts fit")
    parser.add_argument("--repeat", type=int, default=0, metavar="RUNS", help="compare the bits of further runs")
    parser.add_argument("--trace", type=Path, metavar="FOLDER", help="keep profiles here and read the overlap off them")
    parser.add_argument("--link", type=int, default=256, metavar="MIB", help="size for the bandwidths, 0 for none")
    parser.add_argument("--in-flight", type=int, metavar="N", help="collectives that XLA may overlap (its default: 1)")
    parser.add_argument("--jobs", type=int, default=8, help="programs to compile at the same time")
    parser.add_argument("--plan", action="store_true", help="only say how long this would take")
    parser.add_argument("--rate", type=float, default=500.0, help="TFLOP/s of one GPU that --plan assumes")
    parser.add_argument("--out", type=Path, help="Markdown file to append to")
    parser.add_argument("--csv", type=Path, help="file to write the rows to")
    arguments = parser.parse_args(argv)

    bench = Bench(arguments)
    if arguments.plan:
        print(f"{len(bench.problems)} problems, about {bench.plan(arguments.rate):.0f} s after compilation")
        return
    flags = os.environ.get("XLA_FLAGS", "")
    header = (
        f"{datetime.date.today()}, {bench.mesh.size} x {jax.devices()[0].device_kind}, jax {jax.__version__}, jax_fa4 "
        f"{jax_fa4.__version__}, head_dim {arguments.head_dim}, XLA_FLAGS '{flags}'. Command: `python "
        f"benchmarks/parallel.py {' '.join(sys.argv[1:] if argv is None else argv)}`."
    )
    head = [f"| {' | '.join(COLUMNS.values())} |", f"| {' | '.join(['---'] * len(COLUMNS))} |"]
    links = link_lines(bench.mesh, arguments.link) if arguments.link and bench.mesh.size > 1 else []
    print("\n".join([header, *links, *head]), flush=True)
    rows = bench.rows()
    if arguments.out is not None:
        lines = [header, "", *(f"- {line}" for line in links), "", *head, *map(_line, rows), "", ""]
        with arguments.out.open("a") as file:
            file.write("\n".join(lines))
    if arguments.csv is not None:
        with arguments.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(COLUMNS), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
