"""Attention on one GPU: jax_fa4 next to cuDNN (through ``jax.nn``) in the same run, as TFLOP/s.

    python benchmarks/attention.py [--direction forward backward] [--cells 128:causal:2x8192 ...] [--gqa]
        [--out TABLE.md]

The 24 cells: head_dim 64, 128, 256; full and causal; batch x sequence 32x512, 8x2048, 2x8192, 1x16384 (16k tokens);
heads x head_dim = 2048; bfloat16. With ``--gqa`` two cells more, of 64 query heads and 8 key heads, which do not count
in the geometric means. FLOP counts: forward 4·B·N·T·S·D, backward 2.5 times that, causal half of either.
Input is random normal. The backward is timed alone: its residuals are computed once, outside of the timed function.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import functools
import math
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
from timing import Timing, compare

import jax_fa4

WIDTH = 2048  # heads x head_dim


@dataclass(frozen=True)
class Cell:
    """One row of the table."""

    head_dim: int
    causal: bool
    batch: int
    length: int
    grouped: tuple[int, int] | None = None

    @property
    def heads(self) -> tuple[int, int]:
        """Query heads and key heads."""
        return self.grouped or (WIDTH // self.head_dim,) * 2

    @property
    def forward_flop(self) -> float:
        full = 4.0 * self.batch * self.heads[0] * self.length**2 * self.head_dim
        return full / 2 if self.causal else full

    @property
    def name(self) -> str:
        heads = "" if self.grouped is None else f":{self.grouped[0]}/{self.grouped[1]}"
        return f"{self.head_dim}:{self.mask}:{self.batch}x{self.length}{heads}"

    @property
    def mask(self) -> str:
        return "causal" if self.causal else "full"


CELLS = tuple(
    Cell(head_dim, causal, batch, length)
    for head_dim in (64, 128, 256)
    for causal in (False, True)
    for batch, length in ((32, 512), (8, 2048), (2, 8192), (1, 16384))
)
GQA_CELLS = tuple(Cell(128, True, batch, length, (64, 8)) for batch, length in ((4, 4096), (1, 16384)))


def implementations(causal: bool) -> dict[str, Callable]:
    """The functions compared, by the name of their table column."""
    return {
        "jax_fa4": functools.partial(jax_fa4.attention, is_causal=causal, implementation="fa4"),
        "cudnn": functools.partial(jax.nn.dot_product_attention, is_causal=causal, implementation="cudnn"),
    }


def operands(cell: Cell) -> tuple[jax.Array, ...]:
    """query, key, value and the output's cotangent, bfloat16 (batch, length, heads, head_dim)."""
    keys = jax.random.split(jax.random.key(cell.length + cell.head_dim), 4)
    n, k = cell.heads
    shapes = [(cell.batch, cell.length, heads, cell.head_dim) for heads in (n, k, k, n)]
    return tuple(jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, shapes, strict=True))


def timed_functions(cell: Cell, direction: str) -> dict[str, Callable[[], object]]:
    """Zero-argument functions of one cell, ready for :func:`timing.compare`."""
    query, key, value, cotangent = operands(cell)
    functions: dict[str, Callable[[], object]] = {}
    for name, function in implementations(cell.causal).items():
        if direction == "forward":
            functions[name] = functools.partial(jax.jit(function), query, key, value)
            continue
        _, pullback = jax.jit(functools.partial(jax.vjp, function))(query, key, value)
        functions[name] = functools.partial(jax.jit(lambda pull, g: pull(g)), pullback, cotangent)
    return functions


def measure(cell: Cell, direction: str) -> dict[str, tuple[float, Timing]]:
    """TFLOP/s and timing of each implementation."""
    flop = cell.forward_flop * (1.0 if direction == "forward" else 2.5)
    timings = compare(timed_functions(cell, direction))
    return {name: (flop / t.median / 1e12, t) for name, t in timings.items()}


