"""Sequence parallelism on the GPUs of one host: per-GPU TFLOP/s next to one GPU's, memory, and hidden transfer time.

    python benchmarks/parallel.py [--strategies ring all_gather ulysses] [--lengths 65536 131072] [--heads 16 16]
        [--mask causal full] [--backward] [--trace] [--out TABLE.md]

For P devices and length T one row gives the strategy's TFLOP/s per GPU, and that of one GPU alone at the same work per
GPU, which is length T / sqrt(P). FLOP counts as in benchmarks/attention.py. bfloat16, head_dim 128, batch 1, random
normal input; causal runs use the zigzag layout. ``--trace`` profiles one call and reports which share of the transfer
kernels' time lies under compute kernels of the same device.
"""

from __future__ import annotations

import argparse
import collections
import datetime
import functools
import gzip
import json
import math
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from timing import compare

import jax_fa4
from jax_fa4 import parallel

HEAD_DIM = 128
TRANSFER_WORDS = ("nccl", "collective", "sendrecv", "allgather", "reducescatter", "alltoall", "memcpyp2p")


def flop(length: int, heads: int, causal: bool, backward: bool) -> float:
    """Floating-point operations of one call (forward, or forward and backward)."""
    forward = 4.0 * heads * length**2 * HEAD_DIM / (2 if causal else 1)
    return forward * (3.5 if backward else 1.0)


def operands(length: int, heads: tuple[int, int], mesh: jax.sharding.Mesh) -> tuple[jax.Array, ...]:
    """query, key, value and the cotangent, sequence-sharded, drawn on the devices that hold them."""
    sharding = NamedSharding(mesh, P(None, "seq"))
    n, k = heads
    shapes = [(1, length, h, HEAD_DIM) for h in (n, k, k, n)]
    draw = jax.jit(
        lambda seed: tuple(
            jax.random.normal(key, shape, jnp.bfloat16)
            for key, shape in zip(jax.random.split(jax.random.key(seed), 4), shapes, strict=True)
        ),
        out_shardings=(sharding,) * 4,
    )
    return draw(0)


def with_gradient(function: Callable) -> Callable:
    """(out, gradients) of one forward and backward."""

    def run(query, key, value, cotangent):
        out, pullback = jax.vjp(function, query, key, value)
        return out, pullback(cotangent)

    return run


def make(strategy: str, mesh: jax.sharding.Mesh, causal: bool, backward: bool) -> Callable:
    """The jitted function of global arrays."""
    attend = parallel.make_attention(
        mesh, sequence_axis="seq", strategy=strategy, layout="zigzag" if causal else "contiguous"
    )
    function = functools.partial(attend, is_causal=causal)
    return jax.jit(with_gradient(function) if backward else lambda q, k, v, _: function(q, k, v))


def make_single(causal: bool, backward: bool) -> Callable:
    """The same on one device."""
    function = functools.partial(jax_fa4.attention, is_causal=causal)
    return jax.jit(with_gradient(function) if backward else lambda q, k, v, _: function(q, k, v))


def peak_gib(device: jax.Device) -> float:
    """Largest memory in use so far on a device, GiB."""
    stats = device.memory_stats() or {}
    return stats.get("peak_bytes_in_use", 0) / 2**30


def hidden_share(run: Callable[[], object]) -> tuple[float, float]:
    """(transfer seconds per device, share of them that lies under compute) of one call, from a profile."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(run())
        files = list(Path(folder).rglob("*.trace.json.gz"))
        with gzip.open(files[0]) as file:
            events = json.load(file)["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e.get("name") == "process_name"}
    transfers, computes = collections.defaultdict(list), collections.defaultdict(list)
    for event in events:
        if event.get("ph") != "X" or "GPU" not in names.get(event["pid"], ""):
            continue
        if "correlation_id" not in event.get("args", {}):
            continue  # summary rows repeat the kernels by source line and by module
        kind = event["name"].lower()
        spans = transfers if any(word in kind for word in TRANSFER_WORDS) else computes
        spans[event["pid"]].append((event["ts"], event["ts"] + event["dur"]))
    total = hidden = 0.0
    for pid, spans in transfers.items():
        busy = union(computes[pid])
        for start, stop in union(spans):
            total += stop - start
            hidden += sum(max(0.0, min(stop, b) - max(start, a)) for a, b in busy)
    return total / max(1, len(transfers)) / 1e6, hidden / total if total else math.nan


def union(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Disjoint spans that cover the same times."""
    merged: list[tuple[float, float]] = []
    for start, stop in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], stop))
        else:
            merged.append((start, stop))
    return merged


