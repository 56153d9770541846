"""(DSL) PTX instructions that the Blackwell kernels use, as functions on DSL values.

Each function emits one inline-assembly block at the point of the call. Shared-memory and tensor-memory addresses are
plain 32-bit integers, global addresses 64-bit ones: the kernels do their own address arithmetic from the maps in
``shared`` and ``tmem``. Instructions with an effect on memory or on barriers are volatile and keep their order; pure
arithmetic is left to the compiler's scheduler.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cutlass import Boolean, Float32, Int32, Int64
from cutlass._mlir.dialects import llvm

_REGISTER = {"i32": "r", "f32": "f", "i64": "l"}


def _value(operand):
    if isinstance(operand, bool | int):
        operand = Int32(operand)
    return operand.ir_value()


def assemble(text: str, results: Sequence = (), operands: Sequence = (), *, pure: bool = False) -> list:
    """Emits ``text``; ``$0, $1, ...`` are the results, then the operands. Returns the results as DSL values.

    ``pure`` says that the results depend on the operands alone, so that the block may move or vanish.
    """
    values = [_value(operand) for operand in operands]
    types = [result.mlir_type for result in results]
    constraints = ["=" + _REGISTER[str(t)] for t in types] + [_REGISTER[str(v.type)] for v in values]
    if not pure:
        constraints.append("~{memory}")
    struct: Any = llvm.StructType  # type: ignore[attr-defined]
    returned = None if not types else types[0] if len(types) == 1 else struct.get_literal(types)
    out = llvm.inline_asm(
        returned,
        values,
        text,
        ",".join(constraints),
        has_side_effects=not pure,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
    )
    if not types:
        return []
    if len(types) == 1:
        return [results[0](out)]
    return [result(llvm.extractvalue(t, out, [i])) for i, (result, t) in enumerate(zip(results, types, strict=True))]


def _list(first: int, count: int) -> str:
    return "{" + ", ".join(f"${i}" for i in range(first, first + count)) + "}"


# --- warps and barriers -----------------------------------------------------------------------------------------------


def thread() -> Int32:
    """Number of the thread in its CTA, read from the special register at this point."""
    return assemble("mov.u32 $0, %tid.x;", [Int32])[0]


def elect() -> Boolean:
    """True in one lane of the (converged) warp."""
    text = "{ .reg .pred p; elect.sync _|p, 0xffffffff; selp.b32 $0, 1, 0, p; }"
    return assemble(text, [Int32])[0] != Int32(0)


def sync_warp() -> None:
    """Waits for the other lanes; their memory accesses before it are visible after it."""
    assemble("bar.warp.sync 0xffffffff;")


def warp_any(condition: Boolean) -> Boolean:
    """True in all lanes if ``condition`` holds in one of them."""
    text = "{ .reg .pred p, q; setp.ne.b32 p, $1, 0; vote.sync.any.pred q, p, 0xffffffff; selp.b32 $0, 1, 0, q; }"
    return assemble(text, [Int32], [Int32(condition)])[0] != Int32(0)


def named_barrier(index: int, threads: int) -> None:
    """Waits until ``threads`` threads have come to hardware barrier ``index``."""
    assemble(f"bar.sync {index}, {threads};")


def set_registers(count: int, *, grow: bool) -> None:
    """Gives registers back, or takes more: ``count`` per thread of this warpgroup from here on."""
    assemble(f"setmaxnreg.{'inc' if grow else 'dec'}.sync.aligned.u32 {count};")


def mbarrier_init(barrier: Int32, arrivals: int) -> None:
    """Sets up a barrier whose phases complete after ``arrivals`` arrivals (and its expected bytes)."""
    assemble("mbarrier.init.shared::cta.b64 [$0], $1;", [], [barrier, arrivals])


def mbarrier_init_fence() -> None:
    """Makes initialised barriers visible to the asynchronous units."""
    assemble("fence.mbarrier_init.release.cluster;")


def mbarrier_arrive(barrier: Int32) -> None:
    """One arrival with release semantics."""
    assemble("mbarrier.arrive.release.cta.shared::cta.b64 _, [$0];", [], [barrier])


def mbarrier_expect(barrier: Int32, size: int) -> None:
    """One arrival that adds ``size`` bytes to what the current phase waits for."""
    assemble("mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [$0], $1;", [], [barrier, size])


def mbarrier_arrive_leader(barrier: Int32) -> None:
    """One arrival at the barrier of the same address in the pair's first CTA (this one or the other)."""
    assemble(
        "{ .reg .b32 remote; mapa.shared::cluster.u32 remote, $0, 0;\n"
        "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [remote]; }",
        [],
        [barrier],
    )


