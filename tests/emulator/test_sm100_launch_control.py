"""Cluster launch control: every tile is done exactly once, by a launched CTA or by one that took it over."""

import struct

import numpy as np
import pytest

from tests.emulator.kernel_compiler import compile_many
from tests.emulator.launch import Options, run_foreign
from tests.emulator.memory import GlobalMemory

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl to compile the kernels")


@pytest.fixture(scope="module")
def ptx():
    (text,) = compile_many("tests.emulator.kernels.sm100_clc", "sm_100f", [{}])
    return text


def run(ptx: str, tiles: int, resident: int, seed: int):
    visits = np.zeros(tiles, np.int32)
    memory = GlobalMemory()
    base = memory.add("visits", visits.view(np.uint8)).base
    (line,) = [line for line in ptx.splitlines() if ".entry" in line]
    entry = line.split(".entry")[1].strip().rstrip("(")
    options = Options(seed=seed, resident=resident)
    report = run_foreign(
        ptx, entry, (tiles, 1, 1), (64, 1, 1), (1, 1, 1), 1024, [struct.pack("<Qi", base, tiles)], memory, options
    )
    return visits, report


@pytest.mark.parametrize("tiles,resident", [(1, 4), (9, 2), (23, 4)])
@pytest.mark.parametrize("seed", range(4))
def test_every_tile_once(ptx, tiles, resident, seed):
    visits, report = run(ptx, tiles, resident, seed)
    np.testing.assert_array_equal(visits, 1)
    # Whoever is not launched was cancelled; with as many CTAs in flight as tiles nothing is left to cancel.
    assert report.counters["clusters_cancelled"] <= tiles - min(resident, tiles)
    if tiles > resident:
        assert report.counters["clusters_cancelled"] > 0
