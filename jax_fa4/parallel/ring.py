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
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jax_fa4.config import AttentionConfig, Gradients, Operands
from jax_fa4.parallel import layout as layouts
from jax_fa4.parallel.block import Engine, Placement, slice_tokens
from jax_fa4.parallel.schedule import UNBOUNDED, Move, Schedule, needed_pieces, plan


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
    pairs: tuple[tuple[int, tuple[tuple[int, int, bool], ...]], ...]
    """(offset, pairs): chunk pairs that some device needs at that offset; True where every device does."""


def make_ring(config: AttentionConfig, engine: Engine, placement: Placement, *, static_offset: bool) -> Ring:
    """Works out who needs what. With a traced query offset the affine mask excludes nothing in advance."""
    reach = placement.reach(config) if static_offset else UNBOUNDED
    devices = placement.devices
    needed = needed_pieces(reach, placement.layout, devices, placement.query_chunk, placement.key_chunk)
    schedule = plan(needed)
    chunks = layouts.chunk_indices(placement.layout, devices)
    pairs = []
    for offset in (0, *(m.offset for m in schedule.up), *(m.offset for m in schedule.down)):
        found = []
        for a in range(chunks.shape[1]):
            for b in range(chunks.shape[1]):
                seen = [
                    reach.allows(
                        int(chunks[r, a]) * placement.query_chunk,
                        int(chunks[(r - offset) % devices, b]) * placement.key_chunk,
                        placement.query_chunk,
                        placement.key_chunk,
                    )
                    for r in range(devices)
                ]
                if any(seen):
                    found.append((a, b, all(seen)))
        pairs.append((offset, tuple(found)))
    return Ring(config, engine, placement, schedule, tuple(pairs))


def _send(tree, move: Move, axis_name):
    """One move of every array of a pytree, each in a transfer of its own dtype."""
    return jax.tree.map(lambda x: lax.ppermute(x, axis_name, move.edges), tree)


def _merge(out: Array, lse: Array, new_out: Array, new_lse: Array) -> tuple[Array, Array]:
    """Softmax-weighted mean of two partial results; out (B, T, N, Hv) float32, lse (B, N, T)."""
    peak = jnp.maximum(lse, new_lse)
    peak = jnp.where(jnp.isneginf(peak), 0, peak)
    weight, new_weight = jnp.exp(lse - peak), jnp.exp(new_lse - peak)
    total = weight + new_weight
    safe = jnp.where(total == 0, 1, total)

    def spread(w: Array) -> Array:
        return (w / safe).swapaxes(1, 2)[..., None]

    merged = out * spread(weight) + new_out.astype(jnp.float32) * spread(new_weight)
    return merged, jnp.where(total == 0, -jnp.inf, jnp.log(safe) + peak)


def _travel(ring: Ring, operands: Operands, visit):
    """Calls ``visit(offset, piece)`` for every stop of every piece at this device, transfers issued one step ahead."""
    axis = ring.placement.axis_name
    home = Piece(operands.key, operands.value, operands.key_value_segment_ids)
    arriving = {moves: _send(home, moves[0], axis) for moves in (ring.schedule.up, ring.schedule.down) if moves}
    visit(0, home)
    for moves, piece in arriving.items():
        for i, move in enumerate(moves):
            following = _send(piece, moves[i + 1], axis) if i + 1 < len(moves) else piece
            visit(move.offset, piece)
            piece = following


def _visible(ring: Ring, operands: Operands, offset: int, a: int, b: int) -> Array:
    """Whether this device's query chunk ``a`` sees chunk ``b`` of the piece it holds after moves by ``offset``."""
    place = ring.placement
    distance = place.position_difference(operands, offset, a, b)
    visible = jnp.ones((), bool)
    if ring.config.window_right is not None:
        visible &= jnp.max(distance) + place.query_chunk - 1 + ring.config.window_right >= 0
    if ring.config.window_left is not None:
        visible &= jnp.min(distance) - ring.config.window_left <= place.key_chunk - 1
    return visible


def _forward(ring: Ring, operands: Operands) -> tuple[Array, Array]:
    place, engine = ring.placement, ring.engine
    pairs = dict(ring.pairs)
    chunks = layouts.chunks_per_device(place.layout)
    batch, _, heads, _ = operands.query.shape
    shape = (batch, place.query_chunk, heads, operands.value.shape[-1])
    results = [
        place.vary(operands, jnp.zeros(shape, jnp.float32), jnp.full((batch, heads, shape[1]), -jnp.inf))
        for _ in range(chunks)
    ]

    def visit(offset: int, piece: Piece) -> None:
        for a, b, always in pairs[offset]:

            def attend(out, lse, a=a, b=b, offset=offset, piece=piece):
                return _merge(out, lse, *engine.forward(ring.config, _pair(ring, operands, piece, offset, a, b)))

            if always:
                results[a] = attend(*results[a])
            else:
                seen = _visible(ring, operands, offset, a, b)
                results[a] = lax.cond(seen, attend, lambda out, lse: (out, lse), *results[a])

    _travel(ring, operands, visit)
    out = jnp.concatenate([out for out, _ in results], 1)
    return out.astype(operands.query.dtype), jnp.concatenate([lse for _, lse in results], 2)