def recorded(path: Path | None, peer: str, direction: str) -> dict[tuple, float]:
    """A peer's recorded TFLOP/s by (head_dim, causal, batch, length), from a CSV file with h200.csv's columns."""
    if path is None:
        return {}
    column = {"forward": "tflops_fwd", "backward": "tflops_bwd"}[direction]
    with path.open() as file:
        return {
            (int(r["d"]), r["causal"] == "True", int(r["b"]), int(r["s"])): float(r[column])
            for r in csv.DictReader(file)
            if r["peer"] == peer
        }


def geometric_mean(values: list[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values)) if values else math.nan


def table(direction: str, cells: list[Cell], peers: Path | None) -> str:
    """Measures the cells and returns a Markdown table."""
    other = recorded(peers, "flash-attn-4", direction)
    lines = [
        f"### {direction}, TFLOP/s (median; 10th to 90th percentile)",
        "",
        "| d | mask | batch x length | jax_fa4 | cuDNN | ratio | flash-attn-4 (recorded) | ratio |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    ratios, other_ratios = [], []
    for cell in cells:
        start = f"| {cell.head_dim} | {cell.mask} | {cell.batch}x{cell.length}"
        start += "" if cell.grouped is None else ", {} query and {} key heads".format(*cell.grouped)
        try:
            rates = measure(cell, direction)
        except Exception as error:  # one failing cell must not lose the others' figures
            print(f"{direction} {cell.name}: {error}", file=sys.stderr, flush=True)
            lines.append(f"{start} | failed | | | | |")
            continue
        ours, theirs = rates["jax_fa4"], rates["cudnn"]
        flop = ours[0] * ours[1].median
        spread = f"{flop / ours[1].high:.0f}–{flop / ours[1].low:.0f}"
        ratio = ours[0] / theirs[0]
        peer = None
        if cell.grouped is None:
            ratios.append(ratio)
            peer = other.get((cell.head_dim, cell.causal, cell.batch, cell.length))
        tail = " | |"
        if peer is not None:
            other_ratios.append(ours[0] / peer)
            tail = f" {peer:.0f} | {other_ratios[-1]:.3f} |"
        lines.append(f"{start} | {ours[0]:.1f} ({spread}) | {theirs[0]:.1f} | {ratio:.3f} |{tail}")
        print(lines[-1], flush=True)
    summary = f"Geometric mean over {len(ratios)} cells: {geometric_mean(ratios):.3f} of cuDNN"
    if other_ratios:
        summary += f", {geometric_mean(other_ratios):.3f} of flash-attn-4's recorded figures"
    return "\n".join([*lines, "", summary + ".", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--direction", nargs="+", choices=["forward", "backward"], default=["forward", "backward"])
    parser.add_argument("--cells", nargs="+", help="names like 128:causal:2x8192 (default: all 24)")
    parser.add_argument("--gqa", action="store_true", help="the cells of 64 query heads and 8 key heads too")
    parser.add_argument("--peers", type=Path, help="CSV of recorded figures, columns as in h200.csv")
    parser.add_argument("--out", type=Path, help="Markdown file to write")
    arguments = parser.parse_args()
    cells = [c for c in CELLS + GQA_CELLS if arguments.cells is not None and c.name in arguments.cells]
    if arguments.cells is None:
        cells = [*CELLS, *(GQA_CELLS if arguments.gqa else ())]
    if not cells:
        parser.error(f"no such cell; the names are {', '.join(c.name for c in CELLS + GQA_CELLS)}")
    # A backward that left the kernels would be timed as theirs.
    warnings.simplefilter("error", jax_fa4.FallbackWarning)
    device = jax.devices()[0]
    header = (
        f"{datetime.date.today()}, {device.device_kind}, jax {jax.__version__}, jax_fa4 {jax_fa4.__version__}. "
        f"Command: `python benchmarks/attention.py {' '.join(sys.argv[1:])}`.\n"
    )
    text = "\n".join([header, *(table(direction, cells, arguments.peers) for direction in arguments.direction)])
    print(text)
    if arguments.out is not None:
        arguments.out.write_text(text)


if __name__ == "__main__":
    main()
