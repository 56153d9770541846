"""Epilogue of the consumer warpgroups: dK (scaled) and dV to shared memory, then to global memory through TMA."""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32

from jax_fa4.kernels.sm90.backward.config import MainConfig, NamedBarrier
from jax_fa4.kernels.sm90.backward.scratch import WARPGROUP
from jax_fa4.kernels.sm90.backward.tiles import to_global, to_shared


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
    to_shared(c.dtype, products.dkey, products.dkey_acc, shared.key, thread)
    to_shared(c.dtype, products.dvalue, products.dvalue_acc, shared.value, thread)
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.barrier(barrier_id=NamedBarrier.EPILOGUE, number_of_threads=threads)
    if cute.arch.make_warp_uniform(thread // 32) == 0:
        to_global(dkey, shared.key, work.batch, work.key_block, work.key_head, (c.tile_n, c.head_dim))
        to_global(dvalue, shared.value, work.batch, work.key_block, work.key_head, (c.tile_n, c.head_dim_v))
        cute.arch.cp_async_bulk_commit_group()
        cute.arch.cp_async_bulk_wait_group(0, read=True)
