"""Compiles every kernel that the emulator's comparison with a GPU and its long tests need.

``python -m tests.emulator.prepare --out jax_fa4/artefacts``, on a machine with the DSL. Artefacts in that folder are
found as shipped ones are, so that ``pytest --long`` and ``tests.gpu.emulator_agreement`` run where there is no DSL.
"""

from __future__ import annotations

import argparse
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from jax_fa4.kernels.spec import KernelSpec
from jax_fa4.kernels.store import make
from tests.emulator.attention_backward import specs_of
from tests.emulator.cases import (
    SM90_BACKWARD_CLEAN,
    SM90_CLEAN,
    SM90_FAULTS,
    SM90_ROWS,
    SM100_BACKWARD_FAULTS,
    SM100_FAULTS,
    SM100_PAIR_FAULTS,
    SM100_WIDE_PAIR_FAULTS,
)
from tests.gpu.emulator_agreement import CASES


def specs() -> list[KernelSpec]:
    """Every spec once, by name."""
    found = {case.spec for case in (*CASES, *SM90_FAULTS, SM90_ROWS, *SM90_CLEAN, *SM100_FAULTS)}
    for case in SM90_BACKWARD_CLEAN:
        found.update(specs_of(case))
    found.update((*specs_of(SM100_BACKWARD_FAULTS, False), *specs_of(SM100_PAIR_FAULTS, True)))
    found.update(specs_of(SM100_WIDE_PAIR_FAULTS, True))
    return sorted(found, key=lambda spec: spec.name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the artefacts")
    folder = parser.parse_args().out
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # each compiles in a process of its own
        for artefact in pool.map(lambda spec: make(spec, folder), specs()):
            print(artefact.spec.name, flush=True)


if __name__ == "__main__":
    main()
