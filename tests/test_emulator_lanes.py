"""Races between lanes of one warp, and fences that cover the lanes that execute them only."""

import numpy as np
import pytest

from tests.emulator.errors import RaceError, SyncError
from tests.emulator.launch import Options
from tests.emulator.snippets import launch, module
from tests.emulator.tma import TensorMap

SEEDS = range(4)
EXCHANGE = """ mov.u32 %r0, smem; shl.b32 %r1, lane_id, 2; add.u32 %r2, %r0, %r1; xor.b32 %r1, %r1, 4;
 add.u32 %r3, %r0, %r1; st.shared.b32 [%r2], tx; {between} ld.shared.b32 %r4, [{source}]; {after}
 st.shared.b32 [{target}], %r4;
 ld.param.u64 base, [out]; mul.wide.u32 %d0, tx, 4; add.u64 base, base, %d0; st.global.b32 [base], %r4;
"""


def exchange(between: str, source: str = "%r3", after: str = "", target: str = "%r3") -> np.ndarray:
    """Every lane writes its number, then reads its neighbour's (%r3, or %r2 for its own), then writes once more."""
    out = np.zeros(32, np.uint32)
    body = EXCHANGE.format(between=between, source=source, after=after, target=target)
    for seed in SEEDS:
        launch(module(body), [out, out], shared=256, options=Options(seed=seed))
    return out


def test_lanes_that_meet_may_exchange():
    for barrier in ("bar.warp.sync -1;", "bar.sync 0;"):
        assert (exchange(barrier) == np.arange(32) ^ 1).all()


def test_a_lane_may_read_what_it_wrote():
    assert (exchange("", "%r2", "", "%r2") == np.arange(32)).all()


def test_reading_another_lane_without_a_barrier_is_a_race():
    with pytest.raises(RaceError, match="in another lane than wrote it"):
        exchange("")


def test_a_shuffle_is_no_barrier():
    with pytest.raises(RaceError, match="in another lane than wrote it"):
        exchange("shfl.sync.bfly.b32 %r5, tx, 1, 31, -1;")


def test_overwriting_what_another_lane_read_is_a_race():
    with pytest.raises(RaceError, match="which another lane has read"):
        exchange("bar.warp.sync -1;", target="%r2")
    exchange("bar.warp.sync -1;", after="bar.warp.sync -1;", target="%r2")


def test_one_lane_writes_all_read():
    body = """ mov.u32 %r0, smem; setp.ne.u32 p, lane_id, 7; @p bra READ; st.shared.b32 [%r0], 5;
    READ: {between} ld.shared.b32 %r1, [%r0];
    ld.param.u64 base, [out]; mul.wide.u32 %d0, tx, 4; add.u64 base, base, %d0; st.global.b32 [base], %r1;"""
    out = np.zeros(32, np.uint32)
    launch(module(body.format(between="bar.warp.sync -1;")), [out, out], shared=256)
    assert (out == 5).all()
    with pytest.raises(RaceError, match="in another lane than wrote it"):
        launch(module(body.format(between="")), [out, out], shared=256)


STORE = """ mov.u32 %r0, smem; setp.ne.u32 q, tx, 0; @q bra READY;
 mbarrier.init.shared::cta.b64 [%r0+2048], 1; fence.mbarrier_init.release.cluster;
READY: bar.sync 0; setp.ge.u32 q, tx, 32; @q bra SENDER;
 shl.b32 %r1, lane_id, 2; add.u32 %r2, %r0, %r1; st.shared.b32 [%r2], tx;
 {fence} {barrier} setp.ne.u32 p, lane_id, 0; @p bra END;
 {late} mbarrier.arrive.shared::cta.b64 %d0, [%r0+2048]; bra END;
SENDER: setp.ne.u32 p, lane_id, 0; @p bra END;
WAIT: mbarrier.try_wait.parity.shared::cta.b64 p, [%r0+2048], 0; @!p bra WAIT;
 ld.param.u64 base, [out]; mov.b32 %r3, 0;
 cp.async.bulk.tensor.1d.global.shared::cta.tile.bulk_group [%d9, {{%r3}}], [%r0];
 cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;
END:
"""


