"""What the compiler made of the Blackwell backward: no spills, registers within budget, work per step."""

from __future__ import annotations

import pytest

from jax_fa4.kernels.sm100.backward import config as sizes
from jax_fa4.kernels.sm100.backward import tmem
from jax_fa4.kernels.sm100.backward.config import BackwardConfig
from jax_fa4.kernels.sm100.backward.shared import SharedMap
from jax_fa4.kernels.sm100.backward_pair import config as pair_sizes
from jax_fa4.kernels.sm100.backward_pair import tmem as pair_tmem
from jax_fa4.kernels.sm100.backward_pair.shared import PairMap
from jax_fa4.kernels.sm100.backward_split import maps
from jax_fa4.kernels.sm100.backward_split.config import SplitConfig
from jax_fa4.kernels.spec import KernelSpec, UnsupportedSpecError, sm100_pair_backward_tile, standard_specs
from tests import sass
from tests.compiled import require_kernels
from tests.emulator.attention import ForwardCase, artefact
from tests.emulator.attention_backward import inputs, run_backward
from tests.emulator.launch import Options
from tests.emulator.roofline import B200, cycles

require_kernels()

ARCH = "sm_100f"
HEAD_DIMS = (64, 128)

MMA_CYCLES = {64: 1280, 128: 2560}
"""Five products of 2 * 128 * 128 * d FLOP at 8192 a cycle."""

OPERAND_CYCLES = {64: 1152, 128: 2048}
"""Shared-memory operands: S, dP and dQ read both of theirs, dV and dK only B."""

MOVED_CYCLES = {64: 768, 128: 1280}
"""dS written once (32 KiB), dQ (float32) written and read as it leaves."""


PAIR_OPERAND_CYCLES = 1536
"""Shared-memory operands of a CTA in a pair: S and dP read K or V and half of Q or dO, dV and dK half of dO or Q, dQ
half of the rows of dS and half of the columns of K, of 256 keys."""

PAIR_MOVED_CYCLES = 1024
"""dS written once (32 KiB), half of it read and written as it goes to the peer; half of dQ written and read."""

PAIR_DESIGN_CYCLES = 2688
"""Shared memory in the design's table."""


def make_spec(head_dim: int, mask: str = "none", **fields) -> KernelSpec:
    return KernelSpec.create(arch=ARCH, kind="backward_main", dtype="bfloat16", head_dim=head_dim, mask=mask, **fields)


MAIN_SPECS = standard_specs([ARCH], ["backward_main"])
SINGLE_SPECS, PAIR_SPECS = ([s for s in MAIN_SPECS if s.tile.option("ctas", 1) == ctas] for ctas in (1, 2))


def test_every_head_dim_and_mask_of_two_boxes_has_a_kernel_on_pairs():
    two_boxes = [s for s in SINGLE_SPECS if min(s.head_dim, s.head_dim_v) > sizes.BOX_COLUMNS]
    assert [s.with_tile(sm100_pair_backward_tile(s.head_dim, s.head_dim_v)) for s in two_boxes] == PAIR_SPECS


