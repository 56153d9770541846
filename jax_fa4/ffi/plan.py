"""LaunchPlan: one call's kernel launches as pure data.

A plan is built in Python at lowering time from concrete shapes, travels inside the custom call as bytes, and is
executed by the C++ handler on a GPU or by the emulator of the test suite on a CPU. It knows nothing of attention.

Buffers are named by index: first the operands of the custom call in order, then its results in order (scratch buffers
are results too, so that XLA owns all memory). A kernel's parameters are listed in the order of the entry's parameter
list, with the byte layout that a CuTe-DSL kernel has for them:

- a TMA atom is a 128-byte ``CUtensorMap``, 64-byte aligned, by value (:class:`TensorMap`);
- a ``cute.Tensor`` is a 64-bit pointer followed by its dynamic shape and stride values as packed int32 or int64
  (:class:`Tensor`); the coordinate tensor of a TMA atom has no pointer, only such integers (:class:`Scalars`);
- anything else is its bytes (:class:`Scalars`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

SWIZZLE_NONE, SWIZZLE_32B, SWIZZLE_64B, SWIZZLE_128B = 0, 1, 2, 3
"""Values of ``CUtensorMapSwizzle``."""


@dataclass(frozen=True)
class TensorMap:
    """Arguments of ``cuTensorMapEncodeTiled`` for one TMA descriptor (interleave none, out-of-bounds fill zero).

    ``dims`` and ``box`` list the innermost dimension first, in elements; ``strides`` are in bytes and start with the
    second dimension (one fewer than ``dims``), as the driver wants them.
    """

    buffer: int
    dtype: str  # "bfloat16" | "float16" | "float32" | "int32"
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int
    offset: int = 0  # bytes from the start of the buffer
    l2_promotion: int = 2  # CU_TENSOR_MAP_L2_PROMOTION_L2_128B


@dataclass(frozen=True)
class Tensor:
    """A pointer into a buffer, followed by the dynamic shape and stride values of the ``cute.Tensor``."""

    buffer: int
    ints: tuple[int, ...] = ()
    offset: int = 0  # bytes
    int_bits: int = 32


@dataclass(frozen=True)
class Scalars:
    """Plain bytes: ``struct.pack(format, *values)`` with little-endian, unpadded layout."""

    format: str  # struct characters, e.g. "iif"
    values: tuple[int | float, ...]


Parameter = TensorMap | Tensor | Scalars


@dataclass(frozen=True)
class Kernel:
    """One launch. ``artefact`` indexes :attr:`LaunchPlan.artefacts`; sizes in threads, CTAs and bytes."""

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