def mbarrier_wait(barrier: Int32, parity: Int32, *, scope: str = "cta") -> None:
    """Waits until the phase of the given parity is complete; ``scope`` "cluster" where a peer CTA arrives too."""
    assemble(
        "{ .reg .pred done;\n"
        f"WAIT: mbarrier.try_wait.parity.acquire.{scope}.shared::cta.b64 done, [$0], $1;\n"
        "@done bra DONE;\n"
        "bra WAIT;\n"
        "DONE: }",
        [],
        [barrier, parity],
    )


def cluster_rank() -> Int32:
    """This CTA's number in its cluster."""
    return assemble("mov.u32 $0, %cluster_ctarank;", [Int32], pure=True)[0]


def cluster_barrier() -> None:
    """Waits for all threads of the cluster's CTAs; orders their memory accesses."""
    assemble("barrier.cluster.arrive.release.aligned;")
    assemble("barrier.cluster.wait.acquire.aligned;")


def fence_async_shared() -> None:
    """Orders this thread's ordinary shared-memory accesses before later ones of TMA and the tensor core."""
    assemble("fence.proxy.async.shared::cta;")


def request_cluster(response: Int32, barrier: Int32) -> None:
    """Asks for a CTA of the grid that has not started (cluster launch control): it will not start, the caller takes its
    work. 16 bytes at ``response`` (aligned) say whether there was one; ``barrier`` counts them."""
    text = "clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.b128 [$0], [$1];"
    assemble(text, [], [response, barrier])


def requested_cluster(response: Int32) -> tuple[Boolean, Int32]:
    """Whether :func:`request_cluster` got a CTA, and its x coordinate in the grid (0 if not)."""
    text = (
        "{ .reg .b128 r; .reg .b64 low, high; .reg .pred got;\n"
        "ld.shared.v2.b64 {low, high}, [$2]; mov.b128 r, {low, high};\n"
        "clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 got, r; selp.b32 $0, 1, 0, got; mov.b32 $1, 0;\n"
        "@got clusterlaunchcontrol.query_cancel.get_first_ctaid::x.b32.b128 $1, r; }"
    )
    got, x = assemble(text, [Int32, Int32], [response])
    return got != Int32(0), x


# --- tensor memory ----------------------------------------------------------------------------------------------------


def tmem_alloc(result_address: Int32, columns: int, ctas: int = 1) -> None:
    """Allocates tensor memory (whole warp; in both CTAs of a pair); its base goes to shared ``result_address``."""
    assemble(f"tcgen05.alloc.cta_group::{ctas}.sync.aligned.shared::cta.b32 [$0], {columns};", [], [result_address])
    assemble(f"tcgen05.relinquish_alloc_permit.cta_group::{ctas}.sync.aligned;")


def tmem_dealloc(base: Int32, columns: int, ctas: int = 1) -> None:
    """Gives tensor memory back (same warp as allocated it)."""
    assemble(f"tcgen05.dealloc.cta_group::{ctas}.sync.aligned.b32 $0, {columns};", [], [base])


def tmem_fence_before() -> None:
    """Before a barrier arrival that hands tensor memory to another thread."""
    assemble("tcgen05.fence::before_thread_sync;")


def tmem_fence_after() -> None:
    """After a barrier wait that received tensor memory from another thread."""
    assemble("tcgen05.fence::after_thread_sync;")


def tmem_load(address: Int32, columns: int) -> list[Float32]:
    """Reads ``columns`` (a multiple of 32, or at most 32) 32-bit columns of this thread's lane, and waits for them.

    Loads and wait are one block: no use of a register can move between them.
    """
    return tmem_load_each([address], columns)[0]


def tmem_load_each(addresses: Sequence[Int32], columns: int) -> list[list[Float32]]:
    """As :func:`tmem_load` from several addresses, with one wait for all."""
    step, total = min(columns, 32), columns * len(addresses)
    lines = [
        f"tcgen05.ld.sync.aligned.32x32b.x{step}.b32 {_list(i * columns + first, step)}, [${total + i} + {first}];"
        for i in range(len(addresses))
        for first in range(0, columns, step)
    ]
    text = "{ " + "\n".join([*lines, "tcgen05.wait::ld.sync.aligned;"]) + " }"
    values = assemble(text, [Float32] * total, addresses)
    return [values[first : first + columns] for first in range(0, total, columns)]