@pytest.mark.parametrize("spec", PAIR_SPECS, ids=lambda spec: spec.name)
def test_budgets_of_pairs(spec):
    config = BackwardConfig.from_spec(spec)
    assert PairMap.of(config).size <= sizes.SHARED_LIMIT
    registers = 2 * pair_sizes.COMPUTE_REGISTERS + pair_sizes.REDUCE_REGISTERS + pair_sizes.OTHER_REGISTERS
    assert registers <= 65536 // 128
    assert pair_tmem.DQUERY + config.columns // 2 <= pair_tmem.DVALUE
    used = [pair_tmem.probability_step(step) for step in range(sizes.ROWS // sizes.K_STEP)]
    assert sorted(used) == list(range(0, pair_tmem.DQUERY, sizes.K_STEP // 2))


@pytest.mark.parametrize("spec", SINGLE_SPECS, ids=lambda spec: spec.name)
def test_budgets(spec):
    config = BackwardConfig.from_spec(spec)
    assert SharedMap.of(config).size <= sizes.SHARED_LIMIT
    registers = 2 * sizes.COMPUTE_REGISTERS + sizes.REDUCE_REGISTERS + sizes.OTHER_REGISTERS
    assert registers <= 65536 // 128
    assert tmem.DVALUE + config.columns_v <= tmem.DPROBABILITIES
    own = config.columns if config.dq_over_dp else 64
    assert tmem.DKEY + own <= (tmem.COLUMNS if config.dq_over_dp else tmem.dquery(config))
    assert tmem.dquery(config) + config.columns <= tmem.COLUMNS


@pytest.mark.parametrize(
    "spec", standard_specs([ARCH], ["backward_key_value", "backward_query"]), ids=lambda spec: spec.name
)
def test_budgets_of_the_split_kernels(spec):
    config = SplitConfig.from_spec(spec)
    assert maps.SharedMap.of(config).size <= sizes.SHARED_LIMIT
    assert maps.second(config) + config.qk_part * sizes.BOX_COLUMNS <= maps.COLUMNS
    assert config.parts * config.qk_part >= config.qk_boxes
    assert not config.key_side or config.parts * config.v_part >= config.v_boxes


def test_the_one_kernel_refuses_larger_head_dims():
    with pytest.raises(UnsupportedSpecError, match="up to 128"):
        make_spec(192)


@pytest.mark.parametrize("kind", ["backward_key_value", "backward_query"])
@pytest.mark.parametrize("head_dim", [192, 256])
def test_split_kernels_do_not_spill(head_dim, kind):
    if sass.nvdisasm() is None:
        pytest.skip("needs nvdisasm to read machine code")
    spec = KernelSpec.create(arch=ARCH, kind=kind, dtype="bfloat16", head_dim=head_dim)
    counts = sass.Machine.of(artefact(spec).cubin).count()
    assert counts["LDL"] == counts["STL"] == 0


@pytest.mark.parametrize("mask", ["none", "causal", "window"])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_machine_code(head_dim, mask):
    if sass.nvdisasm() is None:
        pytest.skip("needs nvdisasm to read machine code")
    machine = sass.Machine.of(artefact(make_spec(head_dim, mask)).cubin)
    everything = machine.count()
    assert everything["LDL"] == everything["STL"] == 0
    regions = machine.register_regions()
    assert sorted(granted for granted, _ in regions) == sorted(
        (sizes.COMPUTE_REGISTERS, sizes.REDUCE_REGISTERS, sizes.OTHER_REGISTERS)
    )
    for granted, used in regions:
        assert used <= granted
    counts, length = machine.innermost("MUFU", sizes.HALF)
    assert counts["MUFU"] == counts["F2FP"] == sizes.HALF
    assert counts["FFMA2"] == 2 * counts["FMUL2"] == sizes.HALF
    assert counts["LDTM"] == counts["STTM"] == 4
    assert counts["LDS"] == 2 * sizes.HALF // 4
    assert length <= 500


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_work_per_step(head_dim):
    """The emulator's counters, as the difference between four steps and two, on the units of the design's table."""
    busy, moved = [], []
    for blocks in (2, 4):
        case = ForwardCase(sizes.ROWS * blocks, sizes.KEYS, head_dim, arch=ARCH)
        report = run_backward(case, inputs(case), Options(detect_races=False)).reports[1]
        busy.append(cycles(report, B200))
        moved.append(report.counters["shared_write"] + report.counters["async_shared_read"])
    unit = {name: (getattr(busy[1], name) - getattr(busy[0], name)) / 2 for name in vars(busy[0])}
    assert unit["mma"] == MMA_CYCLES[head_dim]
    assert unit["shared_mma"] == OPERAND_CYCLES[head_dim]
    assert unit["mufu"] == sizes.ROWS * sizes.KEYS / B200.mufu
    assert (moved[1] - moved[0]) / 2 / B200.shared_bytes == MOVED_CYCLES[head_dim]


def is_long(config: pytest.Config) -> bool:
    return bool(config.getoption("--long"))


def test_machine_code_of_pairs(pytestconfig):
    if sass.nvdisasm() is None:
        pytest.skip("needs nvdisasm to read machine code")
    for spec in PAIR_SPECS if is_long(pytestconfig) else PAIR_SPECS[-1:]:
        machine = sass.Machine.of(artefact(spec).cubin)
        everything = machine.count()
        assert everything["LDL"] == everything["STL"] == 0, spec.name
        regions = machine.register_regions()
        assert sorted(granted for granted, _ in regions) == sorted(
            (pair_sizes.COMPUTE_REGISTERS, pair_sizes.REDUCE_REGISTERS, pair_sizes.OTHER_REGISTERS)
        )
        assert all(used <= granted for granted, used in regions), spec.name
        counts, length = machine.innermost("MUFU", sizes.HALF)
        assert counts["MUFU"] == counts["F2FP"] == sizes.HALF
        assert counts["FFMA2"] == 2 * counts["FMUL2"] == sizes.HALF
        assert counts["LDTM"] == counts["STTM"] == 4
        assert counts["LDS"] == 2 * sizes.HALF // 4
        assert length <= 500


def test_work_per_step_of_pairs():
    """As above, of each CTA; and what the pair's halves are for: half of the single CTA's dQ traffic per key."""
    added = {}
    for pair in (False, True):
        reports = []
        for blocks in (2, 4):
            case = ForwardCase(sizes.ROWS * blocks, 2 * sizes.KEYS, 128, arch=ARCH)
            reports.append(run_backward(case, inputs(case), Options(detect_races=False), pair=pair).reports[1])
        difference = {name: reports[1].counters[name] - reports[0].counters[name] for name in reports[0].counters}
        # Two CTAs, two steps each.
        added[pair] = difference["global_write"] / 4
    busy = [cycles(report, B200) for report in reports]
    unit = {name: (getattr(busy[1], name) - getattr(busy[0], name)) / 4 for name in vars(busy[0])}
    exchanged = difference["async_shared_write"] - difference["global_read"]
    moved = (difference["shared_write"] + difference["async_shared_read"] + exchanged) / 4 / B200.shared_bytes
    assert unit["mma"] == MMA_CYCLES[128]
    assert unit["mufu"] == sizes.ROWS * sizes.KEYS / B200.mufu
    assert unit["shared_mma"] == PAIR_OPERAND_CYCLES
    assert exchanged / 4 == pair_sizes.SEND_BYTES
    assert moved == PAIR_MOVED_CYCLES
    assert unit["shared_mma"] + moved == pytest.approx(PAIR_DESIGN_CYCLES, rel=0.05)
    assert added[True] == added[False] / 2 == sizes.ROWS * 128 * 4 / 2
