"""LaunchPlan as bytes, the form in which it travels inside the custom call.

All integers little-endian and unaligned. Version 1::

    magic "JFA4", u16 version, u16 0, 32 bytes SHA-256 of everything that follows
    u16 buffers, each: u64 bytes
    u16 artefacts, each: 32 bytes SHA-256 of the cubin, u64 bytes of the cubin, u16 length + entry symbol (ASCII)
    u32 steps, each: u8 tag
      1 kernel: u16 artefact, u32[3] grid, u32[3] block, u32[3] cluster, u32 shared bytes, u16 parameters, each: u8 tag
        1 tensor map: u16 buffer, u8 dtype (CUtensorMapDataType), u8 rank, u8 swizzle, u8 l2 promotion, u64 offset,
                      u64[rank] dims, u64[rank-1] strides, u32[rank] box
        2 tensor:     u16 buffer, u64 offset, u8 int_bits, u16 length + format, u16 length + payload
        3 scalars:    u16 length + format, u16 length + payload
      2 fill: u16 buffer, u64 offset, u64 bytes, u32 pattern

The formats are for the Python reader only: the C++ reader copies payloads. Two artefacts with the same hash share one
cubin; the cubins follow each other in the custom call's ``cubins`` attribute in the order of first mention.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .plan import (
    INT_FORMATS,
    TENSOR_MAP_DTYPES,
    ArtefactRef,
    Fill,
    Kernel,
    LaunchPlan,
    Parameter,
    Scalars,
    Tensor,
    TensorMap,
)
from .validate import check_artefacts, validate

MAGIC = b"JFA4"
VERSION = 1
DIGEST_BYTES = 32
HEADER_BYTES = len(MAGIC) + 4 + DIGEST_BYTES

_STEP_KERNEL, _STEP_FILL = 1, 2
_TENSOR_MAP, _TENSOR, _SCALARS = 1, 2, 3
_DTYPE_NAMES = {code: name for name, (code, _) in TENSOR_MAP_DTYPES.items()}


@dataclass(frozen=True)
class Decoded:
    """What :func:`decode` finds: the plan, the sizes of the call's buffers and of each artefact's cubin, in bytes."""

    plan: LaunchPlan
    buffer_bytes: tuple[int, ...]
    cubin_bytes: tuple[int, ...]


def encode(plan: LaunchPlan, buffer_bytes: Sequence[int], cubins: Mapping[str, bytes]) -> tuple[bytes, bytes]:
    """Validates and serialises a plan.

    Args:
      plan: what to launch.
      buffer_bytes: size in bytes of every operand and then every result of the custom call.
      cubins: sha256 (hexadecimal) -> cubin, for every artefact of the plan.

    Returns:
      The custom call's ``plan`` and ``cubins`` attributes.

    Raises:
      ValueError: the plan breaks a limit, a buffer or cubin is missing, or a cubin is not what its hash says.
    """
    validate(plan, buffer_bytes)
    check_artefacts(plan, cubins)
    out = bytearray(struct.pack(f"<H{len(buffer_bytes)}Q", len(buffer_bytes), *buffer_bytes))
    out += struct.pack("<H", len(plan.artefacts))
    images: dict[str, bytes] = {}
    for artefact in plan.artefacts:
        cubin = cubins[artefact.sha256]
        if artefact.sha256 not in images and hashlib.sha256(cubin).hexdigest() != artefact.sha256:
            raise ValueError(f"kernel {artefact.entry}: the cubin is corrupt, its sha256 is not {artefact.sha256}")
        images[artefact.sha256] = cubin
        out += bytes.fromhex(artefact.sha256) + struct.pack("<Q", len(cubin)) + _text(artefact.entry)
    out += struct.pack("<I", len(plan.steps))
    for step in plan.steps:
        if isinstance(step, Fill):
            out += struct.pack("<BHQQI", _STEP_FILL, step.buffer, step.offset, step.size, step.pattern)
        else:
            sizes = (*step.grid, *step.block, *step.cluster, step.shared_bytes)
            out += struct.pack("<BH10IH", _STEP_KERNEL, step.artefact, *sizes, len(step.parameters))
            out += b"".join(map(_encode_parameter, step.parameters))
    header = MAGIC + struct.pack("<HH", VERSION, 0) + hashlib.sha256(out).digest()
    return header + bytes(out), b"".join(images.values())


def decode(data: bytes) -> Decoded:
    """Reads what :func:`encode` wrote.

    Raises:
      ValueError: not a plan, an unknown version, or damaged bytes.
    """
    if len(data) < HEADER_BYTES or not data.startswith(MAGIC):
        raise ValueError(f"not a launch plan: {len(data)} bytes starting with {data[:4]!r}, expected {MAGIC!r}")
    version, _ = struct.unpack_from("<HH", data, len(MAGIC))
    if version != VERSION:
        raise ValueError(f"launch plan has format version {version}, this jax_fa4 reads version {VERSION}")
    body = data[HEADER_BYTES:]
    if hashlib.sha256(body).digest() != data[HEADER_BYTES - DIGEST_BYTES : HEADER_BYTES]:
        raise ValueError("launch plan is corrupt: its contents do not match its SHA-256")
    reader = _Reader(body)
    (count,) = reader.take("H")
    buffer_bytes = reader.take(f"{count}Q")
    (count,) = reader.take("H")
    artefacts: list[ArtefactRef] = []
    cubin_bytes: list[int] = []
    for _ in range(count):
        digest = reader.raw(DIGEST_BYTES)
        cubin_bytes += reader.take("Q")
        artefacts.append(ArtefactRef(digest.hex(), reader.sized().decode("ascii")))
    (count,) = reader.take("I")
    steps = tuple(_decode_step(reader) for _ in range(count))
    if reader.position != len(body):
        raise ValueError(f"launch plan has {len(body) - reader.position} bytes too many")
    plan = LaunchPlan(steps, tuple(artefacts))
    validate(plan, buffer_bytes)
    return Decoded(plan, buffer_bytes, tuple(cubin_bytes))


class _Reader:
    """Sequential reader that turns truncation into ValueError."""

    def __init__(self, data: bytes):
        self.data = data
        self.position = 0

    def raw(self, size: int) -> bytes:
        if self.position + size > len(self.data):
            raise ValueError(f"launch plan ends at byte {len(self.data)}, expected {size} more at {self.position}")
        self.position += size
        return self.data[self.position - size : self.position]

    def take(self, format: str) -> tuple[int, ...]:
        return struct.unpack("<" + format, self.raw(struct.calcsize("<" + format)))

    def sized(self) -> bytes:
        return self.raw(self.take("H")[0])


def _unpack(format: str, payload: bytes) -> tuple[Any, ...]:
    try:
        return struct.unpack("<" + format, payload)
    except struct.error as error:
        raise ValueError(f"launch plan has a payload that does not fit its format {format!r}: {error}") from None


def _text(text: str) -> bytes:
    return struct.pack("<H", len(text)) + text.encode("ascii")


def _encode_parameter(parameter: Parameter) -> bytes:
    if isinstance(parameter, TensorMap):
        rank = len(parameter.dims)
        return struct.pack(
            f"<BHBBBBQ{rank}Q{rank - 1}Q{rank}I",
            _TENSOR_MAP,
            parameter.buffer,
            TENSOR_MAP_DTYPES[parameter.dtype][0],
            rank,
            parameter.swizzle,
            parameter.l2_promotion,
            parameter.offset,
            *parameter.dims,
            *parameter.strides,
            *parameter.box,
        )
    tail = _text(parameter.format) + struct.pack("<H", len(parameter.payload)) + parameter.payload
    if isinstance(parameter, Tensor):
        return struct.pack("<BHQB", _TENSOR, parameter.buffer, parameter.offset, parameter.int_bits) + tail
    return struct.pack("<B", _SCALARS) + tail


def _decode_step(reader: _Reader) -> Kernel | Fill:
    (tag,) = reader.take("B")
    if tag == _STEP_FILL:
        buffer, offset, size, pattern = reader.take("HQQI")
        return Fill(buffer, size, offset, pattern)
    if tag != _STEP_KERNEL:
        raise ValueError(f"launch plan has an unknown step tag {tag}")
    artefact, gx, gy, gz, bx, by, bz, cx, cy, cz, shared_bytes, count = reader.take("H10IH")
    parameters = tuple(_decode_parameter(reader) for _ in range(count))
    return Kernel(artefact, (gx, gy, gz), (bx, by, bz), (cx, cy, cz), shared_bytes, parameters)


def _decode_parameter(reader: _Reader) -> Parameter:
    (tag,) = reader.take("B")
    if tag == _TENSOR_MAP:
        buffer, dtype, rank, swizzle, l2_promotion, offset = reader.take("HBBBBQ")
        if dtype not in _DTYPE_NAMES or rank == 0:
            raise ValueError(f"launch plan has a tensor map of dtype code {dtype} and rank {rank}")
        dims, strides, box = reader.take(f"{rank}Q"), reader.take(f"{rank - 1}Q"), reader.take(f"{rank}I")
        return TensorMap(buffer, _DTYPE_NAMES[dtype], dims, strides, box, swizzle, offset, l2_promotion)
    if tag == _TENSOR:
        buffer, offset, int_bits = reader.take("HQB")
        if int_bits not in INT_FORMATS:
            raise ValueError(f"launch plan has a tensor with {int_bits}-bit values")
        format, payload = reader.sized().decode("ascii"), reader.sized()
        characters = format or INT_FORMATS[int_bits] * (len(payload) * 8 // int_bits)
        return Tensor(buffer, _unpack(characters, payload), offset, int_bits, format)
    if tag == _SCALARS:
        format, payload = reader.sized().decode("ascii"), reader.sized()
        return Scalars(format, _unpack(format, payload))
    raise ValueError(f"launch plan has an unknown parameter tag {tag}")
