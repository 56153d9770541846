"""A CuTe-DSL kernel whose CTAs add tiles into one output by asynchronous bulk reductions."""

import struct

import numpy as np
import pytest

from tests.emulator.errors import EmulatorError, RaceError
from tests.emulator.kernel_compiler import compile_many
from tests.emulator.launch import Options, run_foreign
from tests.emulator.memory import GlobalMemory
from tests.emulator.mutants import faults
from tests.emulator.ptx import parse
from tests.emulator.tma import TensorMap

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl to compile the kernels")

ROWS, COLUMNS, BLOCKS = 32, 32, 7


@pytest.fixture(scope="module")
def ptx():
    options = [{"rows": ROWS, "columns": COLUMNS}]
    return compile_many("tests.emulator.kernels.reduce_sm90", "sm_90a", options)[0]


def reduce(ptx, x, seed, temperament=None):
    """Returns (sum over blocks plus the number of blocks, report)."""
    memory = GlobalMemory()
    out = np.zeros((ROWS, COLUMNS), np.float32)
    source = memory.add("x", x.reshape(-1).view(np.uint8), writable=False)
    target = memory.add("out", out.reshape(-1).view(np.uint8))
    box, strides = (COLUMNS, ROWS), (COLUMNS * 4,)
    parameters = [
        TensorMap(source.base, "float32", (COLUMNS, len(x)), strides, box),
        struct.pack("<i", len(x)),
        TensorMap(target.base, "float32", (COLUMNS, ROWS), strides, box),
    ]
    entry = next(iter(parse(ptx)))
    options = Options(seed=seed, temperament=temperament)
    report = run_foreign(ptx, entry, (BLOCKS, 1, 1), (128, 1, 1), (1, 1, 1), 8192, parameters, memory, options)
    return out, report


@pytest.fixture(scope="module")
def x():
    return np.random.default_rng(0).integers(-50, 50, (BLOCKS * ROWS, COLUMNS)).astype(np.float32)


def test_sum(ptx, x):
    expected = x.reshape(BLOCKS, ROWS, COLUMNS).sum(0) + BLOCKS
    for seed in range(8):
        out, report = reduce(ptx, x, seed)
        assert (out == expected).all()
        assert report.counters["global_write"] == out.nbytes * BLOCKS


@pytest.mark.parametrize("kind", ["wait skipped", "proxy fence removed", "CTA barrier removed", "copy removed",
                                  "16 bytes more expected", "bulk commit removed", "init fence removed"])  # fmt: skip
def test_faults(ptx, x, kind):
    expected = x.reshape(BLOCKS, ROWS, COLUMNS).sum(0) + BLOCKS
    executed = reduce(ptx, x, 0)[1].lines
    planted = list(faults(ptx, executed, (kind,)))
    assert planted
    for _, line, mutant in planted:
        found = False
        for seed in range(1, 21):
            try:
                found = not (reduce(mutant, x, seed)[0] == expected).all()
            except EmulatorError:
                found = True
            if found:
                break
        assert found, f"PTX line {line}"


@pytest.mark.parametrize("temperament", ["eager", "lazy", "bursts", "starve", "random", "orderly"])
def test_missing_fence_is_found_under_every_temperament(ptx, x, temperament):
    """The race detector does not depend on luck."""
    (_, _, mutant) = next(faults(ptx, reduce(ptx, x, 0)[1].lines, ("proxy fence removed",)))
    with pytest.raises(RaceError, match="without fence"):
        reduce(mutant, x, 5, temperament)
