"""tcgen05 instructions executed from PTX text: data, errors and orders that PTX demands."""

import struct

import numpy as np
import pytest

from tests.emulator.errors import DeadlockError, EmulatorError, RaceError, SyncError
from tests.emulator.launch import Options, run_foreign
from tests.emulator.memory import GlobalMemory
from tests.emulator.sm100.tmem import TensorMemoryError

HEADER = """
.version 8.8
.target sm_100a
.address_size 64
.visible .entry k(.param .u64 out)
{
 .reg .pred %p<8>; .reg .b32 %r<200>; .reg .b64 %rd<8>; .reg .b32 lane_index, warp_index, quarter_index;
 .reg .b32 tmem_index;
 .shared .align 16 .b8 slot[16];
 .shared .align 8 .b8 bar[8];
 ld.param.u64 %rd0, [out];
 mov.u32 %r0, %tid.x;
 and.b32 lane_index, %r0, 31;
 shr.u32 warp_index, %r0, 5;
 and.b32 quarter_index, warp_index, 3;
 shl.b32 quarter_index, quarter_index, 21;
"""
ALLOC = """
 setp.ne.u32 %p0, warp_index, 0;
 @%p0 bra ALLOCATED;
 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [slot], 64;
ALLOCATED:
 bar.sync 0;
 ld.shared.b32 tmem_index, [slot];
 add.u32 tmem_index, tmem_index, quarter_index;
"""
FREE = """
 bar.sync 0;
 @%p0 bra FREED;
 sub.u32 tmem_index, tmem_index, quarter_index;
 tcgen05.dealloc.cta_group::1.sync.aligned.b32 tmem_index, 64;
FREED:
"""
END = " ret;\n}\n"


def run(body: str, *, threads: int = 128, words: int = 1, seed: int = 0, cluster: int = 1, **options) -> np.ndarray:
    """Runs ``HEADER + body + END`` on one cluster; returns the output: (threads of all CTAs, words) uint32."""
    out = np.full(cluster * threads * words, 0xDEADBEEF, np.uint32)
    memory = GlobalMemory()
    base = memory.add("out", out.view(np.uint8)).base
    shape = (cluster, 1, 1)
    ptx = HEADER + body + END
    run_foreign(
        ptx, "k", shape, (threads, 1, 1), shape, 0, [struct.pack("<Q", base)], memory, Options(seed=seed, **options)
    )
    return out.reshape(cluster * threads, words)


def store_out(registers: list[str]) -> str:
    """Thread t writes its registers to out[t * len(registers)...]."""
    lines = [f" mul.wide.u32 %rd1, %r0, {4 * len(registers)};", " add.s64 %rd1, %rd0, %rd1;"]
    lines += [f" st.global.b32 [%rd1+{4 * i}], {name};" for i, name in enumerate(registers)]
    return "\n".join(lines)


def write_columns(count: int) -> str:
    """Every lane's column c of 0..count-1 becomes 1000 * lane-in-CTA + c."""
    lines = [" mul.lo.u32 %r1, %r0, 1000;"]
    lines += [f" add.u32 %r{10 + c}, %r1, {c};" for c in range(count)]
    names = ", ".join(f"%r{10 + c}" for c in range(count))
    lines.append(f" tcgen05.st.sync.aligned.32x32b.x{count}.b32 [tmem_index], {{{names}}};")
    lines.append(" tcgen05.wait::st.sync.aligned;")
    return "\n".join(lines)


def load(form: str, registers: int, offset: int = 0, extra: str = "") -> str:
    names = ", ".join(f"%r{100 + i}" for i in range(registers))
    text = f" tcgen05.ld.sync.aligned.{form}.b32 {{{names}}}, [tmem_index+{offset}]{extra};\n"
    return text + " tcgen05.wait::ld.sync.aligned;"


def loaded(registers: int) -> list[str]:
    return [f"%r{100 + i}" for i in range(registers)]


