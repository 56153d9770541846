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
from jax_fa4.kernels.spec import (
    DTYPES,
    MASKS,
    KernelSpec,
    UnsupportedSpecError,
    sm100_pair_backward_tile,
    standard_specs,
)
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


PAIR_HEAD_DIMS = ((128, 128), (192, 128))
PAIR_MMA_CYCLES = {(128, 128): 2560, (192, 128): 3328}
PAIR_OPERAND_CYCLES = {(128, 128): 1536, (192, 128): 2560}
"""Shared-memory operands of a CTA in a pair: S and dP read K or V and half of Q or dO, dV and dK half of dO or Q, dQ
half of the rows of dS and half of the columns of K, of 256 keys. At 192 K and V are read for each half of the rows."""

PAIR_MOVED_CYCLES = {(128, 128): 1024, (192, 128): 1280}
"""dS written once (32 KiB), half of it read and written as it goes to the peer; half of dQ written and read."""

PAIR_DESIGN_CYCLES = 2688
"""Shared memory in the design's table, for 128."""


def make_spec(head_dim: int, mask: str = "none", **fields) -> KernelSpec:
    return KernelSpec.create(arch=ARCH, kind="backward_main", dtype="bfloat16", head_dim=head_dim, mask=mask, **fields)


MAIN_SPECS = standard_specs([ARCH], ["backward_main"])
SINGLE_SPECS, PAIR_SPECS = ([s for s in MAIN_SPECS if s.tile.option("ctas", 1) == ctas] for ctas in (1, 2))


def test_every_mask_and_flag_has_a_kernel_on_pairs():
    head_dims = ((96, 96), (128, 128), (192, 128))
    assert {(s.head_dim, s.head_dim_v) for s in PAIR_SPECS} == set(head_dims)
    assert len(PAIR_SPECS) == len(head_dims) * len(DTYPES) * len(MASKS) * 2
    for spec in PAIR_SPECS:
        assert spec.tile == sm100_pair_backward_tile(spec.head_dim, spec.head_dim_v)


@pytest.mark.parametrize("spec", PAIR_SPECS, ids=lambda spec: spec.name)
def test_budgets_of_pairs(spec):
    config = BackwardConfig.from_spec(spec)
    assert PairMap.of(config).size <= sizes.SHARED_LIMIT
    shape = pair_sizes.PairShape.of(config)
    compute, reduce, other = shape.registers
    assert 2 * compute + reduce + other <= 65536 // 128
    dq = pair_tmem.dquery(shape)
    assert dq + config.columns // 2 <= pair_tmem.DPROBABILITIES
    assert pair_tmem.DPROBABILITIES + shape.rows <= pair_tmem.dvalue(shape)
    assert pair_tmem.dkey(shape, config.columns_v) + config.columns <= pair_tmem.COLUMNS
    steps = range(shape.rows // sizes.K_STEP)
    used = [pair_tmem.probability_step(shape, step) for step in steps]
    assert sorted(used) == list(range(0, dq, sizes.K_STEP // 2))
    assert len({pair_tmem.dscore_step(shape, step) for step in steps}) == len(steps)
    assert shape.pieces * shape.piece_vectors * 4 == shape.dq_columns


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
    core = [s for s in PAIR_SPECS if s.dtype == "bfloat16" and s.mask == "none" and not s.varlen and s.head_dim > 96]
    for spec in PAIR_SPECS if is_long(pytestconfig) else core:
        shape = pair_sizes.PairShape.of(BackwardConfig.from_spec(spec))
        machine = sass.Machine.of(artefact(spec).cubin)
        everything = machine.count()
        assert everything["LDL"] == everything["STL"] == 0, spec.name
        regions = machine.register_regions()
        assert sorted(granted for granted, _ in regions) == sorted(shape.registers)
        assert all(used <= granted for granted, used in regions), spec.name
        counts, length = machine.innermost("MUFU", sizes.HALF)
        assert counts["MUFU"] == counts["F2FP"] == sizes.HALF
        assert counts["FFMA2"] == 2 * counts["FMUL2"] == sizes.HALF
        assert counts["LDTM"] == counts["STTM"] == 4 * shape.parts
        assert counts["LDS"] == 2 * sizes.HALF // 4
        assert length <= 500 + 50 * (shape.parts - 1)


def steps_of_pairs(head_dims, pair: bool) -> tuple[dict[str, float], dict[str, float]]:
    """(cycles by unit, counters) of a step, of each of two CTAs with 128 keys: four steps' less two steps'."""
    reports = []
    for blocks in (2, 4):
        case = ForwardCase(sizes.ROWS * blocks, 2 * sizes.KEYS, *head_dims, arch=ARCH)
        reports.append(run_backward(case, inputs(case), Options(detect_races=False), pair=pair).reports[1])
    few, many = (cycles(report, B200) for report in reports)
    unit = {name: (getattr(many, name) - getattr(few, name)) / 4 for name in vars(few)}
    counters = {name: (reports[1].counters[name] - reports[0].counters[name]) / 4 for name in reports[0].counters}
    return unit, counters


@pytest.mark.parametrize("head_dims", PAIR_HEAD_DIMS, ids=str)
def test_work_per_step_of_pairs(head_dims):
    unit, counters = steps_of_pairs(head_dims, pair=True)
    exchanged = counters["async_shared_write"] - counters["global_read"]
    moved = (counters["shared_write"] + counters["async_shared_read"] + exchanged) / B200.shared_bytes
    assert unit["mma"] == PAIR_MMA_CYCLES[head_dims]
    assert unit["mufu"] == sizes.ROWS * sizes.KEYS / B200.mufu
    assert unit["shared_mma"] == PAIR_OPERAND_CYCLES[head_dims]
    assert exchanged == pair_sizes.SEND_BYTES
    assert moved == PAIR_MOVED_CYCLES[head_dims]
    if head_dims == (128, 128):
        assert unit["shared_mma"] + moved == pytest.approx(PAIR_DESIGN_CYCLES, rel=0.05)
    # float32 dQ of half of the rows: half of what a single CTA adds for as many keys.
    assert counters["global_write"] == sizes.ROWS // 2 * head_dims[0] * 4


def test_pairs_add_half_as_much_to_global_memory():
    single, pair = (steps_of_pairs((128, 128), given)[1]["global_write"] for given in (False, True))
    assert pair == single / 2
