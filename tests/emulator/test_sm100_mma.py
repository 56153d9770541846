"""tcgen05.mma against matrices laid out by the per-element formulas of the canonical layouts, written out here."""

import ml_dtypes
import numpy as np
import pytest

from tests.emulator.sm100.descriptors import DescriptorError, decode_instruction, decode_shared
from tests.emulator.sm100.mma import MmaRequest, execute
from tests.emulator.sm100.tmem import TensorAddress, TensorMemory, TensorMemoryError

DTYPES = {"bf16": ml_dtypes.bfloat16, "f16": np.float16, "tf32": np.float32}
CODES = {"f16": 0, "bf16": 1, "tf32": 2}
SHARED_BYTES = 160 * 1024


def instruction_bits(m, n, a="bf16", b="bf16", d="f32", a_mn=0, b_mn=0, neg_a=0, neg_b=0):
    d_code = {"f16": 0, "f32": 1}[d]
    return (
        d_code << 4
        | CODES[a] << 7
        | CODES[b] << 10
        | neg_a << 13
        | neg_b << 14
        | a_mn << 15
        | b_mn << 16
        | n >> 3 << 17
        | m >> 4 << 24
    )


def shared_bits(start, leading, stride, layout):
    return start >> 4 | leading >> 4 << 16 | stride >> 4 << 32 | 1 << 46 | layout << 61


def element_address(start, leading, stride, layout, itemsize, mn_major, mn, k):
    """Byte address of element (mn, k), from the canonical layouts as CUTLASS's make_umma_desc states them."""
    unit = 16 // itemsize
    rows = {0: 1, 6: 2, 4: 4, 2: 8, 1: 8}[layout]
    if mn_major:
        inner, block = mn % (unit * rows), mn // (unit * rows)
        depth = 4 if layout == 1 else 8
        if layout == 0:
            offset = (inner + k % depth * unit) * itemsize + block * stride + k // depth * leading
        else:
            offset = (inner + k % depth * unit * rows) * itemsize + block * leading + k // depth * stride
    elif layout == 0:
        offset = mn % 8 * 16 + mn // 8 * stride + k // unit * leading + k % unit * itemsize
    else:
        offset = mn % 8 * 16 * rows + mn // 8 * stride + k * itemsize
    address = start + offset
    bits, base, shift = {0: (0, 4, 3), 6: (1, 4, 3), 4: (2, 4, 3), 2: (3, 4, 3), 1: (2, 5, 2)}[layout]
    return address ^ (address >> shift & ((1 << bits) - 1) << base)


def place(shared, matrix, start, leading, stride, layout, mn_major):
    itemsize = matrix.dtype.itemsize
    for mn in range(matrix.shape[0]):
        for k in range(matrix.shape[1]):
            at = element_address(start, leading, stride, layout, itemsize, mn_major, mn, k)
            shared[at : at + itemsize] = np.frombuffer(matrix[mn, k].tobytes(), np.uint8)