def rows(arguments: argparse.Namespace) -> list[str]:
    """Measures and returns the table's lines."""
    devices = jax.devices()
    mesh = jax.make_mesh((len(devices),), ("seq",), axis_types=(AxisType.Auto,))
    alone = jax.make_mesh((1,), ("seq",), axis_types=(AxisType.Auto,), devices=devices[:1])
    heads = tuple(arguments.heads)
    lines = [
        "| strategy | mask | T | TFLOP/s per GPU | one GPU, T/sqrt(P) | ratio | peak GiB per GPU | transfer ms "
        "| hidden |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    print("\n".join(lines), flush=True)
    for mask in arguments.mask:
        causal = mask == "causal"
        for length in arguments.lengths:
            reduced = round(length / math.sqrt(len(devices)) / 256) * 256
            single, small = make_single(causal, arguments.backward), operands(reduced, heads, alone)
            large = operands(length, heads, mesh)
            for strategy in arguments.strategies:
                function = make(strategy, mesh, causal, arguments.backward)
                timings = compare(
                    {strategy: lambda: function(*large), "single": lambda: single(*small)},  # noqa: B023
                    bursts=7, burst_seconds=0.2, max_calls=4,
                )  # fmt: skip
                work = flop(length, heads[0], causal, arguments.backward) / len(devices)
                rate = work / timings[strategy].median / 1e12
                reference = flop(reduced, heads[0], causal, arguments.backward) / timings["single"].median / 1e12
                transfer, hidden = hidden_share(lambda: function(*large)) if arguments.trace else (math.nan,) * 2  # noqa: B023
                lines.append(
                    f"| {strategy} | {mask} | {length} | {rate:.1f} | {reference:.1f} | {rate / reference:.3f} | "
                    f"{peak_gib(devices[0]):.2f} | {transfer * 1e3:.2f} | {hidden:.2f} |"
                )
                print(lines[-1], flush=True)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategies", nargs="+", choices=["ring", "all_gather", "ulysses"], default=["ring"])
    parser.add_argument("--lengths", nargs="+", type=int, default=[65536, 131072, 262144])
    parser.add_argument("--heads", nargs=2, type=int, default=[16, 16], metavar=("N", "K"))
    parser.add_argument("--mask", nargs="+", choices=["causal", "full"], default=["causal"])
    parser.add_argument("--backward", action="store_true", help="time forward and backward together")
    parser.add_argument("--trace", action="store_true", help="profile one call for the hidden share of transfers")
    parser.add_argument("--out", type=Path, help="Markdown file to append to")
    arguments = parser.parse_args()
    device = jax.devices()[0]
    header = (
        f"{datetime.date.today()}, {len(jax.devices())} x {device.device_kind}, jax {jax.__version__}, jax_fa4 "
        f"{jax_fa4.__version__}, {'forward and backward' if arguments.backward else 'forward'}, "
        f"{arguments.heads[0]} query and {arguments.heads[1]} key heads. "
        f"Command: `python benchmarks/parallel.py {' '.join(sys.argv[1:])}`."
    )
    text = "\n".join([header, "", *rows(arguments), "", ""])
    if arguments.out is not None:
        with arguments.out.open("a") as file:
            file.write(text)


if __name__ == "__main__":
    main()
