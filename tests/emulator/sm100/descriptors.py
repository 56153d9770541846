"""Descriptors of tcgen05.mma: the 32-bit instruction descriptor and the 64-bit shared-memory matrix descriptor.

Source: PTX ISA, "Instruction descriptor", "Shared memory descriptor" and "Canonical layouts" of tcgen05.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from tests.emulator.errors import EmulatorError

CHUNK = 16  # bytes: the 128-bit unit in which canonical layouts are stated
SWIZZLE_PERIOD = 1024  # bytes after which every swizzle repeats


class DescriptorError(EmulatorError):
    """A descriptor that the ISA does not allow, or that this emulator does not execute."""


# kind -> {format code: (name, bits)}
OPERAND_FORMATS = {
    "f16": {0: "f16", 1: "bf16"},
    "tf32": {2: "tf32"},
}
ELEMENT_BYTES = {"f16": 2, "tf32": 4}
INSTRUCTION_K = {"f16": 16, "tf32": 8}
ACCUMULATORS = {"f16": {0: "f16", 1: "f32"}, "tf32": {1: "f32"}}


@dataclass(frozen=True)
class InstructionDescriptor:
    """Decoded instruction descriptor of a dense MMA."""

    kind: str
    m: int
    n: int
    k: int
    a_format: str
    b_format: str
    d_format: str
    negate_a: bool
    negate_b: bool
    a_mn_major: bool
    b_mn_major: bool


@lru_cache(maxsize=256)
def decode_instruction(bits: int, kind: str, cta_group: int) -> InstructionDescriptor:
    """Decodes ``bits`` for ``.kind::kind`` and ``.cta_group::cta_group``.

    Raises DescriptorError for reserved bits, sparsity, a shape that the ISA lacks or a kind not executed here.
    """
    if kind not in OPERAND_FORMATS:
        raise DescriptorError(f"tcgen05.mma .kind::{kind} is not executed here: one of {sorted(OPERAND_FORMATS)}")
    if bits & 0xF or bits & (1 << 6) or bits & (1 << 23) or bits >> 29:
        raise DescriptorError(f"instruction descriptor {bits:#010x}: sparsity, saturation or reserved bits are set")
    formats, accumulators = OPERAND_FORMATS[kind], ACCUMULATORS[kind]
    a_code, b_code, d_code = (bits >> 7) & 7, (bits >> 10) & 7, (bits >> 4) & 3
    if a_code not in formats or b_code not in formats or d_code not in accumulators:
        raise DescriptorError(f"instruction descriptor {bits:#010x}: formats a={a_code} b={b_code} d={d_code}")
    m, n = ((bits >> 24) & 0x1F) << 4, ((bits >> 17) & 0x3F) << 3
    if m not in ({64, 128} if cta_group == 1 else {128, 256}):
        raise DescriptorError(f"instruction descriptor {bits:#010x}: M={m} with .cta_group::{cta_group}")
    step = 8 if m == 64 else 16 if cta_group == 1 else 32
    if n < step or n > 256 or n % step:
        raise DescriptorError(f"instruction descriptor {bits:#010x}: N={n} is no multiple of {step} up to 256 (M={m})")
    return InstructionDescriptor(
        kind=kind,
        m=m,
        n=n,
        k=INSTRUCTION_K[kind],
        a_format=formats[a_code],
        b_format=formats[b_code],
        d_format=accumulators[d_code],
        negate_a=bool(bits >> 13 & 1),
        negate_b=bool(bits >> 14 & 1),
        a_mn_major=bool(bits >> 15 & 1),
        b_mn_major=bool(bits >> 16 & 1),
    )


# layout code -> (atom row in bytes, XOR: lowest changed bit, number of bits, distance to the source bits)
SWIZZLES = {
    0: (16, 4, 0, 3),
    1: (128, 5, 2, 2),
    2: (128, 4, 3, 3),
    4: (64, 4, 2, 3),
    6: (32, 4, 1, 3),
}


@dataclass(frozen=True)
class SharedDescriptor:
    """Decoded shared-memory matrix descriptor; addresses and offsets in bytes."""

    start: int
    leading: int
    stride: int
    layout: int


def decode_shared(bits: int) -> SharedDescriptor:
    """Decodes a 64-bit matrix descriptor.

    Raises DescriptorError for a wrong version, an unknown layout, a base offset or the absolute leading mode.
    """
    layout = bits >> 61 & 7
    if (bits >> 46) & 3 != 1:
        raise DescriptorError(f"matrix descriptor {bits:#018x}: version {(bits >> 46) & 3}, sm_100 requires 1")
    if layout not in SWIZZLES:
        raise DescriptorError(f"matrix descriptor {bits:#018x}: layout code {layout} is reserved")
    if bits >> 49 & 0xF:
        raise DescriptorError(f"matrix descriptor {bits:#018x}: base offset or absolute leading dimension")
    return SharedDescriptor(
        start=(bits & 0x3FFF) << 4,
        leading=(bits >> 16 & 0x3FFF) << 4,
        stride=(bits >> 32 & 0x3FFF) << 4,
        layout=layout,
    )


def swizzle(address: np.ndarray, layout: int) -> np.ndarray:
    """Physical byte addresses of logical ones under swizzle ``layout``."""
    _, low, count, distance = SWIZZLES[layout]
    return address ^ ((address >> distance) & (((1 << count) - 1) << low))


@dataclass(frozen=True)
class OperandChunks:
    """16-byte chunks of a matrix operand in shared memory.

    index: chunk numbers relative to ``descriptor.start`` rounded down to the swizzle period: K-major
    (rows, chunks per row), MN-major (rows / elements per chunk, K). stop: one past the highest chunk.
    """

    index: np.ndarray
    stop: int


@lru_cache(maxsize=1024)
def _chunks(
    phase: int, leading: int, stride: int, layout: int, rows: int, k: int, itemsize: int, mn_major: bool
) -> OperandChunks:
    width, per_chunk = SWIZZLES[layout][0], CHUNK // itemsize
    if mn_major:
        mn = np.arange(rows // per_chunk)[:, None] * CHUNK
        kk = np.arange(k)[None, :]
        if layout == 0:
            offset = mn // CHUNK * stride + kk % 8 * CHUNK + kk // 8 * leading
        else:
            depth = 4 if layout == 1 else 8
            offset = mn % width + mn // width * leading + kk % depth * width + kk // depth * stride
    else:
        if layout == 1:
            raise DescriptorError("128-byte swizzle with 32-byte atoms exists for MN-major operands only")
        row, chunk = np.arange(rows)[:, None], np.arange(k * itemsize // CHUNK)[None, :]
        step = leading if layout == 0 else CHUNK
        offset = row % 8 * width + row // 8 * stride + chunk * step
    index = swizzle(offset + phase, layout) // CHUNK
    index.setflags(write=False)
    return OperandChunks(index, int(index.max()) + 1)


def operand_chunks(
    descriptor: SharedDescriptor, rows: int, k: int, itemsize: int, mn_major: bool
) -> tuple[int, OperandChunks]:
    """First byte of the swizzle period that holds ``descriptor.start``, and the chunks relative to it."""
    phase = descriptor.start % SWIZZLE_PERIOD
    chunks = _chunks(phase, descriptor.leading, descriptor.stride, descriptor.layout, rows, k, itemsize, mn_major)
    return descriptor.start - phase, chunks
