"""tcgen05.cp: shared memory to tensor memory, in the order of the tensor core's queue.

The source is a K-major matrix (canonical layouts, any swizzle); its rows go to lanes, with the copies that ``.warpx2``
and ``.warpx4`` ask for. Source: PTX ISA, "tcgen05.cp".
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .descriptors import SharedDescriptor, operand_chunks
from .tmem import LANES, TensorAddress, TensorMemory, TensorMemoryError


@dataclass(frozen=True)
class CopyShape:
    """Rows and bytes per row of the source, and the lanes that each copy of the rows takes."""

    rows: int
    row_bytes: int
    lanes: tuple[tuple[int, ...], ...]


def _quarters(*numbers: int) -> tuple[int, ...]:
    return tuple(lane for quarter in numbers for lane in range(32 * quarter, 32 * quarter + 32))


# (shape, multicast) -> CopyShape
SHAPES = {
    ("128x256b", ""): CopyShape(128, 32, (_quarters(0, 1, 2, 3),)),
    ("4x256b", ""): CopyShape(4, 32, ((0, 32, 64, 96),)),
    ("128x128b", ""): CopyShape(128, 16, (_quarters(0, 1, 2, 3),)),
    ("64x128b", "warpx2::02_13"): CopyShape(64, 16, (_quarters(0, 1), _quarters(2, 3))),
    ("64x128b", "warpx2::01_23"): CopyShape(64, 16, (_quarters(0, 2), _quarters(1, 3))),
    ("32x128b", "warpx4"): CopyShape(32, 16, tuple(_quarters(quarter) for quarter in range(4))),
}


def copy_shape(shape: str, multicast: str) -> CopyShape:
    """Raises TensorMemoryError for a combination that the ISA does not have."""
    if (shape, multicast) not in SHAPES:
        raise TensorMemoryError(f"tcgen05.cp .{shape} {multicast or 'without multicast'}: one of {sorted(SHAPES)}")
    return SHAPES[shape, multicast]


def execute(
    form: CopyShape, address: TensorAddress, source: SharedDescriptor, shared: np.ndarray, memory: TensorMemory
) -> None:
    """Copies within one CTA; ``shared`` is its shared window as complex128 (16-byte items)."""
    if address.lane:
        raise TensorMemoryError(f"tcgen05.cp to lane {address.lane}: lane 0 is required")
    columns = form.row_bytes // 4
    memory.check_owned(address.column, address.column + columns, "tcgen05.cp")
    base, chunks = operand_chunks(source, max(form.rows, 8), form.row_bytes // 2, 2, False)
    first = base // 16
    index = chunks.index[: form.rows]
    if first + int(index.max()) >= shared.size:
        raise TensorMemoryError(f"tcgen05.cp reads past the end of shared memory ({shared.size * 16} bytes)")
    words = shared[first:].take(index).view(np.uint32).T
    for lanes in form.lanes:
        assert len(lanes) in (form.rows, LANES)
        memory.words[address.column : address.column + columns, list(lanes)] = words
        memory.written[address.column : address.column + columns, list(lanes)] = True
