"""PTX memory, copies and synchronisation: data against formulas written out here, and what must be reported."""

import struct

import ml_dtypes
import numpy as np
import pytest

from tests.emulator.errors import DeadlockError, EmulatorError, MemoryFault, RaceError, SyncError
from tests.emulator.launch import Options
from tests.emulator.snippets import launch, module, operation
from tests.emulator.tma import TensorMap

RANDOM = np.random.default_rng(7)
SEEDS = range(6)
WAIT = "{label}: mbarrier.try_wait.parity.shared::cta.b64 p, [{bar}], {parity}; @!p bra {label};\n"


def wait(label, bar, parity=0):
    return WAIT.format(label=label, bar=bar, parity=parity)


def test_load_and_store_widths():
    data = RANDOM.integers(0, 256, 32 * 32, dtype=np.uint8)
    out = np.zeros(32 * 64, np.uint8)
    body = """ ld.param.u64 base, [data]; ld.param.u64 place, [out];
    mul.wide.u32 %d0, lane_id, 32; add.u64 base, base, %d0; mul.wide.u32 %d0, lane_id, 64; add.u64 place, place, %d0;
    ld.global.nc.v4.b32 {%r0, %r1, %r2, %r3}, [base]; st.global.v4.b32 [place], {%r3, %r2, %r1, %r0};
    ld.global.v2.b64 {%d1, %d2}, [base+16]; st.global.v2.b64 [place+16], {%d2, %d1};
    ld.global.u8 %h0, [base+1]; ld.global.s8 %h1, [base+2]; ld.global.b16 %h2, [base+4];
    st.global.b8 [place+32], %h0; st.global.b16 [place+34], %h1; st.global.v2.b16 [place+36], {%h2, %h0};
    ld.global.s16 %r5, [base+6]; st.global.b32 [place+40], %r5; ld.global.L2::128B.u32 %r6, [base+8];
    st.global.b32 [place+44], %r6; ld.global.s8 %r7, [base+3]; st.volatile.global.b32 [place+48], %r7;"""
    launch(module(body), [data, out], read_only=1)
    for lane in range(32):
        row, got = data[lane * 32 : lane * 32 + 32], out[lane * 64 : lane * 64 + 64]
        want = np.zeros(64, np.uint8)
        want[:16] = np.ascontiguousarray(row[:16].view(np.uint32)[::-1]).view(np.uint8)
        want[16:32] = np.ascontiguousarray(row[16:].view(np.uint64)[::-1]).view(np.uint8)
        want[32] = row[1]
        want[34:36] = row[2:3].view(np.int8).astype(np.int16).view(np.uint8)
        want[36:40] = [row[4], row[5], row[1], 0]
        want[40:44] = row[6:8].view(np.int16).astype(np.int32).view(np.uint8)
        want[44:48] = row[8:12]
        want[48:52] = row[3:4].view(np.int8).astype(np.int32).view(np.uint8)
        assert (got == want).all()


def test_atomics():
    data = np.array([5, 100, 0, 0, 7, 0, 0, 0], np.uint32)
    data[5] = np.float32(1.5).view(np.uint32)
    out = np.zeros(64, np.uint32)
    body = """ ld.param.u64 base, [data]; ld.param.u64 place, [out]; mul.wide.u32 %d0, lane_id, 4;
    add.u64 place, place, %d0;
    atom.global.add.u32 %r0, [base], 2; st.global.b32 [place], %r0; sub.s32 %r1, lane_id, 16;
    atom.global.min.s32 %r2, [base+4], %r1; red.global.max.u32 [base+8], lane_id; red.global.or.b32 [base+12], lane_id;
    atom.global.cas.b32 %r3, [base+16], 7, lane_id; st.global.b32 [place+128], %r3;
    red.global.add.f32 [base+20], 0f3F000000; atom.global.exch.b32 %r4, [base+24], lane_id;
    red.global.inc.u32 [base+28], 20;"""
    launch(module(body), [data, out])
    assert sorted(out[:32]) == list(range(5, 69, 2)) and data[0] == 69
    assert data[1:4].view(np.int32).tolist() == [-16, 31, 31]
    assert np.count_nonzero(out[32:] == 7) == 1 and data[4] == 0  # lane 0 swaps first, 0 is what it wrote
    assert data[5:6].view(np.float32)[0] == 17.5 and data[6] == 31 and data[7] == 32 - 21


