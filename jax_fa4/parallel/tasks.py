"""Which calls of attention a device makes at a stop of the ring: plain Python over ranks, decided while tracing.

A device holds one or two chunks of queries, the piece that has arrived as many chunks of keys. Chunk pairs that the
mask hides are left out, neighbouring ones that it leaves whole are one call without a mask, and the causal triangle of
a device's own tokens is one call too: in the order in which a device holds them, tokens lie as in the sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from jax_fa4.parallel import layout as layouts
from jax_fa4.parallel.schedule import Reach


@dataclass(frozen=True)
class Task:
    """One call: query chunks ``queries`` attend to the piece's key chunks ``keys`` (each first and end).

    ``mask`` says what becomes of the affine mask. "none": every pair is visible. "aligned": first query and first key
    have the same position, so that the call's own offset serves. "placed": the chunks' positions give the offset.
    """

    queries: tuple[int, int]
    keys: tuple[int, int]
    mask: Literal["none", "aligned", "placed"]


Program = tuple[Task, ...]
"""What one device does with one piece; may be nothing."""


@dataclass(frozen=True)
class Stop:
    """What all devices do after moves by ``offset``: ``programs[choice[rank]]``. Programs differ from one another."""

    offset: int
    programs: tuple[Program, ...]
    choice: tuple[int, ...]


@dataclass(frozen=True)
class Chunks:
    """How the sequence is cut: layout, devices, tokens in a chunk of queries and of keys."""

    layout: str
    devices: int
    query: int
    key: int


def plan_stop(reach: Reach | None, chunks: Chunks, offset: int) -> Stop:
    """The programs of one stop.

    Args:
      reach: what the affine mask lets through, or None where that is not known while tracing (every chunk pair is then
        a task of its own, "placed").
      chunks: how the sequence is cut.
      offset: moves up that brought the pieces here.
    """
    by_rank = [_program(reach, chunks, offset, rank) for rank in range(chunks.devices)]
    programs = tuple(dict.fromkeys(by_rank))
    return Stop(offset, programs, tuple(programs.index(program) for program in by_rank))


def _program(reach: Reach | None, chunks: Chunks, offset: int, rank: int) -> Program:
    table = layouts.chunk_indices(chunks.layout, chunks.devices)
    queries = [int(a) * chunks.query for a in table[rank]]
    keys = [int(b) * chunks.key for b in table[(rank - offset) % chunks.devices]]
    count = len(queries)
    pairs = [(a, b) for a in range(count) for b in range(count)]
    if reach is None:
        return tuple(Task((a, a + 1), (b, b + 1), "placed") for a, b in pairs)
    same_tokens = offset == 0 and chunks.query == chunks.key
    if same_tokens and reach == Reach(None, 0):
        return (Task((0, count), (0, count), "aligned"),)
    lengths = (chunks.query, chunks.key)
    whole = {(a, b) for a, b in pairs if reach.allows_all(queries[a], keys[b], *lengths)}
    tasks = _rectangles(whole, count)
    for a, b in pairs:
        if (a, b) not in whole and reach.allows(queries[a], keys[b], *lengths):
            tasks.append(Task((a, a + 1), (b, b + 1), "aligned" if same_tokens and a == b else "placed"))
    return tuple(sorted(tasks, key=lambda task: (task.queries, task.keys)))


def _rectangles(pairs: set[tuple[int, int]], count: int) -> list[Task]:
    """Calls without a mask that cover ``pairs`` once each: runs of keys, the same run of several rows together."""
    runs: list[Task] = []
    for a in range(count):
        b = 0
        while b < count:
            end = b
            while (a, end) in pairs:
                end += 1
            if end > b:
                above = next((run for run in runs if run.queries[1] == a and run.keys == (b, end)), None)
                if above is not None:
                    runs.remove(above)
                runs.append(Task((above.queries[0] if above else a, a + 1), (b, end), "none"))
            b = end + 1
    return runs
