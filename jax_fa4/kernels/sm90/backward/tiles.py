"""Moving tiles: TMA atoms and their partitions, accumulators to shared memory, shared memory to global."""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Int32, const_expr
from cutlass.cute.nvgpu import cpasync, warp

from jax_fa4.kernels.sm90.backward.values import TmaTensor


def by_head(tensor: cute.Tensor) -> cute.Tensor:
    """A (batch, rows, heads, head dim) tensor as (rows, head dim, heads, batch)."""
    return cute.make_tensor(tensor.iterator, cute.select(tensor.layout, [1, 3, 2, 0]))


def load_atom(tensor: cute.Tensor, layout: Any, rows: int, columns: int) -> TmaTensor:
    """TMA load of (rows, columns) tiles into one stage of a shared ``layout``."""
    if const_expr(cute.rank(layout) == 3):
        layout = cute.slice_(layout, (None, None, 0))
    operation = cpasync.CopyBulkTensorTileG2SOp()
    return TmaTensor(*cpasync.make_tiled_tma_atom(operation, by_head(tensor), layout, (rows, columns)))


def store_atom(tensor: cute.Tensor, layout: Any, rows: int, columns: int) -> TmaTensor:
    """TMA store of (rows, columns) tiles; what lies outside the tensor is dropped."""
    operation = cpasync.CopyBulkTensorTileS2GOp()
    return TmaTensor(*cpasync.make_tiled_tma_atom(operation, by_head(tensor), layout, (rows, columns)))


def operand_atoms(
    c: Any, layouts: dict[str, Any], query: cute.Tensor, key: cute.Tensor, value: cute.Tensor, dout: cute.Tensor
) -> tuple[TmaTensor, TmaTensor, TmaTensor, TmaTensor]:
    """TMA loads of the four operands, by the kernel's tiles."""
    return (
        load_atom(query, layouts["query"], c.tile_m, c.head_dim),
        load_atom(key, layouts["key"], c.tile_n, c.head_dim),
        load_atom(value, layouts["value"], c.tile_n, c.head_dim_v),
        load_atom(dout, layouts["dout"], c.tile_m, c.head_dim_v),
    )


def tiles(given: TmaTensor, shared: cute.Tensor, batch: Int32, tile: tuple[int, int]):
    """(atom, shared tile[, stage], global tiles by (row block, 0, head))."""
    atom = given.atom
    blocks = cute.flat_divide(given.tensor[None, None, None, batch], tile)
    target, source = cpasync.tma_partition(
        atom, 0, cute.make_layout(1), cute.group_modes(shared, 0, 2), cute.group_modes(blocks, 0, 2)
    )
    return atom, target, source


def to_shared(dtype: Any, tiled_mma: cute.TiledMma, acc: cute.Tensor, target: cute.Tensor, thread: Int32) -> None:
    """Rounds an accumulator and stores it into a shared tile."""
    atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), dtype)
    copy = cute.make_tiled_copy_C(atom, tiled_mma).get_slice(thread)
    rounded = cute.make_rmem_tensor(acc.layout, dtype)
    rounded.store(acc.load().to(dtype))
    cute.copy(atom, copy.retile(rounded), copy.partition_D(target))


def to_global(
    given: TmaTensor,
    shared: cute.Tensor,
    batch: Int32,
    block: Int32,
    head: Int32,
    tile: tuple[int, int],
) -> None:
    """Starts the TMA store of a shared tile to one row block of one head."""
    atom, source, target = tiles(given, shared, batch, tile)
    cute.copy(atom, source, target[None, block, 0, head])
