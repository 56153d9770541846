"""The tensor memory accelerator: tensor maps, tiled loads, stores and reductions with swizzle and bounds."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .errors import EmulatorError, MemoryFault
from .memory import Region
from .operations import Operation, TwoStep, reduce_into
from .race import GRANULE, STRONG

ELEMENT_BYTES = {"uint8": 1, "bfloat16": 2, "float16": 2, "float32": 4, "int32": 4, "uint16": 2, "uint32": 4,
                 "int64": 8, "uint64": 8, "float64": 8}  # fmt: skip
_REDUCE_KIND = {"bfloat16": "bf16", "float16": "f16", "float32": "f32", "int32": "s32", "uint32": "u32",
                "uint64": "u64"}  # fmt: skip
SWIZZLE_SPAN = {0: None, 1: 32, 2: 64, 3: 128}
MAGIC = b"emulated tensor map:"


@dataclass(frozen=True)
class TensorMap:
    """Arguments of ``cuTensorMapEncodeTiled`` (interleave none, element strides 1, out-of-bounds fill zero).

    ``address`` is an emulated global address. ``dims`` and ``box`` in elements, innermost first; ``strides`` in bytes
    from the second dimension on; ``swizzle`` 0..3 as in ``CUtensorMapSwizzle``.
    """

    address: int
    dtype: str
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int = 0

    def check(self) -> None:
        """The driver's own conditions; raises :class:`EmulatorError` as the driver would refuse."""
        size = ELEMENT_BYTES[self.dtype]
        rank = len(self.dims)
        wrong = []
        if not 1 <= rank <= 5 or len(self.box) != rank or len(self.strides) != rank - 1:
            wrong.append(f"rank {rank} with {len(self.strides)} strides and a box of {len(self.box)}")
        if self.address % 16:
            wrong.append(f"address {self.address:#x} is not a multiple of 16")
        wrong += [f"stride {s} is not a multiple of 16" for s in self.strides if s % 16 or s >= 1 << 40]
        wrong += [f"box extent {b} is not in 1..256" for b in self.box if not 1 <= b <= 256]
        wrong += [f"dimension {d} is not in 1..2**32" for d in self.dims if not 1 <= d <= 1 << 32]
        inner = self.box[0] * size if self.box else 0
        if inner % 16:
            wrong.append(f"the box's inner extent of {inner} bytes is not a multiple of 16")
        span = SWIZZLE_SPAN.get(self.swizzle)
        if self.swizzle not in SWIZZLE_SPAN or (span and inner > span):
            wrong.append(f"inner extent of {inner} bytes exceeds the span of swizzle {self.swizzle}")
        if wrong:
            raise EmulatorError("cuTensorMapEncodeTiled: " + "; ".join(wrong))

    @property
    def box_bytes(self) -> int:
        n = ELEMENT_BYTES[self.dtype]
        for b in self.box:
            n *= b
        return n


def encode(number: int) -> bytes:
    """The 128 bytes that stand for tensor map ``number`` of a launch."""
    return (MAGIC + number.to_bytes(4, "little")).ljust(128, b"\0")


def decode(warp, address: int) -> TensorMap:
    region, offset, _ = warp.resolve("generic", address)
    raw = region.bytes[offset : offset + 128].tobytes()
    if not raw.startswith(MAGIC) or offset % 64:
        raise MemoryFault(f"{warp.describe()}: no tensor map at {address:#x} (or not aligned to 64 bytes)")
    return warp.machine.tensor_maps[int.from_bytes(raw[len(MAGIC) : len(MAGIC) + 4], "little")]


def swizzled_chunks(base: int, count: int, swizzle: int) -> np.ndarray:
    """Physical 16-byte chunk numbers of ``count`` consecutive logical chunks from byte address ``base``."""
    chunks = np.arange(base >> 4, (base >> 4) + count)
    if swizzle == 3:
        return chunks ^ (chunks >> 3 & 7)
    if swizzle == 2:
        return chunks ^ (chunks >> 3 & 3)
    if swizzle == 1:
        return chunks ^ (chunks >> 3 & 1)
    return chunks


def box_view(tensor: TensorMap, region: Region, origin: tuple[int, ...], report) -> tuple[np.ndarray, tuple, tuple]:
    """The part of the box inside the tensor as a view of global memory (outermost dimension first).

    Returns (view of shape (..., element bytes), slices of the box that it fills, byte range touched).
    """
    size = ELEMENT_BYTES[tensor.dtype]
    strides = (size, *tensor.strides)
    low = [max(0, -o) for o in origin]
    high = [min(b, d - o) for b, d, o in zip(tensor.box, tensor.dims, origin, strict=True)]
    shape = [max(0, h - lo) for lo, h in zip(low, high, strict=True)]
    start = tensor.address - region.base
    slices = tuple(slice(lo, lo + n) for lo, n in zip(low, shape, strict=True))[::-1]
    if min(shape) == 0:
        return np.zeros((*shape[::-1], size), np.uint8), slices, (0, 0)
    start += sum((o + lo) * s for o, lo, s in zip(origin, low, strides, strict=True))
    last = start + sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + size
    if start < 0 or last > region.size:
        raise MemoryFault(
            f"{report()}: the tensor map reaches bytes {start}..{last} of {region.name} ({region.size} bytes)"
        )
    shape_bytes, stride_bytes = (*shape[::-1], size), (*strides[: len(shape)][::-1], 1)
    view = np.ndarray(shape_bytes, np.uint8, region.bytes.data, start, stride_bytes)
    return view, slices, (start, last)


