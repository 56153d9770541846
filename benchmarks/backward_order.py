"""What the fixed order of dQ sums costs the Blackwell backward: makespan with turn counters over makespan without.

A simulation, not a measurement. CTAs start in the order of their index on whichever multiprocessor is free, pairs of
CTAs on whichever two, and take the steps that ``kernels/sm100/backward/work.py`` gives them. A step keeps shared memory
busy for ``STEP`` cycles (head dim 128: the emulator's shared-memory cycles, docs/sm100-backward.md); its dQ is then
read by the reduce warpgroup, which waits for its turn, adds (``ADD`` cycles until the addition is complete) and passes
the turn on. The next step's dQ can be read only when that is over, and the one after it cannot be computed before.

CTAs and pairs depend on those of smaller index only, so one pass in index order gives exact times.

    python benchmarks/backward_order.py [--tokens 32768] [--heads 16] [--group 1] [--multiprocessors 148]
"""

from __future__ import annotations

import argparse
import heapq
import itertools

from jax_fa4.kernels.sm90.backward.plan import team_size
from jax_fa4.kernels.sm100.backward.config import KEYS, ROWS
from jax_fa4.kernels.sm100.backward.plan import LEAST_TEAM, TEAM_BYTES

HEAD_DIM = 128
STEP = {1: 3840, 2: 3072}
"""Shared-memory cycles of a step, the limiter: operands 2048, dS and dQ pieces 1280, TMA writes 512. In each CTA of a
pair: operands 1536, dS, its exchange and dQ pieces 1024, TMA writes 512."""

ADD = {1: 2000, 2: 1488}
"""Cycles of a CTA's additions in L2, 64 or 32 KiB, at 64 bytes a cycle, and their latency: an assumption."""

EDGE = 4000
"""Cycles before a CTA's first step and after its last one: launch, first loads, gradients out: an assumption."""


def makespan(
    length: int, pairs: int, causal: bool, processors: int, ordered: bool, ctas: int = 1, group: int = 1
) -> float:
    """Cycles until the last CTA is done; ``pairs`` (batch, key head) pairs of ``length`` queries and keys, ``group``
    query heads a key head, ``ctas`` CTAs together on ``ctas`` times the keys."""
    keys = KEYS * ctas
    blocks = -(-length // ROWS)
    together = team_size(pairs, TEAM_BYTES // (group * length * HEAD_DIM * 8), LEAST_TEAM)
    free = [0.0] * (processors // ctas)
    passed: dict[tuple[int, int, int], float] = {}
    end = 0.0
    for first in range(0, pairs, together):
        for key_block in range(-(-length // keys)):
            for pair in range(first, min(first + together, pairs)):
                computed = heapq.heappop(free) + EDGE
                added = read = 0.0
                lowest = key_block * keys // ROWS if causal else 0
                for block, member in itertools.product(range(blocks - 1, lowest - 1, -1), range(group)):
                    computed = max(computed, read) + STEP[ctas]
                    read = max(computed, added)
                    turn = passed.get((pair, block, member), 0.0) if ordered else 0.0
                    added = max(read, turn) + ADD[ctas]
                    passed[pair, block, member] = added
                done = max(computed, added) + EDGE
                end = max(end, done)
                heapq.heappush(free, done)
    return end


def main() -> None:
    """Prints one line per length, mask and number of CTAs that work together."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=32768, help="batch times length")
    parser.add_argument("--heads", type=int, default=16, help="query heads")
    parser.add_argument("--group", type=int, default=1, help="query heads a key head")
    parser.add_argument("--multiprocessors", type=int, default=148)
    arguments = parser.parse_args()
    print(f"{'T':>6} {'mask':<7} {'CTAs':>4} {'ordered':>12} {'unordered':>12} {'ratio':>6}")
    length = 1024
    while length <= arguments.tokens:
        pairs = arguments.tokens // length * arguments.heads // arguments.group
        for causal, ctas in itertools.product((False, True), (1, 2)):
            given = (length, pairs, causal, arguments.multiprocessors)
            ordered, unordered = (makespan(*given, ordered, ctas, arguments.group) for ordered in (True, False))
            mask = "causal" if causal else "dense"
            ratio = ordered / unordered
            print(f"{length:>6} {mask:<7} {ctas:>4} {ordered:>12.0f} {unordered:>12.0f} {ratio:>6.3f}", flush=True)
        length *= 2


if __name__ == "__main__":
    main()