@pytest.mark.parametrize("trans", ["", ".trans"])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_matrix_load_and_store(count, trans):
    matrices = RANDOM.integers(0, 1 << 16, (count, 8, 8), dtype=np.uint16)
    regs = ", ".join(f"%r{i}" for i in range(count))
    body = f""" ld.param.u64 base, [data]; ld.param.u64 place, [out]; mov.u32 %r20, smem;
    mad.lo.u32 %r21, lane_id, 16, %r20;
    setp.lt.u32 p, lane_id, {8 * count}; mul.wide.u32 %d0, lane_id, 16; add.u64 base, base, %d0;
    @p ld.global.v2.b64 {{%d1, %d2}}, [base]; @p st.shared.v2.b64 [%r21], {{%d1, %d2}}; bar.warp.sync -1;
    ldmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 {{{regs}}}, [%r21];
    stmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 [%r21+1024], {{{regs}}};
    mul.wide.u32 %d3, lane_id, 16; add.u64 place, place, %d3;"""
    body += "".join(f" st.global.b32 [place+{4 * i}], %r{i};" for i in range(count))
    body += " @p ld.shared.v2.b64 {%d1, %d2}, [%r21+1024]; @p st.global.v2.b64 [place+512], {%d1, %d2};"
    out = np.zeros(32 * 8, np.uint32)
    launch(module(body), [matrices, out], shared=4096)
    fragments = out[:128].reshape(32, 4).view(np.uint16).reshape(32, 4, 2)
    for lane in range(32):
        for i in range(count):
            for half in range(2):
                row, column = lane // 4, lane % 4 * 2 + half
                want = matrices[i, column, row] if trans else matrices[i, row, column]
                assert fragments[lane, i, half] == want
    assert (out[128:].view(np.uint16)[: count * 64].reshape(count, 8, 8) == matrices).all()


INIT = """ mov.u32 %r100, smem; setp.ne.u32 q, tx, 0; @q bra READY; mbarrier.init.shared::cta.b64 [%r100], {count};
 fence.mbarrier_init.release.cluster; READY: bar.sync 0;\n"""


def swizzled(address, mode):
    return address ^ (address >> 7 & {0: 0, 1: 1, 2: 3, 3: 7}[mode]) << 4


