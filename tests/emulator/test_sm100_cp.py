"""tcgen05.cp: which lane and column each 32-bit word of the source reaches."""

import numpy as np
import pytest

from tests.emulator.sm100.cp import copy_shape, execute
from tests.emulator.sm100.descriptors import decode_shared
from tests.emulator.sm100.tmem import TensorAddress, TensorMemory, TensorMemoryError


def source_words(rows: int, words: int) -> tuple[np.ndarray, np.ndarray]:
    """Shared memory with an unswizzled K-major source (8x16-byte core matrices) and its words (rows, words)."""
    shared = np.zeros(16384, np.uint8)
    values = np.arange(rows * words, dtype=np.uint32).reshape(rows, words) + 1
    flat = shared.view(np.uint32)
    for row in range(rows):
        for word in range(words):
            at = 1024 + row % 8 * 16 + row // 8 * 128 + word // 4 * 4096 + word % 4 * 4
            flat[at // 4] = values[row, word]
    return shared, values


# (shape, multicast) -> (rows, words per row, source row of each lane)
CASES = {
    ("128x256b", ""): (128, 8, {lane: lane for lane in range(128)}),
    ("128x128b", ""): (128, 4, {lane: lane for lane in range(128)}),
    ("4x256b", ""): (4, 8, {0: 0, 32: 1, 64: 2, 96: 3}),
    ("64x128b", "warpx2::02_13"): (64, 4, {lane: lane % 64 for lane in range(128)}),
    ("64x128b", "warpx2::01_23"): (64, 4, {lane: lane % 32 + 32 * (lane // 64) for lane in range(128)}),
    ("32x128b", "warpx4"): (32, 4, {lane: lane % 32 for lane in range(128)}),
}


@pytest.mark.parametrize("shape,multicast", CASES)
def test_lanes_and_columns(shape, multicast):
    rows, words, row_of_lane = CASES[shape, multicast]
    shared, values = source_words(rows, words)
    memory = TensorMemory()
    memory.allocate(0, 32)
    descriptor = decode_shared(1024 >> 4 | 4096 >> 4 << 16 | 128 >> 4 << 32 | 1 << 46)
    execute(copy_shape(shape, multicast), TensorAddress(0, 8), descriptor, shared.view(np.complex128), memory)
    for lane in range(128):
        if lane in row_of_lane:
            np.testing.assert_array_equal(memory.words[8 : 8 + words, lane], values[row_of_lane[lane]])
        else:
            assert not memory.written[:, lane].any()
    assert memory.written.sum() == len(row_of_lane) * words


def test_unknown_combination():
    with pytest.raises(TensorMemoryError, match="warpx4"):
        copy_shape("64x128b", "warpx4")
