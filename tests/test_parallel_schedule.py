"""The ring's schedule and the sequence layouts, by simulation over ranks."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from jax_fa4.parallel import layout
from jax_fa4.parallel.schedule import Reach, needed_pieces, plan
from jax_fa4.parallel.tasks import Chunks, Task, plan_stop

WINDOWS = [(None, None), (None, 0), (0, 0), (5, 0), (17, 0), (3, 40), (40, 3), (None, -20), (-9, 30), (100, 100)]


def brute_force(reach: Reach, kind: str, devices: int, chunk: int) -> np.ndarray:
    """needed_pieces from the mask itself, token by token."""
    length = devices * chunk * layout.chunks_per_device(kind)
    owner = np.empty(length, int)
    owner[layout.positions(kind, devices, length)] = np.repeat(np.arange(devices), length // devices)
    row, column = np.arange(length)[:, None], np.arange(length)[None]
    mask = np.ones((length, length), bool)
    if reach.right is not None:
        mask &= column - row <= reach.right
    if reach.left is not None:
        mask &= row - column <= reach.left
    needed = np.zeros((devices, devices), bool)
    np.logical_or.at(needed, (owner[:, None] + 0 * column, owner[None] + 0 * row), mask)
    return needed


@pytest.mark.parametrize("kind", layout.LAYOUTS)
@pytest.mark.parametrize("devices", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("window", WINDOWS)
def test_every_needed_piece_arrives_and_nothing_else_moves(kind: str, devices: int, window: tuple) -> None:
    chunk = 6
    needed = needed_pieces(Reach(*window), kind, devices, chunk, chunk)
    np.testing.assert_array_equal(needed, brute_force(Reach(*window), kind, devices, chunk))
    schedule = plan(needed)
    visited = np.eye(devices, dtype=bool)
    for moves, direction in ((schedule.up, 1), (schedule.down, -1)):
        held: list[int | None] = list(range(devices))
        history = []
        for step, move in enumerate(moves, 1):
            assert move.offset == direction * step
            sources, destinations = [s for s, _ in move.edges], [d for _, d in move.edges]
            assert len(set(sources)) == len(sources) and len(set(destinations)) == len(destinations)
            arriving: list[int | None] = [None] * devices
            for source, destination in move.edges:
                assert destination == (source + direction) % devices
                assert held[source] is not None, "a device forwards a piece that it never received"
                arriving[destination] = held[source]
            held = arriving
            history.append(held)
            for r, s in enumerate(held):
                if s is not None:
                    assert s == (r - move.offset) % devices
                    visited[r, s] = True
        for step, row in enumerate(history):
            for r, s in enumerate(row):
                if s is not None:
                    onward = [needed[(r + direction * k) % devices, s] for k in range(len(history) - step)]
                    assert any(onward), "a transfer that nobody needs"
    assert not (needed & ~visited).any()


@pytest.mark.parametrize("kind", layout.LAYOUTS)
@pytest.mark.parametrize("devices", [1, 2, 3, 4])
@pytest.mark.parametrize("query_chunk", [6, 9])
@pytest.mark.parametrize("window", WINDOWS)
def test_tasks_cover_each_visible_pair_once(kind: str, devices: int, query_chunk: int, window: tuple) -> None:
    reach, chunks = Reach(*window), Chunks(kind, devices, query_chunk, 6)
    table = layout.chunk_indices(kind, devices)
    for offset in range(devices):
        stop = plan_stop(reach, chunks, offset)
        for rank in range(devices):

            def positions(length: int, chunk: int, row: np.ndarray) -> np.ndarray:
                return (row[:, None] * length + np.arange(chunk)).reshape(-1)

            rows = positions(query_chunk, query_chunk, table[rank])
            columns = positions(6, 6, table[(rank - offset) % devices])
            distance = columns[None] - rows[:, None]
            visible = np.ones_like(distance, bool)
            if reach.right is not None:
                visible &= distance <= reach.right
            if reach.left is not None:
                visible &= distance >= -reach.left
            count = np.zeros_like(distance)
            for task in stop.programs[stop.choice[rank]]:
                (a, a_end), (b, b_end) = task.queries, task.keys
                block = np.s_[a * query_chunk : a_end * query_chunk, b * 6 : b_end * 6]
                count[block] += 1
                assert visible[block].any(), "a call that sees nothing"
                if task.mask == "none":
                    assert visible[block].all()
                elif task.mask == "aligned":  # local indices stand for positions: the mask is the same
                    i, j = np.indices(visible[block].shape)
                    local = np.ones_like(visible[block])
                    if reach.right is not None:
                        local &= j - i <= reach.right
                    if reach.left is not None:
                        local &= j - i >= -reach.left
                    np.testing.assert_array_equal(local, visible[block])
                else:
                    assert (a_end - a, b_end - b) == (1, 1)
            assert (count[visible] == 1).all() and count.max(initial=0) <= 1


def test_causal_zigzag_makes_one_call_at_each_stop() -> None:
    home, away = (plan_stop(Reach(None, 0), Chunks("zigzag", 4, 8, 8), offset) for offset in (0, 1))
    assert home.programs == ((Task((0, 2), (0, 2), "aligned"),),)
    assert away.choice == (0, 1, 1, 1)  # rank 0 holds the last rank's piece, the others an earlier one
    assert away.programs == ((Task((1, 2), (0, 2), "none"),), (Task((0, 2), (0, 1), "none"),))


def test_nothing_is_left_out_where_the_mask_is_not_known() -> None:
    (program,) = plan_stop(None, Chunks("zigzag", 4, 8, 8), 1).programs
    assert len(program) == 4 and {task.mask for task in program} == {"placed"}


def test_causal_contiguous_ring_sends_nothing_backwards() -> None:
    schedule = plan(needed_pieces(Reach(None, 0), "contiguous", 4, 8, 8))
    assert [len(m.edges) for m in schedule.up] == [3, 2, 1]
    assert not schedule.down


def test_short_window_needs_one_move() -> None:
    assert len(plan(needed_pieces(Reach(8, 0), "contiguous", 8, 16, 16)).up) == 1
    both = plan(needed_pieces(Reach(8, 8), "contiguous", 8, 16, 16))
    assert (len(both.up), len(both.down)) == (1, 1)


@pytest.mark.parametrize("kind, devices", list(itertools.product(layout.LAYOUTS, [1, 2, 4, 8])))
def test_layout_round_trip_and_pieces(kind: str, devices: int) -> None:
    x = np.arange(devices * 12 * 3).reshape(1, devices * 12, 3)
    there = np.asarray(layout.to_layout(x, devices, layout=kind))
    np.testing.assert_array_equal(layout.from_layout(there, devices, layout=kind), x)
    np.testing.assert_array_equal(there[0], x[0][layout.positions(kind, devices, devices * 12)])
    pieces = np.split(there, devices, 1)
    chunks = np.split(x, devices * layout.chunks_per_device(kind), 1)
    for rank, piece in enumerate(pieces):
        expected = np.concatenate([chunks[i] for i in layout.chunk_indices(kind, devices)[rank]], 1)
        np.testing.assert_array_equal(piece, expected)


def test_bad_layout_and_length() -> None:
    with pytest.raises(ValueError, match="layout: got 'diagonal'"):
        layout.to_layout(np.zeros((1, 8)), 2, layout="diagonal")
    with pytest.raises(ValueError, match="multiple of 8"):
        layout.to_layout(np.zeros((1, 12)), 4, layout="zigzag")