# form -> (registers, {(thread, register): (lane, column)}), from the figures of the PTX ISA
FORMS = {
    "32x32b.x4": (4, {(0, 0): (0, 0), (9, 3): (9, 3), (31, 2): (31, 2)}),
    "16x64b.x2": (2, {(0, 0): (0, 0), (1, 0): (8, 0), (2, 0): (0, 1), (7, 1): (9, 3), (31, 1): (15, 3)}),
    "16x128b.x2": (4, {(0, 0): (0, 0), (3, 1): (8, 3), (5, 2): (1, 5), (31, 3): (15, 7)}),
    "16x256b.x1": (4, {(0, 0): (0, 0), (1, 1): (0, 3), (6, 2): (9, 4), (31, 3): (15, 7)}),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("seed", range(3))
def test_load_shapes(form, seed):
    registers, table = FORMS[form]
    body = ALLOC + write_columns(8) + load(form, registers) + store_out(loaded(registers)) + FREE
    out = run(body, words=registers, seed=seed)
    for warp in range(4):
        for (thread, register), (lane, column) in table.items():
            assert out[32 * warp + thread, register] == 1000 * (32 * warp + lane) + column


def test_upper_half_of_a_quarter():
    body = ALLOC + write_columns(8) + " add.u32 tmem_index, tmem_index, 0x100000;" + load("16x256b.x1", 4)
    body += " sub.u32 tmem_index, tmem_index, 0x100000;" + store_out(loaded(4)) + FREE
    out = run(body, words=4)
    assert out[32 + 6, 2] == 1000 * (32 + 16 + 9) + 4


def test_packed_load_and_split_halves():
    body = ALLOC + write_columns(8) + load("32x32b.x2.pack::16b", 2) + store_out(loaded(2)) + FREE
    out = run(body, words=2)
    values = np.array([[1000 * 70 + c for c in range(4)]], np.uint32)
    assert out[70, 1] == (values[0, 2] & 0xFFFF) | (values[0, 3] & 0xFFFF) << 16
    body = ALLOC + write_columns(8) + load("16x32bx2.x2", 2, extra=", 4") + store_out(loaded(2)) + FREE
    out = run(body, words=2)
    assert (out[3, 1], out[16 + 3, 1]) == (3001, 3005)


@pytest.mark.parametrize("seed", range(6))
def test_use_before_the_wait(seed):
    """Refused by default; with ``unwaited_loads`` the value is there, as ptxas makes it."""
    early = load("32x32b.x1", 1).replace("tcgen05.wait::ld.sync.aligned;", "")
    body = ALLOC + write_columns(2) + early + store_out(loaded(1)) + " tcgen05.wait::ld.sync.aligned;" + FREE
    with pytest.raises(SyncError, match=r"before tcgen05.wait::ld"):
        run(body, seed=seed)
    out = run(body, seed=seed, unwaited_loads=True)
    np.testing.assert_array_equal(out[:, 0], 1000 * np.arange(128))


@pytest.mark.parametrize("seed", range(6))
def test_load_without_waiting_for_the_store(seed):
    body = ALLOC + write_columns(2).replace("tcgen05.wait::st.sync.aligned;", "")
    body += load("32x32b.x1", 1) + store_out(loaded(1)) + " tcgen05.wait::st.sync.aligned;" + FREE
    with pytest.raises((RaceError, EmulatorError), match=r"not ordered after the write|nobody has written"):
        run(body, seed=seed)


@pytest.mark.parametrize("seed", range(6))
def test_overwriting_a_load_that_was_not_waited_for(seed):
    body = ALLOC + write_columns(2) + load("32x32b.x1", 1).replace("tcgen05.wait::ld.sync.aligned;", "")
    body += write_columns(2) + " tcgen05.wait::ld.sync.aligned;" + FREE
    with pytest.raises(RaceError, match=r"not ordered after the (read|write)"):
        run(body, seed=seed)


def test_unwritten_columns():
    body = ALLOC + write_columns(2) + load("32x32b.x4", 4) + store_out(loaded(4)) + FREE
    with pytest.raises(EmulatorError, match=r"column 2, lane .* which nobody has written"):
        run(body, words=4)


def test_foreign_lane_quarter():
    body = ALLOC + " xor.b32 tmem_index, tmem_index, 0x200000;" + write_columns(2) + FREE
    with pytest.raises(TensorMemoryError, match="can be reached"):
        run(body)


def test_store_not_waited_for_at_exit():
    body = ALLOC + write_columns(2).replace("tcgen05.wait::st.sync.aligned;", "") + FREE
    with pytest.raises((SyncError, RaceError), match=r"not waited for|not ordered after"):
        run(body)


def test_leak():
    with pytest.raises(TensorMemoryError, match="leak"):
        run(ALLOC)


def test_dealloc_must_match():
    with pytest.raises(TensorMemoryError, match="matches none"):
        run(ALLOC + FREE.replace("tmem_index, 64;", "tmem_index, 32;"))


def test_columns_must_be_a_power_of_two():
    with pytest.raises(TensorMemoryError, match="power of two"):
        run(ALLOC.replace("[slot], 64", "[slot], 48") + FREE)


def test_alloc_after_relinquish():
    body = ALLOC + "@!%p0 tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;\n"
    body += "@!%p0 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [slot], 32;" + FREE
    with pytest.raises(TensorMemoryError, match="relinquish"):
        run(body)


WAITS_FOR_COLUMNS = """
 setp.ne.u32 %p0, warp_index, 0;
 setp.gt.u32 %p1, warp_index, 1;
 @%p1 bra DONE;
 @%p0 bra SECOND;
 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [slot], 512;
 bar.sync 1, 64;
 DEALLOC
 bra DONE;
SECOND:
 bar.sync 1, 64;
 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [slot+4], 256;
 ld.shared.b32 tmem_index, [slot+4];
 tcgen05.dealloc.cta_group::1.sync.aligned.b32 tmem_index, 256;
DONE:
"""
DEALLOC = "ld.shared.b32 tmem_index, [slot]; tcgen05.dealloc.cta_group::1.sync.aligned.b32 tmem_index, 512;"


@pytest.mark.parametrize("seed", range(4))
def test_alloc_waits_for_columns(seed):
    run(WAITS_FOR_COLUMNS.replace("DEALLOC", DEALLOC), seed=seed)
    with pytest.raises(DeadlockError, match="tensor memory"):
        run(WAITS_FOR_COLUMNS.replace("DEALLOC", ""), seed=seed)


PAIR = """
 setp.ne.u32 %p0, warp_index, 0;
 @%p0 bra DONE;
 mov.u32 %r5, %cluster_ctarank;
 setp.eq.u32 %p1, %r5, 1;
 @%p1 bra PEER;
 tcgen05.alloc.cta_group::2.sync.aligned.shared::cta.b32 [slot], 128;
 bra MEET;
PEER:
 PEER_ALLOC
MEET:
 ld.shared.b32 tmem_index, [slot];
 tcgen05.relinquish_alloc_permit.cta_group::2.sync.aligned;
 tcgen05.dealloc.cta_group::2.sync.aligned.b32 tmem_index, 128;
DONE:
"""
PEER_ALLOC = "tcgen05.alloc.cta_group::2.sync.aligned.shared::cta.b32 [slot], 128;"


@pytest.mark.parametrize("seed", range(4))
def test_pair_allocates_together(seed):
    run(PAIR.replace("PEER_ALLOC", PEER_ALLOC), seed=seed, cluster=2)
    with pytest.raises(DeadlockError, match="peer's allocation"):
        run(PAIR.replace("PEER_ALLOC", "bra DONE;"), seed=seed, cluster=2)
    with pytest.raises(SyncError, match="no peer"):
        run(PAIR.replace("PEER_ALLOC", PEER_ALLOC), seed=seed, cluster=1)


COMMIT = """
 setp.ne.u32 %p0, %r0, 0;
 @%p0 bra INITIALISED;
 mbarrier.init.shared.b64 [bar], 1;
 fence.mbarrier_init.release.cluster;
INITIALISED:
 bar.sync 0;
 setp.ne.u32 %p1, warp_index, 0;
 @%p1 bra WAIT;
 elect.sync %r5|%p2, -1;
 GUARD tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [bar];
WAIT:
 mbarrier.try_wait.parity.shared.b64 %p3, [bar], 0, 1000;
 @!%p3 bra WAIT;
"""


@pytest.mark.parametrize("seed", range(4))
def test_commit_without_products_arrives(seed):
    out = run(COMMIT.replace("GUARD", "@%p2") + store_out(["lane_index"]), seed=seed)
    np.testing.assert_array_equal(out[:, 0], np.arange(128) % 32)


def test_commit_by_a_whole_warp():
    with pytest.raises(SyncError, match="issued by 32 threads"):
        run(COMMIT.replace("GUARD", ""))


def test_commit_needs_a_fenced_barrier():
    with pytest.raises(SyncError, match=r"fence.mbarrier_init"):
        run(COMMIT.replace("GUARD", "@%p2").replace("fence.mbarrier_init.release.cluster;", ""))


def test_unknown_forms_are_refused():
    for text in (
        "tcgen05.mma.cta_group::1.kind::mxf4 [%r1], %rd1, %rd1, %r1, %p0;",
        "tcgen05.mma.ws.cta_group::1.kind::f16 [%r1], %rd1, %rd1, %r1, %p0;",
        "tcgen05.shift.cta_group::1.down [%r1];",
    ):
        with pytest.raises(EmulatorError, match="tcgen05"):
            run(text)


EXCHANGE = """
 setp.ne.u32 %p0, %r0, 0;
 @%p0 bra READY;
 mbarrier.init.shared.b64 [bar], 1;
READY:
 bar.sync 0;
 mov.b32 %r6, exchanged;
 shl.b32 %r7, lane_index, 2;
 add.u32 %r6, %r6, %r7;
 setp.ne.u32 %p1, warp_index, 0;
 @%p1 bra READER;
 st.shared.b32 [%r6], %r0;
 SYNC
 elect.sync _|%p2, -1;
 @%p2 mbarrier.arrive.shared.b64 %rd3, [bar];
READER:
 mbarrier.try_wait.parity.shared.b64 %p3, [bar], 0, 1000;
 @!%p3 bra READER;
 ld.shared.b32 %r100, [%r6];
"""


@pytest.mark.parametrize("seed", range(4))
def test_one_lane_arrives_for_its_warp(seed):
    """What 31 other lanes wrote is covered by one lane's arrival only after bar.warp.sync."""
    body = ".shared .align 16 .b8 exchanged[128];\n" + EXCHANGE + store_out(loaded(1))
    out = run(body.replace("SYNC", "bar.warp.sync -1;"), threads=64, seed=seed)
    np.testing.assert_array_equal(out[:, 0], np.arange(64) % 32)
    with pytest.raises(RaceError, match="not ordered after the write"):
        run(body.replace("SYNC", ""), threads=64, seed=seed)