def _pair(ring: Ring, operands: Operands, piece: Piece, offset: int, a: int, b: int) -> Operands:
    """Operands of the attention of query chunk ``a`` to chunk ``b`` of a piece."""
    place = ring.placement
    local = operands._replace(key=piece.key, value=piece.value, key_value_segment_ids=piece.segment_ids)
    return place.pair(local, offset, a, b)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def ring_core(ring: Ring, operands: Operands) -> tuple[Array, Array]:
    """(out, lse) of this device's queries over the whole sequence."""
    return _forward(ring, operands)


def _ring_forward(ring: Ring, operands: Operands):
    out, lse = _forward(ring, operands)
    return (out, lse), (operands, out, lse)


class _Homeward(NamedTuple):
    """Gradients of one piece, travelling with it: float32 (B, S_local, K, H) and (B, S_local, K, Hv)."""

    key: Array
    value: Array


def _ring_backward(ring: Ring, residuals, cotangents):
    operands, out, lse = residuals
    d_out, d_lse = cotangents
    place, engine, axis = ring.placement, ring.engine, ring.placement.axis_name
    pairs = dict(ring.pairs)
    chunks = layouts.chunks_per_device(place.layout)

    wanted = frozenset({"query", "key", "value"} | ({"scale"} if operands.scale is not None else set()))

    def zeros(x: Array) -> Array:
        return place.vary(operands, jnp.zeros(x.shape, jnp.float32))[0]

    d_query = [zeros(slice_tokens(operands.query, place.query_chunk, a)) for a in range(chunks)]
    d_scale = [None if operands.scale is None else zeros(operands.scale)]
    total = {"home": _Homeward(zeros(operands.key), zeros(operands.value))}
    carried: dict[int, _Homeward] = {}

    def contributions(offset: int, piece: Piece) -> _Homeward:
        """Adds to this device's dQ, returns what it adds to the piece's dK and dV."""
        d_key = [zeros(slice_tokens(piece.key, place.key_chunk, b)) for b in range(chunks)]
        d_value = [zeros(slice_tokens(piece.value, place.key_chunk, b)) for b in range(chunks)]
        for a, b, always in pairs[offset]:
            rows = functools.partial(slice_tokens, length=place.query_chunk, index=a)
            row_values = functools.partial(slice_tokens, length=place.query_chunk, index=a, axis=2)

            def add(sums, a=a, b=b, rows=rows, row_values=row_values):
                pair = _pair(ring, operands, piece, offset, a, b)
                grads = engine.backward(
                    ring.config, pair, rows(out), row_values(lse), rows(d_out), row_values(d_lse), wanted
                )
                new = (grads.query, grads.key, grads.value, grads.scale)
                return tuple(
                    None if old is None else old + x.astype(jnp.float32) for old, x in zip(sums, new, strict=True)
                )

            sums = (d_query[a], d_key[b], d_value[b], d_scale[0])
            if always:
                sums = add(sums)
            else:
                sums = lax.cond(_visible(ring, operands, offset, a, b), add, lambda s: s, sums)
            d_query[a], d_key[b], d_value[b], d_scale[0] = sums
        return _Homeward(jnp.concatenate(d_key, 1), jnp.concatenate(d_value, 1))

    moves = {m.offset: m for m in (*ring.schedule.up, *ring.schedule.down)}

    def visit(offset: int, piece: Piece) -> None:
        added = contributions(offset, piece)
        if offset == 0:
            total["home"] = jax.tree.map(jnp.add, total["home"], added)
            return
        direction = 1 if offset > 0 else -1
        before = carried.pop(offset - direction, None)
        if before is not None:
            added = jax.tree.map(jnp.add, added, _send(before, moves[offset], axis))
        following = moves.get(offset + direction)
        going_on = set() if following is None else {source for source, _ in following.edges}
        stopping = tuple(
            (rank, (rank - offset) % place.devices) for _, rank in moves[offset].edges if rank not in going_on
        )
        if stopping:
            total["home"] = jax.tree.map(jnp.add, total["home"], _send(added, Move(0, stopping), axis))
        if going_on:
            carried[offset] = added

    _travel(ring, operands, visit)
    gradients = Gradients(
        query=jnp.concatenate(d_query, 1), key=total["home"].key, value=total["home"].value, scale=d_scale[0]
    )
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