@pytest.mark.parametrize("mode,inner", [(0, 24), (1, 16), (2, 32), (3, 64)])
def test_tma_load_layout_and_bounds(mode, inner):
    """Every element of the box lands where the swizzle formula says; elements outside are zero."""
    rows, cols, depth = 20, 72, 3
    source = RANDOM.integers(1, 1 << 16, (depth, rows, cols), dtype=np.uint16)
    box = (inner, 16, 2)
    nbytes = inner * 16 * 2 * 2
    body = (
        INIT.format(count=1)
        + f""" @q bra DONE; mov.u64 %d0, tmap;
    mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r100], {nbytes};
    cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes
    [%r100+1024], [%d0, {{%r0, %r1, %r2}}], [%r100];
    DONE: {wait("W", "%r100")} ld.param.u64 place, [out]; mov.u32 %r5, tx;
    COPY: add.u32 %r6, %r100, %r5; ld.shared.u8 %h0, [%r6+1024]; cvt.u64.u32 %d1, %r5; add.u64 %d1, place, %d1;
    st.global.u8 [%d1], %h0; add.u32 %r5, %r5, 64; setp.lt.u32 p, %r5, {nbytes}; @p bra COPY;"""
    )
    header = ".param .u64 out, .param .align 64 .b8 tmap[128], .param .u32 x, .param .u32 y, .param .u32 z"
    body = " ld.param.u32 %r0, [x]; ld.param.u32 %r1, [y]; ld.param.u32 %r2, [z];\n" + body
    for origin in ((0, 0, 0), (8, 3, 1), (cols - 5, 10, 2), (-6, -3, -1), (200, 0, 0)):
        out = np.zeros(nbytes, np.uint8)
        region = np.ascontiguousarray(source)

        def tensor(regions, region=region):
            added = MEMORY(regions, region)
            return TensorMap(added, "uint16", (cols, rows, depth), (cols * 2, cols * rows * 2), box, mode)

        extra = [tensor, *(struct.pack("<i", o) for o in origin)]
        launch(module(body, header), [out], threads=64, shared=nbytes + 2048, extra=extra, options=Options(seed=3))
        want = np.zeros(nbytes // 2, np.uint16)
        for k in range(2):
            for j in range(16):
                for i in range(inner):
                    x, y, z = origin[0] + i, origin[1] + j, origin[2] + k
                    inside = 0 <= x < cols and 0 <= y < rows and 0 <= z < depth
                    at = swizzled(2048 + ((k * 16 + j) * inner + i) * 2, mode) - 2048
                    want[at // 2] = source[z, y, x] if inside else 0
        assert (out.view(np.uint16) == want).all(), (mode, origin)


def MEMORY(regions, array):
    """Adds a read-only buffer to the memory that owns ``regions``; returns its address."""
    from tests.emulator.memory import GlobalMemory

    memory = GlobalMemory()
    memory.regions = regions
    memory._next = 0x7F8000000000
    return memory.add("tensor", array.reshape(-1).view(np.uint8), writable=False).base


BULK = INIT.format(count=1) + """ ld.param.u64 base, [data]; ld.param.u64 place, [out]; @q bra LOADED;
 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r100], 256;
 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r100+128], [base], 256, [%r100];
LOADED: """ + wait("W", "%r100")  # fmt: skip


@pytest.mark.parametrize(
    "kind,dtype", [("f32", np.float32), ("s32", np.int32), ("u64", np.uint64), ("bf16", ml_dtypes.bfloat16)]
)
def test_bulk_copy_and_reduce(kind, dtype):
    values = (RANDOM.standard_normal(256 // np.dtype(dtype).itemsize) * 50).astype(np.int32)
    values = (np.abs(values) if kind[0] == "u" else values).astype(dtype)
    noftz = ".noftz" if kind == "bf16" else ""
    body = (
        BULK
        + f""" @q bra END;
        cp.reduce.async.bulk.global.shared::cta.bulk_group.add{noftz}.{kind} [place], [%r100+128], 256;
    cp.reduce.async.bulk.global.shared::cta.bulk_group.add{noftz}.{kind} [place], [%r100+128], 256;
    mov.u32 %r9, %ctaid.x; setp.ne.u32 p, %r9, 0; @p bra COMMIT;
    cp.async.bulk.global.shared::cta.bulk_group [place+256], [%r100+128], 128; COMMIT:
    cp.async.bulk.commit_group; cp.async.bulk.wait_group 0; END:"""
    )
    for seed in SEEDS:
        out = np.zeros(512, np.uint8)
        start = np.arange(len(values)).astype(dtype)
        out[:256] = start.view(np.uint8)
        launch(module(body), [values, out], threads=64, shared=1024, options=Options(seed=seed), grid=3)
        want = (start.astype(np.float64) + 6 * values.astype(np.float64)).astype(dtype)
        np.testing.assert_allclose(out[:256].view(dtype).astype(np.float64), want.astype(np.float64), rtol=2e-2)
        assert (out[256:384] == values.view(np.uint8)[:128]).all()


CLUSTER = """ mov.u32 %r100, smem; mov.u32 %r50, %cluster_ctarank; setp.ne.u32 q, tx, 0; @q bra READY;
 mbarrier.init.shared::cta.b64 [%r100], {count}; fence.mbarrier_init.release.cluster;
READY: barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;
 ld.param.u64 base, [data]; ld.param.u64 place, [out]; and.b32 %r100, %r100, 16777215; mov.u32 %r101, smem;
"""
CLUSTER_END = " barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"


def test_distributed_shared_memory():
    """Every CTA writes a word into every CTA of the cluster, arrives there, and reads what it got."""
    body = CLUSTER.format(count=4 * 32) + f""" mov.u32 %r0, 0;
    SEND: mapa.shared::cluster.u32 %r1, %r101, %r0; shl.b32 %r2, %r50, 7; add.u32 %r2, %r2, %r1;
    mad.lo.u32 %r2, lane_id, 4, %r2;
    mad.lo.u32 %r3, %r50, 1000, lane_id; st.shared::cluster.b32 [%r2+256], %r3;
    mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r1]; add.u32 %r0, %r0, 1; setp.lt.u32 p, %r0, 4;
    @p bra SEND;
    {wait("W", "%r101")} mov.u32 %r0, 0; mov.u32 %r9, %ctaid.x; mul.lo.u32 %r9, %r9, 512; cvt.u64.u32 %d2, %r9;
    add.u64 place, place, %d2;
    READ: shl.b32 %r2, %r0, 7; mad.lo.u32 %r4, lane_id, 4, %r2; add.u32 %r5, %r101, %r4; ld.shared.b32 %r6, [%r5+256];
    cvt.u64.u32 %d1, %r4; add.u64 %d1, %d1, place; st.global.b32 [%d1], %r6; add.u32 %r0, %r0, 1;
    setp.lt.u32 p, %r0, 4; @p bra READ;
    """ + CLUSTER_END  # fmt: skip
    for seed in SEEDS:
        out = np.zeros((8, 4, 32), np.uint32)
        launch(module(body), [out, out], threads=32, grid=8, cluster=4, shared=2048, options=Options(seed=seed))
        assert (out == (np.arange(4) * 1000)[None, :, None] + np.arange(32)).all()


def test_remote_read_without_cluster_barrier_is_reported():
    body = (
        CLUSTER.format(count=1)
        + """ mad.lo.u32 %r2, lane_id, 4, %r101; st.shared.b32 [%r2+256], lane_id;
    xor.b32 %r3, %r50, 1; mapa.shared::cluster.u32 %r4, %r2, %r3; ld.shared::cluster.b32 %r5, [%r4+256];
    """
        + CLUSTER_END
    )
    with pytest.raises((RaceError, MemoryFault)):
        launch(module(body), [np.zeros(4), np.zeros(4)], grid=2, cluster=2, shared=2048, options=Options(seed=1))


def test_multicast():
    """CTA r of a cluster loads row r into all CTAs; every barrier gets all bytes."""
    source = RANDOM.integers(0, 1 << 32, (2, 64), dtype=np.uint32)
    body = CLUSTER.format(count=1) + f""" @q bra DONE; mov.u64 %d0, tmap; mov.u32 %r60, 0; mov.b16 %h0, 3;
    mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r101], 512; shl.b32 %r61, %r50, 8; add.u32 %r61, %r61, %r101;
    cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster
    [%r61+1024], [%d0, {{%r60, %r50}}], [%r101], %h0;
    DONE: {wait("W", "%r101")} mad.lo.u32 %r2, tx, 8, %r101; ld.shared.b64 %d5, [%r2+1024]; mov.u32 %r9, %ctaid.x;
    shl.b32 %r9, %r9, 9; mad.lo.u32 %r9, tx, 8, %r9; cvt.u64.u32 %d6, %r9; add.u64 %d6, place, %d6;
    st.global.b64 [%d6], %d5;
    """ + CLUSTER_END  # fmt: skip
    header = ".param .u64 data, .param .u64 out, .param .align 64 .b8 tmap[128]"
    for seed in SEEDS:
        out = np.zeros((2, 2, 64), np.uint32)
        tensor = [lambda r: TensorMap(MEMORY(r, source), "uint32", (64, 2), (256,), (64, 1), 0)]
        launch(
            module(body, header),
            [out, out],
            threads=64,
            grid=2,
            cluster=2,
            shared=4096,
            extra=tensor,
            options=Options(seed=seed),
        )
        assert (out == source[None]).all()


HANDOVER = """ ld.param.u64 base, [data]; ld.param.u64 place, [out]; mov.u32 %r0, %ctaid.x;
    mul.wide.u32 %d0, lane_id, 4;
 add.u64 %d1, base, %d0; add.u64 %d2, place, %d0; setp.eq.u32 p, %r0, 0; @!p bra TAKE;
 st.global.b32 [%d1+128], lane_id; bar.sync 0; {publish} bra END;
TAKE: {take} setp.eq.u32 p, %r1, 0; @p bra TAKE; {after} ld.global.b32 %r2, [%d1+128]; st.global.b32 [%d2], %r2;
END:"""
GOOD = [
    {
        "publish": "red.release.gpu.global.add.u32 [base], 1;",
        "take": "ld.acquire.gpu.global.b32 %r1, [base];",
        "after": "",
    },
    {
        "publish": "fence.acq_rel.gpu; st.relaxed.gpu.global.b32 [base], 1;",
        "take": "ld.relaxed.gpu.global.b32 %r1, [base];",
        "after": "fence.acq_rel.gpu;",
    },
    {
        "publish": "membar.gl; atom.global.exch.b32 %r9, [base], 1;",
        "take": "ld.volatile.global.b32 %r1, [base];",
        "after": "membar.gl;",
    },
]
BAD = [
    {**GOOD[0], "publish": "red.relaxed.gpu.global.add.u32 [base], 1;"},
    {**GOOD[0], "take": "ld.relaxed.gpu.global.b32 %r1, [base];"},
    {**GOOD[1], "publish": "st.relaxed.gpu.global.b32 [base], 1;"},
    {**GOOD[1], "after": ""},
]


@pytest.mark.parametrize("how", GOOD)
def test_release_and_acquire_through_global_memory(how):
    for seed in SEEDS:
        data, out = np.zeros(64, np.uint32), np.full(32, 99, np.uint32)
        launch(module(HANDOVER.format(**how)), [data, out], grid=2, options=Options(seed=seed))
        assert (out == np.arange(32)).all()


@pytest.mark.parametrize("how", BAD)
def test_unordered_hand_over_is_reported(how):
    with pytest.raises(RaceError, match="not ordered"):
        launch(module(HANDOVER.format(**how)), [np.zeros(64, np.uint32), np.zeros(32, np.uint32)], grid=2)


def test_named_barriers():
    """Warps 0 and 1 fill, warps 2 and 3 wait on barrier 3 only; a reduction over all threads follows."""
    body = """ ld.param.u64 place, [out]; mov.u32 %r100, smem; setp.gt.u32 p, warp_id, 1; @p bra TAKE;
    mad.lo.u32 %r1, tx, 4, %r100; mul.lo.u32 %r2, tx, 3; st.shared.b32 [%r1], %r2; bar.arrive 3, 128; bra MEET;
    TAKE: bar.sync 3, 128; mad.lo.u32 %r1, tx, 4, %r100; ld.shared.b32 %r3, [%r1-256]; mul.wide.u32 %d0, tx, 4;
    add.u64 %d1, place, %d0; st.global.b32 [%d1-256], %r3;
    MEET: setp.lt.u32 q, tx, 50; bar.red.popc.u32 %r4, 0, q; bar.red.and.pred %p1, 0, q; bar.red.or.pred %p2, 0, q;
    selp.u32 %r5, 1000, 0, %p1; selp.u32 %r6, 100, 0, %p2; add.u32 %r4, %r4, %r5; add.u32 %r4, %r4, %r6;
    mul.wide.u32 %d0, tx, 4; add.u64 %d1, place, %d0; st.global.b32 [%d1+256], %r4;"""
    for seed in SEEDS:
        out = np.zeros(64 + 128, np.uint32)
        launch(module(body), [out, out], threads=128, shared=512, options=Options(seed=seed))
        assert (out[:64] == np.arange(64) * 3).all() and (out[64:] == 150).all()


STORE = INIT.format(count=1) + " mad.lo.u32 %r1, tx, 4, %r100; "
LOADS = "ld.param.u64 base, [data]; "
SENDS = """ @q bra A; ld.param.u64 place, [out];
 cp.async.bulk.global.shared::cta.bulk_group [place], [%r100+128], 128; cp.async.bulk.commit_group; """
FILLS = STORE + "st.shared.b32 [%r1+128], tx; "
PARTNER = "xor.b32 %r2, %r1, 128; ld.shared.b32 %r3, [%r2+256]; "
REPORTS = {
    "read of unwritten shared memory": (STORE + "ld.shared.b32 %r2, [%r1+256];", MemoryFault, "nobody has written"),
    "race between warps": (
        STORE + "st.shared.b32 [%r1+256], tx; " + PARTNER,
        (RaceError, MemoryFault),
        "not ordered|nobody has written",
    ),
    "write after read": (
        STORE + "st.shared.b32 [%r1+256], tx; bar.sync 0; " + PARTNER + "st.shared.b32 [%r1+256], 0;",
        RaceError,
        "not ordered after the (read|write)",
    ),
    "shared memory out of range": (STORE + "st.shared.b32 [%r1+4096], tx;", MemoryFault, "outside"),
    "reserved shared memory": ("st.shared.b32 [64], tx;", MemoryFault, "outside"),
    "misaligned": (STORE + "st.shared.b32 [%r1+257], tx;", MemoryFault, "not aligned"),
    "global out of range": (LOADS + "ld.global.b32 %r1, [base+4096];", MemoryFault, "in no buffer|outside"),
    "null pointer": ("mov.u64 base, 0; ld.global.b32 %r1, [base];", MemoryFault, "in no buffer"),
    "barrier not initialised": (
        "mov.u32 %r1, smem; mbarrier.arrive.shared::cta.b64 _, [%r1];",
        SyncError,
        "no initialised",
    ),
    "too many arrivals": (STORE + "mbarrier.arrive.shared::cta.b64 _, [%r100];", SyncError, "more than the phase"),
    "barrier initialised twice": (
        STORE + "bar.sync 0; @!q mbarrier.init.shared::cta.b64 [%r100], 1;",
        SyncError,
        "again",
    ),
    "missing arrival": (STORE + wait("W", "%r100"), DeadlockError, "1 of 1 arrivals missing"),
    "bytes never come": (
        STORE + "@!q mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r100], 64;" + wait("W", "%r100"),
        DeadlockError,
        "tx 64",
    ),
    "barrier with unequal counts": (
        "setp.eq.u32 p, warp_id, 0; @p bra A; bar.sync 2, 64; bra B; A: bar.sync 2, 96; B:",
        SyncError,
        "96|64",
    ),
    "half a named barrier at the end": (
        "setp.ne.u32 q, tx, 0; @q bra A; bar.arrive 2, 64; A:",
        SyncError,
        "exits with",
    ),
    "spin without progress": (
        LOADS + "A: ld.acquire.gpu.global.b32 %r1, [base]; setp.eq.u32 p, %r1, 0; @p bra A;",
        DeadlockError,
        "no progress",
    ),
    "no proxy fence": (
        FILLS + "bar.sync 0;" + SENDS + "cp.async.bulk.wait_group 0; A:",
        RaceError,
        "without fence.proxy.async",
    ),
    "bulk store not waited for": (
        FILLS + "fence.proxy.async.shared::cta; bar.sync 0;" + SENDS + "A: bar.sync 0; st.shared.b32 [%r1+128], 0;",
        (RaceError, SyncError),
        "not ordered|exits while",
    ),
    "misaligned bulk copy": (BULK.replace("[base], 256,", "[base+8], 256,"), MemoryFault, "multiples of 16"),
    "wrong tx count": (BULK.replace("[%r100], 256;\n", "[%r100], 240;\n", 1), EmulatorError, "tx|more than expected"),
    "trap": ("setp.eq.u32 p, tx, 0; @p trap;", EmulatorError, "trap"),
    "write to an operand": (LOADS + "st.global.b32 [base], 1;", MemoryFault, "read-only"),
}


@pytest.mark.parametrize("name", REPORTS)
def test_reports(name):
    body, error, message = REPORTS[name]
    with pytest.raises(error, match=message):
        for seed in range(4):
            data, out = np.zeros(64, np.uint32), np.zeros(64, np.uint32)
            launch(module(body), [data, out], threads=64, shared=1024, read_only=1, options=Options(seed=seed))


def test_report_names_line_and_warp():
    body = "\n\n ld.param.u64 base, [data];\n ld.global.b32 %r1, [base+4096];"
    text = module(body)
    line = 1 + text[: text.index("ld.global")].count("\n")
    with pytest.raises(MemoryFault, match=rf"warp 0 of CTA \(0, 0, 0\) at PTX line {line}\b"):
        launch(text, [np.zeros(4), np.zeros(4)])


def test_mbarrier_phases_and_tokens():
    """Two warps pass a word back and forth three times through two mbarriers; the token form of test_wait too."""
    body = """ mov.u32 %r100, smem; setp.ne.u32 q, tx, 0; @q bra READY; mbarrier.init.shared::cta.b64 [%r100], 32;
    mbarrier.init.shared::cta.b64 [%r100+8], 32; fence.mbarrier_init.release.cluster; READY: bar.sync 0;
    ld.param.u64 place, [out]; mov.u32 %r0, 0; mad.lo.u32 %r1, lane_id, 4, %r100; setp.eq.u32 p, warp_id, 1;
    @p bra TAKE;
    GIVE: xor.b32 %r2, %r0, 1; and.b32 %r2, %r2, 1;
    W0: mbarrier.try_wait.parity.shared::cta.b64 p, [%r100+8], %r2; @!p bra W0;
    mad.lo.u32 %r3, %r0, 100, lane_id; st.shared.b32 [%r1+64], %r3; mbarrier.arrive.shared::cta.b64 %d3, [%r100];
    add.u32 %r0, %r0, 1; setp.lt.u32 p, %r0, 3; @p bra GIVE;
    T: mbarrier.test_wait.shared::cta.b64 p, [%r100], %d3; @!p bra T; bra END;
    TAKE: and.b32 %r2, %r0, 1;
    W1: mbarrier.test_wait.parity.shared::cta.b64 p, [%r100], %r2; @!p bra W1; ld.shared.b32 %r3, [%r1+64];
    mad.lo.u32 %r4, %r0, 32, lane_id; mul.wide.u32 %d0, %r4, 4; add.u64 %d1, place, %d0; st.global.b32 [%d1], %r3;
    mbarrier.arrive.shared::cta.b64 _, [%r100+8]; add.u32 %r0, %r0, 1; setp.lt.u32 p, %r0, 3; @p bra TAKE; END:"""
    for seed in SEEDS:
        out = np.zeros((3, 32), np.uint32)
        launch(module(body), [out, out], threads=64, shared=512, options=Options(seed=seed))
        assert (out == np.arange(3)[:, None] * 100 + np.arange(32)).all()


def test_local_memory():
    text = """ .local .align 16 .b8 depot[64]; mov.u64 %d9, depot; st.local.v2.b32 [%d9+8], {%r0, %r1};
    and.b32 %r5, lane_id, 1; mul.wide.u32 %d10, %r5, 4; add.u64 %d10, %d10, %d9; ld.local.b32 %r9, [%d10+8];"""
    a, b = (RANDOM.integers(0, 1 << 32, 32, dtype=np.uint64).astype(np.uint32) for _ in range(2))
    (got,) = operation(text, [a, b], ["%r9"])
    assert (got == np.where(np.arange(32) % 2, b, a)).all()
