"""Ring attention: K/V pieces travel around the devices of a mesh axis, queries stay (Liu, Zaharia, Abbeel 2023,
section 3).

Forward: device r attends its queries to the piece it holds while the next one is on its way; partial results are merged
by their LSE in float32. Backward: K/V travel again, and a float32 accumulator of dK and dV travels with each piece,
until it goes home in one hop. Both directions add in an order fixed by the schedule, so that results are the same
bits every time.

Data flow of one direction of travel (``schedule.py`` says which edges exist):

    step i:  send piece(i) up ─┐          attend(own queries, piece(i)) ─→ merge
    step i+1:                  └→ piece(i+1)  …

The transfer of step i has no dependency on the attention of step i, so that XLA's scheduler overlaps them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jax_fa4.config import AttentionConfig, Gradients, Operands
from jax_fa4.parallel import layout as layouts
from jax_fa4.parallel.block import Engine, Placement, slice_chunks
from jax_fa4.parallel.schedule import UNBOUNDED, Move, Schedule, needed_pieces, plan
from jax_fa4.parallel.tasks import Program, Stop, Task, plan_stop


class Piece(NamedTuple):
    """What travels forward: one device's keys, values and their segment ids."""

    key: Array
    value: Array
    segment_ids: Array | None


class Ring(NamedTuple):
    """Everything static about one ring call; hashable."""

    config: AttentionConfig
    engine: Engine
    placement: Placement
    schedule: Schedule
    stops: tuple[Stop, ...]
    known: bool
    """Whether the schedule and the stops were made knowing the mask; else each task asks whether it sees anything."""

    def stop(self, offset: int) -> Stop:
        """The stop after moves by ``offset``."""
        return next(stop for stop in self.stops if stop.offset == offset)


def make_ring(config: AttentionConfig, engine: Engine, placement: Placement, *, static_offset: bool) -> Ring:
    """Works out who needs what. With a traced query offset an affine mask excludes nothing in advance."""
    known = static_offset or config.mask_kind == "none"
    reach = placement.reach(config) if known else UNBOUNDED
    needed = needed_pieces(reach, placement.layout, placement.devices, placement.query_chunk, placement.key_chunk)
    schedule = plan(needed)
    offsets = (0, *(m.offset for m in schedule.up), *(m.offset for m in schedule.down))
    stops = tuple(plan_stop(reach if known else None, placement.chunks, offset) for offset in offsets)
    return Ring(config, engine, placement, schedule, stops, known)


def _join(tree) -> list[Array]:
    """The arrays of a pytree as one flat array for each dtype.

    XLA keeps one collective in flight: of two that could hide under the same attention only one would.
    """
    leaves = jax.tree.leaves(tree)
    dtypes = dict.fromkeys(x.dtype for x in leaves)
    groups = ([jnp.reshape(x, -1) for x in leaves if x.dtype == dtype] for dtype in dtypes)
    return [group[0] if len(group) == 1 else jnp.concatenate(group) for group in groups]


def _part_again(joined: list[Array], like):
    """Inverse of :func:`_join`, for a pytree like ``like``."""
    starts = {x.dtype: 0 for x in joined}
    flat = {x.dtype: x for x in joined}

    def take(x: Array) -> Array:
        start = starts[x.dtype]
        starts[x.dtype] += x.size
        return jnp.reshape(lax.slice_in_dim(flat[x.dtype], start, start + x.size), x.shape)

    return jax.tree.map(take, like)


def _send(arrays, move: Move, axis_name):
    """One move of every array of a pytree, each in a transfer of its own."""
    return jax.tree.map(lambda x: lax.ppermute(x, axis_name, move.edges), arrays)


def _sum_dtype(operands: Operands) -> Any:
    """Partial results and gradients add in float32, those of float64 operands in float64."""
    return jnp.promote_types(operands.query.dtype, jnp.float32)


def _merge(out: Array, lse: Array, new_out: Array, new_lse: Array) -> tuple[Array, Array]:
    """Softmax-weighted mean of two partial results; out (B, T, N, Hv) and lse (B, N, T) of :func:`_sum_dtype`."""
    peak = jnp.maximum(lse, new_lse)
    peak = jnp.where(jnp.isneginf(peak), 0, peak)
    weight, new_weight = jnp.exp(lse - peak), jnp.exp(new_lse - peak)
    total = weight + new_weight
    safe = jnp.where(total == 0, 1, total)

    def spread(w: Array) -> Array:
        return (w / safe).swapaxes(1, 2)[..., None]

    merged = out * spread(weight) + new_out.astype(out.dtype) * spread(new_weight)
    return merged, jnp.where(total == 0, -jnp.inf, jnp.log(safe) + peak)