def strides(layout, mn_major, rows, k, itemsize):
    """Leading and stride offsets of a dense buffer that holds (rows, k)."""
    width = {0: 16, 6: 32, 4: 64, 2: 128, 1: 128}[layout]
    if not mn_major:
        return (rows * 16, 128) if layout == 0 else (0, 8 * width)
    if layout == 0:
        return rows // (16 // itemsize) * 128, 128
    depth = 4 if layout == 1 else 8
    blocks = max(1, rows * itemsize // width)
    return depth * width, depth * width * blocks


def new_cta():
    shared, memory = np.full(SHARED_BYTES, 0xFF, np.uint8), TensorMemory()
    memory.allocate(0, 512)
    return shared, memory


def run(request, ctas):
    execute(request, [(shared.view(np.complex128), memory) for shared, memory in ctas])


LAYOUTS = [(0, False), (6, False), (4, False), (2, False), (0, True), (6, True), (4, True), (2, True)]


@pytest.mark.parametrize("layout,mn_major", LAYOUTS)
@pytest.mark.parametrize("name", ["bf16", "f16"])
def test_operand_layouts(layout, mn_major, name):
    rng = np.random.default_rng(2)
    m, n, k = 128, 64, 16
    shared, memory = new_cta()
    a = rng.standard_normal((m, k)).astype(DTYPES[name])
    b = rng.standard_normal((n, k)).astype(DTYPES[name])
    # A start inside a row of the swizzle atom, as for the second K step of a tile.
    start_a = 2048 if mn_major or layout in (0, 6) else 2048 + 32
    start_b = 65536
    la, sa = strides(layout, mn_major, m, k, 2)
    lb, sb = strides(layout, mn_major, n, k, 2)
    place(shared, a, start_a, la, sa, layout, mn_major)
    place(shared, b, start_b, lb, sb, layout, mn_major)
    request = MmaRequest(
        decode_instruction(instruction_bits(m, n, name, name, a_mn=mn_major, b_mn=mn_major), "f16", 1),
        1,
        TensorAddress(0, 32),
        decode_shared(shared_bits(start_a, la, sa, layout)),
        decode_shared(shared_bits(start_b, lb, sb, layout)),
        accumulate=False,
    )
    run(request, [(shared, memory)])
    want = a.astype(np.float64) @ b.astype(np.float64).T
    np.testing.assert_allclose(memory.words[32 : 32 + n].view(np.float32).T, want, rtol=1e-5, atol=1e-5)
    assert memory.written.sum() == m * n


def test_tf32_with_32_byte_atoms():
    rng = np.random.default_rng(3)
    m, n, k = 128, 32, 8
    shared, memory = new_cta()
    a, b = rng.integers(-8, 8, (m, k)).astype(np.float32), rng.integers(-8, 8, (n, k)).astype(np.float32)
    la, sa = strides(1, True, m, k, 4)
    lb, sb = strides(2, False, n, k, 4)
    place(shared, a, 1024, la, sa, 1, True)
    place(shared, b, 65536, lb, sb, 2, False)
    bits = instruction_bits(m, n, "tf32", "tf32", a_mn=1)
    request = MmaRequest(
        decode_instruction(bits, "tf32", 1),
        1,
        TensorAddress(0, 0),
        decode_shared(shared_bits(1024, la, sa, 1)),
        decode_shared(shared_bits(65536, lb, sb, 2)),
        accumulate=False,
    )
    run(request, [(shared, memory)])
    np.testing.assert_array_equal(memory.words[:n].view(np.float32).T, a @ b.T)


def where_of_d(m, n, cta_group, row, column):
    """(CTA, lane, column) of D[row, column], from the data-path figures."""
    if cta_group == 1:
        return (0, row, column) if m == 128 else (0, row % 16 + 32 * (row // 16), column)
    cta, row = divmod(row, m // 2)
    if m == 256:
        return cta, row, column
    return (cta, row, column) if column < n // 2 else (cta, row + 64, column - n // 2)


@pytest.mark.parametrize(
    "m,n,cta_group,lane", [(128, 32, 1, 0), (64, 40, 1, 0), (64, 40, 1, 16), (256, 64, 2, 0), (128, 64, 2, 0)]
)
@pytest.mark.parametrize("from_tensor_memory", [False, True])
def test_data_paths(m, n, cta_group, lane, from_tensor_memory):
    rng = np.random.default_rng(4)
    k, layout = 16, 2
    a = rng.standard_normal((m, k)).astype(ml_dtypes.bfloat16)
    b = rng.standard_normal((n, k)).astype(ml_dtypes.bfloat16)
    ctas = [new_cta() for _ in range(cta_group)]
    rows, columns = m // cta_group, n // cta_group
    for number, (shared, memory) in enumerate(ctas):
        place(shared, b[number * columns : (number + 1) * columns], 65536, 0, 1024, layout, False)
        mine = a[number * rows : (number + 1) * rows]
        if from_tensor_memory:
            words = np.ascontiguousarray(mine).view(np.uint32)
            for row in range(rows):
                lanes = [where_of_d(m, n, cta_group, row, 0)[1] + lane]
                if cta_group == 2 and m == 128:
                    lanes.append(lanes[0] + 64)  # both halves of N read their own copy of A
                for at in lanes:
                    memory.words[400:408, at] = words[row]
                    memory.written[400:408, at] = True
        else:
            place(shared, mine, 1024, 0, 1024, layout, False)
    request = MmaRequest(
        decode_instruction(instruction_bits(m, n), "f16", cta_group),
        cta_group,
        TensorAddress(lane, 0),
        TensorAddress(lane, 400) if from_tensor_memory else decode_shared(shared_bits(1024, 0, 1024, layout)),
        decode_shared(shared_bits(65536, 0, 1024, layout)),
        accumulate=False,
    )
    request.check_lanes()
    run(request, ctas)
    want = a.astype(np.float64) @ b.astype(np.float64).T
    for row in range(m):
        for column in range(n):
            cta, at, col = where_of_d(m, n, cta_group, row, column)
            got = ctas[cta][1].words[col, at + lane].view(np.float32)
            assert abs(got - want[row, column]) < 1e-4, (row, column)
    written = sum(int(memory.written[:400].sum()) for _, memory in ctas)
    assert written == m * n


def plain(accumulate, d="f32", seed=5, **fields):
    rng = np.random.default_rng(seed)
    shared, memory = new_cta()
    a = rng.integers(-4, 5, (128, 16)).astype(np.float16)
    b = rng.integers(-4, 5, (16, 16)).astype(np.float16)
    place(shared, a, 1024, 0, 1024, 2, False)
    place(shared, b, 65536, 0, 1024, 2, False)
    bits = {key: fields.pop(key) for key in ("neg_a", "neg_b") if key in fields}
    request = MmaRequest(
        decode_instruction(instruction_bits(128, 16, "f16", "f16", d, **bits), "f16", 1),
        1,
        TensorAddress(0, 0),
        decode_shared(shared_bits(1024, 0, 1024, 2)),
        decode_shared(shared_bits(65536, 0, 1024, 2)),
        accumulate,
        **fields,
    )
    return request, shared, memory, a.astype(np.float32) @ b.astype(np.float32).T


def test_accumulate_scale_and_negate():
    request, shared, memory, product = plain(True, scale_d=3, neg_a=1)
    memory.words[:16] = np.float32(8).view(np.uint32)
    memory.written[:16] = True
    run(request, [(shared, memory)])
    np.testing.assert_array_equal(memory.words[:16].view(np.float32).T, 1 - product)


def test_both_negated():
    request, shared, memory, product = plain(False, neg_a=1, neg_b=1)
    run(request, [(shared, memory)])
    np.testing.assert_array_equal(memory.words[:16].view(np.float32).T, product)


def test_half_accumulator_takes_a_column_each():
    request, shared, memory, product = plain(False, d="f16")
    run(request, [(shared, memory)])
    np.testing.assert_array_equal(memory.words[:16].astype(np.uint16).view(np.float16).T, product.astype(np.float16))


def test_disabled_lanes_keep_their_words():
    request, shared, memory, product = plain(False, disabled_lanes=1 << 5 | 1 << 127)
    memory.words[:16] = 7
    run(request, [(shared, memory)])
    kept = [lane not in (5, 127) for lane in range(128)]
    np.testing.assert_array_equal(memory.words[:16, kept].view(np.float32).T, product[kept])
    assert (memory.words[:16, [5, 127]] == 7).all()


def test_accumulating_onto_poison_is_an_error():
    request, shared, memory, _ = plain(True)
    with pytest.raises(TensorMemoryError, match="unwritten D"):
        run(request, [(shared, memory)])


def test_unallocated_d_is_an_error():
    request, shared, memory, _ = plain(False)
    memory.deallocate(0, 512)
    with pytest.raises(TensorMemoryError, match="not all allocated"):
        run(request, [(shared, memory)])


def test_descriptor_past_shared_memory():
    request, shared, memory, _ = plain(False)
    with pytest.raises(TensorMemoryError, match="past the end"):
        run(request, [(shared[:2048], memory)])


@pytest.mark.parametrize(
    "bits,kind,group,message",
    [
        (instruction_bits(192, 64), "f16", 1, "M=192"),
        (instruction_bits(64, 64), "f16", 2, "M=64"),
        (instruction_bits(128, 24), "f16", 1, "N=24"),
        (instruction_bits(256, 48), "f16", 2, "N=48"),
        (instruction_bits(128, 64) | 4, "f16", 1, "sparsity"),
        (instruction_bits(128, 64, "tf32", "tf32"), "f16", 1, "formats"),
        (instruction_bits(128, 64), "mxf4", 1, "mxf4"),
    ],
)
def test_bad_instruction_descriptors(bits, kind, group, message):
    with pytest.raises(DescriptorError, match=message):
        decode_instruction(bits, kind, group)


def test_bad_shared_descriptors():
    good = shared_bits(1024, 0, 1024, 2)
    for bits in (good & ~(3 << 46), good | 1 << 61, good | 1 << 49, good | 1 << 52):
        with pytest.raises(DescriptorError):
            decode_shared(bits)
