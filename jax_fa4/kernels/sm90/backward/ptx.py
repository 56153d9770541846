"""Instructions that the DSL offers no function for, and the semaphore built on global memory."""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Int32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import dsl_user_op


@dsl_user_op
def _asm(text: str, operands: list, constraints: str, *, loc=None, ip=None) -> None:
    llvm.inline_asm(
        None,
        operands,
        text,
        constraints,
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def bulk_store(source: cute.Pointer, target: cute.Pointer, size: int, *, loc=None, ip=None) -> None:
    """Starts a bulk copy of ``size`` bytes from shared to global memory (part of the thread's bulk group)."""
    _bulk("cp.async.bulk.global.shared::cta.bulk_group", source, target, size, loc, ip)


@dsl_user_op
def bulk_add_f32(source: cute.Pointer, target: cute.Pointer, size: int, *, loc=None, ip=None) -> None:
    """Starts adding ``size`` bytes of float32 from shared into global memory (part of the thread's bulk group)."""
    _bulk("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32", source, target, size, loc, ip)


def _bulk(name: str, source: cute.Pointer, target: cute.Pointer, size: int, loc, ip) -> None:
    operands = [
        target.toint(loc=loc, ip=ip).ir_value(loc=loc, ip=ip),
        source.toint(loc=loc, ip=ip).ir_value(loc=loc, ip=ip),
        Int32(size).ir_value(loc=loc, ip=ip),
    ]
    _asm(f"{name} [$0], [$1], $2;", operands, "l,r,r", loc=loc, ip=ip)


@dsl_user_op
def bulk_load(
    source: cute.Pointer, target: cute.Pointer, barrier: cute.Pointer, size: int, *, loc=None, ip=None
) -> None:
    """Starts a bulk copy of ``size`` bytes from global to shared memory that completes on an mbarrier."""
    operands = [
        target.toint(loc=loc, ip=ip).ir_value(loc=loc, ip=ip),
        source.toint(loc=loc, ip=ip).ir_value(loc=loc, ip=ip),
        Int32(size).ir_value(loc=loc, ip=ip),
        barrier.toint(loc=loc, ip=ip).ir_value(loc=loc, ip=ip),
    ]
    _asm(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [$1], $2, [$3];",
        operands,
        "r,l,r,r",
        loc=loc,
        ip=ip,
    )


@cute.jit
def wait_for_turn(turn: cute.Pointer, place: Int32) -> None:
    """Spins until the counter is ``place``. One thread calls it; its later bulk operations see what came before."""
    seen = cute.arch.load(turn, Int32, sem="acquire", scope="gpu")
    while seen != place:
        seen = cute.arch.load(turn, Int32, sem="acquire", scope="gpu")
    cute.arch.fence_proxy("async.global")


@cute.jit
def pass_turn(turn: cute.Pointer) -> None:
    """Adds one to the counter after the calling thread's completed bulk operations."""
    cute.arch.fence_proxy("async.global")
    cute.arch.red(turn, Int32(1), op="add", dtype=Int32, sem="release", scope="gpu")


@dsl_user_op
def arrive_once_per_warp(barrier: cute.Pointer, *, loc=None, ip=None) -> None:
    """One arrival by the calling warp, after all its lanes came here.

    Predicated, not branched: a block boundary while operands of a warpgroup product are live in registers makes the
    assembler give up keeping products in flight.
    """
    cute.arch.sync_warp(loc=loc, ip=ip)
    operands = [
        barrier.toint(loc=loc, ip=ip).ir_value(loc=loc, ip=ip),
        cute.arch.lane_idx(loc=loc, ip=ip).ir_value(loc=loc, ip=ip),
    ]
    text = "{ .reg .pred one; setp.eq.s32 one, $1, 0; @one mbarrier.arrive.shared::cta.b64 _, [$0]; }"
    _asm(text, operands, "r,r", loc=loc, ip=ip)
