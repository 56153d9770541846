"""Faults planted in the PTX of real kernels are found, each within 20 schedules."""

import re

import pytest

from tests.emulator import mutants
from tests.emulator.attention import ForwardCase, artefact, assert_right, run_forward
from tests.emulator.errors import EmulatorError
from tests.emulator.launch import Options

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl to compile the kernels")

SEEDS = range(1, 21)
CASE = ForwardCase(400, 420, 64, mask="causal", multiprocessors=1, ramp=0.01)
"""Several tiles in one CTA, several key blocks each, moving maxima: every buffer and phase is used again."""

MUTANTS = {
    "consumer skips the wait for Q": mutants.skip_wait(6),
    "consumer skips the wait for K": mutants.skip_wait(7),
    "consumer skips the wait for K in the masked loop": mutants.skip_wait(8),
    "consumer skips the wait for V": mutants.skip_wait(9),
    "consumer skips the wait for V at the end": mutants.skip_wait(12),
    "producer skips the wait for a free Q buffer": mutants.skip_wait(1),
    "producer skips the wait for a free K stage": mutants.skip_wait(4),
    "producer skips the wait for a free V stage": mutants.skip_wait(5),
    "phase of the wait for Q flipped": mutants.flip_wait(6),
    "phase of the wait for K flipped": mutants.flip_wait(8),
    "phase of the wait for V flipped": mutants.flip_wait(11),
    "phase of the producer's wait for K flipped": mutants.flip_wait(4),
    "phase of the producer's wait for V flipped": mutants.flip_wait(5),
    "expected bytes of Q too small": mutants.everywhere(r"(mov\.b32 \t%r\d+), 8192;", r"\1, 8176;"),
    "expected bytes of K too large": mutants.replace(r"(mov\.b32 \t%r\d+), 16384;", r"\1, 16400;"),
    "expected bytes of V halved": mutants.replace(r"(mov\.b32 \t%r\d+), 16384;", r"\1, 8192;", -1),
    "no wait for the first score product": mutants.remove(r"wgmma\.wait_group", 0),
    "no wait for the score product in the loop": mutants.remove(r"wgmma\.wait_group", 1),
    "no wait for the output product": mutants.remove(r"wgmma\.wait_group", 2),
    "waits leave one group pending": mutants.everywhere(r"(wgmma\.wait_group\.sync\.aligned) \t0", r"\1 \t1"),
    "products not committed": mutants.remove(r"wgmma\.commit_group", 2),
    "no wgmma.fence before the scores": mutants.remove(r"wgmma\.fence", 1),
    "K released before its product is waited for": mutants.move_before(r"wgmma\.wait_group", r"@%p\d+ bra"),
    "K never released": mutants.remove(r"mbarrier\.arrive\.shared\.b64", 1),
    "V never released": mutants.remove(r"mbarrier\.arrive\.shared\.b64", 2),
    "Q never released": mutants.remove(r"mbarrier\.arrive\.shared\.b64", -1),
    "release arrives twice": mutants.replace(r"(mbarrier\.arrive\.shared\.b64 [^;]*;)", r"\1 \1", 1),
    "K's release goes to V's barrier": mutants.replace(r"(mbarrier\.arrive\.shared[^\]]*)\+90176", r"\1+90208", 1),
    "a barrier initialised with one arrival less": mutants.replace(r"(mbarrier\.init[^;]*90176\]), %r\d+", r"\1, 11"),
    "a barrier initialised with one arrival more": mutants.replace(r"(mbarrier\.init[^;]*90208\]), %r\d+", r"\1, 13"),
    "barriers not fenced after init": mutants.remove(r"fence\.mbarrier_init"),
    "barriers used without a CTA barrier after init": mutants.remove(r"bar\.sync", 0),
    "ping-pong turn not taken": mutants.remove(r"bar\.sync", 2),
    "ping-pong turn not given": mutants.remove(r"bar\.arrive", 2),
    "named barrier with a wrong thread count": mutants.replace(r"(bar\.sync \t%r\d+), 256", r"\1, 128"),
    "last turn of the ping-pong left open": mutants.remove(r"bar\.sync", -1),
    "no barrier before the output is stored": mutants.remove(r"bar\.sync", 5),
    "no proxy fence before the output is stored": mutants.remove(r"fence\.proxy\.async"),
    "output buffer released before the store has read it": mutants.remove(r"cp\.async\.bulk\.wait_group"),
    "output store not committed": mutants.remove(r"cp\.async\.bulk\.commit_group"),
    "causal mask off by one": mutants.everywhere(r"(setp)\.gt(\.s32 \t%p\d+, %r\d+), (9|17|25|33);", r"\1.ge\2, \3;"),
    "row sum reduced over the wrong lanes": mutants.replace(r"(shfl\.sync\.bfly\.b32 \t%r\d+, %r\d+), 2", r"\1, 4", -1),
    "K taken from a wrong stage": mutants.replace(r"(expect_tx[^;]*\+90160[^;]*;[^;]*), 14;", r"\1, 13;", 1),
}  # fmt: skip


@pytest.fixture(scope="module")
def original():
    return artefact(CASE.spec).ptx


@pytest.fixture(scope="module")
def operands():
    return CASE.operands(1)


def findings(ptx, operands):
    """The first report, over the seeds, of anything wrong; None if all is well."""
    for seed in SEEDS:
        try:
            assert_right(CASE, operands, run_forward(CASE, operands, Options(seed=seed), ptx))
        except (EmulatorError, AssertionError) as report:
            return seed, report
    return None


def test_the_original_is_clean(original, operands):
    assert findings(original, operands) is None


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_found(name, original, operands):
    mutant = MUTANTS[name](original)
    assert re.sub(r"\s", "", mutant) != re.sub(r"\s", "", original)
    assert findings(mutant, operands) is not None, f"nothing found in 20 schedules: {name}"