def global_granules(tensor: TensorMap, view: np.ndarray, start: int) -> np.ndarray:
    """Granules of a box view: every granule that its elements touch."""
    offsets = np.array([start])
    for n, stride in zip(view.shape[:-2], view.strides[:-2], strict=True):
        offsets = (offsets[:, None] + np.arange(n) * stride).ravel()
    row = view.shape[-2] * view.shape[-1]
    first = offsets // GRANULE
    return (first[:, None] + np.arange(-(-row // GRANULE))).ravel()


class TensorLoad(Operation):
    """``cp.async.bulk.tensor`` global to shared of one CTA; signals the box's full size in bytes."""

    def __init__(self, warp, cta, offset: int, tensor: TensorMap, origin: tuple[int, ...], barrier: tuple):
        super().__init__(warp, f"TMA load of box {tensor.box} at {origin}")
        self.target, self.offset, self.tensor, self.origin, self.barrier = cta, offset, tensor, origin, barrier
        check_shared(self, tensor, offset)

    def run(self) -> bool:
        tensor = self.tensor
        size = ELEMENT_BYTES[tensor.dtype]
        region = self.machine.memory.find(tensor.address, self.report)
        view, slices, (start, stop) = box_view(tensor, region, self.origin, self.report)
        if region.shadow is not None and stop > start:
            region.shadow.read(global_granules(tensor, view, start), self.accessor, self.line)
        shape = (*tensor.box[::-1], size)
        if view.shape == shape:
            data = np.ascontiguousarray(view)
        else:
            data = np.zeros(shape, np.uint8)
            data[slices] = view
        shared = self.target.shared
        nbytes = data.size
        self._range(shared, self.offset, nbytes)
        if shared.shadow is not None:
            shared.shadow.write(
                slice(self.offset // GRANULE, (self.offset + nbytes) // GRANULE), self.accessor, self.line
            )
        if tensor.swizzle == 0:
            shared.bytes[self.offset : self.offset + nbytes] = data.reshape(-1)
        else:
            chunks = swizzled_chunks(self.offset, nbytes // 16, tensor.swizzle)
            shared.view(8, 2)[chunks] = data.reshape(-1).view(np.uint64).reshape(-1, 2)
        shared.touch(self.offset, nbytes)
        self.machine.count("async_shared_write", nbytes)
        self.machine.count("global_read", stop - start and view.size)
        self.close()
        self.signal(*self.barrier, nbytes)
        return True


class TensorStore(TwoStep):
    """``cp.async.bulk.tensor`` shared to global, or ``cp.reduce.async.bulk.tensor``; elements outside are dropped."""

    def __init__(self, warp, offset: int, tensor: TensorMap, origin: tuple[int, ...], operation: str | None = None):
        super().__init__(warp, f"TMA {'reduce' if operation else 'store'} of box {tensor.box} at {origin}")
        self.offset, self.tensor, self.origin, self.operation = offset, tensor, origin, operation
        check_shared(self, tensor, offset)

    def read(self) -> None:
        tensor, shared = self.tensor, self.cta.shared
        nbytes = tensor.box_bytes
        self._range(shared, self.offset, nbytes)
        region = self.machine.memory.find(tensor.address, self.report)
        _view, slices, _ = box_view(tensor, region, self.origin, self.report)
        chunks = swizzled_chunks(self.offset, nbytes // 16, tensor.swizzle)
        rows = np.ascontiguousarray(shared.view(8, 2)[chunks]).view(np.uint8)
        size = ELEMENT_BYTES[tensor.dtype]
        box = rows.reshape(*tensor.box[::-1], size)
        if shared.shadow is not None:
            place = (chunks[:, None] * 16 + np.arange(16)).reshape(box.shape)[slices]
            if place.size:
                shared.shadow.read(np.unique(place // GRANULE), self.accessor, self.line)
        self.data = np.ascontiguousarray(box[slices])
        self.machine.count("async_shared_read", nbytes)

    def write(self) -> None:
        assert self.data is not None
        tensor = self.tensor
        region = self.machine.memory.find(tensor.address, self.report)
        self._writable(region)
        view, _, (start, stop) = box_view(tensor, region, self.origin, self.report)
        if stop == start:
            return
        if self.operation:
            self.accessor.flags |= STRONG
        if region.shadow is not None:
            region.shadow.write(global_granules(tensor, view, start), self.accessor, self.line)
        self.machine.count("global_write", self.data.size)
        if self.operation is None:
            view[...] = self.data
            return
        flat = np.ascontiguousarray(view).reshape(-1)
        reduce_into(flat, self.data.reshape(-1), self.operation, _REDUCE_KIND[tensor.dtype])
        view[...] = flat.reshape(view.shape)


def check_shared(operation: Operation, tensor: TensorMap, offset: int) -> None:
    if offset % 128:
        raise MemoryFault(f"{operation.report()}: shared address offset {offset:#x} is not aligned to 128 bytes")
    tensor_rank = len(tensor.dims)
    if len(operation.origin) != tensor_rank:  # type: ignore[attr-defined]
        raise MemoryFault(f"{operation.report()}: {tensor_rank}-dimensional tensor map with other coordinates")
