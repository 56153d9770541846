"""Epilogue of the consumer warpgroups: dK (scaled) and dV to shared memory, then to global memory through TMA."""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import cpasync, warp

from jax_fa4.kernels.sm90.backward.config import MainConfig, NamedBarrier
from jax_fa4.kernels.sm90.backward.scratch import WARPGROUP


def _to_shared(c: MainConfig, tiled_mma: cute.TiledMma, acc: cute.Tensor, target: cute.Tensor, thread: Int32) -> None:
    atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), c.dtype)
    copy = cute.make_tiled_copy_C(atom, tiled_mma).get_slice(thread)
    rounded = cute.make_rmem_tensor(acc.layout, c.dtype)
    rounded.store(acc.load().to(c.dtype))
    cute.copy(atom, copy.retile(rounded), copy.partition_D(target))


def _to_global(atom_and_tensor: tuple[Any, cute.Tensor], source: cute.Tensor, work: Any, tile: tuple[int, int]) -> None:
    atom, tensor = atom_and_tensor
    blocks = cute.flat_divide(tensor[None, None, None, work.batch], tile)
    source, target = cpasync.tma_partition(
        atom, 0, cute.make_layout(1), cute.group_modes(source, 0, 2), cute.group_modes(blocks, 0, 2)
    )
    cute.copy(atom, source, target[None, work.key_block, 0, work.key_head])


@cute.jit
def store_gradients(
    c: MainConfig, work: Any, shared: Any, products: Any, thread: Int32, dkey: Any, dvalue: Any, scale: Float32
) -> None:
    """Rows past the key length hold exact zeros by now; TMA drops those past the tensor's end.

    The tiles take the places of K and V, which nothing reads any more once both warpgroups are here.
    """
    products.dkey_acc.store(products.dkey_acc.load() * scale)
    threads = c.consumers * WARPGROUP
    cute.arch.barrier(barrier_id=NamedBarrier.EPILOGUE, number_of_threads=threads)
    _to_shared(c, products.dkey, products.dkey_acc, shared.key, thread)
    _to_shared(c, products.dvalue, products.dvalue_acc, shared.value, thread)
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.barrier(barrier_id=NamedBarrier.EPILOGUE, number_of_threads=threads)
    if cute.arch.make_warp_uniform(thread // 32) == 0:
        _to_global(dkey, shared.key, work, (c.tile_n, c.head_dim))
        _to_global(dvalue, shared.value, work, (c.tile_n, c.head_dim_v))
        cute.arch.cp_async_bulk_commit_group()
        cute.arch.cp_async_bulk_wait_group(0, read=True)