def send(fence: str, barrier: str, late: str = "") -> np.ndarray:
    """A warp fills shared memory; one of its lanes tells another warp, which stores it by TMA."""
    out = np.zeros(32, np.uint32)
    text = module(
        STORE.format(fence=fence, barrier=barrier, late=late),
        ".param .u64 data, .param .u64 out, .param .align 64 .b8 map[128]",
    ).replace(" mov.u32 tx, %tid.x;", " mov.b64 %d9, map; cvta.param.u64 %d9, %d9; mov.u32 tx, %tid.x;")
    for seed in SEEDS:
        tensor = lambda regions: TensorMap(regions[1].base, "int32", (32,), (), (32,), 0)  # noqa: E731
        launch(text, [np.zeros(1, np.uint32), out], threads=64, shared=4096, extra=[tensor], options=Options(seed=seed))
    return out


FENCE = "fence.proxy.async.shared::cta;"


def test_lanes_fence_then_meet_then_one_arrives():
    assert (send(FENCE, "bar.warp.sync -1;") == np.arange(32)).all()


@pytest.mark.parametrize(
    "fence, barrier, late",
    [
        (FENCE, "", ""),  # nothing says that the other lanes have written
        ("", "bar.warp.sync -1;", ""),  # nobody fences
        ("bar.warp.sync -1; " + FENCE, "", ""),  # the other lanes' fences may come after the arrival
    ],
)
def test_arrival_of_one_lane_does_not_cover_the_others(fence, barrier, late):
    with pytest.raises(RaceError):
        send(fence, barrier, late)


def test_one_lane_may_fence_for_all_after_they_met():
    assert (send("bar.warp.sync -1;", "", FENCE) == np.arange(32)).all()


COPY = """ mov.u32 %r0, smem; shl.b32 %r1, lane_id, 2; add.u32 %r2, %r0, %r1; st.shared.b32 [%r2], tx;
 {between} setp.ne.u32 p, lane_id, {lane}; @p bra END; {late} ld.param.u64 base, [out];
 cp.async.bulk.global.shared::cta.bulk_group [base], [%r0], 128; cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;
END:
"""


@pytest.mark.parametrize("lane", [0, 9])
def test_one_lane_copies_what_all_have_written(lane):
    out = np.zeros(32, np.uint32)
    for between, late in ((FENCE + " bar.warp.sync -1;", ""), ("bar.warp.sync -1;", FENCE)):
        out[:] = 0
        launch(module(COPY.format(between=between, late=late, lane=lane)), [out, out], shared=256)
        assert (out == np.arange(32)).all()
    for between, late in ((FENCE, ""), ("", FENCE), ("bar.warp.sync -1; " + FENCE, "")):
        with pytest.raises(RaceError):
            launch(module(COPY.format(between=between, late=late, lane=lane)), [out, out], shared=256)


PRODUCT = """ mov.b32 %r0, 0; {first} {{ .reg .f32 f<4>; .reg .pred keep; setp.ne.b32 keep, %r0, 0;
 mov.f32 f0, 0f00000000; mov.f32 f1, f0; mov.f32 f2, f0; mov.f32 f3, f0;
 mov.u32 %r1, smem; shr.u32 %r1, %r1, 4; cvt.u64.u32 %d0, %r1; {fence}
 wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {{f0, f1, f2, f3}}, %d0, %d0, keep, 1, 1, 0, 0;
 {between} wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {{f0, f1, f2, f3}}, %d0, %d0, keep, 1, 1, 0, 0;
 wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0; }}
"""


@pytest.mark.parametrize(
    "first, fence, between, message",
    [
        ("", "", "", "the kernel's beginning"),
        ("wgmma.fence.sync.aligned;", "", "", "the access to its registers"),
        ("", "wgmma.fence.sync.aligned;", "mov.f32 f1, f0;", "the access to its registers"),
    ],
)
def test_unfenced_products_are_refused(first, fence, between, message):
    body = PRODUCT.format(first=first, fence=fence, between=between)
    with pytest.raises(SyncError, match=message):
        launch(module(body), [np.zeros(1, np.uint32)] * 2, threads=128, shared=8192)


def test_products_may_follow_one_another():
    launch(
        module(PRODUCT.format(first="", fence="wgmma.fence.sync.aligned;", between="")), [np.zeros(1, np.uint32)] * 2,
        threads=128, shared=8192,
    )  # fmt: skip
