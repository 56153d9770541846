"""What the fixed order of dQ sums costs the Blackwell backward: makespan with turn counters over makespan without.

A simulation, not a measurement. CTAs start in the order of their index on whichever multiprocessor is free, and take
the steps that ``kernels/sm100/backward/work.py`` gives them. A step keeps shared memory busy for ``STEP`` cycles
(head dim 128: the emulator's shared-memory cycles, docs/sm100-backward.md); its dQ is then read by the
reduce warpgroup, which waits for its turn, adds (``ADD`` cycles until the addition is complete) and passes the turn on.
The next step's dQ can be read only when that is over, and the one after it cannot be computed before.

CTAs depend on CTAs of smaller index only, so one pass in index order gives exact times.

    python benchmarks/backward_order.py [--tokens 32768] [--heads 16] [--multiprocessors 148]
"""

from __future__ import annotations

import argparse
import heapq

from jax_fa4.kernels.sm90.backward.plan import team_size
from jax_fa4.kernels.sm100.backward.config import KEYS, ROWS
from jax_fa4.kernels.sm100.backward.plan import LEAST_TEAM, TEAM_BYTES

HEAD_DIM = 128
STEP = 3840
"""Shared-memory cycles of a step, the limiter: operands 2048, dS and dQ pieces 1280, TMA writes 512."""

ADD = 2000
"""Cycles of 64 KiB of additions in L2 at 64 bytes a cycle, and their latency: an assumption."""

EDGE = 4000
"""Cycles before a CTA's first step and after its last one: launch, first loads, gradients out: an assumption."""


def makespan(length: int, pairs: int, causal: bool, processors: int, ordered: bool) -> float:
    """Cycles until the last CTA is done; ``pairs`` (batch, head) pairs of ``length`` queries and keys."""
    blocks = -(-length // KEYS)
    together = team_size(pairs, TEAM_BYTES // (length * HEAD_DIM * 8), LEAST_TEAM)
    free = [0.0] * processors
    passed: dict[tuple[int, int], float] = {}
    end = 0.0
    for first in range(0, pairs, together):
        for key_block in range(blocks):
            for pair in range(first, min(first + together, pairs)):
                computed = heapq.heappop(free) + EDGE
                added = read = 0.0
                lowest = key_block * KEYS // ROWS if causal else 0
                for block in range(blocks - 1, lowest - 1, -1):
                    computed = max(computed, read) + STEP
                    read = max(computed, added)
                    turn = passed.get((pair, block), 0.0) if ordered else 0.0
                    added = max(read, turn) + ADD
                    passed[pair, block] = added
                done = max(computed, added) + EDGE
                end = max(end, done)
                heapq.heappush(free, done)
    return end


def main() -> None:
    """Prints one line per length and mask."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=32768, help="batch times length")
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--multiprocessors", type=int, default=148)
    arguments = parser.parse_args()
    print(f"{'T':>6} {'mask':<7} {'ordered':>12} {'unordered':>12} {'ratio':>6}")
    length = 1024
    while length <= arguments.tokens:
        pairs = arguments.tokens // length * arguments.heads
        for causal in (False, True):
            times = [makespan(length, pairs, causal, arguments.multiprocessors, ordered) for ordered in (True, False)]
            mask = "causal" if causal else "dense"
            print(f"{length:>6} {mask:<7} {times[0]:>12.0f} {times[1]:>12.0f} {times[0] / times[1]:>6.3f}", flush=True)
        length *= 2


if __name__ == "__main__":
    main()