def _travel(ring: Ring, operands: Operands, visit):
    """Calls ``visit(offset, piece, sharing)`` for every stop of every piece at this device, transfers issued one step
    ahead; ``sharing`` says whether one is under way then.

    ``visit`` returns an array of its results. What has arrived is used only once that is there: XLA would else cut
    tiles off an arrived piece as early as it can, and wait for the transfer before the attention that is to hide it.
    """
    axis = ring.placement.axis_name
    home = Piece(operands.key, operands.value, operands.key_value_segment_ids)
    joined = _join(home)
    arriving = {moves: _send(joined, moves[0], axis) for moves in (ring.schedule.up, ring.schedule.down) if moves}
    done = visit(0, home, bool(arriving))
    for moves, arrived in arriving.items():
        for i, move in enumerate(moves):
            arrived, done = lax.optimization_barrier((arrived, done))
            following = _send(arrived, moves[i + 1], axis) if i + 1 < len(moves) else arrived
            done = visit(move.offset, _part_again(arrived, home), i + 1 < len(moves))
            arrived = following


def _visible(ring: Ring, operands: Operands, offset: int, task: Task) -> Array:
    """Whether a task of one chunk pair has anything to see; for a mask that was not known in advance."""
    place = ring.placement
    distance = place.position_difference(operands, offset, task)
    visible = jnp.ones((), bool)
    if ring.config.window_right is not None:
        visible &= jnp.max(distance) + place.query_chunk - 1 + ring.config.window_right >= 0
    if ring.config.window_left is not None:
        visible &= jnp.min(distance) - ring.config.window_left <= place.key_chunk - 1
    return visible


def _run_stop(ring: Ring, offset: int, run: Callable[[Program, Any], Any], state: Any) -> Any:
    """``run(program, state)`` with this device's program. One branch for each different program, no collectives in
    them."""
    stop = ring.stop(offset)
    if len(stop.programs) == 1:
        return run(stop.programs[0], state)
    choice = jnp.asarray(stop.choice, jnp.int32)[lax.axis_index(ring.placement.axis_name)]
    branches = [functools.partial(run, program) for program in stop.programs]
    return lax.switch(choice, branches, state)


def _update(whole: Array, part: Array, start: int, axis: int) -> Array:
    """``whole`` with ``part`` in it."""
    if part.shape == whole.shape:
        return part
    return lax.dynamic_update_slice_in_dim(whole, part, start, axis)


def _forward(ring: Ring, operands: Operands) -> tuple[Array, Array]:
    place, engine = ring.placement, ring.engine
    batch, length, heads, _ = operands.query.shape
    dtype = _sum_dtype(operands)
    everything = (0, layouts.chunks_per_device(place.layout))

    def empty() -> tuple[Array, Array]:
        shape = (batch, length, heads, operands.value.shape[-1])
        out, lse = jnp.zeros(shape, dtype), jnp.full((batch, heads, length), -jnp.inf, dtype)
        return tuple(place.vary(operands, out, lse))  # type: ignore[return-value]

    def run(offset: int, piece: Piece, sharing: bool, program: Program, state: Any) -> Any:
        for task in program:

            def attend(task=task) -> tuple[Array, Array]:
                return engine.forward(*_part(ring, operands, piece, offset, task, sharing))

            def merge(state, task=task, attend=attend):
                start, chunk = task.queries[0] * place.query_chunk, place.query_chunk
                out, lse = state
                rows = slice_chunks(out, chunk, task.queries), slice_chunks(lse, chunk, task.queries, axis=2)
                new_out, new_lse = _merge(*rows, *attend())
                return _update(out, new_out, start, 1), _update(lse, new_lse, start, 2)

            if not ring.known:
                seen = _visible(ring, operands, offset, task)
                state = lax.cond(seen, merge, lambda state: state, empty() if state is None else state)
            elif state is None and task.queries == everything:
                out, lse = attend()
                state = out.astype(dtype), lse
            else:
                state = merge(empty() if state is None else state)
        return empty() if state is None else state

    state: Any = None

    def visit(offset: int, piece: Piece, sharing: bool) -> Array:
        nonlocal state
        state = _run_stop(ring, offset, functools.partial(run, offset, piece, sharing), state)
        return state[1]

    _travel(ring, operands, visit)
    out, lse = state
    return out.astype(operands.query.dtype), lse


def _part(
    ring: Ring, operands: Operands, piece: Piece, offset: int, task: Task, sharing: bool
) -> tuple[AttentionConfig, Operands]:
    """Config and operands of a task on a piece."""
    local = operands._replace(key=piece.key, value=piece.value, key_value_segment_ids=piece.segment_ids)
    return ring.placement.part(ring.config, local, offset, task, sharing=sharing)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def ring_core(ring: Ring, operands: Operands) -> tuple[Array, Array]:
    """(out, lse) of this device's queries over the whole sequence."""
    return _forward(ring, operands)


def _ring_forward(ring: Ring, operands: Operands):
    out, lse = _forward(ring, operands)
    return (out, lse), (operands, out, lse)


