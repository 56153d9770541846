"""Masks: visibility of tiles and block ranges, against the definition, pair by pair."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_fa4 import masks
from jax_fa4.config import AttentionConfig, Operands
from tests.reference import visible_pairs

QUICK = settings(max_examples=400, derandomize=True, deadline=None, database=None)

bounds = st.one_of(st.none(), st.integers(0, 40))


@st.composite
def affine(draw):
    return {
        "left": draw(bounds),
        "right": draw(bounds),
        "offset": draw(st.integers(-40, 40)),
        "q_len": draw(st.integers(0, 40)),
        "kv_len": draw(st.integers(0, 40)),
    }


def pairs(mask, rows, cols):
    """Visible pairs of an affine mask by definition, (rows, cols)."""
    i, j = np.arange(rows)[:, None], np.arange(cols)[None]
    position = i + mask["offset"]
    seen = (i < mask["q_len"]) & (j < mask["kv_len"])
    if mask["left"] is not None:
        seen &= j >= position - mask["left"]
    if mask["right"] is not None:
        seen &= j <= position + mask["right"]
    return seen


@QUICK
@given(affine(), st.integers(0, 5), st.integers(1, 9), st.integers(1, 9))
def test_affine_key_blocks_are_exactly_those_with_a_visible_pair(mask, block, rows, tile_n):
    row = block * rows
    seen = pairs(mask, row + rows, 45 * tile_n)[row:].any(axis=0).reshape(-1, tile_n).any(axis=1)
    start, stop = masks.affine_key_blocks(row, rows, tile_n, **mask)
    assert start <= stop
    if seen.any():
        # The keys that a tile sees are contiguous, so the range is tight.
        assert (start, stop) == (int(np.argmax(seen)), len(seen) - int(np.argmax(seen[::-1])))
    else:
        assert start == stop


@QUICK
@given(affine(), st.integers(0, 5), st.integers(1, 9), st.integers(1, 9))
def test_affine_full_key_blocks_hold_only_visible_pairs(mask, block, rows, tile_n):
    row = block * rows
    last = min(row + rows, mask["q_len"])
    seen = pairs(mask, row + rows, 45 * tile_n)[row:last].all(axis=0).reshape(-1, tile_n).all(axis=1)
    start, stop = masks.affine_key_blocks(row, rows, tile_n, **mask)
    full_start, full_stop = masks.affine_full_key_blocks(row, rows, tile_n, **mask)
    assert start <= full_start <= full_stop <= stop
    inside = [n for n in range(start, stop) if seen[n]]
    assert list(range(full_start, full_stop)) == inside


@QUICK
@given(affine(), st.integers(0, 5), st.integers(1, 9), st.integers(1, 9))
def test_affine_query_blocks_are_exactly_those_with_a_visible_pair(mask, block, keys, tile_m):
    key = block * keys
    seen = pairs(mask, 45 * tile_m, key + keys)[:, key:].any(axis=1).reshape(-1, tile_m).any(axis=1)
    start, stop = masks.affine_query_blocks(key, keys, tile_m, **mask)
    if seen.any():
        assert (start, stop) == (int(np.argmax(seen)), len(seen) - int(np.argmax(seen[::-1])))
    else:
        assert start == stop


def test_affine_formulas_give_the_same_in_python_numpy_and_jax():
    row = np.arange(6, dtype=np.int32) * 8
    mask = {"left": 5, "right": 3, "offset": -4, "q_len": 37, "kv_len": 29}
    for function in (masks.affine_key_blocks, masks.affine_full_key_blocks, masks.affine_query_blocks):
        python = np.array([function(int(r), 8, 4, **mask) for r in row]).T
        numpy = function(row, 8, 4, **mask, minimum=np.minimum, maximum=np.maximum)
        traced = jax.jit(
            lambda row, function=function: function(row, 8, 4, **mask, minimum=jnp.minimum, maximum=jnp.maximum)
        )(row)
        np.testing.assert_array_equal(python, np.stack(np.broadcast_arrays(*numpy)))
        np.testing.assert_array_equal(python, np.stack(np.broadcast_arrays(*traced)))


def test_extreme_bounds_stay_in_int32():
    huge = 2**30
    mask = {"left": huge, "right": huge, "offset": 2**29, "q_len": 8, "kv_len": 8}
    row = np.array([0, 4], np.int32)
    as32 = {name: np.int32(x) for name, x in mask.items()}
    with np.errstate(over="raise"):
        start, stop = masks.affine_key_blocks(row, 4, 4, **as32, minimum=np.minimum, maximum=np.maximum)
    np.testing.assert_array_equal(start, [0, 0])
    np.testing.assert_array_equal(stop, [2, 2])


@QUICK
@given(st.integers(0, 2**31))
def test_interval_blocks(seed):
    rng = np.random.default_rng(seed)
    rows, keys, tile_n = 6, 30, int(rng.integers(1, 8))
    start, stop = rng.integers(0, keys + 1, size=(2, 3, rows)).astype(np.int32)
    low, high = masks.interval_key_blocks(start, stop, tile_n)
    for k in range(3):
        seen = {j // tile_n for i in range(rows) for j in range(start[k, i], stop[k, i])}
        assert (low[k], high[k]) == ((min(seen), max(seen) + 1) if seen else (0, 0))
    traced = masks.interval_key_blocks(jnp.asarray(start), jnp.asarray(stop), tile_n)
    np.testing.assert_array_equal(traced[0], low)
    np.testing.assert_array_equal(traced[1], high)


@pytest.mark.parametrize("seed", range(5))
def test_sorted_segments_are_intervals(seed):
    rng = np.random.default_rng(seed)
    query = rng.integers(-2, 4, size=(3, 11)).astype(np.int32)
    key = np.sort(rng.integers(-2, 4, size=(3, 13)).astype(np.int32), axis=1)
    start, stop = masks.segment_intervals(jnp.asarray(query), jnp.asarray(key))
    want = masks.SegmentMask(jnp.asarray(query), jnp.asarray(key)).visible(0, 11, 0, 13)
    interval = masks.IntervalMask(start, stop)
    np.testing.assert_array_equal(np.broadcast_to(interval.visible(0, 11, 0, 13), want.shape), want)
    np.testing.assert_array_equal(want[:, 0], query[:, :, None] == key[:, None, :])
    # Both find the same occupied tiles when the query ids ascend too; otherwise each finds at least the true ones.
    true = np.asarray(want).any(axis=(0, 1))
    true = np.pad(true, ((0, 1), (0, 3))).reshape(3, 4, 4, 4).any(axis=(1, 3))
    for mask in (interval, masks.SegmentMask(jnp.asarray(query), jnp.asarray(key))):
        assert (np.asarray(mask.occupied(4, 4, 3, 4)) >= true).all()


ROWS, COLS = 13, 18
SETTINGS = [
    {},
    {"is_causal": True},
    {"is_causal": True, "query_offset": np.array([5, -6], np.int32)},
    {"local_window_size": (2, 4), "query_seq_lengths": np.array([13, 4], np.int32)},
    {"local_window_size": (None, 0), "query_offset": 3, "key_value_seq_lengths": np.array([0, 7], np.int32)},
    {"query_segment_ids": np.sort(np.random.default_rng(0).integers(0, 3, (2, ROWS)).astype(np.int32), axis=1),
     "key_value_segment_ids": np.sort(np.random.default_rng(1).integers(0, 3, (2, COLS)).astype(np.int32), axis=1)},
]  # fmt: skip


@pytest.mark.parametrize("dense", [None, (2, 1, ROWS, COLS), (1, 3, 1, COLS), (1, 1, ROWS, 1)])
@pytest.mark.parametrize("setting", SETTINGS)
def test_mask_of_a_call(setting, dense):
    """Whole-array visibility is the reference's; tiles are its parts; no tile with a visible pair is skipped."""
    array = None if dense is None else np.random.default_rng(2).random(dense) < 0.2
    names = {"query_seq_lengths": "query_lengths", "key_value_seq_lengths": "key_value_lengths"}
    arrays = {names.get(k, k): jnp.asarray(x) for k, x in setting.items() if isinstance(x, np.ndarray)}
    left, right = setting.get("local_window_size", (None, None))
    right = 0 if setting.get("is_causal") else right
    offset = setting.get("query_offset", 0)
    config = AttentionConfig(1.0, left, right, offset if isinstance(offset, int) else 0)
    operands = Operands(
        *(jnp.zeros((2, n, 3, 1)) for n in (ROWS, COLS, COLS)),
        mask=None if array is None else jnp.asarray(array),
        **arrays,
    )
    want = visible_pairs(2, ROWS, COLS, **setting)[:, None]
    want = np.broadcast_to(want if array is None else want & array, (2, 3, ROWS, COLS))

    whole = masks.mask_of(config, operands).visible(0, ROWS, 0, COLS)
    np.testing.assert_array_equal(True if whole is None else np.broadcast_to(whole, want.shape), want)

    tile_m, tile_n, blocks_m, blocks_n = 5, 4, 3, 5
    mask = masks.mask_of(config, operands, padded_t=tile_m * blocks_m, padded_s=tile_n * blocks_n)
    padded = np.pad(want, ((0, 0), (0, 0), (0, 2), (0, 2)))
    occupied = np.asarray(mask.occupied(tile_m, tile_n, blocks_m, blocks_n))
    for m in range(blocks_m):
        for n in range(blocks_n):
            part = padded[:, :, m * tile_m : (m + 1) * tile_m, n * tile_n : (n + 1) * tile_n]
            tile = mask.visible(m * tile_m, tile_m, n * tile_n, tile_n)
            np.testing.assert_array_equal(np.broadcast_to(tile, part.shape), part)
            assert occupied[m, n] or not part.any(), "a tile with a visible pair is skipped"
    if array is None and "query_segment_ids" not in setting:
        for m in range(blocks_m):
            tiles = [padded[:, :, m * tile_m : (m + 1) * tile_m, n * tile_n : (n + 1) * tile_n] for n in range(5)]
            assert [bool(x.any()) for x in tiles] == list(occupied[m]), "an affine mask's empty tiles are skipped"
