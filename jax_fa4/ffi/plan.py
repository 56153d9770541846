"""LaunchPlan: one call's kernel launches as pure data.

A plan is built in Python at lowering time from concrete shapes, travels inside the custom call as bytes
(:mod:`jax_fa4.ffi.wire`), and is executed by the C++ handler on a GPU or by the emulator of the test suite on a CPU. It
knows nothing of attention.

Buffers are named by index: first the operands of the custom call in order, then its results in order (scratch buffers
are results too, so that XLA owns all memory). A kernel's parameters are listed in the order of the entry's parameter
list, with the byte layout that a CuTe-DSL kernel has for them:

- a TMA atom is a 128-byte ``CUtensorMap``, 64-byte aligned, by value (:class:`TensorMap`);
- a ``cute.Tensor`` is a 64-bit pointer followed by its dynamic shape and stride values (:class:`Tensor`); the
  coordinate tensor of a TMA atom has no pointer, only such integers (:class:`Scalars`);
- anything else is its bytes (:class:`Scalars`).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from functools import cached_property

SWIZZLE_NONE, SWIZZLE_32B, SWIZZLE_64B, SWIZZLE_128B = 0, 1, 2, 3
"""Values of ``CUtensorMapSwizzle``."""

SWIZZLE_SPAN = {SWIZZLE_32B: 32, SWIZZLE_64B: 64, SWIZZLE_128B: 128}
"""Bytes of the innermost box dimension that each swizzle can hold."""

TENSOR_MAP_DTYPES = {"int32": (3, 4), "float16": (6, 2), "float32": (7, 4), "bfloat16": (9, 2)}
"""Element types of tensor maps: name -> (value of ``CUtensorMapDataType``, bytes)."""

TENSOR_MAP_BYTES = 128
"""``sizeof(CUtensorMap)``."""

INT_FORMATS = {32: "i", 64: "q"}


@dataclass(frozen=True)
class TensorMap:
    """Arguments of ``cuTensorMapEncodeTiled`` for one TMA descriptor (interleave none, out-of-bounds fill zero).

    ``dims`` and ``box`` list the innermost dimension first, in elements; ``strides`` are in bytes and start with the
    second dimension (one fewer than ``dims``), as the driver wants them.
    """

    buffer: int
    dtype: str  # a key of TENSOR_MAP_DTYPES
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int
    offset: int = 0  # bytes from the start of the buffer
    l2_promotion: int = 2  # CU_TENSOR_MAP_L2_PROMOTION_L2_128B

    @property
    def extent(self) -> int:
        """Bytes from ``offset`` to the end of the last element that the map can touch."""
        size = TENSOR_MAP_DTYPES[self.dtype][1]
        return self.dims[0] * size + sum(
            (dim - 1) * stride for dim, stride in zip(self.dims[1:], self.strides, strict=True)
        )


@dataclass(frozen=True)
class Tensor:
    """A pointer into a buffer, followed by the dynamic shape and stride values of the ``cute.Tensor``.

    ``ints`` are packed with ``int_bits`` (32 or 64) bits each. Where shape and strides differ in width (a DSL tensor
    with int32 shape and int64 strides has padding between them), ``format`` gives the struct characters instead, one
    per value plus ``x`` for padding bytes: ``"iii4xqq"``.
    """

    buffer: int
    ints: tuple[int, ...] = ()
    offset: int = 0  # bytes
    int_bits: int = 32
    format: str = ""

    @cached_property
    def payload(self) -> bytes:
        """The bytes that follow the pointer, little-endian."""
        return struct.pack("<" + (self.format or INT_FORMATS[self.int_bits] * len(self.ints)), *self.ints)


@dataclass(frozen=True)
class Scalars:
    """Plain bytes: ``struct.pack(format, *values)`` with little-endian, unpadded layout."""

    format: str  # struct characters, e.g. "iif"
    values: tuple[int | float, ...]

    @cached_property
    def payload(self) -> bytes:
        """The parameter's bytes, little-endian."""
        return struct.pack("<" + self.format, *self.values)


Parameter = TensorMap | Tensor | Scalars


@dataclass(frozen=True)
class Kernel:
    """One launch. ``artefact`` indexes :attr:`LaunchPlan.artefacts`; sizes in threads, CTAs and bytes.

    A grid with a zero in it launches nothing.
    """

    artefact: int
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    shared_bytes: int
    parameters: tuple[Parameter, ...]


@dataclass(frozen=True)
class Fill:
    """Sets ``size`` bytes of a buffer to one 32-bit pattern (``size`` and ``offset`` are multiples of 4)."""

    buffer: int
    size: int
    offset: int = 0
    pattern: int = 0


@dataclass(frozen=True)
class ArtefactRef:
    """Names a compiled kernel: content hash of its cubin, entry symbol."""

    sha256: str
    entry: str


@dataclass(frozen=True)
class LaunchPlan:
    """The steps of one call, in order."""

    steps: tuple[Kernel | Fill, ...]
    artefacts: tuple[ArtefactRef, ...] = field(default=())


@dataclass(frozen=True)
class ParameterSlot:
    """Where one parameter lies in the entry's parameter space, in bytes.

    ``size`` is what the plan supplies; the kernel may declare up to ``padded_size`` (a structure's tail padding), the
    rest is zero.
    """

    offset: int
    size: int
    alignment: int

    @property
    def padded_size(self) -> int:
        return -(-self.size // self.alignment) * self.alignment


def parameter_layout(parameters: tuple[Parameter, ...]) -> tuple[ParameterSlot, ...]:
    """Offsets and sizes as the driver's ``cuKernelGetParamInfo`` reports them for an entry with these parameters.

    Args:
      parameters: of one :class:`Kernel`, in order.

    Returns:
      One :class:`ParameterSlot` per parameter. Tensor maps are aligned to 64 bytes, tensors to 8, scalars to their
      widest member.
    """
    slots = []
    end = 0
    for parameter in parameters:
        size = parameter_size(parameter)
        alignment = parameter_alignment(parameter)
        offset = -(-end // alignment) * alignment
        slots.append(ParameterSlot(offset, size, alignment))
        end = offset + slots[-1].padded_size
    return tuple(slots)


def parameter_size(parameter: Parameter) -> int:
    """Bytes that the plan supplies for a parameter."""
    if isinstance(parameter, TensorMap):
        return TENSOR_MAP_BYTES
    return len(parameter.payload) + (8 if isinstance(parameter, Tensor) else 0)


def parameter_alignment(parameter: Parameter) -> int:
    """Alignment in bytes of a parameter in the entry's parameter space."""
    if isinstance(parameter, TensorMap):
        return 64
    if isinstance(parameter, Tensor):
        return 8
    return max((struct.calcsize("<" + char) for char in parameter.format if char.isalpha() and char != "x"), default=1)
