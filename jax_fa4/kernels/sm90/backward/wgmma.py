"""Warpgroup matrix products of the backward: atoms, operand views, issue."""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.utils import LayoutEnum
from cutlass.utils import hopper_helpers as hopper

K_MAJOR, MN_MAJOR = OperandMajorMode.K, OperandMajorMode.MN


def rows_layout(dtype, rows: int, columns: int, stages: int | None = None):
    """Swizzled shared-memory layout of a (rows, columns[, stages]) tile whose columns are contiguous."""
    atom = warpgroup.make_smem_layout_atom(hopper.get_smem_layout_atom(LayoutEnum.ROW_MAJOR, dtype, columns), dtype)
    shape = (rows, columns) if stages is None else (rows, columns, stages)
    return cute.tile_to_shape(atom, shape, order=(0, 1) if stages is None else (0, 1, 2))


def transposed(tile: cute.Tensor) -> cute.Tensor:
    """The same shared memory with the first two modes exchanged."""
    shape = (tile.shape[1], tile.shape[0], *tile.shape[2:])
    return cute.composition(tile, cute.make_ordered_layout(shape, order=(1, 0, *range(2, cute.rank(tile)))))


def product(dtype, a_major, b_major, warpgroups: tuple[int, int], columns: int, a_in_registers: bool = False):
    """Tiled product: ``warpgroups`` along (M, N), each 64 rows by ``columns``, float32 accumulation."""
    return hopper.make_trivial_tiled_mma(
        dtype,
        dtype,
        a_major,
        b_major,
        Float32,
        atom_layout_mnk=(*warpgroups, 1),
        tiler_mn=(64, columns),
        a_source=warpgroup.OperandSource.RMEM if a_in_registers else warpgroup.OperandSource.SMEM,
    )


def issue(tiled_mma: cute.TiledMma, acc: cute.Tensor, a: cute.Tensor, b: cute.Tensor, accumulate: bool) -> None:
    """Issues acc (+)= a b over all k blocks as one committed group; nothing is waited for."""
    warpgroup.fence()
    atom = cute.make_mma_atom(tiled_mma.op)
    atom.set(warpgroup.Field.ACCUMULATE, accumulate)
    for k in range(cute.size(a, mode=[2])):
        cute.gemm(atom, acc, a[None, None, k], b[None, None, k], acc)
        atom.set(warpgroup.Field.ACCUMULATE, True)
    warpgroup.commit_group()


def accumulator(tiled_mma: cute.TiledMma, rows: int, columns: int) -> cute.Tensor:
    return cute.make_rmem_tensor(tiled_mma.partition_shape_C((rows, columns)), Float32)


@cute.jit
def to_operand(acc: cute.Tensor, operand: cute.Tensor) -> None:
    """Converts an accumulator into the register operand A of a following product: same order of registers."""
    cute.make_tensor(operand.iterator, acc.layout).store(acc.load().to(operand.element_type))


def warpgroup_slice(tiled_mma: cute.TiledMma, index: Int32) -> cute.ThrMma:
    """Slice whose operand descriptors serve the whole warpgroup ``index``."""
    return tiled_mma.get_slice(index * 128)
