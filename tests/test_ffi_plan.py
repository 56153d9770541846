"""LaunchPlan: serialisation round trip, validation messages, parameter layout."""

import hashlib
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_fa4.ffi import plan as P
from jax_fa4.ffi.validate import check_parameter_sizes, validate
from jax_fa4.ffi.wire import HEADER_BYTES, decode, encode

CUBINS = {hashlib.sha256(data).hexdigest(): data for data in (b"\x7fELF one", b"\x7fELF two\x00\xff")}
HASHES = tuple(CUBINS)
BUFFER_BYTES = (1 << 20, 4096, 1 << 16)


@st.composite
def tensor_maps(draw):
    dtype = draw(st.sampled_from(sorted(P.TENSOR_MAP_DTYPES)))
    size = P.TENSOR_MAP_DTYPES[dtype][1]
    rank = draw(st.integers(1, 5))
    swizzle = draw(st.integers(0, 3))
    inner = draw(st.integers(1, P.SWIZZLE_SPAN.get(swizzle, 256) // 16)) * 16 // size
    dims = tuple(draw(st.integers(1, 6)) for _ in range(rank))
    strides = tuple(draw(st.integers(0, 64)) * 16 for _ in range(rank - 1))
    box = (inner, *(draw(st.integers(1, 256)) for _ in range(rank - 1)))
    return P.TensorMap(0, dtype, dims, strides, box, swizzle, draw(st.integers(0, 9)) * 16, draw(st.integers(0, 3)))


INT32, INT64 = st.integers(-(2**31), 2**31 - 1), st.integers(-(2**63), 2**63 - 1)
tensors = st.one_of(
    st.builds(P.Tensor, st.integers(0, 2), st.lists(INT32, max_size=6).map(tuple), st.integers(0, 4096)),
    st.builds(P.Tensor, st.integers(0, 2), st.lists(INT64, max_size=6).map(tuple), st.just(8), st.just(64)),
    st.builds(
        P.Tensor,
        st.just(1),
        st.tuples(INT32, INT32, INT32, INT64, INT64),
        format=st.sampled_from(["iii4xqq", "3i4x2q"]),
    ),
)
scalars = st.one_of(
    st.builds(P.Scalars, st.just("iif"), st.tuples(INT32, INT32, st.floats(width=32, allow_nan=False))),
    st.builds(P.Scalars, st.just("q"), st.tuples(INT64)),
    st.builds(P.Scalars, st.just("B3xI"), st.tuples(st.integers(0, 255), st.integers(0, 2**32 - 1))),
)
kernels = st.builds(
    P.Kernel,
    st.integers(0, 2),
    st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(0, 9)).map(lambda g: (g[0] * 2, g[1], g[2])),
    st.tuples(st.integers(1, 8), st.integers(1, 8), st.integers(1, 16)),
    st.sampled_from([(1, 1, 1), (2, 1, 1)]),
    st.integers(0, 232448),
    st.lists(st.one_of(tensor_maps(), tensors, scalars), max_size=8).map(tuple),
)
fills = st.builds(
    lambda size, offset, pattern: P.Fill(1, size * 4, offset * 4, pattern),
    st.integers(0, 512), st.integers(0, 512), st.integers(0, 2**32 - 1),
)  # fmt: skip
ARTEFACTS = (P.ArtefactRef(HASHES[0], "forward"), P.ArtefactRef(HASHES[1], "main"), P.ArtefactRef(HASHES[0], "other"))
plans = st.builds(P.LaunchPlan, st.lists(st.one_of(kernels, fills), max_size=5).map(tuple), st.just(ARTEFACTS))


@settings(max_examples=200, deadline=None)
@given(plans)
def test_encode_decode_round_trip(plan):
    data, cubins = encode(plan, BUFFER_BYTES, CUBINS)
    decoded = decode(data)
    assert decoded.plan == plan
    assert decoded.buffer_bytes == BUFFER_BYTES
    assert decoded.cubin_bytes == tuple(len(CUBINS[a.sha256]) for a in ARTEFACTS)
    assert cubins == CUBINS[HASHES[0]] + CUBINS[HASHES[1]]


@settings(max_examples=100, deadline=None)
@given(plans, st.data())
def test_damaged_bytes_are_value_errors(plan, data):
    encoded, _ = encode(plan, BUFFER_BYTES, CUBINS)
    position = data.draw(st.integers(0, len(encoded) - 1))
    flipped = bytearray(encoded)
    flipped[position] ^= data.draw(st.integers(1, 255))
    # The two reserved header bytes carry nothing.
    if position not in (6, 7):
        with pytest.raises(ValueError, match="launch plan"):
            decode(bytes(flipped))
    with pytest.raises(ValueError, match="launch plan"):
        decode(encoded[:position])


def test_malformed_body_with_matching_hash_is_a_value_error():
    encoded, _ = encode(P.LaunchPlan((P.Fill(0, 4),)), BUFFER_BYTES, {})
    for body in (encoded[HEADER_BYTES:-3], encoded[HEADER_BYTES:] + b"\0"):
        with pytest.raises(ValueError, match="launch plan"):
            decode(encoded[:8] + hashlib.sha256(body).digest() + body)


TENSOR_MAP = P.TensorMap(0, "bfloat16", (64, 8, 4), (128, 1024), (64, 64, 1), P.SWIZZLE_128B)


def kernel(*parameters, **changes):
    fields = dict(
        artefact=0, grid=(1, 1, 1), block=(128, 1, 1), cluster=(1, 1, 1), shared_bytes=0, parameters=parameters
    )
    return P.LaunchPlan((P.Kernel(**(fields | changes)),), ARTEFACTS)


def changed(**changes):
    return kernel(P.TensorMap(**(vars(TENSOR_MAP) | changes)))


@pytest.mark.parametrize(
    "plan, message",
    [
        (changed(box=(64, 257, 1)), r"step 0 \(kernel forward\), parameter 0 \(tensor map\): box \(64, 257, 1\)"),
        (changed(box=(128, 1, 1)), "256 bytes, the swizzle holds 128"),
        (changed(box=(4, 1, 1)), "8 bytes, must be a multiple of 16"),
        (changed(strides=(128, 1028)), "multiples of 16"),
        (changed(strides=(128,)), "one stride fewer"),
        (changed(dims=(64, 0, 4)), r"outside \[1"),
        (changed(offset=8), "offset 8"),
        (changed(dtype="float8"), "dtype must be one of"),
        (changed(swizzle=4), "swizzle must be"),
        (changed(l2_promotion=4), "l2_promotion"),
        (changed(buffer=3), "buffer 3 does not exist, the call has 3 buffers"),
        (changed(dims=(64, 8, 2000)), "reaches byte 2048000 of buffer 0, which has 1048576 bytes"),
        (kernel(P.Tensor(0, (1,), offset=(1 << 20) + 1)), "reaches byte 1048577"),
        (kernel(P.Tensor(0, (2**31,))), "does not fit format"),
        (kernel(P.Tensor(0, (1,), int_bits=16)), "int_bits must be 32 or 64"),
        (kernel(P.Scalars("", ())), "format is empty"),
        (kernel(P.Scalars("P", (1,))), "may hold only"),
        (kernel(P.Scalars("if", (1,))), "does not fit format"),
        (kernel(grid=(2**31, 1, 1)), "grid"),
        (kernel(grid=(1, 65536, 1)), "grid"),
        (kernel(grid=(-1, 1, 1)), "grid"),
        (kernel(grid=(3, 1, 1), cluster=(2, 1, 1)), "not a multiple of cluster"),
        (kernel(block=(1024, 2, 1)), "more than 1024 threads"),
        (kernel(block=(0, 1, 1)), "block"),
        (kernel(cluster=(17, 1, 1), grid=(17, 1, 1)), "between 1 and 16 CTAs"),
        (kernel(shared_bytes=232449), "shared_bytes"),
        (kernel(artefact=3), "artefact 3 does not exist"),
        (kernel(*[P.Scalars("4000i", (0,) * 4000)] * 3), "more than 32764 bytes"),
        (P.LaunchPlan((P.Fill(1, 6),)), "multiples of 4"),
        (P.LaunchPlan((P.Fill(1, 4096, 4),)), "reaches byte 4100 of buffer 1"),
        (P.LaunchPlan((P.Fill(1, 4, 0, -1),)), "pattern"),
        (P.LaunchPlan((), (P.ArtefactRef("00", "x"),)), "64 lower-case hexadecimal digits"),
        (P.LaunchPlan((), (P.ArtefactRef(HASHES[0], ""),)), "non-empty ASCII symbol"),
    ],
)
def test_validation_names_what_is_wrong(plan, message):
    with pytest.raises(ValueError, match=message):
        validate(plan, BUFFER_BYTES)


def test_legal_limits_pass():
    validate(changed(box=(64, 256, 256)), BUFFER_BYTES)
    validate(kernel(grid=(2**31 - 1, 65535, 65535), block=(1024, 1, 1), shared_bytes=232448), BUFFER_BYTES)
    validate(kernel(grid=(0, 1, 1)), BUFFER_BYTES)


def test_encode_refuses_missing_and_corrupt_cubins():
    with pytest.raises(ValueError, match="kernel main: no cubin"):
        encode(kernel(), BUFFER_BYTES, {HASHES[0]: CUBINS[HASHES[0]]})
    with pytest.raises(ValueError, match="kernel forward: the cubin is corrupt"):
        encode(kernel(), BUFFER_BYTES, dict.fromkeys(HASHES, b"?"))


def test_parameter_layout_follows_the_entry_alignment():
    parameters = (
        P.Scalars("i", (1,)),
        TENSOR_MAP,
        P.Tensor(0, (1, 2, 3)),
        P.Scalars("f", (1.0,)),
        P.Tensor(0, (1, 2, 3, 4, 5), format="iii4xqq"),
        P.Scalars("B", (1,)),
    )
    slots = P.parameter_layout(parameters)
    assert [(s.offset, s.size, s.padded_size) for s in slots] == [
        (0, 4, 4), (64, 128, 128), (192, 20, 24), (216, 4, 4), (224, 40, 40), (264, 1, 1),
    ]  # fmt: skip
    (step,) = kernel(*parameters).steps
    check_parameter_sizes(step, [4, 128, 24, 4, 40, 1], "forward")
    check_parameter_sizes(step, [4, 128, 20, 4, 40, 1], "forward")
    with pytest.raises(ValueError, match="kernel forward declares 16 bytes for parameter 2, the plan supplies 20"):
        check_parameter_sizes(step, [4, 128, 16, 4, 40, 1], "forward")
    with pytest.raises(ValueError, match="declares 5 parameters, the plan supplies 6"):
        check_parameter_sizes(step, [4, 128, 20, 4, 40], "forward")


def test_mixed_width_tensor_payload_is_naturally_aligned():
    tensor = P.Tensor(0, (1, 2, 3, 4, 5), format="iii4xqq")
    assert tensor.payload == struct.pack("<iii", 1, 2, 3) + b"\0" * 4 + struct.pack("<qq", 4, 5)
