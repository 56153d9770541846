"""Epilogue: dK (scaled) and dV go through shared memory to global memory.

A CTA of one tile has its consumer warpgroups do all of it. In a persistent CTA they only fill shared memory: the store
warp sees to the rest while they begin the next tile.
"""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32

from jax_fa4.kernels.sm90.backward.config import MainConfig, NamedBarrier
from jax_fa4.kernels.sm90.backward.ptx import arrive_once_per_warp
from jax_fa4.kernels.sm90.backward.scratch import WARPGROUP
from jax_fa4.kernels.sm90.backward.tile_queue import Before
from jax_fa4.kernels.sm90.backward.tiles import to_global, to_shared


@cute.jit
def store_in_place(
    c: MainConfig, work: Any, shared: Any, products: Any, thread: Int32, dkey: Any, dvalue: Any, scale: Float32
) -> None:
    """Rows past the key length hold exact zeros by now; TMA drops those past the tensor's end.

    The tiles take the places of K and V, which nothing reads any more once both warpgroups are here.
    """
    products.dkey_acc.store(products.dkey_acc.load() * scale)
    threads = c.consumers * WARPGROUP
    cute.arch.barrier(barrier_id=NamedBarrier.EPILOGUE, number_of_threads=threads)
    to_shared(c.dtype, products.dkey, products.dkey_acc, shared.key, thread)
    to_shared(c.dtype, products.dvalue, products.dvalue_acc, shared.value, thread)
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.barrier(barrier_id=NamedBarrier.EPILOGUE, number_of_threads=threads)
    if cute.arch.make_warp_uniform(thread // 32) == 0:
        to_global(dkey, shared.key, work.batch, work.key_block, work.key_head, (c.tile_n, c.head_dim))
        to_global(dvalue, shared.value, work.batch, work.key_block, work.key_head, (c.tile_n, c.head_dim_v))
        cute.arch.cp_async_bulk_commit_group()
        cute.arch.cp_async_bulk_wait_group(0, read=True)


@cute.jit
def stage_gradients(c: MainConfig, shared: Any, products: Any, thread: Int32, scale: Float32) -> None:
    """As :func:`store_in_place`, up to shared memory.

    The tiles take the places of dS and V, which nothing reads any more once both warpgroups are here.
    """
    products.dkey_acc.store(products.dkey_acc.load() * scale)
    cute.arch.barrier(barrier_id=NamedBarrier.EPILOGUE, number_of_threads=c.consumers * WARPGROUP)
    to_shared(c.dtype, products.dkey, products.dkey_acc, shared.dkey, thread)
    to_shared(c.dtype, products.dvalue, products.dvalue_acc, shared.value, thread)
    cute.arch.fence_proxy("async.shared", space="cta")
    arrive_once_per_warp(shared.staged_full)


@cute.jit
def store_gradients(c: MainConfig, work: Any, shared: Any, dkey: Any, dvalue: Any, before: Before) -> None:
    """One tile, in the store warp; TMA drops the rows past the tensor's end."""
    cute.arch.mbarrier_wait(shared.staged_full, before.tiles & 1)
    to_global(dkey, shared.dkey, work.batch, work.key_block, work.key_head, (c.tile_n, c.head_dim))
    to_global(dvalue, shared.value, work.batch, work.key_block, work.key_head, (c.tile_n, c.head_dim_v))
    cute.arch.cp_async_bulk_commit_group()
    cute.arch.cp_async_bulk_wait_group(0, read=True)
    arrive_once_per_warp(shared.staged_empty)
