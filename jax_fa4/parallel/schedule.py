"""Which piece of K/V goes where, and when, in a ring: plain Python over ranks, decided while tracing.

The ring has P devices. K/V pieces move "up" (rank r to r+1) and, where that is shorter, "down". After i moves up,
device r holds the piece of rank r-i. A move is made only along edges behind which some device still needs the piece,
so that a windowed ring sends nothing that nobody attends to, and a causal contiguous one nothing backwards.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from jax_fa4.parallel import layout as layouts


@dataclass(frozen=True)
class Reach:
    """Static bounds on key position minus query position that the affine mask lets through; None is unbounded."""

    left: int | None
    right: int | None

    def allows(self, first_query: int, first_key: int, query_length: int, key_length: int) -> bool:
        """Whether any query of a chunk sees any key of another (positions of their first tokens and their lengths)."""
        lowest = first_key - (first_query + query_length - 1)
        highest = first_key + key_length - 1 - first_query
        return (self.right is None or lowest <= self.right) and (self.left is None or highest >= -self.left)

    def allows_all(self, first_query: int, first_key: int, query_length: int, key_length: int) -> bool:
        """Whether every query of a chunk sees every key of another."""
        lowest = first_key - (first_query + query_length - 1)
        highest = first_key + key_length - 1 - first_query
        return (self.right is None or highest <= self.right) and (self.left is None or lowest >= -self.left)


UNBOUNDED = Reach(None, None)


def needed_pieces(reach: Reach, layout: str, devices: int, query_chunk: int, key_chunk: int) -> np.ndarray:
    """bool (devices, devices): whether the queries on rank r need the K/V piece of rank s."""
    chunks = layouts.chunk_indices(layout, devices)
    needed = np.zeros((devices, devices), bool)
    for r in range(devices):
        for s in range(devices):
            needed[r, s] = any(
                reach.allows(a * query_chunk, b * key_chunk, query_chunk, key_chunk)
                for a in chunks[r]
                for b in chunks[s]
            )
    return needed


@dataclass(frozen=True)
class Move:
    """One exchange: ``edges`` are (source, destination) ranks; afterwards device r holds the piece of rank r -
    offset.
    """

    offset: int
    edges: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Schedule:
    """Moves up (offsets 1, 2, …) and down (offsets -1, -2, …); offset 0 needs no move."""

    up: tuple[Move, ...]
    down: tuple[Move, ...]


def _moves(needed: np.ndarray, distances: list[int], direction: int) -> tuple[Move, ...]:
    devices = len(needed)
    moves = []
    for step in distances:
        edges = []
        later = [d for d in distances if d >= step]
        for r in range(devices):
            piece = (r - direction * step) % devices
            if any(needed[(piece + direction * d) % devices, piece] for d in later):
                edges.append(((r - direction) % devices, r))
        moves.append(Move(direction * step, tuple(edges)))
    while moves and not moves[-1].edges:
        moves.pop()
    return tuple(moves)


def plan(needed: np.ndarray) -> Schedule:
    """The schedule with the fewest moves: each needed distance is reached going up or going down, whichever costs
    less.
    """
    devices = len(needed)
    distances = sorted({int((r - s) % devices) for r, s in zip(*np.nonzero(needed), strict=True)} - {0})
    best: tuple[int, int] | None = None
    for split in range(len(distances) + 1):
        up = distances[split - 1] if split else 0
        down = devices - distances[split] if split < len(distances) else 0
        if best is None or up + down <= sum(best):  # ties go up: one direction is simpler to follow
            best = (up, down)
    up, down = best or (0, 0)
    return Schedule(_moves(needed, list(range(1, up + 1)), 1), _moves(needed, list(range(1, down + 1)), -1))