class _Homeward(NamedTuple):
    """Gradients of one piece, travelling with it: (B, S_local, K, H) and (B, S_local, K, Hv) of :func:`_sum_dtype`."""

    key: Array
    value: Array


class _Sums(NamedTuple):
    """A device's gradients so far: of its queries, of the piece at hand and of the scale. None for zero."""

    query: Any
    key: Any
    value: Any
    scale: Any


def _ring_backward(ring: Ring, residuals, cotangents):
    operands, out, lse = residuals
    d_out, d_lse = cotangents
    place, engine, axis = ring.placement, ring.engine, ring.placement.axis_name
    dtype = _sum_dtype(operands)
    wanted = frozenset({"query", "key", "value"} | ({"scale"} if operands.scale is not None else set()))

    def zeros(x: Array) -> Array:
        return place.vary(operands, jnp.zeros(x.shape, dtype))[0]

    def add(total: Array | None, like: Array, part: Array, chunk: int, chunks: tuple[int, int]) -> Array:
        """``total`` (None for zero), shaped like ``like``, plus ``part`` at ``chunks``."""
        part = part.astype(dtype)
        if total is None and part.shape == like.shape:
            return part
        total = zeros(like) if total is None else total
        return _update(total, slice_chunks(total, chunk, chunks) + part, chunks[0] * chunk, 1)

    def run(offset: int, piece: Piece, sharing: bool, program: Program, sums: _Sums) -> _Sums:
        for task in program:
            rows = functools.partial(slice_chunks, length=place.query_chunk, chunks=task.queries)
            row_values = functools.partial(rows, axis=2)

            def contribute(sums: _Sums, task=task, rows=rows, row_values=row_values) -> _Sums:
                config, part = _part(ring, operands, piece, offset, task, sharing)
                grads = engine.backward(
                    config, part, rows(out), row_values(lse), rows(d_out), row_values(d_lse), wanted
                )
                return _Sums(
                    add(sums.query, operands.query, grads.query, place.query_chunk, task.queries),
                    add(sums.key, piece.key, grads.key, place.key_chunk, task.keys),
                    add(sums.value, piece.value, grads.value, place.key_chunk, task.keys),
                    None if sums.scale is None else sums.scale + grads.scale.astype(dtype),
                )

            if ring.known:
                sums = contribute(sums)
            else:
                seen = _visible(ring, operands, offset, task)
                sums = lax.cond(seen, contribute, lambda sums: sums, filled(sums, piece))
        return filled(sums, piece)

    def filled(sums: _Sums, piece: Piece) -> _Sums:
        query, key, value = (
            zeros(like) if x is None else x
            for x, like in ((sums.query, operands.query), (sums.key, piece.key), (sums.value, piece.value))
        )
        return _Sums(query, key, value, sums.scale)

    d_query: Array | None = None
    d_scale = None if operands.scale is None else zeros(operands.scale)
    home: _Homeward | None = None
    carried: dict[int, _Homeward] = {}

    moves = {m.offset: m for m in (*ring.schedule.up, *ring.schedule.down)}

    def visit(offset: int, piece: Piece, sharing: bool) -> Array:
        nonlocal d_query, d_scale, home
        program = functools.partial(run, offset, piece, sharing or bool(carried))
        sums = _run_stop(ring, offset, program, _Sums(d_query, None, None, d_scale))
        d_query, d_scale, added = sums.query, sums.scale, _Homeward(sums.key, sums.value)
        if offset == 0:
            home = added
            return d_query
        direction = 1 if offset > 0 else -1
        before = carried.pop(offset - direction, None)
        if before is not None:
            arrived = _part_again(_send(_join(before), moves[offset], axis), before)
            added = jax.tree.map(jnp.add, added, arrived)
        following = moves.get(offset + direction)
        going_on = set() if following is None else {source for source, _ in following.edges}
        stopping = tuple(
            (rank, (rank - offset) % place.devices) for _, rank in moves[offset].edges if rank not in going_on
        )
        if stopping:
            home = jax.tree.map(jnp.add, home, _send(added, Move(0, stopping), axis))
        if going_on:
            carried[offset] = added
        return d_query

    _travel(ring, operands, visit)
    assert home is not None
    gradients = Gradients(query=d_query, key=home.key, value=home.value, scale=d_scale)
    return (_as_cotangents(operands, gradients),)


def _as_cotangents(operands: Operands, gradients: Gradients) -> Operands:
    """Operand-shaped cotangents: gradients in the operands' dtypes, float0 zeros for integers, None for absent ones."""

    def one(name: str, operand):
        if operand is None:
            return None
        if not jnp.issubdtype(operand.dtype, jnp.inexact):
            return np.zeros(operand.shape, jax.dtypes.float0)
        return getattr(gradients, name).astype(operand.dtype)

    return Operands(**{name: one(name, operand) for name, operand in operands._asdict().items()})


ring_core.defvjp(_ring_forward, _ring_backward)
