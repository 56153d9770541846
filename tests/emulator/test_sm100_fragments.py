"""Register layouts of tcgen05.ld/st, lane quarters of warps and TMEM allocation, against tables written out here."""

import numpy as np
import pytest

from tests.emulator.sm100.fragments import check_quarter, fragment, load, store, touched
from tests.emulator.sm100.tmem import POISON, TensorAddress, TensorMemory, TensorMemoryError

# shape -> {(thread, register): (lane, column)}: rows read off the figures of the PTX ISA.
KNOWN = {
    ("32x32b", 4): {(0, 0): (0, 0), (7, 3): (7, 3), (31, 1): (31, 1)},
    ("16x64b", 2): {
        (0, 0): (0, 0),
        (1, 0): (8, 0),
        (2, 0): (0, 1),
        (3, 0): (8, 1),
        (4, 0): (1, 0),
        (31, 0): (15, 1),
        (0, 1): (0, 2),
        (30, 1): (7, 3),
    },
    ("16x128b", 2): {
        (0, 0): (0, 0),
        (3, 0): (0, 3),
        (4, 0): (1, 0),
        (0, 1): (8, 0),
        (31, 1): (15, 3),
        (0, 2): (0, 4),
        (31, 3): (15, 7),
    },
    ("16x256b", 2): {
        (0, 0): (0, 0),
        (0, 1): (0, 1),
        (1, 0): (0, 2),
        (3, 1): (0, 7),
        (4, 0): (1, 0),
        (0, 2): (8, 0),
        (31, 3): (15, 7),
        (0, 4): (0, 8),
        (31, 7): (15, 15),
    },
}


@pytest.mark.parametrize("shape,num", KNOWN)
def test_positions(shape, num):
    part = fragment(shape, num)
    for (thread, register), where in KNOWN[shape, num].items():
        assert (part.lanes[register, thread], part.columns[register, thread]) == where


@pytest.mark.parametrize(
    "shape,per_repetition,largest", [("32x32b", 1, 128), ("16x64b", 1, 128), ("16x128b", 2, 64), ("16x256b", 4, 32)]
)
@pytest.mark.parametrize("packed", [False, True])
def test_every_word_once(shape, per_repetition, largest, packed):
    for num in (1, 2, 8, largest if not packed else largest // 2):
        part = fragment(shape, num, packed)
        assert part.registers == num * per_repetition
        columns, lanes = touched(TensorAddress(0, 0), part)
        assert len(set(zip(columns.tolist(), lanes.tolist(), strict=True))) == columns.size
        assert columns.size == part.registers * 32 * (1 + packed)
        assert part.column_extent * part.lane_count == columns.size


def test_split_halves():
    part = fragment("16x32bx2", 4, half_split=64)
    assert (part.lanes[2, 5], part.columns[2, 5]) == (5, 2)
    assert (part.lanes[2, 21], part.columns[2, 21]) == (5, 66)


@pytest.mark.parametrize("shape", ["32x32b", "16x64b", "16x128b", "16x256b", "16x32bx2"])
@pytest.mark.parametrize("packed", [False, True])
def test_store_then_load(shape, packed):
    rng = np.random.default_rng(1)
    memory, part = TensorMemory(), fragment(shape, 8, packed, 128 if shape == "16x32bx2" else 0)
    memory.allocate(0, 512)
    registers = rng.integers(0, 1 << 32, (part.registers, 32), dtype=np.uint32)
    at = TensorAddress(32 if shape == "32x32b" else 48, 16)
    store(memory, at, part, registers)
    got, known = load(memory, at, part)
    np.testing.assert_array_equal(got, registers)
    assert known.all()
    assert memory.written.sum() == registers.size * (1 + packed)


def test_packed_layout():
    memory = TensorMemory()
    memory.allocate(0, 32)
    registers = np.full((1, 32), 0xBEEFCAFE, np.uint32)
    store(memory, TensorAddress(0, 0), fragment("32x32b", 1, packed=True), registers)
    assert (memory.words[0, :32] == 0xCAFE).all() and (memory.words[1, :32] == 0xBEEF).all()
    memory.words[0:2, :32] |= np.uint32(0x12340000)
    got, _ = load(memory, TensorAddress(0, 0), fragment("32x32b", 1, packed=True))
    assert (got == 0xBEEFCAFE).all()


def test_unwritten_words_are_reported():
    memory = TensorMemory()
    memory.allocate(0, 32)
    store(memory, TensorAddress(0, 0), fragment("32x32b", 1), np.zeros((1, 32), np.uint32))
    got, known = load(memory, TensorAddress(0, 0), fragment("32x32b", 2))
    assert known[0].all() and not known[1].any()
    assert (got[1] == POISON).all() and np.isnan(got.view(np.float32)[1]).all()


@pytest.mark.parametrize(
    "shape,warp,lane,legal",
    [
        ("32x32b", 1, 32, True),
        ("32x32b", 5, 32, True),
        ("32x32b", 1, 0, False),
        ("32x32b", 1, 48, False),
        ("16x256b", 3, 96, True),
        ("16x256b", 3, 112, True),
        ("16x256b", 3, 104, False),
        ("16x256b", 2, 96, False),
    ],
)
def test_lane_quarter(shape, warp, lane, legal):
    if legal:
        check_quarter(TensorAddress(lane, 0), shape, warp)
    else:
        with pytest.raises(TensorMemoryError, match="can be reached"):
            check_quarter(TensorAddress(lane, 0), shape, warp)


def test_bad_shapes():
    for shape, num in (("16x256b", 64), ("32x32b", 3), ("64x32b", 1)):
        with pytest.raises(TensorMemoryError):
            fragment(shape, num)


def test_allocation():
    memory = TensorMemory()
    assert memory.find_free(128) == 0
    memory.allocate(0, 128)
    assert memory.find_free(256) == 256
    memory.allocate(256, 256)
    assert memory.find_free(256) is None
    with pytest.raises(TensorMemoryError, match="power of two"):
        memory.find_free(96)
    with pytest.raises(TensorMemoryError, match="leak"):
        memory.check_exit()
    with pytest.raises(TensorMemoryError, match="matches none"):
        memory.deallocate(256, 128)
    memory.deallocate(256, 256)
    memory.deallocate(0, 128)
    memory.check_exit()
    with pytest.raises(TensorMemoryError, match="not all allocated"):
        load(memory, TensorAddress(0, 0), fragment("32x32b", 1))
    memory.may_allocate = False
    with pytest.raises(TensorMemoryError, match="relinquish"):
        memory.find_free(32)


def test_address_range():
    assert TensorAddress.decode(0x00400080) == TensorAddress(64, 128)
    for address in (0x00800000, 0x00000200):
        with pytest.raises(TensorMemoryError, match="out of range"):
            TensorAddress.decode(address)
