"""(DSL) Descriptors of the tcgen05 matrix instructions, built from the PTX ISA's tables (kind::f16).

Shared-memory descriptor, 64 bits: start address / 16 (bits 0-13), leading-dimension byte offset / 16 (16-29),
stride-dimension byte offset / 16 (32-45), the constant 1 (46-48), swizzle mode (61-63). The kernels keep the low word
in a register and know the high word at compile time.
"""

from __future__ import annotations

from cutlass import Int32

VERSION = 1 << (46 - 32)
SWIZZLE_128B = 2 << (61 - 32)
SWIZZLE_64B = 4 << (61 - 32)
FORMATS = {"float16": 0, "bfloat16": 1}
ACCUMULATE_FLOAT32 = 1


def high_word(stride_bytes: int, swizzle: int = SWIZZLE_128B) -> int:
    """High word for a swizzle; ``stride_bytes`` from one group of 8 rows to the next."""
    return (stride_bytes >> 4) | VERSION | swizzle


def low_word(address: Int32, leading_bytes: int = 16) -> Int32:
    """Low word for a tile at shared-memory ``address``.

    ``leading_bytes``: for MN-major operands, from one 64-element column group to the next; K-major swizzled operands
    do not use it. The window's bits above the 18th (the CTA's rank in its cluster) are dropped.
    """
    return ((address >> 4) & 0x3FFF) | ((leading_bytes >> 4) << 16)


def instruction_descriptor(dtype: str, m: int, n: int, *, b_is_mn_major: bool, a_is_mn_major: bool = False) -> int:
    """The 32-bit instruction descriptor: 16-bit A and B, float32 D, one CTA."""
    return (
        (ACCUMULATE_FLOAT32 << 4)
        | (FORMATS[dtype] << 7)
        | (FORMATS[dtype] << 10)
        | (int(a_is_mn_major) << 15)
        | (int(b_is_mn_major) << 16)
        | ((n >> 3) << 17)
        | ((m >> 4) << 24)
    )