def tmem_store(address: Int32, registers: Sequence) -> None:
    """Writes 32-bit registers to consecutive columns of this thread's lane; see :func:`tmem_store_wait`."""
    count = len(registers)
    text = f"tcgen05.st.sync.aligned.32x32b.x{count}.b32 [$0], {_list(1, count)};"
    assemble(text, [], [address, *registers])


def tmem_store_wait() -> None:
    """Waits for this thread's tensor-memory stores."""
    assemble("tcgen05.wait::st.sync.aligned;")


# --- matrix products --------------------------------------------------------------------------------------------------


def mma_shared(
    d: Int32,
    a: Int32,
    b: Int32,
    accumulate,
    *,
    high_a: int,
    high_b: int,
    offset_a: int,
    offset_b: int,
    instruction: int,
    ctas: int = 1,
) -> None:
    """D (tensor memory) = A B, or D += A B, one K step.

    ``a``, ``b``: low words of the tiles' descriptors; ``offset_a``, ``offset_b`` are added to them here, so that the
    compiler keeps no register for every step of an unrolled product. With two CTAs the instruction is the pair's: each
    has half of A's and D's rows and half of B's columns.
    """
    text = (
        "{ .reg .pred acc; .reg .b64 a, b; .reg .b32 x;\n"
        f"add.s32 x, $1, {offset_a}; mov.b64 a, {{x, {high_a}}};\n"
        f"add.s32 x, $2, {offset_b}; mov.b64 b, {{x, {high_b}}};\n"
        "setp.ne.b32 acc, $3, 0;\n"
        f"tcgen05.mma.cta_group::{ctas}.kind::f16 [$0], a, b, {instruction}, acc; }}"
    )
    assemble(text, [], [d, a, b, Int32(accumulate)])


def mma_tmem(
    d: Int32,
    a: Int32,
    b: Int32,
    accumulate,
    *,
    high_b: int,
    offset_a: int,
    offset_b: int,
    instruction: int,
    ctas: int = 1,
) -> None:
    """As :func:`mma_shared` with A in tensor memory at address ``a + offset_a``."""
    text = (
        "{ .reg .pred acc; .reg .b64 b; .reg .b32 x, y;\n"
        f"add.s32 x, $1, {offset_a};\n"
        f"add.s32 y, $2, {offset_b}; mov.b64 b, {{y, {high_b}}};\n"
        "setp.ne.b32 acc, $3, 0;\n"
        f"tcgen05.mma.cta_group::{ctas}.kind::f16 [$0], [x], b, {instruction}, acc; }}"
    )
    assemble(text, [], [d, a, b, Int32(accumulate)])


def mma_commit(barrier: Int32, ctas: int = 1) -> None:
    """The barrier (of the same address in each CTA of a pair) gets one arrival when all matrix products that this
    thread has issued so far are complete."""
    if ctas == 1:
        assemble("tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [$0];", [], [barrier])
        return
    assemble(
        "{ .reg .b16 both; mov.b16 both, 3;\n"
        "tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 [$0], both; }",
        [],
        [barrier],
    )


# --- copies -----------------------------------------------------------------------------------------------------------


def tma_prefetch(descriptor: Int64) -> None:
    """Brings a tensor map into the descriptor cache."""
    assemble("prefetch.tensormap [$0];", [], [descriptor])


LEADER_MASK = ~(1 << 24)
"""Clears the lowest bit of the CTA's rank in a shared-window address: the first CTA of the pair."""


def tma_load(shared: Int32, descriptor: Int64, coordinates: Sequence, barrier: Int32, ctas: int = 1) -> None:
    """Global box to shared memory; ``barrier`` (in a pair: the first CTA's) counts its bytes.

    ``coordinates``: innermost first.
    """
    rank = len(coordinates)
    group = ""
    if ctas == 2:
        group, barrier = ".cta_group::2", barrier & LEADER_MASK
    text = (
        f"cp.async.bulk.tensor.{rank}d.shared::cluster.global.tile.mbarrier::complete_tx::bytes{group} "
        f"[$0], [$1, {_list(2, rank)}], [${2 + rank}];"
    )
    assemble(text, [], [shared, descriptor, *coordinates, barrier])


def tma_store(descriptor: Int64, coordinates: Sequence, shared: Int32) -> None:
    """Shared memory to a global box, into this thread's current bulk group."""
    rank = len(coordinates)
    text = f"cp.async.bulk.tensor.{rank}d.global.shared::cta.tile.bulk_group [$0, {_list(1, rank)}], [${1 + rank}];"
    assemble(text, [], [descriptor, *coordinates, shared])


