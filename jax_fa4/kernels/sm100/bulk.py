"""(DSL) Bulk copies without a tensor map, and the counters that order additions to global memory.

A counter (int32, global memory) says how many additions to a piece of memory are complete. Its reader acquires, its
writer releases, both at the scope of the device; the proxy fences order the copy engine's accesses to global memory
with respect to the counter.
"""

from __future__ import annotations

from cutlass import Int32, Int64

from jax_fa4.kernels.sm100.ptx import assemble


def bulk_load(shared: Int32, source: Int64, size: int, barrier: Int32) -> None:
    """Starts copying ``size`` bytes from global to shared memory; ``barrier`` counts them."""
    text = f"cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [$1], {size}, [$2];"
    assemble(text, [], [shared, source, barrier])


def bulk_store(target: Int64, shared: Int32, size: int) -> None:
    """Starts copying ``size`` bytes from shared to global memory (this thread's current bulk group)."""
    assemble(f"cp.async.bulk.global.shared::cta.bulk_group [$0], [$1], {size};", [], [target, shared])


def bulk_add(target: Int64, shared: Int32, size: int) -> None:
    """Starts adding ``size`` bytes of float32 from shared into global memory (this thread's current bulk group)."""
    text = f"cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [$0], [$1], {size};"
    assemble(text, [], [target, shared])


def bulk_send(target: Int32, shared: Int32, size: int, barrier: Int32, cta: Int32) -> None:
    """Starts copying ``size`` bytes from this CTA's shared memory to that of ``cta``, a rank in the cluster. ``target``
    and ``barrier``, which counts the bytes there, are addresses as this CTA has them."""
    assemble(
        "{ .reg .b32 target, barrier;\n"
        "mapa.shared::cluster.u32 target, $0, $3; mapa.shared::cluster.u32 barrier, $2, $3;\n"
        f"cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [target], [$1], {size}, [barrier]; }}",
        [],
        [target, shared, barrier, cta],
    )


def wait_for_turn(counter: Int64, place: Int32) -> None:
    """Spins until the counter is ``place``; this thread's later bulk operations come after what was counted."""
    assemble(
        "{ .reg .pred early; .reg .b32 seen;\n"
        "AGAIN: ld.acquire.gpu.global.b32 seen, [$0];\n"
        "setp.ne.s32 early, seen, $1;\n"
        "@early bra AGAIN; }",
        [],
        [counter, place],
    )
    assemble("fence.proxy.async.global;")


def pass_turn(counter: Int64) -> None:
    """Adds one to the counter, after this thread's completed bulk operations."""
    assemble("fence.proxy.async.global;")
    assemble("red.release.gpu.global.add.u32 [$0], $1;", [], [counter, 1])
