"""Checks a LaunchPlan against the limits of the hardware and of the driver calls that will carry it out.

Limits: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability" (9.0 and 10.x agree in these), and
the driver API reference of ``cuTensorMapEncodeTiled``.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence

from .plan import (
    INT_FORMATS,
    SWIZZLE_NONE,
    SWIZZLE_SPAN,
    TENSOR_MAP_DTYPES,
    Fill,
    Kernel,
    LaunchPlan,
    Parameter,
    Scalars,
    Tensor,
    TensorMap,
    parameter_layout,
)

MAX_GRID = (2**31 - 1, 65535, 65535)
MAX_BLOCK = (1024, 1024, 64)
MAX_THREADS = 1024
MAX_CLUSTER = 16  # CTAs; more than 8 needs the non-portable attribute, which the launcher sets
MAX_SHARED_BYTES = 232448  # 227 KiB of dynamic shared memory per CTA
MAX_PARAMETER_BYTES = 32764
MAX_BOX = 256  # elements per dimension of a TMA box
MAX_RANK = 5
MAX_DIM = 2**32
MAX_STRIDE = 2**40
TMA_ALIGNMENT = 16  # bytes: global address, strides, innermost box extent
L2_PROMOTIONS = range(4)


def validate(plan: LaunchPlan, buffer_bytes: Sequence[int] | None = None) -> None:
    """Raises ValueError naming step and parameter if the plan cannot be launched.

    Args:
      plan: what to check.
      buffer_bytes: size in bytes of every operand and then every result. When given, indices and extents are checked
        against it.

    Raises:
      ValueError: with what came and what is allowed.
    """
    for index, artefact in enumerate(plan.artefacts):
        if len(artefact.sha256) != 64 or not set(artefact.sha256) <= set("0123456789abcdef"):
            raise ValueError(
                f"artefact {index}: sha256 must be 64 lower-case hexadecimal digits, got {artefact.sha256!r}"
            )
        if not artefact.entry.isascii() or not artefact.entry.isprintable() or not 0 < len(artefact.entry) < 2**16:
            raise ValueError(f"artefact {index}: entry must be a non-empty ASCII symbol, got {artefact.entry!r}")
    for index, step in enumerate(plan.steps):
        if isinstance(step, Fill):
            _check_fill(f"step {index} (fill)", step, buffer_bytes)
        else:
            _check_kernel(f"step {index}", plan, step, buffer_bytes)


def check_parameter_sizes(kernel: Kernel, declared: Sequence[int], entry: str) -> None:
    """Compares a kernel's parameters with the sizes that the compiled entry declares.

    Args:
      kernel: one launch of the plan.
      declared: bytes of each of the entry's parameters in order (from the artefact's meta data).
      entry: symbol, for the message.

    Raises:
      ValueError: on a different count, or a size that is not the plan's (tail padding allowed).
    """
    slots = parameter_layout(kernel.parameters)
    if len(slots) != len(declared):
        raise ValueError(f"kernel {entry} declares {len(declared)} parameters, the plan supplies {len(slots)}")
    for index, (slot, size) in enumerate(zip(slots, declared, strict=True)):
        if not slot.size <= size <= slot.padded_size:
            raise ValueError(
                f"kernel {entry} declares {size} bytes for parameter {index}, the plan supplies {slot.size}"
            )


def _check_buffer(where: str, buffer: int, offset: int, end: int, buffer_bytes: Sequence[int] | None) -> None:
    if not 0 <= buffer < 2**16:
        raise ValueError(f"{where}: buffer must be in [0, 65535], got {buffer}")
    if not 0 <= offset < 2**63:
        raise ValueError(f"{where}: offset must not be negative, got {offset}")
    if buffer_bytes is None:
        return
    if buffer >= len(buffer_bytes):
        raise ValueError(f"{where}: buffer {buffer} does not exist, the call has {len(buffer_bytes)} buffers")
    if end > buffer_bytes[buffer]:
        raise ValueError(f"{where}: reaches byte {end} of buffer {buffer}, which has {buffer_bytes[buffer]} bytes")


def _check_fill(where: str, fill: Fill, buffer_bytes: Sequence[int] | None) -> None:
    if fill.size < 0 or fill.size % 4 or fill.offset % 4:
        raise ValueError(f"{where}: size and offset must be multiples of 4, got size {fill.size}, offset {fill.offset}")
    if not 0 <= fill.pattern < 2**32:
        raise ValueError(f"{where}: pattern must be an unsigned 32-bit value, got {fill.pattern}")
    _check_buffer(where, fill.buffer, fill.offset, fill.offset + fill.size, buffer_bytes)


def _check_kernel(where: str, plan: LaunchPlan, kernel: Kernel, buffer_bytes: Sequence[int] | None) -> None:
    if not 0 <= kernel.artefact < len(plan.artefacts):
        raise ValueError(f"{where}: artefact {kernel.artefact} does not exist, the plan has {len(plan.artefacts)}")
    where = f"{where} (kernel {plan.artefacts[kernel.artefact].entry})"
    for name in ("grid", "block", "cluster"):
        if len(getattr(kernel, name)) != 3:
            raise ValueError(f"{where}: {name} must have 3 dimensions, got {getattr(kernel, name)}")
    if any(not 0 <= size <= limit for size, limit in zip(kernel.grid, MAX_GRID, strict=True)):
        raise ValueError(f"{where}: grid {kernel.grid} outside [0, {MAX_GRID}]")
    if any(not 1 <= size <= limit for size, limit in zip(kernel.block, MAX_BLOCK, strict=True)):
        raise ValueError(f"{where}: block {kernel.block} outside [1, {MAX_BLOCK}]")
    if math.prod(kernel.block) > MAX_THREADS:
        raise ValueError(f"{where}: block {kernel.block} has more than {MAX_THREADS} threads")
    if any(size < 1 for size in kernel.cluster) or math.prod(kernel.cluster) > MAX_CLUSTER:
        raise ValueError(f"{where}: cluster {kernel.cluster} must have between 1 and {MAX_CLUSTER} CTAs")
    if any(size % cluster for size, cluster in zip(kernel.grid, kernel.cluster, strict=True)):
        raise ValueError(f"{where}: grid {kernel.grid} is not a multiple of cluster {kernel.cluster}")
    if not 0 <= kernel.shared_bytes <= MAX_SHARED_BYTES:
        raise ValueError(f"{where}: shared_bytes {kernel.shared_bytes} outside [0, {MAX_SHARED_BYTES}]")
    for index, parameter in enumerate(kernel.parameters):
        _check_parameter(f"{where}, parameter {index}", parameter, buffer_bytes)
    slots = parameter_layout(kernel.parameters)
    if slots and slots[-1].offset + slots[-1].padded_size > MAX_PARAMETER_BYTES:
        raise ValueError(f"{where}: parameters take more than {MAX_PARAMETER_BYTES} bytes")


def _check_parameter(where: str, parameter: Parameter, buffer_bytes: Sequence[int] | None) -> None:
    if isinstance(parameter, TensorMap):
        _check_tensor_map(f"{where} (tensor map)", parameter, buffer_bytes)
        return
    if isinstance(parameter, Tensor):
        where = f"{where} (tensor)"
        if parameter.int_bits not in INT_FORMATS:
            raise ValueError(f"{where}: int_bits must be 32 or 64, got {parameter.int_bits}")
        _check_buffer(where, parameter.buffer, parameter.offset, parameter.offset, buffer_bytes)
    else:
        assert isinstance(parameter, Scalars)
        where = f"{where} (scalars)"
        if not parameter.format:
            raise ValueError(f"{where}: format is empty")
    if set(parameter.format) - set("0123456789xbBhHiIqQfd"):
        raise ValueError(
            f"{where}: format {parameter.format!r} may hold only x, b, B, h, H, i, I, q, Q, f, d and counts"
        )
    try:
        size = len(parameter.payload)
    except struct.error as error:
        values = parameter.ints if isinstance(parameter, Tensor) else parameter.values
        raise ValueError(f"{where}: {values} does not fit format {parameter.format!r}: {error}") from None
    if size > MAX_PARAMETER_BYTES:
        raise ValueError(f"{where}: {size} bytes, at most {MAX_PARAMETER_BYTES} are possible")


def _check_tensor_map(where: str, tensor_map: TensorMap, buffer_bytes: Sequence[int] | None) -> None:
    if tensor_map.dtype not in TENSOR_MAP_DTYPES:
        raise ValueError(f"{where}: dtype must be one of {sorted(TENSOR_MAP_DTYPES)}, got {tensor_map.dtype!r}")
    rank = len(tensor_map.dims)
    if not 1 <= rank <= MAX_RANK or len(tensor_map.strides) != rank - 1 or len(tensor_map.box) != rank:
        raise ValueError(
            f"{where}: needs 1 to {MAX_RANK} dims, one stride fewer and as many box extents, got "
            f"dims {tensor_map.dims}, strides {tensor_map.strides}, box {tensor_map.box}"
        )
    if any(not 1 <= dim <= MAX_DIM for dim in tensor_map.dims):
        raise ValueError(f"{where}: dims {tensor_map.dims} outside [1, 2**32]")
    if any(stride % TMA_ALIGNMENT or not 0 <= stride < MAX_STRIDE for stride in tensor_map.strides):
        raise ValueError(f"{where}: strides {tensor_map.strides} must be multiples of {TMA_ALIGNMENT} below 2**40")
    if any(not 1 <= extent <= MAX_BOX for extent in tensor_map.box):
        raise ValueError(f"{where}: box {tensor_map.box} outside [1, {MAX_BOX}] elements")
    inner = tensor_map.box[0] * TENSOR_MAP_DTYPES[tensor_map.dtype][1]
    if inner % TMA_ALIGNMENT:
        raise ValueError(f"{where}: innermost box extent is {inner} bytes, must be a multiple of {TMA_ALIGNMENT}")
    if tensor_map.swizzle != SWIZZLE_NONE and tensor_map.swizzle not in SWIZZLE_SPAN:
        raise ValueError(f"{where}: swizzle must be a SWIZZLE_ constant (0 to 3), got {tensor_map.swizzle}")
    if tensor_map.swizzle in SWIZZLE_SPAN and inner > SWIZZLE_SPAN[tensor_map.swizzle]:
        span = SWIZZLE_SPAN[tensor_map.swizzle]
        raise ValueError(f"{where}: innermost box extent is {inner} bytes, the swizzle holds {span}")
    if tensor_map.l2_promotion not in L2_PROMOTIONS:
        raise ValueError(f"{where}: l2_promotion must be in [0, 3], got {tensor_map.l2_promotion}")
    if tensor_map.offset % TMA_ALIGNMENT:
        raise ValueError(f"{where}: offset {tensor_map.offset} must be a multiple of {TMA_ALIGNMENT}")
    end = tensor_map.offset + tensor_map.extent
    _check_buffer(where, tensor_map.buffer, tensor_map.offset, end, buffer_bytes)


def check_artefacts(plan: LaunchPlan, cubins: Mapping[str, bytes]) -> None:
    """Raises ValueError if the plan names a cubin that ``cubins`` (sha256 -> bytes) does not hold."""
    for artefact in plan.artefacts:
        if artefact.sha256 not in cubins:
            raise ValueError(f"kernel {artefact.entry}: no cubin with sha256 {artefact.sha256} was supplied")