def tma_add(descriptor: Int64, coordinates: Sequence, shared: Int32) -> None:
    """As :func:`tma_store`, added to what is there."""
    rank = len(coordinates)
    text = f"cp.reduce.async.bulk.tensor.{rank}d.global.shared::cta.add.tile.bulk_group "
    assemble(text + f"[$0, {_list(1, rank)}], [${1 + rank}];", [], [descriptor, *coordinates, shared])


def bulk_commit() -> None:
    """Closes this thread's current bulk group."""
    assemble("cp.async.bulk.commit_group;")


def bulk_wait(pending: int, *, read: bool) -> None:
    """Waits until at most ``pending`` bulk groups are incomplete (``read``: still read shared memory)."""
    assemble(f"cp.async.bulk.wait_group{'.read' if read else ''} {pending};")


def load_shared(address: Int32) -> Float32:
    return assemble("ld.shared.f32 $0, [$1];", [Float32], [address])[0]


def load_shared_int(address: Int32) -> Int32:
    return assemble("ld.shared.b32 $0, [$1];", [Int32], [address])[0]


def load_shared_floats(address: Int32) -> list[Float32]:
    """Four float32 values from 16 aligned bytes."""
    return assemble("ld.shared.v4.f32 {$0, $1, $2, $3}, [$4];", [Float32] * 4, [address])


def store_shared(address: Int32, value: Float32) -> None:
    assemble("st.shared.f32 [$0], $1;", [], [address, value])


def store_shared_vector(address: Int32, registers: Sequence[Int32]) -> None:
    """Four 32-bit registers to 16 aligned bytes."""
    assemble("st.shared.v4.b32 [$0], {$1, $2, $3, $4};", [], [address, *registers])


def load_global_vector(address: Int64) -> list[Int32]:
    """Four 32-bit integers from 16 aligned bytes of read-only memory."""
    return assemble("ld.global.nc.v4.b32 {$0, $1, $2, $3}, [$4];", [Int32] * 4, [address])


def load_global_float(address: Int64) -> Float32:
    """One float32 of read-only memory."""
    return assemble("ld.global.nc.f32 $0, [$1];", [Float32], [address])[0]


def store_global(address: Int64, value: Float32) -> None:
    assemble("st.global.f32 [$0], $1;", [], [address, value])


def store_global_zeros(address: Int64) -> None:
    """16 aligned bytes of zeros."""
    assemble("st.global.v4.b32 [$0], {$1, $1, $1, $1};", [], [address, 0])


# --- arithmetic -------------------------------------------------------------------------------------------------------


def max3(a: Float32, b: Float32, c: Float32) -> Float32:
    return assemble("max.f32 $0, $1, $2, $3;", [Float32], [a, b, c], pure=True)[0]


def max2(a: Float32, b: Float32) -> Float32:
    return assemble("max.f32 $0, $1, $2;", [Float32], [a, b], pure=True)[0]


Pair = tuple[Float32, Float32]


def _packed(instruction: str, *pairs: Pair) -> Pair:
    names = "abcd"[: len(pairs)]
    flat = [element for pair in pairs for element in pair]
    moves = "".join(f"mov.b64 {name}, {{${2 + 2 * i}, ${3 + 2 * i}}}; " for i, name in enumerate(names))
    inputs = ", ".join(names)
    text = f"{{ .reg .b64 {inputs}, out; {moves}{instruction} out, {inputs}; mov.b64 {{$0, $1}}, out; }}"
    low, high = assemble(text, [Float32, Float32], flat, pure=True)
    return low, high


def fma2(a: Pair, b: Pair, c: Pair) -> Pair:
    """a * b + c on both halves, rounded once."""
    return _packed("fma.rn.f32x2", a, b, c)


def mul2(a: Pair, b: Pair) -> Pair:
    return _packed("mul.rn.f32x2", a, b)


def add2(a: Pair, b: Pair, rounding: str = "rn") -> Pair:
    """a + b on both halves; ``rounding`` is "rn" (nearest) or "rm" (down)."""
    return _packed(f"add.{rounding}.f32x2", a, b)


def bits(x: Float32) -> Int32:
    return assemble("mov.b32 $0, $1;", [Int32], [x], pure=True)[0]


def from_bits(x: Int32) -> Float32:
    return assemble("mov.b32 $0, $1;", [Float32], [x], pure=True)[0]


def low_mask(count: Int32) -> Int32:
    """The ``count`` lowest bits set; any count: none for negative ones, all from 32 on."""
    text = (
        "{ .reg .b32 n; max.s32 n, $1, 0; min.s32 n, n, 32; shl.b32 n, 1, n; sub.s32 $0, n, 1; }"  # shl by 32 gives 0
    )
    return assemble(text, [Int32], [count], pure=True)[0]
