"""What the compiler made of the Blackwell forward: no spills, registers within budget, instructions per key block."""

from __future__ import annotations

import pytest

from jax_fa4.kernels.artefact import Artefact
from jax_fa4.kernels.sm100.forward.config import SHARED_LIMIT, ForwardConfig
from jax_fa4.kernels.sm100.forward.edges import edge_specs
from jax_fa4.kernels.sm100.forward.shared import SharedMap
from jax_fa4.kernels.spec import KernelSpec, sm100_pair_tile, standard_specs
from tests import sass
from tests.cases import Case
from tests.compiled import own_store, require_kernels
from tests.emulated import prepare
from tests.emulator.launch import Options
from tests.emulator.roofline import B200, cycles

require_kernels()

ARCH = "sm_100f"
HEAD_DIMS = ((64, 64), (128, 128), (192, 128), (256, 256))
ARTEFACT_LIMIT = 200 * 1000
ROW = 128
"""Scores of one thread's row in a key block."""

MMA_CYCLES = {(64, 64): 1024, (128, 128): 2048, (192, 128): 2560, (256, 256): 2048}
"""Tensor-core cycles of one key block, all query tiles of a CTA: 2 * 128 * 128 * (d + d_v) FLOP a tile at 8192 a cycle.
The shared-memory cycles of its operands: the score product reads Q and K, the other reads V (P is in tensor memory)."""

SHARED_CYCLES = {(64, 64): 768, (128, 128): 1536, (192, 128): 2048, (256, 256): 1536}


PAIR_SHARED_CYCLES = {(128, 128): 1024, (192, 128): 1408, (256, 256): 1024}
"""The same for pairs: a CTA reads its own Q, and half of K and V."""


def make_spec(head_dims: tuple[int, int], mask: str = "none", **fields) -> KernelSpec:
    head_dim, head_dim_v = head_dims
    named = {"arch": ARCH, "kind": "forward", "dtype": "bfloat16", "head_dim": head_dim, "head_dim_v": head_dim_v}
    return KernelSpec.create(**named, mask=mask, **fields)


RELEASED = standard_specs([ARCH], ["forward"])


def in_short_mode(spec: KernelSpec) -> bool:
    """Variants that other tests of the core sets compile too: float16, another head dim, pairs, packed groups."""
    dims, dense = (spec.head_dim, spec.head_dim_v), (spec.mask, spec.varlen, spec.pack_gqa) == ("none", False, False)
    if spec.tile.option("exp2fma") == 0 and dims == (128, 128):
        return False
    if spec.tile.option("ctas") == 2:
        return dims == (128, 128) and dense and spec.dtype == "bfloat16"
    if spec.pack_gqa:
        return (spec.mask, spec.varlen, spec.dtype, dims) == ("causal", True, "bfloat16", (64, 64))
    return dense and (spec.dtype, *dims) in (("float16", 128, 128), ("bfloat16", 192, 192))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """The long mode looks at every kernel of a release."""
    if "released" in metafunc.fixturenames:
        long = metafunc.config.getoption("--long")
        chosen = [spec for spec in RELEASED if long or in_short_mode(spec)]
        metafunc.parametrize("released", chosen, ids=lambda spec: spec.name)


@pytest.mark.parametrize("spec", RELEASED, ids=lambda spec: spec.name)
def test_budgets(spec):
    config = ForwardConfig.from_spec(spec)
    assert SharedMap.of(config).size <= SHARED_LIMIT
    softmax, correction, other = config.registers
    assert softmax * config.q_stages + correction + other <= 65536 // 128
    assert config.kv_stages * 4 >= 5 * (config.k_chunks + config.v_chunks)
    edges = {edge.name: edge for edge in edge_specs(config)}
    assert edges["q"].empty == (2 if config.o_over_q else 1)


def load(spec: KernelSpec) -> tuple[ForwardConfig, Artefact, sass.Machine]:
    """(config, artefact, machine code) of a kernel."""
    if sass.nvdisasm() is None:
        pytest.skip("needs nvdisasm to read machine code")
    artefact = own_store().load(spec)
    return ForwardConfig.from_spec(spec), artefact, sass.Machine.of(artefact.cubin)


def assert_within_budget(config: ForwardConfig, artefact: Artefact, machine: sass.Machine) -> None:
    """The size of the file, no spills, and in each role no more registers than it asks for."""
    assert len(artefact.cubin) < ARTEFACT_LIMIT
    everything = machine.count()
    assert everything["LDL"] == everything["STL"] == 0
    regions = machine.register_regions()
    assert sorted(granted for granted, _ in regions) == sorted(config.registers)
    for granted, used in regions:
        assert used <= granted


@pytest.fixture(scope="module", params=HEAD_DIMS, ids=str)
def compiled(request):
    """:func:`load` of one head dim."""
    return load(make_spec(request.param))


def test_size_spills_and_registers(compiled):
    assert_within_budget(*compiled)


def test_size_spills_and_registers_of_other_kernels(released):
    assert_within_budget(*load(released))


def test_softmax_instructions(compiled):
    """Per row and key block, against the arithmetic minimum."""
    config, _, machine = compiled
    counts, _ = machine.innermost("FMNMX3", 60)
    emulated = ROW // 16 * config.exp2_fma_pairs
    # One more exponential for the rescale factor.
    assert counts["MUFU"] == ROW - emulated + 1
    assert counts["FMNMX3"] <= ROW // 2
    assert counts["F2FP"] == ROW // 2
    # Scale and subtract: one a pair. Cody-Waite and Horner: four more for an emulated pair.
    assert counts["FFMA2"] == ROW // 2 + 4 * emulated // 2
    assert counts["FADD2"] == ROW // 2 + 1 + 2 * emulated // 2
    assert counts["LDTM"] == counts["STTM"] == 4


def test_mma_instructions(compiled):
    config, _, machine = compiled
    per_block = config.q_stages * (config.qk_steps + ROW // 16)
    counts, length = machine.innermost("UTCHMMA", per_block)
    assert counts["UTCHMMA"] == per_block
    assert length <= 12 * per_block


@pytest.mark.parametrize("ctas", [1, 2])
@pytest.mark.parametrize("head_dims", HEAD_DIMS, ids=str)
def test_work_per_key_block(head_dims, ctas):
    """The emulator's counters for one CTA: eight key blocks less four, on the design's units."""
    tile = None if ctas == 1 else sm100_pair_tile(*head_dims)
    if ctas == 2 and tile is None:
        assert head_dims == (64, 64)
        return
    config = ForwardConfig.from_spec(make_spec(head_dims, tile=tile))
    rows = ROW * config.q_stages * ctas
    busy = []
    for blocks in (4, 8):
        case = Case((rows, ROW * blocks), head_dims, "none", "1", "bfloat16", batch=1)
        _, _, report = prepare(case, ARCH, case.operands(), tile=tile).run(Options(detect_races=False))
        busy.append(cycles(report, B200))
    heads = 2 * ctas
    unit = {name: (getattr(busy[1], name) - getattr(busy[0], name)) / (4 * heads) for name in vars(busy[0])}
    shared = SHARED_CYCLES if ctas == 1 else PAIR_SHARED_CYCLES
    assert unit["mma"] == MMA_CYCLES[head_dims]
    assert unit["shared_mma"] == pytest.approx(shared[head_dims], rel=0.05)
    exponentials = rows // ctas * (ROW - ROW // 16 * config.exp2_fma_pairs + 1)
    assert unit["mufu"] == pytest.approx(exponentials / B200.mufu, rel=0.01)
